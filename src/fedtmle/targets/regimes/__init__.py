"""Treatment over time: means under regimes, by sequential regression."""
