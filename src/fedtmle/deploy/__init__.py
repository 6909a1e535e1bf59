"""Deployment on NVIDIA FLARE: start-up kits, processes, runs, and a doctor for each party."""
