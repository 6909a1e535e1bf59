"""Targets: each file states one problem (Psi, D, L, fluctuation)."""
