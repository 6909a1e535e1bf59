"""An effect at one point in time, as a program over questions.

    counts -> treatment, missingness and outcome models -> overlap -> targeting -> closing and diagnostics

Every arrow is a question; nothing but totals over all hospitals comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.gradient import Central, Exact, Gradient
from fedtmle.algorithms.optimizers import Newton
from fedtmle.errors import FitError, InputError
from fedtmle.estimation.components import indicator
from fedtmle.estimation.counts import Counted, count_people
from fedtmle.estimation.diagnostics.base import Pool
from fedtmle.estimation.diagnostics.missing import MayBeMissing, MissingValues
from fedtmle.estimation.effect import EffectTerms
from fedtmle.estimation.eif import first_of
from fedtmle.estimation.flow import Flow, ask, both, name
from fedtmle.estimation.fluctuated import Law
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.nuisances import Nuisances, fit_nuisances
from fedtmle.estimation.overlap import find_overlap
from fedtmle.estimation.people import People, known
from fedtmle.estimation.rows import FluctuatedArms, contrast_rows, initial
from fedtmle.estimation.targeting import TermProblem, over_questions
from fedtmle.estimation.weights import arm_probabilities, score_bound, weigh
from fedtmle.programs.flow import StudyDetails
from fedtmle.programs.missing import MissingCounts
from fedtmle.programs.study import Study
from fedtmle.protocol.outcome import Targeted
from fedtmle.targets.diagnostics import Diagnostics, Overlap
from fedtmle.targets.effects.components import component_blocks
from fedtmle_core.blocks import Moments
from fedtmle_core.terms import ONE, ZERO, ByCluster, Kept, Term, product


@final
@dataclass(frozen=True, kw_only=True)
class PreparedEffect:
    """A study before it is targeted: its people, counts, terms, Q and overlap."""

    declared: Declared
    people: People
    counted: Counted
    nuisances: Nuisances
    effect: EffectTerms
    q: FluctuatedArms
    problem: TermProblem
    overlap: Overlap
    pool: Pool
    missing: MissingCounts | None = None  # of covariates that may be missing, if there are any


@final
@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is asked in the round that closes a study, and the columns of these sums, named before."""

    ask: Callable[[PreparedEffect, Law], Flow[Diagnostics]]
    columns: Callable[[EffectTerms], tuple[Term, ...]]


def effect_flow(
    declared: Declared, *, hospitals: int = 1, diagnosis: Diagnosis | None = None
) -> Flow[Targeted]:
    """Return the flow of a study of an effect; ``diagnosis`` is asked along with the closing."""
    wanted = diagnosis if declared.study.diagnostics else None
    prepared = yield from prepare(declared, hospitals, wanted)
    return (yield from target(prepared, wanted))


def prepare(declared: Declared, hospitals: int, diagnosis: Diagnosis | None = None) -> Flow[PreparedEffect]:
    """Count, fit the models, name what is added up from there on, and look at the overlap."""
    study = declared.study
    refuse_hospitals_own(study)
    people = People.of(study, declared.dictionary)
    if study.missingness_model is None:  # the loader refuses a missing outcome
        people = people.completely_observed()
    counted, missing = yield from both(count_people(study, people), missing_values(declared).ask())
    refuse_imputation(study, missing)
    declared = declared.with_indicators(missing) if declared.indicators else declared
    people = people.relative_to(counted.weight_mean)
    if counted.is_complete:
        people = people.completely_observed()
    nuisances = yield from fit_nuisances(declared, people, counted.n)
    effect = yield from effect_terms(declared, people, counted, nuisances)
    q = fluctuation(declared, effect)
    pool = Pool(n=counted.n, silos=hospitals)
    also = () if diagnosis is None else diagnosis.columns(effect)
    yield from name(*with_clusters((*closing_columns(effect, q), *also), effect.cluster))
    problem = TermProblem(q=q, dictionary=declared.dictionary)
    start = yield from find_overlap(problem, effect, pool)
    return PreparedEffect(
        declared=declared,
        people=people,
        counted=counted,
        nuisances=nuisances,
        effect=effect,
        q=q,
        problem=replace(problem, known=start.scales),
        overlap=start.overlap,
        pool=pool,
        missing=missing if study.may_be_missing else None,
    )


def effect_terms(
    declared: Declared, people: People, counted: Counted, nuisances: Nuisances
) -> Flow[EffectTerms]:
    """Return the terms of the effect; the share of the overlap population takes a question."""
    study = declared.study
    components = study.target.components(people.strata_levels)
    g = arm_probabilities(nuisances.treatment, len(people.arms))
    pi = tuple(map(Kept, nuisances.observed)) if not counted.is_complete else nuisances.observed
    pooled = counted.weights
    for component in components:
        if component.population.needs_scores and pooled.overlap != pooled.overlap:
            v = product(people.relative, indicator(component.population, people, g))
            (totals,) = yield from ask(Moments.of([v]))
            pooled = replace(pooled, overlap=float(totals[0]) * counted.weight_mean)
    shares = [component.population.share(pooled) for component in components]
    for component, share in zip(components, shares, strict=True):
        if share <= 0:
            raise FitError("arm", f"strata: no record with a positive weight is {component.population.label}")
    floor = score_bound(study.g_bounds, sum(counted.observed))
    weights = weigh(people, components, declared.dictionary, g=g, pi=pi, floor=floor, shares=shares)
    return EffectTerms(
        arms=people.arms,
        components=components,
        y=people.y,
        observed=people.observed,
        taken=people.taken,
        weight=people.weight,
        g=g,
        pi=pi,
        q=tuple(initial(each, fluctuates=study.algorithm.fluctuates) for each in nuisances.outcome),
        v=weights.v,
        d=weights.d,
        H=weights.H,
        H_arm=weights.H_arm,
        truncated=weights.truncated,
        floor=floor,
        outcome_bounds=people.outcome_bounds,
        treatment=people.treatment,
        cluster=people.cluster,
    )


def closing_columns(effect: EffectTerms, q: FluctuatedArms) -> tuple[Term, ...]:
    """Return the columns of all sums that targeting and closing ask for: w H, w H y and w v.

    The EIF's parts at any law are sums of these, with predictions as their coefficients.
    """
    weight = effect.weights
    H = [product(weight, each) for each in effect.H]
    H += [product(layer.w or ONE, each) for layer in q.layers(Law()) for each in layer.X if each != ZERO]
    v = [product(weight, each) for each in effect.v]
    return tuple(dict.fromkeys([*H, *(product(each, effect.y) for each in H), *v]))


def with_clusters(columns: tuple[Term, ...], cluster: str | None) -> tuple[Term, ...]:
    """Return columns of people with the same of clusters, if there are any."""
    if cluster is None:
        return columns
    return (*columns, *(ByCluster(cluster, column) for column in columns), first_of(cluster))


def fluctuation(declared: Declared, effect: EffectTerms) -> FluctuatedArms:
    """Return the Q that is moved: along each mean, or along their one contrast."""
    study, components = declared.study, effect.components
    contrast = study.target.contrast() if study.submodel == "contrast" else None
    size = len(components)
    rows = tuple(tuple(float(i == j) for j in range(size)) for i in range(size))
    labels = tuple(component.name for component in components)
    if contrast is not None:
        populations = list(dict.fromkeys(component.population for component in components))
        rows = contrast_rows(populations, contrast)
        labels = tuple(f"contrast {population.label}".strip() for population in populations)
    return FluctuatedArms(
        effect=effect,
        labels=labels,
        combination=rows,
        blocks=component_blocks(components) if contrast is None else (),
        is_linear=study.link == "linear" or not study.algorithm.fluctuates,
        as_weight=study.clever == "weight",
    )


def target(prepared: PreparedEffect, diagnosis: Diagnosis | None) -> Flow[Targeted]:
    """Target the means and close the run; diagnostics share the last round."""
    study, problem, counted = prepared.declared.study, prepared.problem, prepared.counted

    def diagnosed(law: object) -> Flow[Diagnostics] | None:
        if diagnosis is None or not isinstance(law, Law):
            return None
        return diagnosis.ask(prepared, law)

    queries = over_totals(study.algorithm).flow(problem, problem.start(), counted.n)
    outcome, diagnostics = yield from over_questions(queries, diagnosed)
    if not isinstance(outcome, Targeted):
        raise AssertionError("an algorithm over totals has one law")
    details = StudyDetails(
        problem=problem,
        components=prepared.effect.components,
        strata=prepared.people.strata_levels,
        levels=study.levels,
        arm_counts=counted.arms,
        observed_counts=counted.observed,
        g_floor=prepared.effect.floor,
        overlap=prepared.overlap,
        diagnostics=diagnostics,
        nuisances=prepared.nuisances.fitted,
        silos=None,
        missing=prepared.missing,
    )
    return replace(outcome, details=details)


def over_totals(algorithm: AbstractAlgorithm) -> AbstractAlgorithm:
    """Return the algorithm as it is over totals: the pooled comparator is Newton's method on them."""
    if isinstance(algorithm, Central):
        optimizer = Newton() if isinstance(algorithm.optimizer, Exact) else algorithm.optimizer
        return Gradient(tolerance=algorithm.tolerance, optimizer=optimizer, max_updates=algorithm.max_updates)
    if algorithm.fits_locally:
        raise InputError(
            f"algorithm: {type(algorithm).__name__} fits at each hospital alone, and only totals over all "
            "hospitals are seen; choose Coded, Gradient or OneStep"
        )
    return algorithm


def missing_values(declared: Declared) -> MissingValues:
    """Return the counts of the covariates' missing values; none are asked if none may be missing."""
    return MissingValues(
        variables=tuple(
            MayBeMissing(name=name, known=known(declared.dictionary, name))
            for name in declared.declared.may_be_missing
        )
    )


def refuse_imputation(study: Study, missing: MissingCounts) -> None:
    """Refuse values that must be imputed."""
    if imputed := missing.affected(study, "impute"):
        raise InputError(
            f"variables: imputation is not available over questions yet, and '{imputed[0]}' has missing "
            "values; declare an indicator"
        )


def refuse_hospitals_own(study: Study) -> None:
    """Refuse what is no function of totals over all hospitals."""
    if study.uses_silo:
        raise InputError("C(silo): a hospital's own coefficients are no totals over all; leave it out")
    if study.cluster_scope == "spanning":
        raise InputError("cluster_scope: clusters in several hospitals cannot be added up; leave it out")
