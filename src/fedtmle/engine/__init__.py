"""A study on an engine that carries bytes between machines; `flare` and `flare_silo` are NVIDIA FLARE."""
