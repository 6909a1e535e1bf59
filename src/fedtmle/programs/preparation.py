"""A study before it is targeted: its clusters, counts, fitted models, problem and overlap; and its preflight.

The flow of a study and the programs of a preflight are made of these parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self, final

from fedtmle.errors import FitError, InputError
from fedtmle.initial.crossfit import Fitted, SuppliedPrediction, SuppliedProbability
from fedtmle.initial.design import range_exponent
from fedtmle.initial.glm import Supplied
from fedtmle.model.table import SILO, AnyTable, with_silo
from fedtmle.programs.diagnostics import find_overlap
from fedtmle.programs.fitting import Fitting
from fedtmle.programs.missing import Levels
from fedtmle.programs.nuisance import Regression, effect_columns, regressions
from fedtmle.programs.regimes import study_at
from fedtmle.programs.sites import compare_silos
from fedtmle.programs.study import Study
from fedtmle.programs.superlearner import (
    OwnCoefficients,
    begin_fits,
    count_separated,
    fit_together,
    own_view,
    seen,
)
from fedtmle.protocol.bins import BinsQuery
from fedtmle.protocol.clusters import ClustersQuery, SpanningQuery
from fedtmle.protocol.flows import ask, both
from fedtmle.protocol.outcome import Described, Outcome, SiteTest
from fedtmle.protocol.plan import AbstractProgram
from fedtmle.protocol.query import CountCell, Flow
from fedtmle.protocol.sums import TallyQuery
from fedtmle.targets.diagnostics import Histogram, Overlap, named_histograms
from fedtmle.targets.effects.components import PooledWeights, component_blocks
from fedtmle.targets.effects.prepare import EffectColumns, Preparation
from fedtmle.targets.effects.problem import EffectProblem
from fedtmle.targets.effects.statistics import FittedPropensityBins, OverlapMass, StudyCounts
from fedtmle_core import kernels

SMALLEST_EXPONENT = -512  # a smaller exponent of weights leaves the range of a double
UNBOUNDED_CEILING = 4096.0  # declared for 1/(g pi) where g is not bounded
ROLES = ("treatment", "missingness", "outcome")


def factor_levels(study: Study, silos: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the levels of every factor: the dictionary's, and those of C(silo)."""
    return {**study.levels, SILO: silos} if silos else study.levels


def find_shared_clusters(study: Study) -> Flow[tuple[bytes, ...]]:
    """Return the clusters that are in more than one silo, where the study allows any."""
    if study.cluster is None or study.cluster_scope == "silo":
        return ()
    allowed = study.cluster_scope == "spanning"
    shared: tuple[bytes, ...] = yield ClustersQuery(column=study.cluster, spanning=allowed)
    if shared:
        yield SpanningQuery(column=study.cluster, spanning=shared)
    return shared


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Pooled counts: rows and observed outcomes per arm, the mean weight, and the sums of weights."""

    arms: tuple[int, ...]
    observed: tuple[int, ...]
    weight_mean: float
    weights: PooledWeights


def count_arms(study: Study, columns: EffectColumns, n: int) -> Flow[Tally]:
    """Count records and observed outcomes per arm and stratum, and add up their weights."""
    exponent = 1
    if study.weights:  # whatever their unit, the sums keep their digits
        exponent = max(range_exponent(study.variables.ranges[study.weights]), SMALLEST_EXPONENT)
    counts = StudyCounts(columns=columns, weight_exponent=exponent)
    at = counts.layout.places
    pooled = yield TallyQuery(
        columns=counts,
        n=n,
        grid=counts.layout.grid,
        counts=(
            *(CountCell(k, is_arm=True) for k in at["arm"]),
            *(
                CountCell(k, of=arm, rest_floor="min_missing", is_arm=True)
                for k, arm in zip(at["observed"], at["arm"], strict=True)
            ),
            *(CountCell(k) for k in at["stratum"]),
        ),
    )
    sums = {name: part.tolist() for name, part in counts.layout.split(pooled.values()).items()}
    weight_mean = sums["weight"][0] / n
    tally = Tally(
        arms=tuple(map(int, sums["arm"])),
        observed=tuple(map(int, sums["observed"])),
        weight_mean=weight_mean,
        weights=PooledWeights(
            total=weight_mean * n,
            by_arm=tuple(sums["arm weight"]),
            by_stratum=tuple(sums["stratum weight" if study.weights else "stratum"]),
        ),
    )
    if not tally.weight_mean > 0:
        raise InputError(f"weights: column '{study.weights}' is zero in every row")
    for arm, count in zip(columns.arms, tally.observed, strict=True):
        if not count:
            raise FitError(
                "arm",
                f"treatment: no silo has an observed outcome in arm '{arm}'; check the treatment's column, "
                "its arms and who has an outcome",
            )
    return tally


@dataclass(frozen=True, kw_only=True)
class PreparedStudy:
    """A study before it is targeted: pooled counts, fitted models, the problem, and its overlap."""

    columns: EffectColumns
    levels: Levels
    tally: Tally
    fitted: Mapping[str, tuple[Fitted, ...]]
    preparation: Preparation
    effect: EffectProblem
    overlap: Overlap
    view: OwnCoefficients | None = None  # the rows with which the models predict, if not the study's
    separated: Mapping[str, int] = field(default_factory=dict)  # see `count_separated`


def prepare_study(study: Study, levels: Levels, n: int) -> Flow[PreparedStudy]:
    """Count, fit the models, and look at the overlap."""
    columns = effect_columns(study, (yield from find_shared_clusters(study)))
    tally, fitting = yield from begin_study(study, columns, levels, n)
    _require_outcomes(study, tally, n)
    fitted = yield from fit_nuisances(study, columns, tally, fitting)
    view = own_view(fit for fits in fitted.values() for fit in fits)
    preparation = yield from seen(prepare_effect(study, columns, fitted, tally, n), view)
    effect = effect_problem(study, preparation)
    overlap_found = seen(find_overlap(study, effect, preparation, n), view)
    (overlap, scales), separated = yield from both(overlap_found, count_separated(view))
    return PreparedStudy(
        columns=columns,
        levels=levels,
        tally=tally,
        fitted=fitted,
        preparation=preparation,
        effect=effect.knowing(scales),
        overlap=overlap,
        view=view,
        separated=separated,
    )


def _require_outcomes(study: Study, tally: Tally, n: int) -> None:
    if sum(tally.observed) < n and study.missingness_model is None:
        raise InputError(
            f"missingness_model: {n - sum(tally.observed)} outcome(s) are missing; give a model of who was "
            "observed, or leave those rows out"
        )


def begin_study(
    study: Study,
    columns: EffectColumns,
    levels: Mapping[str, tuple[str, ...]],
    n: int,
    roles: Sequence[str] = ROLES,
) -> Flow[tuple[Tally, Fitting]]:
    """Ask for the counts and for what the fits begin with: in one round, unless rows have weights.

    Weights are relative to their mean, so that the fits need the counts first.
    """
    fitting = Fitting(levels=levels, n=n, accuracy=study.fit_accuracy if study.rounds_sums else None)

    def first(weight_mean: float) -> Flow[Fitting]:
        by_role = regressions(study, columns, weight_mean)
        asked = [each for role in roles for each in by_role.get(role, ())]
        return begin_fits(asked, fitting, study.outer_folds)

    if study.weights:
        tally = yield from count_arms(study, columns, n)
        return tally, (yield from first(tally.weight_mean))
    return (yield from both(count_arms(study, columns, n), first(1.0)))


def fit_nuisances(
    study: Study, columns: EffectColumns, tally: Tally, fitting: Fitting, roles: Sequence[str] = ROLES
) -> Flow[dict[str, tuple[Fitted, ...]]]:
    """Fit the models of these roles in shared rounds; return one predictor or one per arm by role."""
    asked = regressions(study, columns, tally.weight_mean)
    fitted: dict[str, tuple[Fitted, ...]] = {}
    to_fit: list[tuple[str, Regression]] = []
    for role in roles:
        model = study.models.get(role)
        if isinstance(model, Supplied):
            fitted[role] = supplied_predictors(model, role, study)
        elif role == "missingness" and sum(tally.observed) == fitting.n:
            continue  # nothing is missing: pi = 1, and there is nothing to fit
        elif model is not None:
            to_fit += [(role, regression) for regression in asked[role]]
    fits = yield from fit_together([part for _, part in to_fit], fitting, study.outer_folds)
    for (role, _), fit in zip(to_fit, fits, strict=True):
        fitted[role] = (*fitted.get(role, ()), fit)
    return fitted


def supplied_predictors(model: Supplied, role: str, study: Study) -> tuple[Fitted, ...]:
    """Return the predictors of a role whose predictions each silo has as columns."""
    arms, names = len(study.target.arms), model.columns
    counts = {"treatment": (arms - 1, arms), "missingness": (1, arms), "outcome": (arms,)}[role]
    if len(names) not in counts:
        expected = " or ".join(str(count) for count in dict.fromkeys(counts))
        raise InputError(f"{role}_model: expected {expected} supplied column(s), not {len(names)}")
    if role == "treatment":
        is_all = len(names) == arms
        *others, last = names  # the last one is checked with all the others
        final = SuppliedProbability(last, tuple(others), is_last=is_all)
        return (*map(SuppliedProbability, others), final)
    if role == "missingness":
        return tuple(map(SuppliedProbability, names))
    low, high = study.outcome_bounds
    return tuple(SuppliedPrediction(name, low, high - low) for name in names)


def prepare_effect(
    study: Study,
    columns: EffectColumns,
    fitted: Mapping[str, tuple[Fitted, ...]],
    tally: Tally,
    n: int,
) -> Flow[Preparation]:
    """Return what turns rows into the problem's columns: fitted models, and the share of each population."""
    components = study.target.components(columns.strata_levels)
    weights = tally.weights
    if any(component.population.needs_scores for component in components):
        scores = scores_alone(columns, fitted["treatment"], tally.weight_mean)
        ceiling = study.weight_ceiling if study.weights else 1.0
        mass = OverlapMass(preparation=scores, weight_ceiling=ceiling)
        pooled = yield TallyQuery(columns=mass, n=n)
        weights = replace(weights, overlap=float(pooled.values()[0]) * tally.weight_mean)
    shares = tuple(component.population.share(weights) for component in components)
    for component, share in zip(components, shares, strict=True):
        if share <= 0:
            raise FitError("arm", f"strata: no record with a positive weight is {component.population.label}")
    return Preparation(
        columns=columns,
        components=components,
        outcome=fitted["outcome"],
        treatment=fitted.get("treatment", ()),
        missingness=fitted.get("missingness", ()),
        g_floor=score_bound(study.g_bounds, sum(tally.observed)),
        weight_mean=tally.weight_mean,
        shares=shares,
        shows_g=study.diagnostics,
        truncates_q=study.algorithm.fluctuates,
    )


def score_bound(rule: Literal["auto"] | float | None, observed: int) -> float:
    """Return the bound on g: "auto" is 5/(sqrt(n) log n), n the number of observed outcomes, as in R's tmle.

    No bound is above 1/2. None means no bound: 0 is returned.
    """
    n = max(observed, 2)
    floor = 5.0 / (math.sqrt(n) * kernels.log(float(n))) if rule == "auto" else float(rule or 0.0)
    return min(floor, 0.5)


def scores_alone(columns: EffectColumns, treatment: tuple[Fitted, ...], weight_mean: float) -> Preparation:
    """Return a preparation that gives propensity scores alone, before anything else is known."""
    return Preparation(
        columns=replace(columns, strata=None, strata_levels=()),
        components=(),
        outcome=(),
        treatment=treatment,
        missingness=(),
        g_floor=0.0,
        weight_mean=weight_mean,
        shares=(),
    )


def effect_problem(study: Study, preparation: Preparation) -> EffectProblem:
    """Return the problem that is targeted, once nuisances are fitted."""
    components = preparation.components
    contrast = study.target.contrast() if study.submodel == "contrast" else None
    identity = tuple(tuple(float(i == j) for j in range(len(components))) for i in range(len(components)))
    smallest_share = min(preparation.shares)
    inverse = 1.0 / preparation.g_floor if preparation.g_floor else UNBOUNDED_CEILING
    weight = study.weight_ceiling if study.weights else 1.0
    is_complete = not preparation.missingness
    ratios = [c.population.largest_ratio(inverse, is_complete=is_complete) for c in components]
    rows, labels = identity, tuple(c.name for c in components)
    if contrast is not None:  # one contrast per population
        populations = list(dict.fromkeys(c.population for c in components))
        rows = tuple(
            tuple(w for other in populations for w in (contrast if other == own else (0.0,) * len(contrast)))
            for own in populations
        )
        labels = tuple(f"contrast {population.label}".strip() for population in populations)
    return EffectProblem(
        labels=labels,
        combination=rows,
        blocks=component_blocks(components) if contrast is None else (),
        outcome_bounds=study.outcome_bounds,
        prepare=preparation,
        ceiling=weight * max(ratio / share for ratio, share in zip(ratios, preparation.shares, strict=True)),
        population_ceiling=weight / smallest_share,
        has_floor=bool(preparation.g_floor),
        largest_cluster=study.largest_cluster if study.cluster else 1,
        spanning=len(preparation.columns.spanning),
        linear=study.link == "linear" or not study.algorithm.fluctuates,
        as_weight=study.clever == "weight",
    )


# The programs that come before a study: its preflight, and the test whether silos differ.
#
# Both fit models across silos and estimate no effect. A preflight fits the treatment model alone, and asks
# for histograms of the propensity scores.

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
