"""Compiled loops of the elementary functions, the softmax and the kernel density.

Rows are taken in blocks that stay in the first-level cache; each inner loop is a single pass over
a block, which LLVM vectorises.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedtmle.model.kernels import _scalar  # noqa: F401 - registers what follows with numba
from fedtmle.model.kernels._elementary import exp, expit, log, logit, softplus
from fedtmle.model.kernels._jit import jit
from fedtmle.model.kernels._primitives import select
from fedtmle.model.types import Array

BLOCK = 512


@jit
def _exp(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = exp(x[i])


@jit
def _log(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = log(x[i])


@jit
def _expit(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = expit(x[i])


@jit
def _softplus(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = softplus(x[i])


@jit
def _logit(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = logit(x[i])


ELEMENTWISE: dict[str, Callable[[Array, Array], None]] = {
    "exp": _exp,
    "log": _log,
    "expit": _expit,
    "softplus": _softplus,
    "logit": _logit,
}


@jit
def softmax(logits: Array, first: int, last: int, result: Array) -> None:
    """Columns first to last of exp(l_j - max_j l_j) over their sum, added in order of j."""
    tops, totals = np.empty(BLOCK), np.empty(BLOCK)
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        size = end - begin
        top, total = tops[:size], totals[:size]
        values = logits[0, begin:end]
        for i in range(size):
            top[i] = values[i]
        for j in range(1, len(logits)):
            values = logits[j, begin:end]
            for i in range(size):
                top[i] = select(values[i] > top[i], values[i], top[i])
        for j in range(len(logits)):
            values, powers = logits[j, begin:end], result[j, begin:end]
            for i in range(size):
                powers[i] = exp(values[i] - top[i])
        powers = result[0, begin:end]
        for i in range(size):
            total[i] = powers[i]
        for j in range(1, len(logits)):
            powers = result[j, begin:end]
            for i in range(size):
                total[i] = total[i] + powers[i]
        for j in range(len(logits)):
            powers = result[j, begin:end]
            for i in range(size):
                powers[i] = powers[i] / total[i]


@jit
def _squared_distance(points: Array, centres: Array, c: int, begin: int, squared: Array) -> None:
    """|p - c|^2 for a block of points, coordinates added in order."""
    size = len(squared)
    coordinate, centre = points[0, begin : begin + size], centres[0, c]
    for i in range(size):
        difference = coordinate[i] - centre
        squared[i] = difference * difference
    for j in range(1, len(points)):
        coordinate, centre = points[j, begin : begin + size], centres[j, c]
        for i in range(size):
            difference = coordinate[i] - centre
            squared[i] = squared[i] + difference * difference


@jit
def log_mean_kernel(points: Array, centres: Array, first: int, last: int, result: Array) -> None:
    """Points first to last of log((1/n0) sum_i exp(-|p - c_i|^2/2)).

    The smallest distance is found first, so that the largest term of the sum is 1.
    """
    n_centres = centres.shape[1]
    distances, nearests, totals = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    for begin in range(first, last, BLOCK):
        size = min(BLOCK, last - begin)
        distance, nearest, total = distances[:size], nearests[:size], totals[:size]
        for i in range(size):
            nearest[i] = np.inf
            total[i] = 0.0
        for c in range(n_centres):
            _squared_distance(points, centres, c, begin, distance)
            for i in range(size):
                nearest[i] = select(distance[i] < nearest[i], distance[i], nearest[i])
        for c in range(n_centres):
            _squared_distance(points, centres, c, begin, distance)
            for i in range(size):
                total[i] = total[i] + exp(0.5 * (nearest[i] - distance[i]))
        for i in range(size):
            result[begin + i] = log(total[i] / n_centres) - 0.5 * nearest[i]
