"""Public quadrature: expectations over nodes, the normaliser made of them, and a memory of what was computed.

Expectations are exact integer sums, so no order of the nodes changes a bit. Masses add up to one, so a
column bounded by 2^c has |sum| <= 2^c and the grid 2^-(62-c) fits an int64 for any number of nodes in use;
each node's rounding is at most 2^-(63-c).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar, final

import numpy as np

from fedtmle.errors import NumericalError
from fedtmle.model.submodel import AbstractNormaliser
from fedtmle_core import kernels
from fedtmle_core.types import Array, exponent, unpack
from fedtmle_paper.density.fluctuation import AbstractFluctuation

Value = TypeVar("Value")

NODE_BITS = 62
MOST_PARTS = 48  # of a segment along which the curvature of A is bounded
PARTS_PER_LENGTH = 96.0  # per unit of the largest |step . D|


@final
class Memo(Generic[Value]):
    """A memory of the last ``size`` values, by key; the lock is held while a value is computed.

    Forty silos of one process that reach the same law at once wait for one quadrature instead of doing
    forty. The values must be pure functions of the key.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        with self._lock:
            if key not in self._values:
                self._values[key] = compute()
                if len(self._values) > self._size:
                    self._values.popitem(last=False)
            self._values.move_to_end(key)
            return self._values[key]

    def __reduce__(self) -> tuple[type[Memo[Value]], tuple[int]]:
        # A copy in another process starts empty: a lock cannot travel, and values are rebuilt.
        return Memo, (self._size,)


def expectation(masses: Array, columns: Array, bound: int) -> Array:
    """Return E[column], shape (p,), for columns (p, J) bounded by 2^bound."""
    units = np.rint(columns * (masses * 2.0 ** (NODE_BITS - bound))).astype(np.int64)
    return np.asarray(units.sum(axis=1) * 2.0 ** (bound - NODE_BITS))


def second_moment(masses: Array, columns: Array, bound: int) -> Array:
    """Return E[column column^T], shape (p, p)."""
    upper, lower = np.triu_indices(len(columns))
    return unpack(expectation(masses, columns[upper] * columns[lower], 2 * bound), len(columns))


def reweight(masses: Array, logs: Array) -> tuple[Array, float]:
    """Return masses proportional to m e^logs, adding up to one, and the log of their total before that."""
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
    """Return matrix @ columns, shape (p, N), added in a fixed order: BLAS would let the bits vary."""
    return np.stack([combined(row, columns) for row in matrix])


def combined(weights: Array, columns: Array) -> Array:
    """Return weights . columns, shape (N,), added in the order of the coordinates."""
    total = weights[0] * columns[0]
    for weight, column in zip(weights[1:], columns[1:], strict=True):
        total = total + weight * column
    return np.asarray(total)


@final
@dataclass(frozen=True, kw_only=True)
class DensityNormaliser(AbstractNormaliser):
    """The public normaliser A(eps) = log Z(eps) = log sum_j m_j f(eps . D_j) of a density submodel.

    ``eif`` is D at the law's nodes, (d, J), and ``masses`` m, (J,).
    """

    fluctuation: AbstractFluctuation
    eif: Array
    masses: Array
    vertices: Array

    def value(self, eps: Array) -> float:
        return self._fluctuated(eps)[2]

    def gradient(self, eps: Array) -> Array:
        """E_q[phi' D] under q = p(eps)."""
        t, q, _ = self._fluctuated(eps)
        return self._mean_slope(t, q)

    def hessian(self, eps: Array) -> Array:
        """E_q[(phi'' + phi'^2) D D^T] - E_q[phi' D] E_q[phi' D]^T."""
        t, q, _ = self._fluctuated(eps)
        upper, lower = np.triu_indices(len(self.eif))
        columns = self.fluctuation.curvature_and_slope_squared(t) * self.eif[upper] * self.eif[lower]
        mean = self._mean_slope(t, q)
        return unpack(expectation(q, columns, 2 + 2 * self._bound), len(self.eif)) - np.outer(mean, mean)

    def curvature_ceiling(self, C: Array) -> float:
        # C Hess A C^T is the Hessian of the same normaliser for C D, whose hull has the vertices C V.
        return self.fluctuation.curvature_ceiling(combine(C, self.vertices))

    def segment_curvature(self, start: Array, step: Array) -> float:
        """Evaluate A'' in the middle of equal parts of the segment, and add what it may gain within each.

        The number of parts grows with the segment, up to `MOST_PARTS`.
        """
        t, y = combined(start, self.eif), combined(step, self.eif)
        largest = float(np.abs(y).max())
        parts = min(MOST_PARTS, max(1, math.ceil(PARTS_PER_LENGTH * largest)))
        ceiling = self.curvature_ceiling(step[None, :])
        if not (largest > 0 and math.isfinite(ceiling)):
            return ceiling
        bounds = []
        for part in range(parts):
            middle = t + (2 * part + 1) / (2 * parts) * y
            q, _ = reweight(self.masses, self.fluctuation.log_factor(middle))

            def mean(column: Array, size: float, masses: Array = q) -> float:
                return float(expectation(masses, column[None, :], exponent(size))[0])

            bounds.append(self.fluctuation.curvature_near(middle, y, 0.5 / parts, mean))
        return min(max(bounds), ceiling)

    def _fluctuated(self, eps: Array) -> tuple[Array, Array, float]:
        """t = eps . D at the nodes, the masses of p(eps), and A(eps)."""
        t = combined(eps, self.eif)
        return t, *reweight(self.masses, self.fluctuation.log_factor(t))

    def _mean_slope(self, t: Array, q: Array) -> Array:
        return expectation(q, self.fluctuation.slope(t) * self.eif, 1 + self._bound)

    @property
    def _bound(self) -> int:
        return exponent(float(np.abs(self.vertices).max()) * (1 + 2.0**-20))
