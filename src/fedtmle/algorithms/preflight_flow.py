"""The program of a preflight: the treatment model alone, and the histograms of what it predicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from fedtmle.algorithms.diagnostics import Histogram, named_histograms
from fedtmle.algorithms.study import Study
from fedtmle.algorithms.study_flow import fit_treatment
from fedtmle.model.table import AnyTable
from fedtmle.protocol.bins import BinsQuery
from fedtmle.protocol.outcome import Described, Outcome
from fedtmle.protocol.plan import AbstractProgram
from fedtmle.protocol.query import Flow
from fedtmle.targets.effects.prepare import Preparation
from fedtmle.targets.effects.statistics import FittedPropensityBins


@final
@dataclass(frozen=True, kw_only=True)
class PreflightProgram(AbstractProgram):
    """Fits a study's treatment model across silos and estimates nothing; ``details`` has the histograms."""

    study: Study

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def smallest_part(self, rows: AnyTable) -> int:
        return self.study.smallest_part(rows)

    def flow(self, n: int) -> Flow[Described]:
        columns, models, weight_mean = yield from fit_treatment(self.study, n)
        preparation = Preparation(
            columns=replace(columns, strata=None, strata_levels=()),
            components=(),
            outcome=(),
            treatment=models,
            missingness=(),
            g_floor=0.0,
            weight_mean=weight_mean,
            shares=(),
        )
        bins = yield BinsQuery(bins=FittedPropensityBins(preparation), n=n)
        return Described(details=named_histograms(bins, self.study.target.arms))


def propensity_histograms(outcome: Outcome) -> tuple[Histogram, ...]:
    """Return the histograms of a preflight's outcome."""
    if not isinstance(outcome, Described) or not isinstance(outcome.details, tuple):
        raise TypeError("this outcome is not a preflight's")
    return outcome.details
