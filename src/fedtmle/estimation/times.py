"""Time to an event as a program over questions.

    counts -> treatment, hazard and censoring models -> overlap and targeting -> closing and diagnostics

Every arrow is a question; nothing but totals over all hospitals comes back. Hazards without a model are
counted by arm and period, in the round in which the fits begin. A study on a finer grid, for comparison,
shares the rounds of the counts and of the fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from fedtmle.errors import FedTMLEError, FitError, InputError
from fedtmle.estimation.diagnostics.base import Pool
from fedtmle.estimation.fit import cross_fit, fit, folds_of
from fedtmle.estimation.flow import Flow, ask, attempted, both
from fedtmle.estimation.fluctuated import Law
from fedtmle.estimation.followup import Periods
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.nuisances import AnyFit, regressions, reported, treatment_scores
from fedtmle.estimation.people import People, levels
from fedtmle.estimation.regression import Record, Regression
from fedtmle.estimation.strands import CountedHazard, Model, Timed
from fedtmle.estimation.study import over_totals, refuse_hospitals_own
from fedtmle.estimation.targeting import TermProblem, over_questions
from fedtmle.estimation.timecounts import Tally, count_followed, count_hazards
from fedtmle.estimation.weights import arm_probabilities, score_bound
from fedtmle.initial.crossfit import Fitted
from fedtmle.initial.glm import GLM
from fedtmle.programs.study import Study
from fedtmle.programs.time import AtRisk, FinerGrid, TimeDetails, TimeOverlap
from fedtmle.protocol.outcome import Targeted
from fedtmle.targets.diagnostics import Balance
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.problem import RegimeGroup
from fedtmle_core.blocks import Moments
from fedtmle_core.terms import product
from fedtmle_core.types import Family

NO_EVENT = "no person-period that it is fitted on has an event, or every one has"
NOT_CENSORED = "nobody that it is fitted on is censored before the last period, or everyone is"


@final
@dataclass(frozen=True, kw_only=True)
class PreparedTime:
    """A study before it is targeted: counts, fitted models as terms, and the Q."""

    declared: Declared
    target: AbstractTimeEffect
    tally: Tally
    fitted: dict[str, tuple[Fitted, ...]]
    groups: tuple[RegimeGroup, ...]
    timed: Timed
    problem: TermProblem


Diagnosed: TypeAlias = tuple[AtRisk, tuple[Balance, ...] | None]
Diagnose: TypeAlias = Callable[[PreparedTime, Pool], Flow[Diagnosed]]


def time_flow(declared: Declared, *, hospitals: int = 1, diagnose: Diagnose | None = None) -> Flow[Targeted]:
    """Return the flow of a study of time to an event; ``diagnose`` asks along with the closing."""
    refuse_hospitals_own(declared.study)
    target = _target(declared.study)
    if target.finer is None:
        prepared = yield from prepare(declared)
        return (yield from targeted(prepared, hospitals, diagnose))
    finer = Declared(replace(declared.study, target=target.finer, diagnostics=False))
    declared = Declared(replace(declared.study, target=replace(target, compare_subperiods=None)))
    prepared, begun = yield from both(prepare(declared), attempted(prepare(finer)))
    # The finer grid is targeted first: the last closing sums of the run are those of the estimate itself.
    ended: Targeted | FedTMLEError = (
        begun if isinstance(begun, FedTMLEError) else (yield from attempted(targeted(begun, hospitals, None)))
    )
    outcome = yield from targeted(prepared, hospitals, diagnose)
    if not isinstance(outcome.details, TimeDetails):
        raise AssertionError("a study of times has their details")
    compared = FinerGrid.of(target.finer, ended)
    return replace(outcome, details=replace(outcome.details, finer=compared))


def prepare(declared: Declared) -> Flow[PreparedTime]:
    """Count, and fit all models."""
    study, target = declared.study, _target(declared.study)
    people, periods = People.of(study, declared.dictionary), periods_of(declared)
    horizon = max(each.horizon for each in target.functionals)
    tally = yield from count_followed(target, people, periods, horizon)
    people = people.relative_to(tally.weight_mean)
    asked = _regressions(declared, people, periods, tally)
    counted, fits = yield from both(
        count_hazards(people, periods, _uncovered(study, target, tally)),
        _fitted(declared, asked, tally.n),
    )
    timed = Timed(
        people=people,
        periods=periods,
        horizon=horizon,
        dictionary=declared.dictionary,
        events=tuple(counted.get(j) or fits["hazard"][j] for j in range(len(target.causes))),
        censoring=_censoring(counted, fits, len(target.causes)),
        g=arm_probabilities(
            treatment_scores(declared, people, fits.get("treatment", (None,))[0]), len(people.arms)
        ),
        worlds=tuple(declared.arm(a) for a in range(len(people.arms))),
        regimes=_shares(target, people, tally),
        floor=score_bound(study.g_bounds, tally.n),
    )
    labels = tuple(component.name for component in target.components(people.strata_levels))
    q = timed.fluctuated(labels, target.functionals)
    return PreparedTime(
        declared=declared,
        target=target,
        tally=tally,
        fitted={role: declared.supplied(role) for role in study.models if declared.supplied(role)}
        | {
            role: tuple(reported(each, study.levels, study.outer_folds, tally.n) for each in listed)
            for role, listed in fits.items()
        },
        groups=timed.regimes,
        timed=timed,
        problem=TermProblem(q=q, dictionary=declared.dictionary),
    )


def targeted(prepared: PreparedTime, hospitals: int, diagnose: Diagnose | None) -> Flow[Targeted]:
    """Target the functionals and close the run; overlap shares the first round, diagnostics the last."""
    study, problem, tally = prepared.declared.study, prepared.problem, prepared.tally

    def diagnosed(law: object) -> Flow[Diagnosed] | None:
        if diagnose is None or not study.diagnostics or not isinstance(law, Law):
            return None
        return diagnose(prepared, Pool(n=tally.n, silos=hospitals))

    queries = over_totals(study.algorithm).flow(problem, problem.start(), tally.n)
    overlap, (outcome, shown) = yield from both(
        find_overlap(prepared, hospitals), over_questions(queries, diagnosed)
    )
    if not isinstance(outcome, Targeted):
        raise AssertionError("an algorithm over totals has one law")
    at_risk, balance = shown or (None, None)
    details = TimeDetails(
        problem=problem,
        regimes=prepared.groups,
        components=prepared.target.components(prepared.timed.people.strata_levels),
        strata=prepared.timed.people.strata_levels,
        levels=study.levels,
        arm_counts=tally.arms,
        events=tally.pooled_events(hospitals),
        g_floor=prepared.timed.floor,
        overlap=overlap,
        at_risk=at_risk,
        balance=balance,
        nuisances=prepared.fitted,
    )
    return replace(outcome, details=details)


def find_overlap(prepared: PreparedTime, hospitals: int) -> Flow[TimeOverlap]:
    """Ask for overlap in one round; refuse a study whose arms do not overlap."""
    timed, n = prepared.timed, prepared.tally.n
    people = timed.people
    omega = [product(people.relative, each) for each in timed.last_omegas]
    groups, arms = len(omega), len(people.arms)
    below = [product(timed.truncated, taken) for taken in people.taken]
    products = (*((s,) for s in range(groups)), *((s, s) for s in range(groups)))
    places = tuple((k,) for k in range(groups, groups + arms))
    (totals,) = yield from ask(Moments(columns=(*omega, *below), products=(*products, *places)))
    listed = totals.tolist()
    truncated = tuple(map(round, listed[2 * groups :]))
    for arm, count in zip(people.arms, truncated, strict=True):
        if count > n / 2:
            raise FitError(
                "overlap",
                f"g_bounds: the probability of arm '{arm}' and of not being censored is below "
                f"{timed.floor:.3g} for {count} of {n} people; there is no overlap to learn from. Restrict "
                "the cohort, choose an earlier horizon, or simplify the models",
            )
    return TimeOverlap(
        truncated=truncated,
        disclosing=(hospitals,) * arms,
        effective_sizes=tuple(
            a * a / b if b > 0 else 0.0
            for a, b in zip(listed[:groups], listed[groups : 2 * groups], strict=True)
        ),
    )


def periods_of(declared: Declared) -> Periods:
    """Return the follow-up of a study as terms."""
    target = _target(declared.study)
    follow_up = target.follow_up
    return Periods(
        time=declared.time,
        edges=follow_up.edges,
        ends=levels(declared.dictionary, target.outcome, target.causes),
        subperiods=target.subperiods,
    )


def _target(study: Study) -> AbstractTimeEffect:
    if not isinstance(study.target, AbstractTimeEffect):
        raise TypeError("this study is not of time to an event")
    return study.target


# The models.


def _uncovered(study: Study, target: AbstractTimeEffect, tally: Tally) -> tuple[int, ...]:
    """Return the causes whose hazards are counted; the last number is that of being censored."""
    causes = len(target.causes)
    events = range(causes) if study.hazard_model is None else ()
    return (*events, *([causes] if tally.censors and study.censoring_model is None else ()))


def _regressions(
    declared: Declared, people: People, periods: Periods, tally: Tally
) -> dict[str, tuple[Regression, ...]]:
    study, causes = declared.study, _target(declared.study).causes
    asked: dict[str, tuple[Regression, ...]] = {
        role: (each,) for role, each in regressions(declared, people).items() if role == "treatment"
    }
    hazard, censoring = study.hazard_model, study.censoring_model
    if hazard is not None:
        asked["hazard"] = tuple(
            _regression(
                declared,
                "hazard",
                "hazard model" if len(causes) == 1 else f"hazard model of '{name}'",
                [
                    Record(
                        y=periods.event(cause, t),
                        w=product(people.relative, periods.at_risk_of(cause, t)),
                        world=periods.world(t),
                    )
                    for t in range(1, periods.last + 1)
                ],
                NO_EVENT,
            )
            for cause, name in enumerate(causes)
        )
    if tally.censors and censoring is not None:
        records = [
            Record(
                y=periods.censored(t),
                w=product(people.relative, periods.at_risk_of_censoring(t)),
                world=periods.world(t),
            )
            for t in range(1, periods.last)
        ]
        asked["censoring"] = (_regression(declared, "censoring", "censoring model", records, NOT_CENSORED),)
    return asked


def _regression(
    declared: Declared, role: str, label: str, records: Sequence[Record], constant: str
) -> Regression:
    model = declared.study.models[role]
    if not isinstance(model, GLM):
        raise InputError(f"{role}_model: {type(model).__name__} is not available yet; give a GLM")
    return Regression(
        label=label,
        family=Family.LOGISTIC,
        design=declared.vocabulary.design(model.parsed),
        records=tuple(records),
        ridge=model.ridge,
        constant=constant,
    )


def _fitted(
    declared: Declared, asked: dict[str, tuple[Regression, ...]], n: int
) -> Flow[dict[str, tuple[AnyFit, ...]]]:
    """Fit the models of all roles in shared rounds."""
    study, listed = declared.study, [each for role in asked.values() for each in role]
    accuracy = study.fit_accuracy if study.rounds_sums else None
    fits: Sequence[AnyFit]
    if study.folds is None:
        fits = yield from fit(listed, n=n, accuracy=accuracy)
    else:
        folds = folds_of(study.folds, study.seed, study.cluster or "")
        fits = yield from cross_fit(listed, folds, n=n, accuracy=accuracy)
    rest: Iterator[AnyFit] = iter(fits)
    return {role: tuple(next(rest) for _ in each) for role, each in asked.items()}


def _censoring(
    counted: Mapping[int, CountedHazard], fits: dict[str, tuple[AnyFit, ...]], place: int
) -> Model | None:
    if "censoring" in fits:
        return fits["censoring"][0]
    return counted.get(place)


def _shares(target: AbstractTimeEffect, people: People, tally: Tally) -> tuple[RegimeGroup, ...]:
    """Return the regimes in populations with the population's share P(v) of the weight."""
    found = []
    for regime, population in target.groups(people.strata_levels):
        share = population.share(tally.weights)
        if share <= 0:
            raise FitError("arm", f"strata: no record with a positive weight is {population.label}")
        found.append(RegimeGroup(regime, population, share))
    return tuple(found)
