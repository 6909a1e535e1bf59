"""Targets of a full density: a kernel start, fluctuations of it, and public quadrature."""
