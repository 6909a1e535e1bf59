"""The law p^k: the start and the accepted history, with what anyone can rebuild from these two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fedtmle.model.density.fluctuation import AbstractFluctuation
from fedtmle.model.density.memo import Memo
from fedtmle.model.density.start import KernelDensity, Rule
from fedtmle.model.density.sums import combined
from fedtmle.model.types import Array

KEPT_LAWS = 16


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

    @property
    def psi(self) -> Array:
        """Psi(p^k)."""
        return self.functional.psi

    def log_density(self, points: Array) -> Array:
        """log p^k at points (q, N): log p^0 and what each accepted step added."""
        total = self.start.log_density(points)
        for step in self.steps:
            total = total + step.log_ratio(points)
        return total
