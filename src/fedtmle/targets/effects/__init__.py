"""Treatment effects: means under regimes in populations, and what is made of them."""
