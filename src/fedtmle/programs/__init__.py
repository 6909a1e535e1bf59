"""Programs of studies: the flows that fit nuisance models, check overlap and run an algorithm."""
