"""Fluctuations of a density: p(eps)(o) = p(o) f(eps . D(o)) / Z(eps).

Both are known by phi = log f as a function of t = eps . D, with phi(0) = 0 and phi'(0) = -1,
so that the gradient of -log p(eps)(o) at eps = 0 is D(o) - E_p[D] = D(o): eq. (local-score).
The row part -phi(eps . D) is a `Family` of eps . X with X a multiple of D.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle_core import kernels
from fedtmle_core.types import Array, Family

Mean = Callable[[Array, float], float]
ROUNDING_OF_MEANS = (
    2.0**-36
)  # of 2^16 nodes, each rounded to 2^-60 of the column's magnitude, and of products
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

    @abstractmethod
    def curvature_near(self, t: Array, y: Array, radius: float, mean: Mean) -> float:
        """A bound on (log Z)'' along t + s y, |s| <= radius, t and y at the nodes of the quadrature, (J,).

        ``mean(column, size)`` is the mean of a column of magnitude at most ``size`` under q at s = 0.
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

    def curvature_near(self, t: Array, y: Array, radius: float, mean: Mean) -> float:
        # With s = expit(2t): x = phi' y = -2 s y and c = -phi'' y^2 = 4 s (1 - s) y^2, of means under q,
        #
        #     (log Z)'' = V - P,   V = Var_q(x),   P = E_q[c] >= 0.
        #
        # Under q a mean changes by E_q[g]' = E_q[g'] + Cov_q(g, x), x' = -c, and |c'| <= 2 |y| c. Let x vary
        # by at most W over the nodes and |y| <= Y. As |Cov(g, x)| <= W E[g] for g >= 0,
        #
        #     |P'| <= (2 Y + W) P,   |V'| <= W V + 2 W P,
        #
        # so U = V + 2 P has |U'| <= rate U with rate = 2 W + 2 Y, and |V' - P'| <= W V + (3 W + 2 Y) P
        # <= (3/2 W + Y) U. Within the radius U gains at most a factor of e^(rate |s|); x moves by Y^2 |s|.
        slope = kernels.expit(2.0 * t)
        x, c = -2.0 * slope * y, 4.0 * slope * (1.0 - slope) * y * y
        Y = float(np.abs(y).max())
        W = float(x.max() - x.min()) + 2.0 * radius * Y * Y
        P, V = mean(c, Y * Y), mean(x * x, 4.0 * Y * Y) - mean(x, 2.0 * Y) ** 2
        growth = kernels.exp(2.0 * (W + Y) * radius)
        gain = (1.5 * W + Y) * (V + 2.0 * P) * growth * radius
        return _rounded_up(V - P + gain, Y)


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

    def curvature_near(self, t: Array, y: Array, radius: float, mean: Mean) -> float:  # noqa: ARG002 - in mean
        # V = Var_q(y) changes by the third central moment of y, which is at most W V if y varies by W.
        Y = float(np.abs(y).max())
        V = mean(y * y, Y * Y) - mean(y, Y) ** 2
        return _rounded_up(V * kernels.exp(float(y.max() - y.min()) * radius), Y)


def _rounded_up(bound: float, Y: float) -> float:
    """Return the bound with room for the rounding of means of columns of magnitude at most 4 Y^2."""
    return bound * ROUNDING + ROUNDING_OF_MEANS * Y * Y


def diameter(vertices: Array) -> float:
    """The largest distance within the convex hull: that between two of its vertices, shape (d, V)."""
    apart = vertices[:, :, None] - vertices[:, None, :]
    return float(np.sqrt((apart**2).sum(axis=0)).max())
