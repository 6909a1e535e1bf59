"""The version of the core; a release of `fedtmle` requires exactly one."""

__version__ = "0.1.0"
