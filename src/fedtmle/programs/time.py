"""The parts of a study of time to an event: counts, hazards, the problem, overlap and people at risk.

levels -> clusters -> counts -> treatment, hazard and censoring models -> overlap -> targeting -> at risk
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np

from fedtmle.errors import FedTMLEError, InputError
from fedtmle.initial.crossfit import Fitted
from fedtmle.initial.design import range_exponent
from fedtmle.initial.glm import Supplied
from fedtmle.initial.superlearner import used_columns
from fedtmle.model.problem import Estimate
from fedtmle.programs.fitting import Fitting
from fedtmle.programs.imputation import pool_estimates
from fedtmle.programs.missing import Levels, MissingCounts
from fedtmle.programs.nuisance import Regression, regressions
from fedtmle.programs.sites import ComparedSilos
from fedtmle.programs.study import Study
from fedtmle.programs.superlearner import OwnCoefficients, begin_fits, fit_together
from fedtmle.protocol.bins import BinsQuery, PooledBins
from fedtmle.protocol.flows import both
from fedtmle.protocol.outcome import Outcome, Targeted
from fedtmle.protocol.query import CountCell, Flow, JointQuery, Phase, Query
from fedtmle.protocol.sums import PresenceQuery, TallyQuery
from fedtmle.targets.diagnostics import Balance, Histogram, named_histograms
from fedtmle.targets.effects.components import Component, PooledWeights
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.effects.problem import AbstractMeans
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.problem import RegimeGroup, TimePreparation, TimeProblem
from fedtmle.targets.time.statistics import (
    AtRiskBins,
    CensoringResponse,
    CountedHazard,
    EventBins,
    EventResponse,
    FollowUpColumns,
    LifeTable,
    TimeCounts,
    TimeOverlapColumns,
    TimePropensityBins,
    TimeTruncationBins,
)
from fedtmle_core import kernels
from fedtmle_core.types import Family

SMALLEST_EXPONENT = -512  # a smaller exponent of weights leaves the range of a double
UNBOUNDED_CEILING = 4096.0  # declared for 1/(g G) where it is not bounded
MOST_SHOWN = 12  # periods whose number at risk is shown


@dataclass(frozen=True, kw_only=True)
class TimeTally:
    """Pooled counts: people and their events per arm, and the sums of weights.

    ``events`` has those without an event, and those with one of each cause, per arm, over the silos that
    disclose theirs; () if they are not shown.
    """

    arms: tuple[int, ...]
    events: PooledBins
    censors: bool  # whether anyone is censored
    weight_mean: float
    weights: PooledWeights


@dataclass(frozen=True, kw_only=True)
class TimeOverlap:
    """Overlap from pooled sums; ``truncated`` is over the silos that disclose theirs."""

    truncated: tuple[int, ...]  # people with a truncated probability, per arm
    disclosing: tuple[int, ...]  # silos that disclose their count, per arm
    effective_sizes: tuple[float, ...]  # (sum omega)^2 / sum omega^2, per regime in a population


@dataclass(frozen=True, kw_only=True)
class AtRisk:
    """People at risk in some periods per arm, the number of silos that show theirs, and propensity scores."""

    periods: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]  # per arm, per period
    silos: tuple[tuple[int, ...], ...]
    overlap: tuple[Histogram, ...]


@dataclass(frozen=True, kw_only=True)
class PreparedTimes:
    """A study before it is targeted: pooled counts, fitted models and the problem."""

    columns: EffectColumns
    levels: Levels
    tally: TimeTally
    fitted: Mapping[str, tuple[Fitted, ...]]
    problem: TimeProblem
    view: OwnCoefficients | None = None  # the rows with which the models predict, if not the study's


@dataclass(frozen=True, kw_only=True)
class PreparedGrids:
    """A study of time to an event before it is targeted, and the same study on a finer grid for comparison.

    ``finer`` is that study with what was prepared or the error that ended it; None if there is none.
    """

    study: Study
    target: AbstractTimeEffect
    prepared: PreparedTimes
    finer: tuple[Study, AbstractTimeEffect, PreparedTimes | FedTMLEError] | None = None


@dataclass(frozen=True, kw_only=True)
class FinerGrid:
    """The estimate on a finer grid, for comparison; ``reason`` says why there is none."""

    subperiods: int
    estimate: Estimate | None = None
    reason: str = ""
    imputed: tuple[Estimate, ...] = ()  # one per data set, if a covariate is imputed

    @classmethod
    def of(cls, target: AbstractTimeEffect, ended: Outcome | FedTMLEError) -> Self:
        """Return what a study on the finer grid ended with: an estimate that converged, or the reason."""
        if isinstance(ended, FedTMLEError):
            return cls(subperiods=target.subperiods, reason=str(ended))
        if not isinstance(ended, Targeted):
            return cls(subperiods=target.subperiods, reason="the algorithm gives no pooled estimate")
        if not ended.status.is_converged:
            return cls(subperiods=target.subperiods, reason=ended.status.value)
        return cls(subperiods=target.subperiods, estimate=ended.estimate)


def combined_grids(grids: Sequence[FinerGrid]) -> FinerGrid:
    """Return one finer grid over imputed data sets, by Rubin's rules; without an estimate if one has none."""
    estimates = tuple(grid.estimate for grid in grids if grid.estimate is not None)
    if len(estimates) < len(grids):
        return next(grid for grid in grids if grid.estimate is None)
    return replace(grids[0], estimate=pool_estimates(estimates), imputed=estimates)


@dataclass(frozen=True, kw_only=True)
class TimeDetails:
    """The results of a study of time to an event besides its estimate; all are pooled and public."""

    problem: TimeProblem | AbstractMeans[Any, Any]
    regimes: tuple[RegimeGroup, ...]  # in populations, in the order of the components
    components: tuple[Component, ...]
    strata: tuple[str, ...]
    levels: Mapping[str, tuple[str, ...]]
    arm_counts: tuple[int, ...]
    events: PooledBins  # per arm: without an event, with one of each cause
    g_floor: float
    overlap: TimeOverlap
    at_risk: AtRisk | None
    balance: tuple[Balance, ...] | None  # None without diagnostics, or without covariates
    nuisances: Mapping[str, tuple[Fitted, ...]]
    finer: FinerGrid | None = None  # None if no finer grid is compared
    silos: ComparedSilos | None = None  # None without diagnostics
    missing: MissingCounts | None = None  # counts for covariates that may be missing
    omitted: int = 0  # records left out, because their treatment is missing
    imputed: tuple[Estimate, ...] = ()  # one per data set, if a covariate is imputed
    separated: Mapping[str, int] = field(default_factory=dict)  # see `count_separated`

    @property
    def start(self) -> object:
        """The law at which the targeting starts."""
        return self.problem.start()

    @property
    def event_counts(self) -> tuple[tuple[int, ...], ...]:
        """People with an event, per arm and cause, over the silos that disclose theirs."""
        return tuple(tuple(cause.count for cause in causes) for _, *causes in self.events)

    @property
    def disclosing_events(self) -> tuple[int, ...]:
        """How many silos disclose their events, per arm."""
        return tuple(without.silos for without, *_ in self.events)

    @property
    def observed_counts(self) -> tuple[int, ...]:
        """People with an event of any cause, per arm, over the same silos."""
        return tuple(map(sum, self.event_counts))

    @property
    def groups(self) -> tuple[str, ...]:
        """The labels of the groups for which effective sample sizes are given: regimes in populations."""
        return tuple(f"{each.regime.label} {each.population.label}".strip() for each in self.regimes)

    def fit_names(self, target: AbstractEffect, role: str) -> tuple[str, ...]:
        """Return a label for each fit of a role that has several."""
        if role == "hazard" and isinstance(target, AbstractTimeEffect):
            return target.causes
        return target.arms


def count_time(
    study: Study, target: AbstractTimeEffect, columns: EffectColumns, n: int, *, shows_events: bool
) -> Flow[TimeTally]:
    """Ask who is in each arm and stratum, and for their events; one round.

    The study needs to know whether anyone is at risk, has an event or is censored. How many have an event is
    shown, with ``shows_events``, where the number is large enough.
    """
    exponent = 1
    if study.weights:
        exponent = max(range_exponent(study.variables.ranges[study.weights]), SMALLEST_EXPONENT)
    horizon = max(each.horizon for each in target.functionals)
    counts = TimeCounts(columns=columns, weight_exponent=exponent)
    followed = FollowUpColumns(columns=columns, follow_up=target.follow_up, horizon=horizon)
    at = counts.layout.places
    arms = (*(CountCell(k, is_arm=True) for k in at["arm"]), *(CountCell(k) for k in at["stratum"]))
    queries: tuple[Query, ...] = TallyQuery(columns=counts, n=n, counts=arms), PresenceQuery(columns=followed)
    if shows_events:
        events = EventBins(columns=columns, follow_up=target.follow_up)
        queries = (
            *queries,
            BinsQuery(bins=events, n=n, phase=Phase.NUISANCE, floors=("min_cell", "min_events")),
        )
    pooled, silos, *shown = yield JointQuery(queries)
    sums = {name: part.tolist() for name, part in counts.layout.split(pooled.values()).items()}
    weight_mean = sums["weight"][0] / n
    if not weight_mean > 0:
        raise InputError(f"weights: column '{study.weights}' is zero in every row")
    anyone = {name: [silos[k] > 0 for k in places] for name, places in followed.layout.places.items()}
    _refuse_counts(target, sums["arm"], anyone, horizon)
    return TimeTally(
        arms=tuple(map(int, sums["arm"])),
        events=shown[0] if shown else (),
        censors=anyone["censored"][0],
        weight_mean=weight_mean,
        weights=PooledWeights(
            total=weight_mean * n,
            by_arm=tuple(sums["arm weight"]),
            by_stratum=tuple(sums["stratum weight"]),
        ),
    )


def _refuse_counts(
    target: AbstractTimeEffect, arms: list[float], anyone: Mapping[str, list[bool]], horizon: int
) -> None:
    for arm, people, risk in zip(target.arms, arms, anyone["at risk"], strict=True):
        if not people:
            raise InputError(
                f"treatment: no silo has a record in arm '{arm}'; check the treatment's column and its arms"
            )
        if not risk:
            raise InputError(
                f"horizons: nobody in arm '{arm}' is at risk in {target.follow_up.name(horizon)}; choose an "
                "earlier horizon, or longer periods"
            )
    for cause, happens in zip(target.causes, anyone["events"], strict=True):
        if not happens:
            raise InputError(
                f"causes: nobody has an event of cause '{cause}'; check the codes of column "
                f"'{target.outcome}', or leave the cause out"
            )


def fit_hazards(
    study: Study,
    target: AbstractTimeEffect,
    columns: EffectColumns,
    levels: Mapping[str, tuple[str, ...]],
    tally: TimeTally,
    n: int,
    supplied: Mapping[str, tuple[Fitted, ...]],
) -> Flow[dict[str, tuple[Fitted, ...]]]:
    """Fit all nuisance models in shared rounds; hazards without a model are counted in one round before.

    ``supplied`` are the predictors of roles whose predictions the silos have.
    """
    censors = tally.censors
    asked = regressions(study, columns, tally.weight_mean)
    asked |= _hazard_regressions(study, target, columns, tally.weight_mean, censors)
    places = [(role, regression) for role, each in asked.items() for regression in each]
    to_fit = [regression for _, regression in places]
    fitting = Fitting(levels=levels, n=n, accuracy=study.fit_accuracy if study.rounds_sums else None)
    counted, fitting = yield from both(
        _counted(study, target, columns, tally.weight_mean, censors, n),
        begin_fits(to_fit, fitting, study.outer_folds),
    )
    fitted: dict[str, tuple[Fitted, ...]] = {**counted, **supplied}
    fits = yield from fit_together(to_fit, fitting, study.outer_folds)
    for (role, _), fit in zip(places, fits, strict=True):
        fitted[role] = (*fitted.get(role, ()), fit)
    return fitted


def _hazard_regressions(
    study: Study, target: AbstractTimeEffect, columns: EffectColumns, weight_mean: float, censors: bool
) -> dict[str, tuple[Regression, ...]]:
    regression = partial(
        Regression,
        kind="binary",
        family=Family.LOGISTIC,
        weight_ceiling=study.weight_ceiling if study.weights else 1.0,
        cluster=study.cluster,
        spanning=study.cluster_scope == "spanning",
        ranges=study.ranges,
        own=study.profiles_silo,
    )
    asked: dict[str, tuple[Regression, ...]] = {}
    event = partial(EventResponse, columns=columns, follow_up=target.follow_up, weight_mean=weight_mean)
    hazard, censoring = study.hazard_model, study.censoring_model
    if hazard is not None and not isinstance(hazard, Supplied):
        asked["hazard"] = tuple(
            regression(
                label="hazard model" if len(target.causes) == 1 else f"hazard model of '{cause}'",
                model=hazard,
                response=event(cause=j),
                constant="no person-period that it is fitted on has an event, or every one has",
            )
            for j, cause in enumerate(target.causes, start=1)
        )
    if censors and censoring is not None and not isinstance(censoring, Supplied):
        asked["censoring"] = (
            regression(
                label="censoring model",
                model=censoring,
                response=CensoringResponse(
                    columns=columns, follow_up=target.follow_up, weight_mean=weight_mean
                ),
                constant="nobody that it is fitted on is censored before the last period, or everyone is",
            ),
        )
    return asked


def _counted(
    study: Study,
    target: AbstractTimeEffect,
    columns: EffectColumns,
    weight_mean: float,
    censors: bool,
    n: int,
) -> Flow[dict[str, tuple[Fitted, ...]]]:
    """Return the hazards that have no model, by arm and period, from a life table; one round if any."""
    causes = tuple(range(1, len(target.causes) + 1)) if study.hazard_model is None else ()
    if censors and study.censoring_model is None:
        causes = (*causes, 0)
    if not causes:
        return {}
    table = LifeTable(
        columns=columns,
        follow_up=target.follow_up,
        causes=causes,
        weight_mean=weight_mean,
        weight_ceiling=study.weight_ceiling if study.weights else 1.0,
    )
    cells = []
    if not study.weights:
        at = table.layout.places
        for cause in causes:
            happens = "min_events" if cause else "min_missing"  # those who are censored lack an outcome
            cells += [CountCell(k, floor="min_support", rest_floor="") for k in at[f"at risk {cause}"]]
            cells += [CountCell(k, floor=happens, rest_floor="") for k in at[f"events {cause}"]]
    pooled = yield TallyQuery(columns=table, n=n, counts=tuple(cells))
    sums = table.layout.split(pooled.values())
    periods = target.follow_up.periods

    def hazard(cause: int) -> CountedHazard:
        risk, events = sums[f"at risk {cause}"], sums[f"events {cause}"]
        share = np.divide(events, risk, out=np.zeros_like(events), where=risk > 0)
        if cause == 0:  # keep G above 0 after a period in which all who are left are censored
            share[share >= 1.0] = 1.0 - 2.0**-20
        return CountedHazard(
            columns=columns,
            subperiods=target.subperiods,
            hazards=tuple(map(tuple, share.reshape(len(columns.arms), periods).tolist())),
        )

    fitted: dict[str, tuple[Fitted, ...]] = {}
    counted = tuple(hazard(cause) for cause in causes if cause)
    if counted:
        fitted["hazard"] = counted
    if 0 in causes:
        fitted["censoring"] = (hazard(0),)
    return fitted


def time_problem(
    study: Study,
    target: AbstractTimeEffect,
    columns: EffectColumns,
    fitted: Mapping[str, tuple[Fitted, ...]],
    tally: TimeTally,
    n: int,
    view: OwnCoefficients | None = None,
) -> TimeProblem:
    """Return the problem that is targeted, once hazards are known; ``view`` is that of the models' rows."""
    groups = []
    for regime, population in target.groups(columns.strata_levels):
        share = population.share(tally.weights)
        if share <= 0:
            raise InputError(f"strata: no record with a positive weight is {population.label}")
        groups.append(RegimeGroup(regime, population, share))
    auto = 5.0 / (math.sqrt(n) * kernels.log(float(max(n, 2))))
    floor = min(auto if study.g_bounds == "auto" else float(study.g_bounds or 0.0), 0.5)
    used = {name for model in study.models.values() for name in used_columns(model)}
    used |= {name for name in (target.treatment, study.weights) if name is not None}
    used |= view.names if view is not None else set()
    preparation = TimePreparation(
        columns=columns,
        follow_up=target.follow_up,
        groups=tuple(groups),
        events=fitted["hazard"],
        censoring=fitted["censoring"][0] if "censoring" in fitted else None,
        treatment=fitted["treatment"],
        horizon=max(each.horizon for each in target.functionals),
        g_floor=floor,
        weight_mean=tally.weight_mean,
        used=frozenset(used),
        folds=study.outer_folds,
    )
    smallest = min(group.share for group in groups)
    weight = study.weight_ceiling if study.weights else 1.0
    inverse = 1.0 / floor if floor else UNBOUNDED_CEILING
    return TimeProblem(
        labels=tuple(component.name for component in target.components(columns.strata_levels)),
        functionals=target.functionals,
        prepare=preparation,
        ceiling=weight * inverse / smallest,
        population_ceiling=weight / smallest,
        largest_cluster=study.largest_cluster if study.cluster else 1,
        spanning=len(columns.spanning),
    )


def find_time_overlap(problem: TimeProblem, n: int) -> Flow[TimeOverlap]:
    """Ask for overlap in one round; refuse a study whose arms do not overlap."""
    columns, arms = TimeOverlapColumns(problem), problem.prepare.columns.arms
    pooled, bins = yield JointQuery(
        (
            TallyQuery(
                columns=columns,
                n=n,
            ),
            BinsQuery(
                bins=TimeTruncationBins(problem),
                n=n,
                phase=Phase.NUISANCE,
                floors=("min_cell", "min_truncated"),
            ),
        )
    )
    sums = columns.layout.split(pooled.values())
    truncated = tuple(below.count for _, below in bins)
    for arm, people in zip(arms, truncated, strict=True):
        if people > n / 2:
            raise InputError(
                f"g_bounds: the probability of arm '{arm}' and of not being censored is below "
                f"{problem.prepare.g_floor:.3g} for {people} of {n} people; there is no overlap to learn "
                "from. Restrict the cohort, choose an earlier horizon, or simplify the models"
            )
    return TimeOverlap(
        truncated=truncated,
        disclosing=tuple(below.silos for _, below in bins),
        effective_sizes=tuple(
            float(a * a / b) if b > 0 else 0.0 for a, b in zip(sums["omega"], sums["squares"], strict=True)
        ),
    )


def count_at_risk(target: AbstractTimeEffect, problem: TimeProblem, n: int) -> Flow[AtRisk]:
    """Ask, after the closing round, who leaves when; a silo hides periods before which few left."""
    parts = target.subperiods
    last = math.ceil(problem.prepare.periods / parts)
    shown = tuple(range(1, last + 1, math.ceil(last / MOST_SHOWN)))
    begins = tuple((period - 1) * parts + 1 for period in shown)
    people, propensities = yield JointQuery(
        (BinsQuery(bins=AtRiskBins(problem, begins), n=n), BinsQuery(bins=TimePropensityBins(problem), n=n))
    )
    return AtRisk(
        periods=shown,
        counts=tuple(tuple(sum(left.count for left in arm[k:]) for k in range(len(shown))) for arm in people),
        silos=tuple(tuple(left.silos for left in arm[:-1]) for arm in people),
        overlap=named_histograms(propensities, target.arms),
    )
