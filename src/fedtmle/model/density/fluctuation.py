"""Fluctuations of a density: p(eps)(o) = p(o) f(eps . D(o)) / Z(eps).

Both are known by phi = log f as a function of t = eps . D, with phi(0) = 0 and phi'(0) = -1,
so that the gradient of -log p(eps)(o) at eps = 0 is D(o) - E_p[D] = D(o): eq. (local-score).
The row part -phi(eps . D) is a `Family` of eps . X with X a multiple of D.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.families import Family
from fedtmle.model.types import Array

ROUNDING = 1.0 + 2.0**-30  # so that the bounds hold for D as computed, not only in exact arithmetic


class AbstractFluctuation(ABC):
    """phi with |phi'| <= 2 and |phi'' + phi'^2| <= 4, on which the exact sums rely."""

    @property
    @abstractmethod
    def family(self) -> Family:
        """The row loss -phi(t) as rho, up to a constant."""

    @property
    @abstractmethod
    def multiple(self) -> float:
        """X / D."""

    @abstractmethod
    def log_factor(self, t: Array) -> Array:
        """phi(t)."""

    @abstractmethod
    def slope(self, t: Array) -> Array:
        """phi'(t)."""

    @abstractmethod
    def curvature_and_slope_squared(self, t: Array) -> Array:
        """phi''(t) + phi'(t)^2, in one piece: apart, the two cancel to rounding error near t = 0."""

    @abstractmethod
    def curvature_ceiling(self, vertices: Array) -> float:
        """A bound on ||Hess log Z(eps)|| at every eps, for D in the convex hull of the vertices, (d, V).

        With q = p(eps), Hess log Z = E_q[phi'' D D^T] + Cov_q(phi' D); the hull contains E_p[D] = 0.
        """


@final
@dataclass(frozen=True)
class LogisticFluctuation(AbstractFluctuation):
    """The normalised logistic of S.3, f(t) = 2 / (1 + e^2t): bounded, whatever D is."""

    @property
    def family(self) -> Family:
        return Family.LOGISTIC

    @property
    def multiple(self) -> float:
        return 2.0

    def log_factor(self, t: Array) -> Array:
        # log 2 from the same function, so that phi(0) is exactly zero.
        return kernels.softplus(0.0) - kernels.softplus(2.0 * t)

    def slope(self, t: Array) -> Array:
        return -2.0 * kernels.expit(2.0 * t)

    def curvature_and_slope_squared(self, t: Array) -> Array:
        s = kernels.expit(2.0 * t)
        return 4.0 * s * (2.0 * s - 1.0)  # -4 s (1 - s) + 4 s^2

    def curvature_ceiling(self, vertices: Array) -> float:
        # Along a unit u put x = u . D, in [a, b] with a <= 0 <= b. From below: phi'' = -4 s (1 - s) >= -1
        # and a covariance is positive, so the form is >= -E_q[x^2] >= -max(a^2, b^2) >= -(b - a)^2. From
        # above: phi'' <= 0, and phi' x = -2 s x lies in [-2b, -2a], so its variance is <= (b - a)^2. Laws
        # come as near to that as one likes (`test_density`), so no bound by the hull alone is better.
        return diameter(vertices) ** 2 * ROUNDING


@final
@dataclass(frozen=True)
class ExponentialTilt(AbstractFluctuation):
    """The tilt of section 2.3, f(t) = e^-t, whose curvature is all in the normaliser."""

    @property
    def family(self) -> Family:
        return Family.LINEAR

    @property
    def multiple(self) -> float:
        return 1.0

    def log_factor(self, t: Array) -> Array:
        return -t

    def slope(self, t: Array) -> Array:
        return np.full_like(t, -1.0)

    def curvature_and_slope_squared(self, t: Array) -> Array:
        return np.ones_like(t)

    def curvature_ceiling(self, vertices: Array) -> float:
        # Hess log Z = Cov_q(D), and a variable in [a, b] has variance <= (b - a)^2/4.
        return 0.25 * diameter(vertices) ** 2 * ROUNDING


def diameter(vertices: Array) -> float:
    """The largest distance within the convex hull: that between two of its vertices, shape (d, V)."""
    apart = vertices[:, :, None] - vertices[:, None, :]
    return float(np.sqrt((apart**2).sum(axis=0)).max())
