"""The model ring: problems, submodels, kernels and solvers; pure mathematics."""
