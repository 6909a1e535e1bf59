"""The protocol ring: codes, lattice, queries and messages; no clock, socket, file or thread."""
