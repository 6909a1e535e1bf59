"""The query of a differentially private study: integer sums, to which every silo adds its share of noise.

A silo sends its sum on a public grid plus discrete Gaussian noise. With M silos, of which a collude, one
share has the variance sigma^2 / (M - a), so that the noise of the others is enough for the stated budget:

    rho = Delta^2 / (2 sigma^2) + the loss by sharing (`model.noise.sharing_loss`),

Delta the sensitivity: the largest Euclidean norm of the change if one record is replaced, in grid units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, final

from fedtmle.model.exact import Sums
from fedtmle.model.noise import share_variance, sharing_loss
from fedtmle.model.statistics import AbstractPrivateColumns
from fedtmle.protocol.query import IntegerSums, Local, Phase

PLACES = 24  # binary places of the sums: rounding is far below the noise, and a share's loss negligible
TAIL = 64  # standard deviations of noise that the range of a sum allows for


@final
@dataclass(frozen=True, kw_only=True)
class NoisySums(IntegerSums):
    """Sums to which every silo adds a share of the noise that a budget of ``rho`` (zCDP) needs.

    The shares are large enough if up to ``colluders`` of the ``silos`` reveal theirs.
    """

    columns: AbstractPrivateColumns[Any]
    n: int
    rho: Fraction
    silos: int
    colluders: int
    phase: Phase = Phase.NUISANCE
    needs_masks: bool = True

    @property
    def shifts(self) -> tuple[int, ...]:
        return (PLACES,) * len(self.columns.names)

    @property
    def row_units(self) -> int:
        return 2 << PLACES

    @cached_property
    def sensitivity(self) -> int:
        """Delta in grid units, rounded up.

        A silo rounds its sum, which adds at most one unit to the change in each term.
        """
        exact = self.columns.squared_sensitivity * (1 << 2 * PLACES)
        root = math.isqrt(-(-exact.numerator // exact.denominator)) + 1
        return root + math.isqrt(len(self.columns.names)) + 1

    @cached_property
    def variance(self) -> Fraction:
        """The variance of the noise that the silos that do not collude add together, in squared units."""
        return Fraction(-(-(self.sensitivity**2) // (2 * self.rho)))

    @property
    def noise(self) -> Fraction:
        return share_variance(self.variance, self.silos, self.colluders)

    @property
    def spent(self) -> Fraction:
        """The zCDP budget that the answer spends: rho, and the loss by sharing the noise."""
        honest = self.silos - self.colluders
        return self.rho + sharing_loss(self.noise, honest, len(self.columns.names))

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise in a pooled sum, on the scale of the columns."""
        return math.sqrt(float(self.noise * self.silos)) / (1 << PLACES)

    @property
    def largest(self) -> tuple[int, ...]:
        room = TAIL * (math.isqrt(int(self.noise * self.silos)) + 1)
        return (self.n * self.row_units + room,) * len(self.columns.names)

    @property
    def explanation(self) -> str:
        return f"sums over the rows with noise (differential privacy): {self.columns.label}"

    def answer(self, local: Local) -> Sums:
        return local.evaluate(self.columns.total).rounded(self.shifts)
