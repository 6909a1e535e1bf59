"""For developers; not part of the package."""
