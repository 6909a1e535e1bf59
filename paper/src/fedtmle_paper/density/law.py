"""The law p^k: its start, its accepted history, and the values and errors that follow from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import numpy as np

from fedtmle_core import kernels
from fedtmle_core.types import Array, Bools, exponent
from fedtmle_paper.density.fluctuation import AbstractFluctuation
from fedtmle_paper.density.quadrature import Memo, combined, expectation, reweight, second_moment
from fedtmle_paper.density.start import DROPPED, KernelDensity, Rule

KEPT_LAWS = 16  # of each start
SLACK = 1.0 + 2.0**-20  # the vertices bound D up to rounding
FLOOR = 2.0**-45  # the least relative error of the quadrature: rounding, and nodes that were dropped


class AbstractFunctional(ABC):
    """Psi and D at one law, as a frozen value."""

    @property
    @abstractmethod
    def psi(self) -> Array:
        """Psi(p), shape (d,)."""

    @abstractmethod
    def eif(self, points: Array) -> Array:
        """Return D(p) at points (q, N), shape (d, N)."""

    @abstractmethod
    def tangent(self, points: Array, j: int) -> Array:
        """Return dD/do_j at points (q, N), shape (d, N)."""

    @property
    @abstractmethod
    def vertices(self) -> Array:
        """Points whose convex hull holds every value of D(p), shape (d, V)."""

    @abstractmethod
    def correction(self, mean: Array, second: Array) -> Array:
        """Return T, shape (d, d), for which T D(p) is the EIF with its expectations taken over the rows.

        ``mean`` and ``second`` are P_n D and P_n D D^T. T is the identity if D contains no expectation.
        """


@final
@dataclass(frozen=True, kw_only=True)
class Step:
    """One accepted fluctuation: p^{k+1}/p^k = f(eps . D(p^k)) / Z."""

    eps: tuple[float, ...]
    fluctuation: AbstractFluctuation
    functional: AbstractFunctional  # at p^k
    log_z: float

    def log_ratio(self, points: Array) -> Array:
        """Return log p^{k+1} - log p^k at points (q, N), shape (N,)."""
        t = combined(np.array(self.eps), self.functional.eif(points))
        return self.fluctuation.log_factor(t) - self.log_z


@final
@dataclass(frozen=True, kw_only=True)
class DensityLaw:
    """The density p^k. Two laws of one problem are equal if their starts and histories are."""

    start: KernelDensity
    history: tuple[tuple[float, ...], ...]
    steps: tuple[Step, ...] = field(repr=False, compare=False)
    rule: Rule = field(repr=False, compare=False)
    masses: Array = field(repr=False, compare=False)  # p^k at the rule's nodes, (J,)
    functional: AbstractFunctional = field(repr=False, compare=False)
    eif: Array = field(repr=False, compare=False)  # D(p^k) at the nodes, (d, J)
    # Laws moved to from this start, by problem and history: one memory for all its descendants.
    moved: Memo[DensityLaw] = field(default_factory=lambda: Memo(KEPT_LAWS), repr=False, compare=False)

    def __post_init__(self) -> None:
        for shared in (self.masses, self.eif, self.psi):  # all silos of a process use the same arrays
            shared.setflags(write=False)

    @property
    def psi(self) -> Array:
        """Psi(p^k)."""
        return self.functional.psi

    @cached_property
    def exponents(self) -> tuple[int, ...]:
        """Powers of two that bound |D_j| at any observation, one for each j."""
        return tuple(exponent(float(bound) * SLACK) for bound in np.abs(self.functional.vertices).max(axis=1))

    @property
    def reach(self) -> float:
        """A bound on every |D_j| at any observation."""
        return float(np.abs(self.functional.vertices).max()) * SLACK

    @cached_property
    def quadrature_error(self) -> float:
        """eta, estimated from the errors of the half-rules of doubled spacing in D and D D^T.

        The trapezoid rule converges geometrically, so doubling the spacing takes the square root of the
        relative error. The square of a half-rule's error therefore estimates the error of the rule itself.
        D is of the order of H^-1, and its error of the order of H^-2.
        """
        bound, reach = max(self.exponents), self.reach
        whole = second_moment(self.masses, self.eif, bound)
        shown = 0.0
        for chosen, masses, share in self._half_rules(np.zeros_like(self.masses), 0.0):
            first = expectation(masses, self.eif[:, chosen], bound) / reach
            second = (second_moment(masses, self.eif[:, chosen], bound) - whole) / reach**2
            shown = max(shown, abs(share - 1.0), float(np.abs(first).max()), float(np.abs(second).max()))
        return reach * max(1.0, reach) * (4 * shown**2 + FLOOR)

    def gradient_error(self, fluctuation: AbstractFluctuation, eps: Array) -> float:
        """Return a bound of the error of grad A(eps) = E_p[f phi' D] / Z, with f and phi' at t = eps . D.

        As eps grows, the poles of a logistic f move towards the real line and the rule converges more slowly
        than D alone shows: the square of the half-rules' errors is no bound any more, but these errors
        themselves are, as long as the integrand's Fourier transform decays. With |phi'| <= 2,
        |phi'' + phi'^2| <= 4 and |D| <= reach, three errors add up:

        * of D, by eta: f phi' D moves by f (4 |eps|_1 reach + 2) eta, Z by 2 Z |eps|_1 eta;
        * of the rule: 2 reach times the relative errors of numerator and Z, each at most ``shown``;
        * of the dropped nodes: their mass times the largest f / Z, which is at a vertex as phi is monotone.
        """
        t = combined(eps, self.eif)
        logs, columns = fluctuation.log_factor(t), fluctuation.slope(t) * self.eif
        masses, log_z = reweight(self.masses, logs)
        bound, reach = 1 + max(self.exponents), self.reach
        whole = expectation(masses, columns, bound)
        shown = 0.0
        for chosen, half, share in self._half_rules(logs, log_z):
            gap = float(np.abs(expectation(half, columns[:, chosen], bound) - whole).max())
            shown = max(shown, abs(share - 1.0), gap / (2 * reach))
        corners = fluctuation.log_factor(combined(eps, self.functional.vertices))
        dropped = DROPPED * kernels.exp(float(corners.max()) - log_z)
        of_eif = 2 * (1 + 4 * float(np.abs(eps).sum()) * reach) * self.quadrature_error
        return of_eif + 4 * reach * (shown + dropped)

    def _half_rules(self, logs: Array, log_z: float) -> Iterator[tuple[Bools, Array, float]]:
        """Yield, for weights p^k e^logs, each half-rule's nodes, its masses there, and its estimate of 1.

        ``log_z`` is the log of the weights' total by the whole rule.
        """
        halves = 2**self.start.columns
        for half in range(halves):
            chosen = self.rule.parity == half
            masses, log_share = reweight(self.masses[chosen], logs[chosen])
            yield chosen, masses, halves * kernels.exp(log_share - log_z)

    def log_density(self, points: Array) -> Array:
        """Return log p^k at points (q, N), shape (N,): log p^0 plus the log ratio of each accepted step."""
        total = self.start.log_density(points)
        for step in self.steps:
            total = total + step.log_ratio(points)
        return total
