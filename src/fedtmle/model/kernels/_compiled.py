"""Compiled loops of the elementary functions, the softmax and the kernel density.

Rows are taken in blocks that stay in the first-level cache; each inner loop is a single pass over
a block, which LLVM vectorises.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedtmle.model.kernels import _elementary, _scalar  # noqa: F401 - _scalar registers _elementary
from fedtmle.model.kernels._jit import jit
from fedtmle.model.kernels._primitives import select
from fedtmle.model.types import Array

BLOCK = 512


@jit
def _exp(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = _elementary.exp(x[i])


@jit
def _log(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = _elementary.log(x[i])


@jit
def _expit(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = _elementary.expit(x[i])


@jit
def _softplus(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = _elementary.softplus(x[i])


@jit
def _logit(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = _elementary.logit(x[i])


ELEMENTWISE: dict[str, Callable[[Array, Array], None]] = {
    "exp": _exp,
    "log": _log,
    "expit": _expit,
    "softplus": _softplus,
    "logit": _logit,
}


@jit
def softmax(logits: Array, first: int, last: int, result: Array) -> None:
    """Columns first to last of exp(l_j - max_j l_j) over their sum."""
    tops, totals = np.empty(BLOCK), np.empty(BLOCK)
    for begin in range(first, last, BLOCK):
        size = min(BLOCK, last - begin)
        top, total = tops[:size], totals[:size]
        top[:] = logits[0, begin : begin + size]
        for row in logits[1:]:
            values = row[begin : begin + size]
            for i in range(size):
                top[i] = select(values[i] > top[i], values[i], top[i])
        total[:] = 0.0
        for j in range(len(logits)):
            values, powers = logits[j, begin : begin + size], result[j, begin : begin + size]
            for i in range(size):
                powers[i] = _elementary.exp(values[i] - top[i])
                total[i] += powers[i]
        for j in range(len(logits)):
            powers = result[j, begin : begin + size]
            for i in range(size):
                powers[i] = powers[i] / total[i]


@jit
def _squared_distance(points: Array, centre: Array, begin: int, squared: Array) -> None:
    """|p - c|^2 for a block of points, coordinates added in order."""
    size = len(squared)
    coordinate = points[0, begin : begin + size]
    for i in range(size):
        difference = coordinate[i] - centre[0]
        squared[i] = difference * difference
    for j in range(1, len(points)):
        coordinate = points[j, begin : begin + size]
        for i in range(size):
            difference = coordinate[i] - centre[j]
            squared[i] = squared[i] + difference * difference


@jit
def log_mean_kernel(points: Array, centres: Array, first: int, last: int, result: Array) -> None:
    """Points first to last of log((1/n0) sum_i exp(-|p - c_i|^2/2))."""
    size0 = centres.shape[1]
    distances, nearests, totals = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    for begin in range(first, last, BLOCK):
        size = min(BLOCK, last - begin)
        distance, nearest, total = distances[:size], nearests[:size], totals[:size]
        nearest[:] = np.inf
        for c in range(size0):
            _squared_distance(points, centres[:, c], begin, distance)
            for i in range(size):
                nearest[i] = select(distance[i] < nearest[i], distance[i], nearest[i])
        total[:] = 0.0
        for c in range(size0):
            _squared_distance(points, centres[:, c], begin, distance)
            for i in range(size):
                total[i] += _elementary.exp(0.5 * (nearest[i] - distance[i]))
        for i in range(size):
            result[begin + i] = _elementary.log(total[i] / size0) - 0.5 * nearest[i]
