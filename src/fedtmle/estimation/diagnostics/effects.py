"""The diagnostics of an effect at one point in time, asked in the round that closes the study."""

from __future__ import annotations

import math

from fedtmle.estimation.components import ratio
from fedtmle.estimation.diagnostics.balance import CovariateBalance
from fedtmle.estimation.diagnostics.base import Pool
from fedtmle.estimation.diagnostics.covariates import measured, model_covariates
from fedtmle.estimation.diagnostics.histograms import PropensityHistograms, Treatment
from fedtmle.estimation.diagnostics.ladder import BoundLadder, Scores, moved_by
from fedtmle.estimation.diagnostics.outcome import Prediction, PredictionFit, bin_edges
from fedtmle.estimation.effect import EffectTerms
from fedtmle.estimation.flow import Flow, both
from fedtmle.estimation.fluctuated import Law
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.study import Diagnosis, PreparedEffect
from fedtmle.estimation.weights import LEAST_FLOOR
from fedtmle.targets.diagnostics import Diagnostics, ladder_bounds
from fedtmle.targets.effects.components import Static
from fedtmle_core.terms import ONE, ZERO, Term, product


def diagnose_effect(prepared: PreparedEffect, law: Law) -> Flow[Diagnostics]:
    """Ask for the diagnostics of a prepared study at its targeted law."""
    histograms, fit = propensities(prepared), prediction_fit(prepared, law)
    ladder = bound_ladder(prepared, law)
    balance = arm_balance(prepared.declared, prepared.effect, prepared.pool)
    (overlap, fitted), (rungs, lines) = yield from both(
        both(histograms.ask(), fit.ask()), both(ladder.ask(), balance.ask())
    )
    return Diagnostics(overlap=overlap, fit=fitted, ladder=rungs, balance=lines or None)


def propensities(prepared: PreparedEffect) -> PropensityHistograms:
    """Return the histograms of the propensity scores."""
    effect = prepared.effect
    treatment = Treatment(arms=effect.arms, taken=effect.taken, scores=effect.g)
    return PropensityHistograms(pool=prepared.pool, treatments=(treatment,))


def prediction_fit(prepared: PreparedEffect, law: Law) -> PredictionFit:
    """Return the fit of the outcome model before targeting, and at the law."""
    effect = prepared.effect
    prediction = Prediction(
        y=effect.y,
        observed=effect.observed,
        weight=effect.weights,
        before=effect.at_arm(effect.q),
        after=prepared.q.factual(law),
    )
    return PredictionFit(
        pool=prepared.pool,
        predictions=(prediction,),
        edges=bin_edges(prepared.overlap.predicted),
        is_binary=prepared.declared.study.response == "binary",
        has_weights=effect.weight is not None,
    )


def bound_ladder(prepared: PreparedEffect, law: Law) -> BoundLadder:
    """Return the estimates under other bounds; of no bounds, if no weight has one."""
    effect, q = prepared.effect, prepared.q
    overall, eif = effect.overall, q.eif(law)
    return BoundLadder(
        pool=prepared.pool,
        scores=(Scores(eif.scores[:overall], denominator(effect)),),
        m=eif.m[:overall],
        t=eif.t[0],
        L=tuple(row[:overall] for row in q.combination[: min(overall, q.dim)]),
        floor=effect.floor or LEAST_FLOOR,
        bounds=other_bounds(effect),
        groups=tuple(product(arm, effect.observed) for arm in effect.taken),
        width=effect.width,
        cluster=effect.cluster,
    )


def other_bounds(effect: EffectTerms) -> tuple[float, ...]:
    """Return the bounds of the ladder; none where nothing is estimated, or each weight is at most one."""
    population = effect.components[0].population
    is_estimated = effect.treatment is not None or effect.observed != ONE
    most = population.largest_ratio(math.inf, is_complete=effect.observed == ONE)
    return ladder_bounds(effect.floor) if is_estimated and most != 1.0 else ()


def diagnosed_columns(effect: EffectTerms) -> tuple[Term, ...]:
    """Return the columns of the diagnostics' sums that targeting does not ask for.

    They are w H and w H y, with H at each bound of the ladder. Covariates by arm are read coarsely.
    """
    floor, g = effect.floor or LEAST_FLOOR, denominator(effect)
    H = [product(effect.weights, each) for each in effect.H[: effect.overall]]
    moved = [product(each, moved_by(g, floor, bound)) for bound in other_bounds(effect) for each in H]
    return (*moved, *(product(each, effect.y) for each in moved))


def denominator(effect: EffectTerms) -> Term:
    """Return the denominator of the first population's H before truncation, of the arm taken.

    It is 1 in an arm that no mean of the population is about.
    """
    per_arm: list[Term] = [ONE] * len(effect.arms)
    for r in range(effect.overall):
        population, v = effect.components[r].population, effect.v[r]
        for a, share in enumerate(effect.d[r]):
            if share != ZERO:
                per_arm[a] = ratio(population, v, a, effect.g, effect.pi, effect.floor).denominator
    return effect.at_arm(per_arm)


def arm_balance(declared: Declared, effect: EffectTerms, pool: Pool) -> CovariateBalance:
    """Return the covariates by arm; none if the means of the first population are not those of the arms."""
    regimes = [component.regime for component in effect.components[: effect.overall]]
    given = [regime.arm for regime in regimes if isinstance(regime, Static)]
    if effect.treatment is None or sorted(given) != sorted(effect.arms) or len(given) != len(regimes):
        return CovariateBalance(pool=pool, covariates=(), arms=(), weights=())
    return CovariateBalance(
        pool=pool,
        covariates=tuple(
            measured(declared.declared, declared.dictionary, each)
            for each in model_covariates(declared.declared)
        ),
        arms=effect.taken,
        weights=tuple(product(effect.weights, effect.H[given.index(arm)]) for arm in effect.arms),
        weight=effect.weights,
    )


EFFECT_DIAGNOSIS = Diagnosis(ask=diagnose_effect, columns=diagnosed_columns)
