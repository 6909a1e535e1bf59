"""Entropy-regularised optimal transport to fixed destinations (section 5 and S.3).

An observation o in R^q is softly allocated to destinations z_1..z_J with capacities c_1..c_J. With
regularisation l and theta_J = 0,

    Psi(p) = argmin over theta of  E_p[l log sum_j e^{(theta_j - |o - z_j|^2/2)/l}] - sum_j c_j theta_j,
    s(o)   = softmax of (theta_j - |o - z_j|^2/2)/l,
    H      = E_p[diag(s) - s s^T] over the first d = J - 1 coordinates,
    D(o)   = -l H^{-1} {s_{1:d}(o) - c_{1:d}}.

The factor l in D: the first-order equation E_p[s] = c has the theta-derivative H/l.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fedtmle.errors import InputError, NumericalError
from fedtmle.model.linear import cholesky, congruence, invert, multiply, solve_factored
from fedtmle_core import kernels
from fedtmle_core.types import Array
from fedtmle_paper.density.fluctuation import AbstractFluctuation, LogisticFluctuation
from fedtmle_paper.density.law import AbstractFunctional
from fedtmle_paper.density.problem import AbstractDensityProblem
from fedtmle_paper.density.quadrature import combine, combined, expectation, second_moment

SQUARE = ((-2.0, -2.0), (2.0, -2.0), (-2.0, 2.0), (2.0, 2.0))  # S.3
ROUNDING = 2.0**-51
ACCEPTED = 2.0**-40  # |g| where rounding ends the descent early
RIDGE = 2.0**-10
NEWTON_STEPS = 100
HALVINGS = 40


@final
@dataclass(frozen=True, kw_only=True)
class OptimalTransport(AbstractDensityProblem):
    """Entropic optimal transport: the relative allocation offsets theta_1..theta_d.

    Mass at each record is allocated to ``destinations`` with the ``capacities``; ``regularisation`` is the
    entropy's weight, ``spacing`` that of the quadrature's grid. The defaults are the paper's benchmark.
    """

    destinations: Sequence[Sequence[float]] = SQUARE
    capacities: Sequence[float] = (0.25, 0.25, 0.25, 0.25)
    regularisation: float = 1.0
    fluctuation: AbstractFluctuation = field(default=LogisticFluctuation())
    spacing: float = 0.15

    def __post_init__(self) -> None:
        destinations = _table(self.destinations, "destinations", ndim=2)
        capacities = _table(self.capacities, "capacities", ndim=1)
        if len(destinations) < 2 or not destinations.shape[1]:
            raise InputError("destinations: expected at least 2 points, shape (J, q)")
        if len(np.unique(destinations, axis=0)) < len(destinations):
            raise InputError("destinations: two of them are the same point")
        if capacities.shape != (len(destinations),):
            raise InputError(f"capacities: expected one for each of {len(destinations)} destinations")
        if (capacities <= 0).any() or abs(math.fsum(capacities) - 1.0) > 1e-12:
            raise InputError("capacities: expected positive numbers that add up to one")
        if not (math.isfinite(self.regularisation) and self.regularisation > 0):
            raise InputError(f"regularisation: expected a positive number, not {self.regularisation}")
        if not (math.isfinite(self.spacing) and self.spacing > 0):
            raise InputError(f"spacing: expected a positive number, not {self.spacing}")
        # Tuples, so that a problem is a hashable value whatever it was built from.
        object.__setattr__(self, "destinations", tuple(tuple(map(float, z)) for z in destinations))
        object.__setattr__(self, "capacities", tuple(map(float, capacities)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"theta_{j}" for j in range(1, len(self.destinations)))

    @property
    def columns(self) -> int:
        return len(self.destinations[0])

    @property
    def strip(self) -> tuple[float, ...]:
        # While the arguments of the J exponentials differ by less than pi, their sum is not zero.
        spread = np.ptp(np.array(self.destinations), axis=0)
        return tuple(math.pi * self.regularisation / float(w) if w else math.inf for w in spread)

    def functional(self, nodes: Array, masses: Array, near: AbstractFunctional | None) -> Transport:
        theta = np.zeros(self.dim) if near is None else near.psi
        return self._newton(nodes, masses, theta)

    def direct(self, rows: object) -> Array:
        """Return theta of the empirical transport problem on pooled rows (N, q): the limit of targeting."""
        points = self.read(rows)
        return self._newton(points, np.full(points.shape[1], 1.0 / points.shape[1]), np.zeros(self.dim)).psi

    def shares(self, points: Array, theta: Array) -> Array:
        """Return s_{1:d} at points (q, N), shape (d, N)."""
        # |o|^2/2 is common to all destinations and cancels.
        logits = [
            (combined(np.array(z), points) + (offset - 0.5 * math.fsum(x * x for x in z)))
            / self.regularisation
            for z, offset in zip(self.destinations, [*theta, 0.0], strict=True)
        ]
        return kernels.softmax(np.stack(logits))[: self.dim]

    def _newton(self, points: Array, masses: Array, theta: Array) -> Transport:
        """Return the root of g(theta) = E[s_{1:d}] - c_{1:d}, the gradient of the convex objective."""
        g, H = self._residual(points, masses, theta)
        for _ in range(NEWTON_STEPS):
            # theta/l, a logit, is resolved to its rounding; g can be no better.
            if _size(g) <= ROUNDING * max(1.0, _size(theta) / self.regularisation):
                break
            # The ridge is for starts where some s_j is nearly zero everywhere, so that H nearly is; of order
            # |g|^2, it leaves the convergence quadratic.
            factor = cholesky(H, shift=RIDGE * _size(g) ** 2)
            if factor is None:
                break
            step = -self.regularisation * solve_factored(factor, g)
            for _ in range(HALVINGS):
                ahead, H_ahead = self._residual(points, masses, theta + step)
                # Either the objective is still falling at the end of the step, or |g| has fallen.
                if math.fsum(ahead * step) <= 0 or _size(ahead) <= 0.75 * _size(g):
                    break
                step = 0.5 * step
            else:
                break
            theta, g, H = theta + step, ahead, H_ahead
        inverse = invert(H)
        if _size(g) > ACCEPTED or inverse is None or not np.isfinite(inverse).all():
            raise NumericalError(
                "psi: the transport problem has no solution to working precision; the destinations may be "
                "too far apart for this regularisation"
            )
        return Transport(problem=self, theta=theta, gain=-self.regularisation * inverse)

    def _residual(self, points: Array, masses: Array, theta: Array) -> tuple[Array, Array]:
        """Return g and H at theta."""
        s = self.shares(points, theta)
        mean = expectation(masses, s, 0)
        return mean - np.array(self.capacities)[: self.dim], np.diag(mean) - second_moment(masses, s, 0)


@final
@dataclass(frozen=True, kw_only=True)
class Transport(AbstractFunctional):
    """Psi = theta and D = gain (s_{1:d} - c_{1:d}), gain = -l H^{-1}."""

    problem: OptimalTransport
    theta: Array
    gain: Array

    @property
    def psi(self) -> Array:
        return self.theta

    def eif(self, points: Array) -> Array:
        return combine(self.gain, self.problem.shares(points, self.theta) - self._capacities)

    def tangent(self, points: Array, j: int) -> Array:
        # ds_a/do_j = s_a (z_aj - sum_b s_b z_bj)/l; |o|^2/2 cancels in the softmax.
        z = np.array(self.problem.destinations)[:, j]
        s = self.problem.shares(points, self.theta)
        mean = z[:-1] @ s + z[-1] * (1.0 - s.sum(axis=0))
        return np.asarray(self.gain @ (s * (z[:-1, None] - mean) / self.problem.regularisation))

    @property
    def vertices(self) -> Array:
        # D is affine in s, and s ranges over the simplex.
        return combine(self.gain, np.eye(len(self.theta), len(self.theta) + 1) - self._capacities)

    def correction(self, mean: Array, second: Array) -> Array:
        # s - c = gain^-1 D, so the moments of D are those of s, and H_n = diag(P_n s) - P_n s s^T.
        scale, c = invert(-self.gain), self._capacities[:, 0]  # H/l
        if scale is None:
            raise NumericalError("psi: the curvature of the transport problem is singular")
        off = -multiply(scale, mean[:, None])[:, 0]  # P_n s - c
        products = congruence(scale, second) + np.outer(off, c) + np.outer(c, off) + np.outer(c, c)
        inverse = invert(np.diag(c + off) - products)
        if inverse is None:
            raise NumericalError("psi: the rows do not determine the curvature of the transport problem")
        return self.problem.regularisation * multiply(inverse, scale)

    @property
    def _capacities(self) -> Array:
        return np.array(self.problem.capacities)[: len(self.theta), None]


def _size(vector: Array) -> float:
    return float(np.abs(vector).max())


def _table(values: object, name: str, *, ndim: int) -> Array:
    try:
        table = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected numbers, in rows of one length") from None
    if table.ndim != ndim or not np.isfinite(table).all():
        raise InputError(f"{name}: expected finite numbers in {ndim} dimension(s)")
    return table
