"""Small dense linear algebra in plain floats: the same bits at every party, without LAPACK."""

from __future__ import annotations

import math

import numpy as np

from fedtmle.model.types import Array


def newton_direction(hessian: Array, gradient: Array) -> Array:
    """-(H + tau I)^-1 g with the first tau in 0, s, 4s, 16s, ... that makes it positive definite."""
    d = len(gradient)
    scale = max(abs(float(hessian[j, j])) for j in range(d)) or 1.0
    tau = 0.0
    while True:
        factor = _cholesky(hessian, tau, floor=1e-12 * scale)
        if factor is not None:
            return -_solve(factor, [float(g) for g in gradient])
        tau = 4.0 * tau if tau else 1e-3 * scale


def _cholesky(matrix: Array, tau: float, *, floor: float) -> list[list[float]] | None:
    """The lower factor of matrix + tau I, or None if a pivot is not above ``floor``."""
    d = len(matrix)
    L = [[0.0] * d for _ in range(d)]
    for i in range(d):
        for j in range(i + 1):
            rest = float(matrix[i, j]) + (tau if i == j else 0.0)
            rest = math.fsum([rest, *(-L[i][k] * L[j][k] for k in range(j))])
            if i > j:
                L[i][j] = rest / L[j][j]
            elif rest > floor:
                L[i][i] = math.sqrt(rest)
            else:
                return None
    return L


def _solve(L: list[list[float]], b: list[float]) -> Array:
    """x with L L^T x = b."""
    d = len(b)
    y = [0.0] * d
    for i in range(d):
        y[i] = math.fsum([b[i], *(-L[i][k] * y[k] for k in range(i))]) / L[i][i]
    x = [0.0] * d
    for i in reversed(range(d)):
        x[i] = math.fsum([y[i], *(-L[k][i] * x[k] for k in range(i + 1, d))]) / L[i][i]
    return np.array(x)
