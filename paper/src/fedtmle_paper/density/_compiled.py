"""The kernel density as compiled loops: blocks of points that stay in the first-level cache."""

from __future__ import annotations

import numpy as np

from fedtmle_core.kernels._elementary import exp, log
from fedtmle_core.kernels._jit import jit
from fedtmle_core.kernels._primitives import select
from fedtmle_core.parallel import shared
from fedtmle_core.types import Array

BLOCK = 512
SERIAL_PAIRS = 1 << 18


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
def _log_mean_kernel(points: Array, centres: Array, first: int, last: int, result: Array) -> None:
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


def log_mean_kernel(points: Array, centres: Array) -> Array:
    """Return log of the mean over centres of exp(-|p - c|^2/2) at each point."""
    result = np.empty(points.shape[1])

    def work(first: int, last: int) -> bool:
        _log_mean_kernel(points, centres, first, last, result)
        return True

    shared(work, points.shape[1], serially=points.shape[1] * centres.shape[1] < SERIAL_PAIRS)
    return result
