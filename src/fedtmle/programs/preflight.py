"""The programs that come before a study: its preflight, and the test whether silos differ.

Both fit models across silos and estimate no effect. A preflight fits the treatment model alone, and asks for
histograms of the propensity scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from fedtmle.initial.crossfit import Fitted
from fedtmle.model.table import AnyTable, with_silo
from fedtmle.programs.diagnostics import Histogram, named_histograms
from fedtmle.programs.nuisance import effect_columns
from fedtmle.programs.own import own_view, seen
from fedtmle.programs.preparation import (
    begin_study,
    effect_problem,
    factor_levels,
    fit_nuisances,
    prepare_effect,
    scores_alone,
)
from fedtmle.programs.regimes import study_at
from fedtmle.programs.rounds import ask
from fedtmle.programs.sites import compare_silos
from fedtmle.programs.study import Study
from fedtmle.protocol.bins import BinsQuery
from fedtmle.protocol.outcome import Described, Outcome, SiteTest
from fedtmle.protocol.plan import AbstractProgram
from fedtmle.protocol.query import Flow
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.effects.statistics import FittedPropensityBins

Treatment = tuple[EffectColumns, tuple[Fitted, ...], float]


@final
@dataclass(frozen=True, kw_only=True)
class PreflightProgram(AbstractProgram[AnyTable]):
    """Fits a study's treatment model across silos and estimates nothing; ``details`` has the histograms."""

    study: Study
    silos: tuple[str, ...] = ()

    @classmethod
    def of(cls, study: Study, silos: Sequence[str]) -> Self:
        """Return the program of a study whose silos are these, in their order."""
        return cls(study=study, silos=study.silo_levels(silos))

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def smallest_part(self, rows: AnyTable) -> int:
        return self.study.smallest_part(rows)

    def at(self, silo: str, rows: AnyTable) -> AnyTable:
        return with_silo(rows, silo, self.silos) if self.silos else rows

    def flow(self, n: int) -> Flow[Described]:
        study = self.study
        if study.timeline is not None:  # the propensity scores of the first period
            study = study_at(study, study.timeline, 1)
        columns, models, weight_mean = yield from fit_treatment(study, self.silos, n)
        preparation = scores_alone(columns, models, weight_mean)
        asked = ask(BinsQuery(bins=FittedPropensityBins(preparation), n=n))
        bins = yield from seen(asked, own_view(models))
        return Described(details=named_histograms(bins, self.study.target.arms))


def fit_treatment(study: Study, silos: tuple[str, ...], n: int) -> Flow[Treatment]:
    """Fit the treatment model alone; return it with the mean weight that its fit is relative to."""
    columns = effect_columns(study)
    tally, fitting = yield from begin_study(study, columns, factor_levels(study, silos), n, ("treatment",))
    fitted = yield from fit_nuisances(study, columns, tally, fitting, ("treatment",))
    return columns, fitted["treatment"], tally.weight_mean


def propensity_histograms(outcome: Outcome) -> tuple[Histogram, ...]:
    """Return the histograms of a preflight's outcome."""
    if not isinstance(outcome, Described) or not isinstance(outcome.details, tuple):
        raise TypeError("this outcome is not a preflight's")
    return outcome.details


@final
@dataclass(frozen=True, kw_only=True)
class SitesProgram(AbstractProgram[AnyTable]):
    """Fits the models of treatment and outcome and asks whether silos differ; ``details`` has the tests."""

    study: Study

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def smallest_part(self, rows: AnyTable) -> int:
        return self.study.smallest_part(rows)

    def flow(self, n: int) -> Flow[Described]:
        study = self.study
        levels = factor_levels(study, ())
        columns = effect_columns(study)
        roles = ("treatment", "outcome")
        tally, fitting = yield from begin_study(study, columns, levels, n, roles)
        fitted = yield from fit_nuisances(study, columns, tally, fitting, roles)
        preparation = yield from prepare_effect(study, columns, fitted, tally, n)
        compared = yield from compare_silos(study, effect_problem(study, preparation), None, n)
        return Described(details=compared.tests)


def site_tests(outcome: Outcome) -> tuple[SiteTest, ...]:
    """Return the tests of a `SitesProgram`, of those that have two silos to compare."""
    if not isinstance(outcome, Described) or not isinstance(outcome.details, tuple):
        raise TypeError("this outcome has no tests")
    return tuple(test for test in outcome.details if test.df > 0)
