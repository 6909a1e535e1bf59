"""The pages of `docs/` that are written by the code: `python -m tools.document`; a test compares them."""
