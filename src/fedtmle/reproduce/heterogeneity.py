"""How much silos differ: the spread of their gradients and Hessians at p^0."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fedtmle.model.types import Part
from fedtmle.reproduce.scenario import Cell, build


@lru_cache(maxsize=256)  # the sentences are read again at every latency
def dispersion(cell: Cell) -> tuple[float, float]:
    """Root of sum_m (N_m/n) |X_m - X|^2, for X the local gradient and for X the local Hessian at eps = 0."""
    data = build(cell)
    problem, origin = data.problem, np.zeros(data.problem.dim)
    local, shares = [], []
    for rows in data.silos.values():
        sums = problem.submodel(data.law, problem.read(rows)).sums(origin, Part.GRADIENT | Part.HESSIAN)
        local.append(sums.values(len(rows)))  # the public normaliser is the same for all
        shares.append(len(rows) / len(data.rows))
    table, weights = np.array(local), np.array(shares)
    squares = weights @ (table - weights @ table) ** 2
    # The packed upper triangle holds each off-diagonal entry once.
    return float(np.sqrt(squares[: problem.dim].sum())), float(np.sqrt(squares[problem.dim :].sum()))
