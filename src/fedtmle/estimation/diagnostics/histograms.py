"""Histograms of propensity scores by the treatment taken, and of inverse probability weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.estimation.diagnostics.base import AbstractDiagnostic, Pool, read_bins
from fedtmle.targets.diagnostics import (
    PROBABILITY_EDGES,
    WEIGHT_EDGES,
    Histogram,
    WeightHistogram,
    named_histograms,
    shown_arms,
)
from fedtmle_core.blocks import Block, Cells
from fedtmle_core.terms import Term
from fedtmle_core.types import Array


@final
@dataclass(frozen=True, kw_only=True)
class Treatment:
    """A treatment at one point in time, or in one period: who takes each arm, and with which probability."""

    arms: tuple[str, ...]
    taken: tuple[Term, ...]  # 1 for those who take the arm, of those at risk
    scores: tuple[Term, ...]  # P(arm | W), before truncation
    period: int | None = None


@final
@dataclass(frozen=True, kw_only=True)
class PropensityHistograms(AbstractDiagnostic[tuple[Histogram, ...]]):
    """People by their propensity score of each arm, by the arm that they took; of two arms, of the second."""

    pool: Pool
    treatments: tuple[Treatment, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(
            Cells(of=treatment.scores[a], edges=PROBABILITY_EDGES[1:-1], groups=treatment.taken)
            for treatment in self.treatments
            for a in shown_arms(len(treatment.arms))
        )

    def read(self, values: Sequence[Array]) -> tuple[Histogram, ...]:
        found, rest = list[Histogram](), iter(values)
        for treatment in self.treatments:
            arms, bins = len(treatment.arms), []
            for _ in shown_arms(arms):
                bins += read_bins(next(rest), groups=arms, sums=0, silos=self.pool.silos)
            found += named_histograms(bins, treatment.arms, treatment.period)
        return tuple(found)


@final
@dataclass(frozen=True, kw_only=True)
class Followed:
    """The weights of those who follow a rule, or take an arm, up to a period; 0 for all others."""

    name: str
    weight: Term
    period: int | None = None


@final
@dataclass(frozen=True, kw_only=True)
class WeightHistograms(AbstractDiagnostic[tuple[WeightHistogram, ...]]):
    """People who follow a rule by their inverse probability weight; together they are those who follow it."""

    pool: Pool
    followed: tuple[Followed, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(
            Cells(of=each.weight, edges=WEIGHT_EDGES, groups=(each.weight,)) for each in self.followed
        )

    def read(self, values: Sequence[Array]) -> tuple[WeightHistogram, ...]:
        silos = self.pool.silos
        return tuple(
            WeightHistogram(
                name=each.name, period=each.period, bins=read_bins(totals, groups=1, sums=0, silos=silos)[0]
            )
            for each, totals in zip(self.followed, values, strict=True)
        )
