"""Sums of Gaussian kernels: compiled if numba is in use, else the same operations in numpy."""

from __future__ import annotations

import numpy as np

from fedtmle.errors import InputError
from fedtmle_core import kernels
from fedtmle_core.kernels import _elementary
from fedtmle_core.types import Array

POINTS = 2048  # a block of points that stays in the cache


def log_mean_kernel(points: Array, centres: Array) -> Array:
    """Return log((1/n0) sum_i exp(-|p - c_i|^2/2)) at each of N points; shapes (q, N), (q, n0) to (N,)."""
    points = np.ascontiguousarray(points, dtype=np.float64)
    centres = np.ascontiguousarray(centres, dtype=np.float64)
    if points.ndim != 2 or centres.ndim != 2 or len(points) != len(centres) or not centres.size:
        raise InputError(
            f"points, centres: expected shapes (q, N) and (q, n0), n0 >= 1, "
            f"not {points.shape} and {centres.shape}"
        )
    if kernels.backend() == "numpy":
        return _in_blocks(points, centres)
    from fedtmle_paper.density import _compiled  # numba is imported by the first call

    return _compiled.log_mean_kernel(points, centres)


def _in_blocks(points: Array, centres: Array) -> Array:
    answer = np.empty(points.shape[1])
    with np.errstate(all="ignore"):
        for start in range(0, points.shape[1], POINTS):
            block = points[:, start : start + POINTS]
            nearest = np.full(block.shape[1], np.inf)
            for centre in centres.T:
                distance = _squared_distance(block, centre)
                nearest = np.where(distance < nearest, distance, nearest)
            total = np.zeros(block.shape[1])
            for centre in centres.T:
                total = total + _elementary.exp(0.5 * (nearest - _squared_distance(block, centre)))
            mean = total / centres.shape[1]
            answer[start : start + POINTS] = _elementary.log(mean) - 0.5 * nearest
    return answer


def _squared_distance(points: Array, centre: Array) -> Array:
    difference = points[0] - centre[0]
    squared: Array = difference * difference
    for coordinate, value in zip(points[1:], centre[1:], strict=True):
        difference = coordinate - value
        squared = squared + difference * difference
    return squared
