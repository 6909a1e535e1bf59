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

from fedtmle.errors import FedTMLEError, FitError
from fedtmle.estimation.diagnostics.base import Pool
from fedtmle.estimation.diagnostics.overlap import WeightOverlap, refuse_no_overlap
from fedtmle.estimation.fit import cross_fit, fit, folds_of
from fedtmle.estimation.flow import Flow, attempted, both, name
from fedtmle.estimation.fluctuated import Law
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.nuisances import AnyFit, reported, treatment_scores
from fedtmle.estimation.people import People
from fedtmle.estimation.regression import Regression
from fedtmle.estimation.strands import CountedHazard, Model, Timed
from fedtmle.estimation.study import over_totals, refuse_hospitals_own, with_clusters
from fedtmle.estimation.targeting import TermProblem, over_questions
from fedtmle.estimation.timecounts import Tally, count_followed, count_hazards
from fedtmle.estimation.timemodels import counted_causes, periods_of, target_of, time_regressions
from fedtmle.estimation.timeplan import closing_columns, last_weights
from fedtmle.estimation.weights import arm_probabilities, score_bound
from fedtmle.initial.crossfit import Fitted
from fedtmle.programs.time import AtRisk, FinerGrid, TimeDetails, TimeOverlap
from fedtmle.protocol.outcome import Targeted
from fedtmle.targets.diagnostics import Balance
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.problem import RegimeGroup
from fedtmle_core import graph
from fedtmle_core.blocks import size
from fedtmle_core.terms import product


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
    target = target_of(declared.study)
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
    study, target = declared.study, target_of(declared.study)
    people, periods = People.of(study, declared.dictionary), periods_of(declared)
    horizon = max(each.horizon for each in target.functionals)
    tally = yield from count_followed(target, people, periods, horizon)
    people = people.relative_to(tally.weight_mean)
    asked = time_regressions(declared, people, censors=tally.censors)
    counted, fits = yield from both(
        count_hazards(people, periods, counted_causes(study, censors=tally.censors)),
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
    yield from name(*with_clusters(closing_columns(timed), people.cluster))
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
    weights = last_weights(timed)
    intervals = graph.intervals_of(weights, timed.dictionary)
    asked = WeightOverlap(
        pool=Pool(n=n, silos=hospitals),
        weights=weights,
        ceilings=tuple(size(intervals[each]) for each in weights),
        truncated=tuple(product(timed.truncated, taken) for taken in timed.people.taken),
    )
    overlap = yield from asked.ask()
    refuse_no_overlap(
        overlap,
        means=[f"{each.regime.label} {each.population.label}".strip() for each in timed.regimes],
        groups=[f"arm '{arm}' and of not being censored" for arm in timed.people.arms],
        n=n,
        floor=timed.floor,
    )
    return TimeOverlap(
        truncated=overlap.truncated,
        disclosing=overlap.disclosing,
        effective_sizes=overlap.effective_sizes,
    )


# The models.


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
