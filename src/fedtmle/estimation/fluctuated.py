"""What a study must give of its Q, whichever way it gets to one: the submodel, the plug-in and the residuals.

An effect has a regression per arm (`rows`), a time to an event has hazards, and treatment over time has a
sequence of regressions. Targeting and the closing sums need no more of them than this.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.estimation.eif import EIF
from fedtmle.model.problem import Calibration, ConvergenceBounds
from fedtmle_core.blocks import Intervals, Layer
from fedtmle_core.types import Array, Family


@final
@dataclass(frozen=True, kw_only=True)
class Law:
    """The accepted fluctuations, in order; with the start, which is public, they are Q."""

    history: tuple[tuple[float, ...], ...] = ()

    def moved(self, eps: Sequence[float] | Array) -> Law:
        """Return the law after one more fluctuation."""
        return Law(history=(*self.history, tuple(map(float, eps))))

    def total(self, dim: int) -> Array:
        """Return the sum of all fluctuations, shape (d,)."""
        return np.array([math.fsum(step) for step in zip(*self.history, strict=True)] or [0.0] * dim)


class AbstractFluctuated(ABC):
    """A Q that is fluctuated: its means are targeted until the EIF equation holds."""

    labels: tuple[str, ...]  # the names of psi's coordinates
    combination: tuple[tuple[float, ...], ...]  # L: row k combines the means into coordinate k of psi
    divides_by_n = False  # whether the covariance is divided by n, not n - 1
    is_common: bool  # whether the submodel's covariates and weights are the same at every law: eps add up

    @property
    @abstractmethod
    def outcome_bounds(self) -> tuple[float, float]:
        """The bounds of the outcome, of which the unit scale is one."""

    @property
    @abstractmethod
    def family(self) -> Family:
        """The family of the loss."""

    @abstractmethod
    def layers(self, law: Law) -> tuple[Layer, ...]:
        """Return the submodel at a law: a layer for each record of a person in the loss, d columns each."""

    @abstractmethod
    def eif(self, law: Law) -> EIF:
        """Return the columns of the closing sums at a law."""

    @abstractmethod
    def admits(self, eps: Array) -> bool:
        """Return whether a fluctuation is one; a runaway one is not."""

    def bounds(
        self,
        law: Law,
        known: Calibration,
        intervals: Intervals,
    ) -> ConvergenceBounds | None:
        """Return by how much a residual bounds the distance from convergence; None if nothing is known."""
        del law, known, intervals
        return None

    @property
    def dim(self) -> int:
        """How many coordinates psi has."""
        return len(self.combination)

    @property
    def L(self) -> Array:
        """The combination as a matrix."""
        return np.array(self.combination)

    @property
    def width(self) -> float:
        """The width of the outcome's bounds."""
        return self.outcome_bounds[1] - self.outcome_bounds[0]
