"""A result for people: one HTML page that needs nothing else, made from the saved document alone."""
