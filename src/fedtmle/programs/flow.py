"""The programs of a study and of its preflight: every party follows them on the same broadcasts.

    clusters -> counts -> treatment, missingness and outcome models -> overlap
             -> targeting -> diagnostics

Each arrow is a query or a sub-flow; nothing but pooled sums comes down. A preflight
fits the treatment model alone, and asks for histograms of the propensity scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, final

from fedtmle.algorithms.base import arithmetic_error
from fedtmle.algorithms.populations import compare_populations
from fedtmle.errors import FitError, InputError
from fedtmle.initial.crossfit import Fitted, SuppliedPrediction, SuppliedProbability
from fedtmle.initial.glm import Supplied
from fedtmle.initial.ranges import range_exponent
from fedtmle.model import kernels
from fedtmle.model.problem import Estimate
from fedtmle.model.table import SILO, AnyTable, numbered, with_silo, without_missing
from fedtmle.programs.diagnostics import (
    Comparisons,
    Diagnostics,
    Histogram,
    Overlap,
    diagnose,
    find_overlap,
    named_histograms,
)
from fedtmle.programs.fitting import Fitting
from fedtmle.programs.imputation import impute
from fedtmle.programs.missing import (
    Levels,
    MissingCounts,
    OmittedQuery,
    count_missing,
    filled,
    refuse_public,
    with_indicators,
)
from fedtmle.programs.noisy import (
    ASSUMPTIONS,
    PrivacyAccount,
    closing_deviation,
    finish,
    known_bound,
    noisy_counts,
    noisy_query,
    private_nuisances,
)
from fedtmle.programs.nuisance import Regression, effect_columns, regressions
from fedtmle.programs.regimes import (
    RegimeDetails,
    SequentialFits,
    count_over_time,
    find_adherence,
    find_regime_overlap,
    fit_sequence,
    named_fits,
    regime_problem,
    study_at,
)
from fedtmle.programs.rounds import together, with_closing
from fedtmle.programs.rubin import combined_silos, pool_estimates
from fedtmle.programs.sites import ComparedSilos, OwnTMLE, compare_silos
from fedtmle.programs.study import Study
from fedtmle.programs.superlearner import begin_fits, fit_together
from fedtmle.programs.target import AbstractTarget, BegunStudy, TargetDetails
from fedtmle.programs.time import (
    TimeDetails,
    count_at_risk,
    count_time,
    find_time_overlap,
    fit_hazards,
    time_problem,
)
from fedtmle.protocol.bins import BinsQuery
from fedtmle.protocol.clusters import ClustersQuery, SpanningQuery
from fedtmle.protocol.outcome import Certificate, Described, Outcome, SiteTest, Status, Targeted
from fedtmle.protocol.plan import AbstractProgram
from fedtmle.protocol.query import CountCell, Flow, Phase
from fedtmle.protocol.sums import TallyQuery
from fedtmle.protocol.views import through
from fedtmle.targets.effects.components import Component, PooledWeights, component_blocks
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle.targets.effects.noisy import OneStepColumns
from fedtmle.targets.effects.prepare import EffectColumns, Preparation
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle.targets.effects.statistics import FittedPropensityBins, OverlapMass, StudyCounts
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.regimes.problem import RegimeLaw
from fedtmle.targets.regimes.timeline import PeriodView
from fedtmle.targets.time.estimands import AbstractTimeEffect

SMALLEST_EXPONENT = -512  # of weights: below it, their grid would leave the range of a double
UNBOUNDED_CEILING = 4096.0  # declared for 1/(g pi) where g is not bounded


@dataclass(frozen=True, kw_only=True)
class StudyDetails:
    """What a study learned besides its estimate; all of it is pooled and public."""

    problem: EffectProblem  # what was targeted
    components: tuple[Component, ...]
    strata: tuple[str, ...]
    levels: Mapping[str, tuple[str, ...]]
    arm_counts: tuple[int, ...]
    observed_counts: tuple[int, ...]
    g_floor: float
    overlap: Overlap
    diagnostics: Diagnostics | None  # None if not wanted, or where each silo has its own law (Personalized)
    nuisances: Mapping[str, tuple[Fitted, ...]]
    silos: ComparedSilos | None  # None where diagnostics are
    missing: MissingCounts | None = None  # of the covariates that may be missing
    omitted: int = 0  # records left out, because their treatment is missing
    imputed: tuple[Estimate, ...] = ()  # of each data set, where a covariate is imputed
    privacy: PrivacyAccount | None = None  # of a study with privacy, whose counts are noisy

    @property
    def start(self) -> EffectLaw:
        """The law at which the targeting starts."""
        return self.problem.start()

    @property
    def groups(self) -> tuple[str, ...]:
        """What effective sample sizes are of."""
        return tuple(component.name for component in self.components)

    def fit_names(self, target: AbstractEffect, role: str) -> tuple[str, ...]:
        """Return what each fit of a role is of, where there are several."""
        return target.arms


@final
@dataclass(frozen=True, kw_only=True)
class StudyProgram(AbstractProgram[AnyTable]):
    """The whole study as one flow; ``silos`` are the levels of C(silo), none where no formula has it."""

    study: Study
    silos: tuple[str, ...] = ()
    sharing: int = 0  # silos that share the noise of a study with privacy

    @classmethod
    def of(cls, study: Study, silos: Sequence[str]) -> Self:
        """Return the program of a study whose silos are these, in their order."""
        if study.privacy is None:
            return cls(study=study, silos=study.silo_levels(silos))
        if study.privacy.colluders >= len(silos):
            raise InputError(
                f"privacy: {study.privacy.colluders} of {len(silos)} silo(s) may collude; at least one must "
                "not. Lower colluders"
            )
        return cls(study=study, silos=study.silo_levels(silos), sharing=len(silos))

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def smallest_part(self, rows: AnyTable) -> int:
        return self.study.smallest_part(rows)

    def at(self, silo: str, rows: AnyTable) -> AnyTable:
        study = self.study
        if study.omits and study.target.treatment is not None:
            rows = without_missing(rows, study.target.treatment)
        if study.imputes:
            rows = numbered(rows)
        if study.timeline is not None:  # variables over time by name, with their values in period 1
            rows = PeriodView(timeline=study.timeline, period=1).of(rows)
        return with_silo(rows, silo, self.silos) if self.silos else rows

    @property
    def goes_on(self) -> bool:
        return self.study.on_refusal == "go on"

    def among(self, silos: tuple[str, ...]) -> Self:
        study = self.study
        if study.privacy is not None:  # a rehearsal, in which nothing leaves the silo: no mask is needed
            study = replace(study, aggregation="open", privacy=replace(study.privacy, server="trusted"))
        return replace(self, study=study, silos=silos if self.silos else ())

    def flow(self, n: int) -> Flow[Outcome]:
        study = self.study
        levels = _levels(study, self.silos)
        if study.privacy is not None:
            return (yield from private_flow(study, levels, n, self.sharing))
        omitted = (yield OmittedQuery(n=n)).units[0] if study.omits else 0
        counts = (yield from count_missing(study, n)) if study.may_be_missing else None
        if counts is None or not any(counts.counts.values()):
            outcome = yield from study_flow(study, levels, n)
        else:
            outcome = yield from _completed_flow(study, counts, levels, n)
        return with_missing(outcome, counts, omitted)


def _completed_flow(study: Study, counts: MissingCounts, levels: Levels, n: int) -> Flow[Outcome]:
    """Return the flow of a study with missing covariates: filled, or imputed m times and combined."""
    variables = study.variables
    refuse_public(study, counts.affected(variables, "indicator"))
    base, study = filled(study, counts, levels), with_indicators(study, counts)
    if not counts.affected(variables, "impute"):
        return (yield from through(study_flow(study, levels, n), base))
    views = yield from impute(study, counts, base, levels, n)
    prepared = yield from together([through(prepare_study(study, levels, n), view) for view in views])
    outcomes = []
    for part, view in zip(prepared, views, strict=True):
        outcomes.append((yield from through(target_study(study, part, n), view)))
    return combined(outcomes)


def combined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return one outcome of the m data sets: the estimate and its covariance by Rubin's rules.

    All that a run has once, such as its certificate, is that of the data set with the largest bound on its
    residual; tables of overlap and fit are those of the first.
    """
    targeted = [outcome for outcome in outcomes if isinstance(outcome, Targeted)]
    if len(targeted) < len(outcomes):
        raise TypeError("data sets are combined by their pooled estimates")
    worst = max(targeted, key=lambda o: (not o.status.is_converged, o.certificate.residual_bound))
    estimates = tuple(outcome.estimate for outcome in targeted)
    details = study_details(targeted[0])
    if not isinstance(details, StudyDetails):
        raise TypeError("a study over time imputes nothing")
    silos = details.silos
    if silos is not None:
        by_set = [study_details(outcome).silos for outcome in targeted]
        silos = replace(silos, own=combined_silos([each.own for each in by_set if each is not None]))
    return replace(
        worst,
        estimate=pool_estimates(estimates),
        details=replace(details, silos=silos, imputed=estimates),
    )


def with_missing(outcome: Outcome, counts: MissingCounts | None, omitted: int) -> Outcome:
    """Return the outcome with the numbers of missing values and of omitted records in its details."""
    details = study_details(outcome)
    return replace(outcome, details=replace(details, missing=counts, omitted=omitted))


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


def study_flow(study: Study, levels: Levels, n: int) -> Flow[Outcome]:
    """Return the flow of a study over n pooled rows, once the levels of its factors are known."""
    if isinstance(study.target, AbstractTimeEffect):
        return (yield from time_flow(study, study.target, levels, n))
    if isinstance(study.target, AbstractTarget):
        return (yield from target_flow(study, study.target, levels, n))
    if isinstance(study.target, AbstractRegimeEffect):
        return (yield from regime_flow(study, study.target, levels, n))
    prepared = yield from prepare_study(study, levels, n)
    return (yield from target_study(study, prepared, n))


def prepare_study(study: Study, levels: Levels, n: int) -> Flow[PreparedStudy]:
    """Count, fit the models, and look at the overlap."""
    columns = effect_columns(study, (yield from _shared_clusters(study)))
    tally, fitting = yield from _begin(study, columns, levels, n)
    _require_outcomes(study, tally, n)
    fitted = yield from _nuisances(study, columns, tally, fitting)
    preparation = yield from _preparation(study, columns, fitted, tally, n)
    effect = effect_problem(study, preparation)
    overlap, scales = yield from find_overlap(study, effect, preparation, n)
    return PreparedStudy(
        columns=columns,
        levels=levels,
        tally=tally,
        fitted=fitted,
        preparation=preparation,
        effect=replace(effect, known=scales),
        overlap=overlap,
    )


def target_study(study: Study, prepared: PreparedStudy, n: int) -> Flow[Outcome]:
    """Target the problem, close the run, and ask for the diagnostics."""
    effect, overlap, preparation = prepared.effect, prepared.overlap, prepared.preparation
    comparisons = Comparisons.of(study, effect)

    def diagnosed(law: object) -> Flow[Any]:
        if not (study.diagnostics and isinstance(law, EffectLaw)):
            return None
        own = OwnTMLE(
            study=study,
            columns=prepared.columns,
            levels=prepared.levels,
            dim=effect.dim,
            flow=study_flow,
        )
        last: list[Flow[Any]] = [
            diagnose(study, effect, law, overlap, n, comparisons),
            compare_silos(study, preparation, own, n),
        ]
        return (yield from together(last))

    populations = None
    # A cluster's rows are not independent, so that the spread of rows is not that of the mean.
    if study.diagnostics and study.algorithm.fits_locally and study.cluster is None:
        populations = yield from compare_populations(effect, effect.start(), n)
    targeting = study.algorithm.flow(effect, effect.start(), n)
    outcome, shown = yield from with_closing(targeting, diagnosed)
    diagnostics, silos = shown or (None, None)
    details = StudyDetails(
        problem=effect,
        components=preparation.components,
        strata=prepared.columns.strata_levels,
        levels=prepared.levels,
        arm_counts=prepared.tally.arms,
        observed_counts=prepared.tally.observed,
        g_floor=preparation.g_floor,
        overlap=overlap,
        diagnostics=diagnostics,
        nuisances=prepared.fitted,
        silos=silos,
    )
    return replace(outcome, details=details, populations=populations)


Details = StudyDetails | TimeDetails | TargetDetails | RegimeDetails


def study_details(outcome: Outcome) -> Details:
    """Return what a study learned, from its outcome."""
    if not isinstance(outcome.details, Details):
        raise TypeError("this outcome is not a study's")
    return outcome.details


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
    rows = identity if contrast is None else (contrast,)
    return EffectProblem(
        labels=tuple(c.name for c in components) if contrast is None else ("contrast",),
        combination=rows,
        blocks=component_blocks(components) if contrast is None else (),
        outcome_bounds=study.outcome_bounds,
        prepare=preparation,
        ceiling=weight * max(ratio / share for ratio, share in zip(ratios, preparation.shares, strict=True)),
        population_ceiling=weight / smallest_share,
        largest_cluster=study.largest_cluster if study.cluster else 1,
        spanning=len(preparation.columns.spanning),
        linear=study.link == "linear" or not study.algorithm.fluctuates,
        as_weight=study.clever == "weight",
    )


def private_flow(study: Study, levels: Levels, n: int, silos: int) -> Flow[Targeted]:
    """Run a study with privacy over ``silos`` silos that share the noise; `programs.noisy` has its parts."""
    privacy = study.privacy
    if privacy is None:
        raise AssertionError("a study without privacy has another flow")
    fit, spent = yield from private_nuisances(study, levels, n, silos)
    columns, components = fit.design.columns, study.target.components(())
    fitted: dict[str, tuple[Fitted, ...]] = {role: (model,) for role, model in fit.models.items()}
    if isinstance(study.treatment_model, Supplied):
        fitted["treatment"] = _supplied(study.treatment_model, "treatment", study)
    bound = study.g_bounds
    if not isinstance(bound, float):
        bound = known_bound(study) or fit.chosen_bound(closing_deviation(study, silos))
    preparation = Preparation(
        columns=columns,
        components=components,
        outcome=fitted["outcome"],
        treatment=fitted.get("treatment", ()),
        missingness=fitted.get("missingness", ()),
        g_floor=bound,
        weight_mean=1.0,
        shares=(1.0,) * len(components),
        shows_g=False,
        truncates_q=False,
    )
    effect = effect_problem(study, preparation)
    centre, radius = fit.range(bound)
    terms = OneStepColumns(problem=effect, arms=fit.arms, centre=centre, radius=radius)
    query = noisy_query(study, terms, privacy.closing, n, silos, Phase.CLOSING)
    estimate, account = finish(study, fit, query, (yield query), bound, spent)
    arms, observed = noisy_counts(fit, columns)
    arithmetic = arithmetic_error(effect, effect.start())
    details = StudyDetails(
        problem=effect,
        components=components,
        strata=(),
        levels=levels,
        arm_counts=arms,
        observed_counts=observed,
        g_floor=bound,
        overlap=Overlap(
            truncated=tuple(max(round(count), 0) for count in account.truncated),
            disclosing=(silos,) * fit.arms,
            effective_sizes=fit.effective_sizes(bound),
            largest_shares=(1.0 / (bound * n),) * fit.arms,
            mean_squares=fit.mean_squares(bound),
            predicted=(0.0, 0.0),
        ),
        diagnostics=None,
        nuisances=fitted,
        silos=None,
        privacy=account,
    )
    return Targeted(
        problem=effect,
        law=effect.start(),
        status=Status.PRIVATE,
        steps=0,
        updates=0,
        residual=arithmetic,
        residual_kind="computed",
        trajectory=(),
        accepted=(),
        certificate=Certificate(
            tolerance=arithmetic,
            residual_bound=arithmetic,
            arithmetic=arithmetic,
            assumptions=ASSUMPTIONS,
        ),
        estimate=estimate,
        details=details,
    )


def time_flow(
    study: Study, target: AbstractTimeEffect, declared: Mapping[str, tuple[str, ...]], n: int
) -> Flow[Outcome]:
    """Run a study of time to an event, with these levels of factors; `programs.time` has its parts."""
    levels = dict(declared)
    columns = effect_columns(study, (yield from _shared_clusters(study)))
    tally = yield from count_time(study, target, columns, n)
    treatment = study.treatment_model
    supplied = {}
    if isinstance(treatment, Supplied):
        supplied["treatment"] = _supplied(treatment, "treatment", study)
    fitted = yield from fit_hazards(study, target, columns, levels, tally, n, supplied)
    problem = time_problem(study, target, columns, fitted, tally, n)
    overlap = yield from find_time_overlap(problem, n)
    outcome = yield from study.algorithm.flow(problem, problem.start(), n)
    shown = silos = None
    if study.diagnostics and isinstance(outcome, Targeted):
        dim = len(outcome.estimate.psi)
        own = OwnTMLE(study=study, columns=columns, levels=declared, dim=dim, flow=study_flow)
        last: list[Flow[Any]] = [
            count_at_risk(study, target, problem, n),
            compare_silos(study, None, own, n),
        ]
        shown, silos = yield from together(last)
    details = TimeDetails(
        problem=problem,
        components=target.components(columns.strata_levels),
        strata=columns.strata_levels,
        levels=levels,
        arm_counts=tally.arms,
        event_counts=tally.events,
        g_floor=problem.prepare.g_floor,
        overlap=overlap,
        at_risk=shown,
        nuisances=fitted,
        silos=silos,
    )
    return replace(outcome, details=details)


def target_flow(study: Study, target: AbstractTarget, levels: Levels, n: int) -> Flow[Outcome]:
    """Run a study whose target has a problem of its own: count, start the target, target it and close."""
    columns = effect_columns(study)
    tally = yield from _tally(study, columns, n)
    begun = BegunStudy(
        study=study,
        columns=columns,
        levels=levels,
        n=n,
        g_floor=score_bound(study.g_bounds, sum(tally.observed)),
    )
    started = yield from target.start(begun)
    outcome = yield from study.algorithm.flow(started.problem, started.law, n)
    silos = None
    if study.diagnostics and isinstance(outcome, Targeted):
        dim = len(outcome.estimate.psi)
        own = OwnTMLE(study=study, columns=columns, levels=levels, dim=dim, flow=study_flow)
        silos = yield from compare_silos(study, None, own, n)
    details = TargetDetails(
        problem=started.problem,
        start=started.law,
        levels=levels,
        arm_counts=tally.arms,
        observed_counts=tally.observed,
        g_floor=started.g_floor,
        nuisances={role: (fit,) for role, fit in started.fits.items()},
        silos=silos,
    )
    return replace(outcome, details=details)


def regime_flow(
    study: Study, target: AbstractRegimeEffect, levels: Mapping[str, tuple[str, ...]], n: int
) -> Flow[Outcome]:
    """Run a study of treatment over time; `programs.regimes` has its parts."""
    columns = effect_columns(study, (yield from _shared_clusters(study)))
    timeline = target.timeline(study.variables)
    tally = yield from count_over_time(study, target, columns, timeline, n)
    floor = score_bound(study.g_bounds, n)
    fits = SequentialFits(
        study=study,
        target=target,
        columns=columns,
        timeline=timeline,
        levels=levels,
        tally=tally,
        ceiling=1.0 / floor if floor else math.inf,
        n=n,
    )
    scores, chains = yield from fit_sequence(fits)
    problem = regime_problem(fits, scores, chains)

    def last(law: object) -> Flow[Any]:
        flows: list[Flow[Any]] = [find_regime_overlap(problem, target, n)]
        if study.diagnostics and isinstance(law, RegimeLaw):
            own = OwnTMLE(study=study, columns=columns, levels=levels, dim=problem.dim, flow=study_flow)
            flows += [find_adherence(problem, n), compare_silos(study, None, own, n)]
        return (yield from together(flows))

    targeting = study.algorithm.flow(problem, problem.start(), n)
    outcome, shown = yield from with_closing(targeting, last)
    if shown is None:
        shown = [(yield from find_regime_overlap(problem, target, n))]
    overlap, adherence, silos = (*shown, None, None)[:3]
    nuisances, labels = named_fits(fits, scores, problem)
    details = RegimeDetails(
        problem=problem,
        components=target.components(()),
        levels=levels,
        tally=tally,
        g_floor=floor,
        overlap=overlap,
        adherence=adherence,
        nuisances=nuisances,
        fit_labels=labels,
        silos=silos,
    )
    return replace(outcome, details=details)


def _levels(study: Study, silos: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the levels of every factor: the dictionary's, and those of C(silo)."""
    return {**study.levels, SILO: silos} if silos else study.levels


def _shared_clusters(study: Study) -> Flow[tuple[bytes, ...]]:
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


def _tally(study: Study, columns: EffectColumns, n: int) -> Flow[Tally]:
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


def _require_outcomes(study: Study, tally: Tally, n: int) -> None:
    if sum(tally.observed) < n and study.missingness_model is None:
        raise InputError(
            f"missingness_model: {n - sum(tally.observed)} outcome(s) are missing; give a model of who was "
            "observed, or leave those rows out"
        )


ROLES = ("treatment", "missingness", "outcome")


def _begin(
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
        tally = yield from _tally(study, columns, n)
        return tally, (yield from first(tally.weight_mean))
    flows: list[Flow[Any]] = [_tally(study, columns, n), first(1.0)]
    tally, fitting = yield from together(flows)
    return tally, fitting


def _nuisances(
    study: Study, columns: EffectColumns, tally: Tally, fitting: Fitting, roles: Sequence[str] = ROLES
) -> Flow[dict[str, tuple[Fitted, ...]]]:
    asked = regressions(study, columns, tally.weight_mean)
    fitted: dict[str, tuple[Fitted, ...]] = {}
    to_fit: list[tuple[str, Regression]] = []
    for role in roles:
        model = study.models.get(role)
        if isinstance(model, Supplied):
            fitted[role] = _supplied(model, role, study)
        elif role == "missingness" and sum(tally.observed) == fitting.n:
            continue  # nothing is missing: pi = 1, and there is nothing to fit
        elif model is not None:
            to_fit += [(role, regression) for regression in asked[role]]
    fits = yield from fit_together([part for _, part in to_fit], fitting, study.outer_folds)
    for (role, _), fit in zip(to_fit, fits, strict=True):
        fitted[role] = (*fitted.get(role, ()), fit)
    return fitted


Treatment = tuple[EffectColumns, tuple[Fitted, ...], float]


def fit_treatment(study: Study, silos: tuple[str, ...], n: int) -> Flow[Treatment]:
    """Fit the treatment model alone; return it with the mean weight that its fit is relative to."""
    columns = effect_columns(study)
    tally, fitting = yield from _begin(study, columns, _levels(study, silos), n, ("treatment",))
    fitted = yield from _nuisances(study, columns, tally, fitting, ("treatment",))
    return columns, fitted["treatment"], tally.weight_mean


def _supplied(model: Supplied, role: str, study: Study) -> tuple[Fitted, ...]:
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


def _preparation(
    study: Study,
    columns: EffectColumns,
    fitted: Mapping[str, tuple[Fitted, ...]],
    tally: Tally,
    n: int,
) -> Flow[Preparation]:
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

    No bound is above 1/2. None is no bound, 0.
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
        bins = yield BinsQuery(bins=FittedPropensityBins(preparation), n=n)
        return Described(details=named_histograms(bins, self.study.target.arms))


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
        levels = _levels(study, ())
        columns = effect_columns(study)
        roles = ("treatment", "outcome")
        tally, fitting = yield from _begin(study, columns, levels, n, roles)
        fitted = yield from _nuisances(study, columns, tally, fitting, roles)
        preparation = yield from _preparation(study, columns, fitted, tally, n)
        compared = yield from compare_silos(study, preparation, None, n)
        return Described(details=compared.tests)


def site_tests(outcome: Outcome) -> tuple[SiteTest, ...]:
    """Return the tests of a `SitesProgram`, of those that have two silos to compare."""
    if not isinstance(outcome, Described) or not isinstance(outcome.details, tuple):
        raise TypeError("this outcome has no tests")
    return tuple(test for test in outcome.details if test.df > 0)


def propensity_histograms(outcome: Outcome) -> tuple[Histogram, ...]:
    """Return the histograms of a preflight's outcome."""
    if not isinstance(outcome, Described) or not isinstance(outcome.details, tuple):
        raise TypeError("this outcome is not a preflight's")
    return outcome.details
