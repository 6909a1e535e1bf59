"""thm:reconstruction: two datasets that no accepted query distinguishes, and the lower bound (S.2.4).

`segment_smoothness` estimates C_s, the constant of that bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.polynomial import chebyshev

from fedtmle.errors import InputError
from fedtmle.privacy.audit import require_at_least_zero
from fedtmle_core.types import Array

LEVEL = 0.5  # the two levels of the Chebyshev polynomial, +-1/2


@final
@dataclass(frozen=True, kw_only=True)
class CollisionPair:
    """The s undisclosed records of x_+ and of x_-, each of shape (s, q); moments below s agree."""

    plus: Array
    minus: Array
    distance: float  # dist(x_+, x_-), exactly

    @property
    def s(self) -> int:
        return len(self.plus)


def level_points(s: int, theta: float) -> Array:
    """u_j(theta) = cos((j pi + arccos((-1)^j theta))/s), j = 0..s-1: the s roots of C_s - theta, falling."""
    j = np.arange(s)
    return np.asarray(np.cos((j * math.pi + np.arccos((-1.0) ** j * theta)) / s))


def collision_pair(s: int, *, radius: float, centre: Array, direction: Array) -> CollisionPair:
    """x_+ and x_- on {centre + u direction, |u| <= radius}, ||direction|| = 1: eq:collision-pair."""
    require_order(s)
    require_at_least_zero(radius=radius)
    centre, direction = np.atleast_1d(centre).astype(np.float64), np.atleast_1d(direction).astype(np.float64)
    if centre.shape != direction.shape or centre.ndim != 1:
        raise InputError(
            f"centre, direction: expected two vectors of one length, not {centre.shape}, {direction.shape}"
        )
    if not abs(float(np.linalg.norm(direction)) - 1) <= 1e-9:
        raise InputError("direction: expected a vector of length 1")
    plus, minus = (centre + radius * level_points(s, theta)[:, None] * direction for theta in (LEVEL, -LEVEL))
    return CollisionPair(plus=plus, minus=minus, distance=collision_distance(s, radius))


def collision_distance(s: int, a: float) -> float:
    """2 a sin(pi/6s) max_j sin((j + 1/2) pi/s): the exact distance of eq:proof-collision-distance."""
    return 2 * a * math.sin(math.pi / (6 * s)) * max(math.sin((j + 0.5) * math.pi / s) for j in range(s))


def distance_floor(s: int, a: float) -> float:
    """a/3s: the left half of eq:collision-pair."""
    return a / (3 * s)


def response_ceiling(s: int, a: float, *, smoothness: float, n_rows: int) -> float:
    """C_s a^s/(N_m 2^(s-1) (s-1)!): how far one answer can move, eq:proof-collision-response."""
    return float(smoothness * a**s / (n_rows * 2 ** (s - 1) * math.factorial(s - 1)))


def transcript_ceiling(s: int, a: float, *, smoothness: float, n_rows: int, T: int) -> float:
    """sqrt(T)/2 times that: the perturbation that makes both candidates give the midpoint transcript."""
    return math.sqrt(T) / 2 * response_ceiling(s, a, smoothness=smoothness, n_rows=n_rows)


def reconstruction_risk(
    s: int, *, radius: float, noise: float, smoothness: float, n_rows: int, T: int
) -> float:
    """(1/6s) min{rho, (2^s N_m (s-1)! eta/(C_s sqrt(T)))^(1/s)}: eq:reconstruction-risk.

    No attack on s free records does better in the worst case. ``smoothness`` is C_s, a bound of every
    accepted query's s-th derivative along the segment; at C_s = 0 (a polynomial of lower degree) the two
    datasets give the very same answers, so the radius alone is left, even at eta = 0.
    """
    require_order(s)
    require_at_least_zero(radius=radius, noise=noise, smoothness=smoothness)
    if not (n_rows >= s and T >= 1):
        raise InputError(f"n_rows, T: expected at least {s} records and 1 query, not {n_rows} and {T}")
    return risk_radius(s, radius=radius, noise=noise, smoothness=smoothness, n_rows=n_rows, T=T) / (6 * s)


def risk_radius(s: int, *, radius: float, noise: float, smoothness: float, n_rows: int, T: int) -> float:
    """a = min{rho, (2^s N_m (s-1)! eta/(C_s sqrt(T)))^(1/s)}: the widest pair that eta hides."""
    if smoothness == 0:
        return radius
    reach = 2**s * n_rows * math.factorial(s - 1) * noise / (smoothness * math.sqrt(T))
    return float(min(radius, reach ** (1 / s)))


def sharper_reconstruction_risk(
    s: int, *, radius: float, noise: float, smoothness: float, n_rows: int, T: int
) -> float:
    """Half the exact distance of the widest hidden pair: the same bound without a/3s in place of dist."""
    a = risk_radius(s, radius=radius, noise=noise, smoothness=smoothness, n_rows=n_rows, T=T)
    return 0.5 * collision_distance(s, a)


def conditioning_ceiling(s: int, a: float, *, smoothness: float, n_rows: int, T: int) -> float:
    """C_s sqrt(sT) a^(s-1)/(N_m (s-1)!) >= the least singular value of the response Jacobian in s records
    within a of one point: eq:collision-jacobian."""
    require_order(s)
    return smoothness * math.sqrt(s * T) * a ** (s - 1) / (n_rows * math.factorial(s - 1))


def matching_distance(x: Array, y: Array) -> float:
    """dist: the largest recordwise distance after the best matching of two sets, each (s, q).

    By bisecting the distances for which a perfect matching exists (records on a line match in order).
    """
    x, y = np.atleast_2d(x), np.atleast_2d(y)
    apart = np.linalg.norm(x[:, None, :] - y[None, :, :], axis=2)
    levels = np.unique(apart)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _matches(apart <= levels[middle]) else (middle + 1, high)
    return float(levels[low])


def _matches(allowed: Array) -> bool:
    """Whether each row can be given a column of its own (Kuhn's augmenting paths)."""
    owner = [-1] * allowed.shape[1]

    def place(row: int, seen: set[int]) -> bool:
        for column in np.flatnonzero(allowed[row]).tolist():
            if column not in seen:
                seen.add(column)
                if owner[column] < 0 or place(owner[column], seen):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(allowed)))


def require_order(s: int) -> None:
    """s records, at least two."""
    if isinstance(s, bool) or not isinstance(s, int) or s < 2:
        raise InputError(f"s: expected an integer of at least 2, not {s!r}")


DEGREE = 40
POINTS = 801


def segment_smoothness(along: Callable[[Array], Array], s: int, radius: float) -> float:
    """sup over |u| <= rho of ||d^s/du^s g(o_o + u v)||: C_s of eq:query-smoothness for one query.

    ``along`` maps u, (k,), to g there, (d, k).
    """
    nodes = np.cos((np.arange(DEGREE + 1) + 0.5) * np.pi / (DEGREE + 1))
    coefficients = chebyshev.chebfit(nodes, along(radius * nodes).T, DEGREE)
    # Coefficients at the level of rounding would grow with each derivative.
    coefficients[np.abs(coefficients) < 1e-14 * np.abs(coefficients).max()] = 0.0
    derived = chebyshev.chebder(coefficients, s)
    values = chebyshev.chebval(np.linspace(-1, 1, POINTS), derived)
    return float(np.linalg.norm(np.atleast_2d(values), axis=0).max()) / radius**s
