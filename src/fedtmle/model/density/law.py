"""The law p^k: the start and the accepted history, with what anyone can rebuild from these two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.density.fluctuation import AbstractFluctuation
from fedtmle.model.density.quadrature import Memo, combined, expectation, reweight, second_moment
from fedtmle.model.density.start import KernelDensity, Rule
from fedtmle.model.types import Array, exponent

KEPT_LAWS = 16
SLACK = 1.0 + 2.0**-20  # D is bounded by its vertices up to rounding
FLOOR = 2.0**-45  # of the quadrature's relative error: rounding, and nodes left out


class AbstractFunctional(ABC):
    """Psi and D at one law, as a frozen value."""

    @property
    @abstractmethod
    def psi(self) -> Array:
        """Psi(p), shape (d,)."""

    @abstractmethod
    def eif(self, points: Array) -> Array:
        """D(p) at points (q, N), shape (d, N)."""

    @property
    @abstractmethod
    def vertices(self) -> Array:
        """Points whose convex hull holds every value of D(p), shape (d, V)."""

    @abstractmethod
    def correction(self, mean: Array, second: Array) -> Array:
        """T, (d, d), such that T D(p) is the EIF whose factor of the law is taken over the rows.

        ``mean`` and ``second`` are P_n D and P_n D D^T. The identity where D has no such factor.
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
        """log p^{k+1} - log p^k at points (q, N)."""
        t = combined(np.array(self.eps), self.functional.eif(points))
        return self.fluctuation.log_factor(t) - self.log_z


@final
@dataclass(frozen=True, kw_only=True)
class DensityLaw:
    """p^k; two laws of one problem are equal when their starts and histories are."""

    start: KernelDensity
    history: tuple[tuple[float, ...], ...]
    steps: tuple[Step, ...] = field(repr=False, compare=False)
    rule: Rule = field(repr=False, compare=False)
    masses: Array = field(repr=False, compare=False)  # of p^k at the rule's nodes, (J,)
    functional: AbstractFunctional = field(repr=False, compare=False)
    eif: Array = field(repr=False, compare=False)  # D(p^k) at the nodes, (d, J)
    # Laws moved to from this start, by problem and history: one memory for all its descendants.
    moved: Memo[DensityLaw] = field(default_factory=lambda: Memo(KEPT_LAWS), repr=False, compare=False)

    def __post_init__(self) -> None:
        for shared in (self.masses, self.eif, self.psi):  # among all parties of a process
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
        """eta, from how well each half-rule of doubled spacing integrates D and D D^T.

        The trapezoid converges geometrically: doubling the spacing takes the square root of the relative
        error, so the square of what the half-rules show estimates what the rule itself has left. D is of
        the order of H^-1, and its error of the order of H^-2.
        """
        bound, reach, halves = max(self.exponents), self.reach, 2**self.start.columns
        whole = second_moment(self.masses, self.eif, bound)
        shown = 0.0
        for half in range(halves):
            chosen = self.rule.parity == half
            masses, log_share = reweight(self.masses[chosen], np.zeros(int(chosen.sum())))
            first = expectation(masses, self.eif[:, chosen], bound) / reach
            second = (second_moment(masses, self.eif[:, chosen], bound) - whole) / reach**2
            share = halves * kernels.exp(log_share) - 1.0
            shown = max(shown, abs(share), float(np.abs(first).max()), float(np.abs(second).max()))
        return reach * max(1.0, reach) * (4 * shown**2 + FLOOR)

    def log_density(self, points: Array) -> Array:
        """log p^k at points (q, N): log p^0 and what each accepted step added."""
        total = self.start.log_density(points)
        for step in self.steps:
            total = total + step.log_ratio(points)
        return total
