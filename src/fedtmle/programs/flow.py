"""The program of a study: every party follows it on the same broadcasts.

    clusters -> counts -> treatment, missingness and outcome models -> overlap
             -> targeting -> diagnostics

Each arrow is a query or a sub-flow; nothing but pooled sums comes down.
`programs.preparation` has all that comes before the targeting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar, final

from fedtmle.algorithms.base import arithmetic_error, compare_populations
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.initial.crossfit import Fitted
from fedtmle.initial.glm import Supplied
from fedtmle.model.budget import Privacy
from fedtmle.model.problem import Estimate
from fedtmle.model.table import AnyTable, Table, numbered, with_silo, without_missing
from fedtmle.programs.diagnostics import Comparisons, diagnose, find_balance
from fedtmle.programs.imputation import combined_silos, impute, pool_estimates
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
    noisy_overlap,
    noisy_query,
    private_nuisances,
)
from fedtmle.programs.nuisance import effect_columns
from fedtmle.programs.preparation import (
    PreparedStudy,
    count_arms,
    effect_problem,
    factor_levels,
    find_shared_clusters,
    prepare_study,
    score_bound,
    supplied_predictors,
)
from fedtmle.programs.regimes import (
    Adherence,
    PreparedRegimes,
    RegimeDetails,
    RegimeOverlap,
    SequentialFits,
    count_over_time,
    find_adherence,
    find_regime_overlap,
    fit_sequence,
    named_fits,
    predictors,
    regime_problem,
)
from fedtmle.programs.sites import ComparedSilos, OwnTMLE, compare_silos
from fedtmle.programs.study import Study
from fedtmle.programs.superlearner import count_separated, own_view, seen
from fedtmle.programs.target import AbstractTarget, BegunStudy, TargetDetails
from fedtmle.programs.time import (
    AtRisk,
    FinerGrid,
    PreparedGrids,
    PreparedTimes,
    TimeDetails,
    combined_grids,
    count_at_risk,
    count_time,
    find_time_overlap,
    fit_hazards,
    time_problem,
)
from fedtmle.protocol.flows import attempted, both, through, together, with_closing
from fedtmle.protocol.outcome import Certificate, Outcome, Status, Targeted
from fedtmle.protocol.plan import AbstractProgram
from fedtmle.protocol.query import Flow, Phase
from fedtmle.targets.diagnostics import Balance, Diagnostics, Overlap
from fedtmle.targets.effects.components import Component
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle.targets.effects.noisy import OneStepColumns
from fedtmle.targets.effects.prepare import Preparation
from fedtmle.targets.effects.problem import AbstractMeans, EffectLaw
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.regimes.problem import RegimeLaw
from fedtmle.targets.regimes.statistics import FirstArmWeights
from fedtmle.targets.regimes.timeline import PeriodView
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.problem import TimeLaw
from fedtmle.targets.time.statistics import TimeArmWeights

Result = TypeVar("Result")
FittedStudy = PreparedStudy | PreparedGrids | PreparedRegimes


@dataclass(frozen=True, kw_only=True)
class StudyDetails:
    """The results of a study besides its estimate; all of them are pooled and public."""

    problem: AbstractMeans[Any, Any]  # the problem that was targeted
    components: tuple[Component, ...]
    strata: tuple[str, ...]
    levels: Mapping[str, tuple[str, ...]]
    arm_counts: tuple[int, ...]
    observed_counts: tuple[int, ...]
    g_floor: float
    overlap: Overlap
    diagnostics: Diagnostics | None  # None if not wanted, or where each silo has its own law (Personalized)
    nuisances: Mapping[str, tuple[Fitted, ...]]
    silos: ComparedSilos | None  # None if ``diagnostics`` is
    missing: MissingCounts | None = None  # counts for covariates that may be missing
    omitted: int = 0  # records left out, because their treatment is missing
    imputed: tuple[Estimate, ...] = ()  # one per data set, if a covariate is imputed
    privacy: PrivacyAccount | None = None  # only with privacy, where counts are noisy
    separated: Mapping[str, int] = field(default_factory=dict)  # see `count_separated`

    @property
    def start(self) -> object:
        """The law at which the targeting starts."""
        return self.problem.start()

    @property
    def groups(self) -> tuple[str, ...]:
        """The labels of the groups for which effective sample sizes are given."""
        return tuple(component.name for component in self.components)

    def fit_names(self, target: AbstractEffect, role: str) -> tuple[str, ...]:
        """Return a label for each fit of a role that has several."""
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
        if study.timeline is not None and not study.imputes:  # else `in_first_period`
            rows = PeriodView(timeline=study.timeline, period=1).of(rows)
        rows = with_silo(rows, silo, self.silos) if self.silos else rows
        if study.timeline is not None and study.outer_folds is not None and isinstance(rows, Table):
            rows = study.outer_folds.mark(rows)  # the folds of whole people, before rows are of one period
        return rows

    @property
    def goes_on(self) -> bool:
        return self.study.on_refusal == "go on"

    @property
    def privacy(self) -> Privacy | None:
        return self.study.privacy

    @property
    def fewest_active(self) -> int | None:
        return self.study.algorithm.fewest_active

    def with_fewest_active(self, fewest: int) -> Self:
        algorithm = self.study.algorithm.with_fewest_active(fewest)
        return replace(self, study=replace(self.study, algorithm=algorithm))

    def among(self, silos: tuple[str, ...]) -> Self:
        study = self.study
        if study.privacy is not None:  # a rehearsal, in which nothing leaves the silo: no mask is needed
            study = replace(study, aggregation="open", privacy=replace(study.privacy, server="trusted"))
        return replace(self, study=study, silos=silos if self.silos else ())

    def flow(self, n: int) -> Flow[Outcome]:
        study = self.study
        levels = factor_levels(study, self.silos)
        if study.privacy is not None:
            return (yield from private_flow(study, levels, n, self.sharing))
        omitted = (yield OmittedQuery(n=n)).units[0] if study.omits else 0
        counts = (yield from count_missing(study, n)) if study.may_be_missing else None
        if counts is None or not any(counts.counts.values()):
            outcome = yield from in_first_period(study, study_flow(study, levels, n))
        else:
            outcome = yield from _completed_flow(study, counts, levels, n)
        return with_missing(outcome, counts, omitted)


def _completed_flow(study: Study, counts: MissingCounts, levels: Levels, n: int) -> Flow[Outcome]:
    """Return the flow of a study with missing covariates: filled, or imputed m times and combined."""
    imputed = counts.affected(study, "impute")
    refuse_public(study, counts.affected(study, "indicator"))
    base, study = filled(study, counts, levels), with_indicators(study, counts)
    if not imputed:
        return (yield from through(in_first_period(study, study_flow(study, levels, n)), base))
    views = yield from impute(study, counts, base, levels, n)
    fits = [in_first_period(study, fit_models(study, levels, n, number)) for number in range(len(views))]
    prepared = yield from together([through(fit, view) for fit, view in zip(fits, views, strict=True)])
    outcomes = []
    for part, view in zip(prepared, views, strict=True):
        outcomes.append((yield from through(in_first_period(study, target_fitted(study, part, n)), view)))
    return combined(outcomes)


def in_first_period(study: Study, flow: Flow[Result]) -> Flow[Result]:
    """Return the flow of a study that imputes, with variables over time by name, as they are in period 1.

    Other studies see them so from the beginning (`StudyProgram.at`).
    """
    if study.timeline is None or not study.imputes:
        return (yield from flow)
    return (yield from through(flow, PeriodView(timeline=study.timeline, period=1)))


def combined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return one outcome of the m data sets: the estimate and its covariance by Rubin's rules.

    The certificate and other parts that a run has once are taken from the data set with the largest residual
    bound; tables of overlap and fit are taken from the first.
    """
    targeted = [outcome for outcome in outcomes if isinstance(outcome, Targeted)]
    if len(targeted) < len(outcomes):
        raise TypeError("data sets are combined by their pooled estimates")
    worst = max(targeted, key=lambda o: (not o.status.is_converged, o.certificate.residual_bound))
    estimates = tuple(outcome.estimate for outcome in targeted)
    every = [study_details(outcome) for outcome in targeted]
    details = every[0]
    if isinstance(details, TargetDetails):
        raise TypeError("a study with such a target imputes nothing")
    if isinstance(details, TimeDetails) and details.finer is not None:
        grids = [each.finer for each in every if isinstance(each, TimeDetails) and each.finer is not None]
        details = replace(details, finer=combined_grids(grids))
    silos = details.silos
    if silos is not None:
        by_set = [each.silos.own for each in every if each.silos is not None]
        silos = replace(silos, own=combined_silos(by_set))
    return replace(
        worst,
        estimate=pool_estimates(estimates),
        details=replace(details, silos=silos, imputed=estimates),
    )


def with_missing(outcome: Outcome, counts: MissingCounts | None, omitted: int) -> Outcome:
    """Return the outcome with the numbers of missing values and of omitted records in its details."""
    details = study_details(outcome)
    return replace(outcome, details=replace(details, missing=counts, omitted=omitted))


def study_flow(study: Study, levels: Levels, n: int) -> Flow[Outcome]:
    """Return the flow of a study over n pooled rows, once the levels of its factors are known."""
    if isinstance(study.target, AbstractTarget):
        return (yield from target_flow(study, study.target, levels, n))
    return (yield from target_fitted(study, (yield from fit_models(study, levels, n)), n))


def fit_models(study: Study, levels: Levels, n: int, completion: int = 0) -> Flow[FittedStudy]:
    """Count, and fit all models of a study; ``completion`` numbers the imputed data sets."""
    if isinstance(study.target, AbstractTimeEffect):
        return (yield from prepare_grids(study, study.target, levels, n))
    if isinstance(study.target, AbstractRegimeEffect):
        return (yield from prepare_regimes(study, study.target, levels, n, completion))
    return (yield from prepare_study(study, levels, n))


def target_fitted(study: Study, prepared: FittedStudy, n: int) -> Flow[Outcome]:
    """Target the problem of a study whose models are fitted, close the run, and ask for the diagnostics."""
    match prepared:
        case PreparedGrids():
            return (yield from target_grids(prepared, n))
        case PreparedRegimes():
            return (yield from target_regimes(study, prepared, n))
        case _:
            return (yield from target_study(study, prepared, n))


def target_study(study: Study, prepared: PreparedStudy, n: int) -> Flow[Outcome]:
    """Target the problem, close the run, and ask for the diagnostics, over the rows of the models."""
    return (yield from seen(_target_study(study, prepared, n), prepared.view))


def _target_study(study: Study, prepared: PreparedStudy, n: int) -> Flow[Outcome]:
    effect, overlap, preparation = prepared.effect, prepared.overlap, prepared.preparation
    comparisons = Comparisons.of(study, effect)

    def diagnosed(law: object) -> Flow[tuple[Diagnostics, ComparedSilos] | None]:
        if not (study.diagnostics and isinstance(law, EffectLaw)):
            return None
        own = OwnTMLE(
            study=study,
            columns=prepared.columns,
            levels=prepared.levels,
            dim=effect.dim,
            flow=study_flow,
        )
        asked = diagnose(study, effect, law, overlap, n, comparisons)
        return (yield from both(asked, compare_silos(study, effect, own, n)))

    populations = None
    # A cluster's rows are dependent, so that the variance of rows does not give that of the mean.
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
        separated=prepared.separated,
    )
    return replace(outcome, details=details, populations=populations)


Details = StudyDetails | TimeDetails | TargetDetails | RegimeDetails


def study_details(outcome: Outcome) -> Details:
    """Return the details of a study's outcome."""
    if not isinstance(outcome.details, Details):
        raise TypeError("this outcome is not a study's")
    return outcome.details


def private_flow(study: Study, levels: Levels, n: int, silos: int) -> Flow[Targeted]:
    """Run a study with privacy over ``silos`` silos that share the noise; `programs.noisy` has its parts."""
    privacy = study.privacy
    if privacy is None:
        raise AssertionError("a study without privacy has another flow")
    fit, spent = yield from private_nuisances(study, levels, n, silos)
    columns, components = fit.design.columns, study.target.components(())
    fitted: dict[str, tuple[Fitted, ...]] = {role: (model,) for role, model in fit.models.items()}
    if isinstance(study.treatment_model, Supplied):
        fitted["treatment"] = supplied_predictors(study.treatment_model, "treatment", study)
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
    terms = OneStepColumns(problem=effect, columns=columns, centre=centre, radius=radius)
    query = noisy_query(study, terms, privacy.closing, n, silos, Phase.CLOSING)
    estimate, account = finish(study, fit, query, (yield query), bound, spent)
    arms, observed = noisy_counts(fit, columns)
    if columns.strata_levels:
        shares = [min(max(rows / n, 1.0 / n), 1.0) for rows in (n, *account.rows)]
        regimes = len(components)
        components = study.target.components(columns.strata_levels)
        by_component = tuple(share for share in shares for _ in range(regimes))
        effect = effect_problem(study, replace(preparation, components=components, shares=by_component))
    arithmetic = arithmetic_error(effect, effect.start())
    details = StudyDetails(
        problem=effect,
        components=components,
        strata=columns.strata_levels,
        levels=levels,
        arm_counts=arms,
        observed_counts=observed,
        g_floor=bound,
        overlap=noisy_overlap(fit, account),
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


Compared = tuple[ComparedSilos, tuple[Balance, ...] | None]  # the silos, and the arms' covariates
Counted = tuple[RegimeOverlap, Mapping[str, int]]  # overlap, and the silos that `count_separated` counts


def prepare_grids(study: Study, target: AbstractTimeEffect, levels: Levels, n: int) -> Flow[PreparedGrids]:
    """Fit the models of time to an event, in the same rounds those on a finer grid for comparison."""
    if target.finer is None:
        prepared = yield from prepare_times(study, target, levels, n)
        return PreparedGrids(study=study, target=target, prepared=prepared)
    compared, finer = target.finer, replace(study, target=target.finer, diagnostics=False)
    target = replace(target, compare_subperiods=None)
    study = replace(study, target=target)
    prepared, begun = yield from both(
        prepare_times(study, target, levels, n),
        attempted(prepare_times(finer, compared, levels, n, shows_events=False)),
    )
    return PreparedGrids(study=study, target=target, prepared=prepared, finer=(finer, compared, begun))


def target_grids(grids: PreparedGrids, n: int) -> Flow[Outcome]:
    """Target a study of time to an event; `programs.time` has its parts.

    A finer grid is targeted first, so that the last closing sums of the run are those of the estimate itself.
    """
    if grids.finer is None:
        return (yield from target_times(grids.study, grids.target, grids.prepared, n))
    finer, compared, begun = grids.finer
    ended: Outcome | FedTMLEError
    if isinstance(begun, PreparedTimes):
        ended = yield from attempted(target_times(finer, compared, begun, n))
    else:
        ended = begun
    outcome = yield from target_times(grids.study, grids.target, grids.prepared, n)
    details = outcome.details
    if not isinstance(details, TimeDetails):
        raise AssertionError("a study of times has their details")
    return replace(outcome, details=replace(details, finer=FinerGrid.of(compared, ended)))


def prepare_times(
    study: Study, target: AbstractTimeEffect, levels: Levels, n: int, *, shows_events: bool = True
) -> Flow[PreparedTimes]:
    """Count people and events, and fit all models."""
    columns = effect_columns(study, (yield from find_shared_clusters(study)))
    tally = yield from count_time(study, target, columns, n, shows_events=shows_events)
    treatment = study.treatment_model
    supplied = {}
    if isinstance(treatment, Supplied):
        supplied["treatment"] = supplied_predictors(treatment, "treatment", study)
    fitted = yield from fit_hazards(study, target, columns, levels, tally, n, supplied)
    view = own_view(fit for fits in fitted.values() for fit in fits)
    problem = time_problem(study, target, columns, fitted, tally, n, view)
    return PreparedTimes(
        columns=columns, levels=levels, tally=tally, fitted=fitted, problem=problem, view=view
    )


def target_times(study: Study, target: AbstractTimeEffect, prepared: PreparedTimes, n: int) -> Flow[Outcome]:
    """Target the problem, close the run, and ask for the diagnostics, over the rows of the models."""
    return (yield from seen(_target_times(study, target, prepared, n), prepared.view))


def _target_times(study: Study, target: AbstractTimeEffect, prepared: PreparedTimes, n: int) -> Flow[Outcome]:
    columns, tally, problem = prepared.columns, prepared.tally, prepared.problem

    def last(law: object) -> Flow[tuple[AtRisk, Compared] | None]:
        if not (study.diagnostics and isinstance(law, TimeLaw)):
            return None
        own = OwnTMLE(study=study, columns=columns, levels=prepared.levels, dim=problem.dim, flow=study_flow)
        compared = both(compare_silos(study, None, own, n), find_balance(study, TimeArmWeights(problem), n))
        return (yield from both(count_at_risk(target, problem, n), compared))

    targeting = with_closing(study.algorithm.flow(problem, problem.start(), n), last)
    asked = both(find_time_overlap(problem, n), count_separated(prepared.view))
    if study.algorithm.fewest_active is None:
        (overlap, separated), (outcome, diagnosed) = yield from both(asked, targeting)
    else:  # no query shares a round with one that may retire a silo
        overlap, separated = yield from asked
        outcome, diagnosed = yield from targeting
    at_risk, (silos, balance) = diagnosed or (None, (None, None))
    details = TimeDetails(
        problem=problem,
        regimes=problem.prepare.groups,
        components=target.components(columns.strata_levels),
        strata=columns.strata_levels,
        levels=prepared.levels,
        arm_counts=tally.arms,
        events=tally.events,
        g_floor=problem.prepare.g_floor,
        overlap=overlap,
        at_risk=at_risk,
        balance=balance,
        nuisances=prepared.fitted,
        silos=silos,
        separated=separated,
    )
    return replace(outcome, details=details)


def target_flow(study: Study, target: AbstractTarget, levels: Levels, n: int) -> Flow[Outcome]:
    """Run a study whose target has a problem of its own: count, start the target, target it and close."""
    columns = effect_columns(study)
    tally = yield from count_arms(study, columns, n)
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


def prepare_regimes(
    study: Study, target: AbstractRegimeEffect, levels: Levels, n: int, completion: int
) -> Flow[PreparedRegimes]:
    """Count people by period and fit all models; `programs.regimes` has the parts."""
    columns = effect_columns(study, (yield from find_shared_clusters(study)))
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
        completion=completion,
    )
    scores, chains = yield from fit_sequence(fits)
    problem, view = regime_problem(fits, scores, chains), own_view(predictors(scores, chains))
    return PreparedRegimes(fits=fits, scores=scores, problem=problem, g_floor=floor, view=view)


def target_regimes(study: Study, prepared: PreparedRegimes, n: int) -> Flow[Outcome]:
    """Target the joint problem, close the run, and ask for the diagnostics, over the rows of the models."""
    return (yield from seen(_target_regimes(study, prepared, n), prepared.view))


def _target_regimes(study: Study, prepared: PreparedRegimes, n: int) -> Flow[Outcome]:
    fits, problem = prepared.fits, prepared.problem
    target, columns, levels = fits.target, fits.columns, fits.levels

    def counted() -> Flow[Counted]:
        return both(find_regime_overlap(problem, target, n), count_separated(prepared.view))

    def last(law: object) -> Flow[tuple[Counted, tuple[Adherence, Compared] | None]]:
        overlap = counted()
        if not (study.diagnostics and isinstance(law, RegimeLaw)):
            return (yield from overlap), None
        own = OwnTMLE(study=study, columns=columns, levels=levels, dim=problem.dim, flow=study_flow)
        compared = both(compare_silos(study, None, own, n), find_balance(study, FirstArmWeights(problem), n))
        diagnosed = both(find_adherence(problem, n), compared)
        return (yield from both(overlap, diagnosed))

    targeting = study.algorithm.flow(problem, problem.start(), n)
    outcome, shown = yield from with_closing(targeting, last)
    (overlap, separated), diagnosed = shown or ((yield from counted()), None)
    adherence, (silos, balance) = diagnosed or (None, (None, None))
    nuisances, labels = named_fits(fits, prepared.scores, problem)
    details = RegimeDetails(
        problem=problem,
        components=target.components(columns.strata_levels),
        strata=columns.strata_levels,
        levels=levels,
        tally=fits.tally,
        g_floor=prepared.g_floor,
        overlap=overlap,
        adherence=adherence,
        balance=balance,
        nuisances=nuisances,
        fit_labels=labels,
        silos=silos,
        separated=separated,
    )
    return replace(outcome, details=details)
