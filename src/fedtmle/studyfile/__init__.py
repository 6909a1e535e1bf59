"""The study file: its format, how it is read, the example that `fedtmle init` writes."""
