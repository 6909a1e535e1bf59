"""Expectations over quadrature nodes as exact integer sums: no order of the nodes changes a bit.

Masses add up to one, so a column bounded by 2^c has |sum| <= 2^c and the grid 2^-(62-c) fits
an int64 for any number of nodes in use; each node's rounding is at most 2^-(63-c).
"""

from __future__ import annotations

import math

import numpy as np

from fedtmle.errors import NumericalError
from fedtmle.model import kernels
from fedtmle.model.types import Array, exponent, unpack

NODE_BITS = 62


def expectation(masses: Array, columns: Array, bound: int) -> Array:
    """E[column], shape (p,), for columns (p, J) bounded by 2^bound."""
    units = np.rint(columns * (masses * 2.0 ** (NODE_BITS - bound))).astype(np.int64)
    return np.asarray(units.sum(axis=1) * 2.0 ** (bound - NODE_BITS))


def second_moment(masses: Array, columns: Array, bound: int) -> Array:
    """E[column column^T], shape (p, p)."""
    upper, lower = np.triu_indices(len(columns))
    return unpack(expectation(masses, columns[upper] * columns[lower], 2 * bound), len(columns))


def reweight(masses: Array, logs: Array) -> tuple[Array, float]:
    """Masses proportional to m e^logs, adding up to one, and the log of their total before that."""
    top = float(logs.max())
    weights = masses * kernels.exp(logs - top)
    peak = float(weights.max())
    if not (math.isfinite(top) and math.isfinite(peak) and peak > 0):
        raise NumericalError("eps: the fluctuated masses are no longer a density")
    # First to within a factor of two, on a grid that cannot overflow; then on the finest grid.
    rough = expectation(weights, np.ones((1, 1)), exponent(peak) + len(weights).bit_length())
    shift = exponent(float(rough[0]))
    weights = weights * 2.0**-shift
    total = float(expectation(weights, np.ones((1, 1)), 0)[0])
    return weights / total, top + kernels.log(math.ldexp(total, shift))


def combine(matrix: Array, columns: Array) -> Array:
    """matrix @ columns, shape (p, N), added in a fixed order: BLAS would let the bits vary."""
    return np.stack([combined(row, columns) for row in matrix])


def combined(weights: Array, columns: Array) -> Array:
    """weights . columns, shape (N,), added in the order of the coordinates."""
    total = weights[0] * columns[0]
    for weight, column in zip(weights[1:], columns[1:], strict=True):
        total = total + weight * column
    return np.asarray(total)
