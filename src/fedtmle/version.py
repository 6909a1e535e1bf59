"""The package's version; a plan holds it, so that a silo approves the code that runs."""

__version__ = "0.1.0"
