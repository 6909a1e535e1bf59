"""Federations that carry our bytes between machines; `flare` is NVIDIA FLARE."""
