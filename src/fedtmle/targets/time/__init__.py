"""Targets of time to an event: risks, restricted means and their comparisons, on a public grid of periods."""
