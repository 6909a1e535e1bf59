"""Regimes and populations as terms: d(a | W), the indicator v, and E[v | W] / g_a.

`targets.effects.components` defines them, and derives the weight of the overlap population.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedtmle.errors import InputError
from fedtmle.estimation.people import People
from fedtmle.targets.effects.components import (
    AbstractPopulation,
    AbstractRegime,
    Everyone,
    InArm,
    InStratum,
    OverlapWeighted,
    Static,
    Stochastic,
    Threshold,
)
from fedtmle_core.dictionary import Dictionary
from fedtmle_core.leaves import Number
from fedtmle_core.terms import ONE, ZERO, Apply, Constant, Kept, Softmax, Term, product

TINY = 1e-300  # a probability below it is 0: the least double whose inverse is one has this size


def rule(regime: AbstractRegime, arms: Sequence[str], dictionary: Dictionary) -> tuple[Term, ...]:
    """Return d(a | W) for each arm; `InputError` if the regime is none at one point in time."""
    match regime:
        case Static(arm=arm):
            return tuple(ONE if arm == each else ZERO for each in arms)
        case Stochastic(shares=shares):
            return tuple(map(Constant, shares))
        case Threshold(column=column, cut=cut):
            exponent = dictionary.numeric(column).exponent
            above = Apply("step", Number(column, exponent), low=cut * 2.0**-exponent)
            parts: dict[str, Term] = {regime.arm: above}
            parts[regime.otherwise] = parts.get(regime.otherwise, ZERO) + (1.0 - above)
            return tuple(parts.get(each, ZERO) for each in arms)
    raise InputError(f"rules: {type(regime).__name__} is for treatment over time")


def indicator(population: AbstractPopulation, people: People, g: Sequence[Term]) -> Term:
    """Return v of a population, given the propensity scores before truncation."""
    match population:
        case Everyone():
            return ONE
        case InArm(code=code):
            return people.taken[code]
        case InStratum(code=code):
            return people.strata[code]
        case OverlapWeighted():
            tilt = people.at_arm(tilts(g))
            return Kept(product(tilt, tilt))
    raise InputError(f"{type(population).__name__} is no population of an effect")


class Ratio(NamedTuple):
    """E[v | W] / (g_a pi_a): its numerator, and its denominator before truncation."""

    numerator: Term
    denominator: Term


def ratio(
    population: AbstractPopulation, v: Term, arm: int, g: Sequence[Term], pi: Sequence[Term], floor: float
) -> Ratio:
    """Return E[v | W] / (g_a pi_a) for one arm; a numerator g is truncated from below at ``floor``."""
    match population:
        case InArm(code=code) if code == arm:  # g cancels: a rare arm has no positivity problem here
            return Ratio(ONE, pi[arm])
        case InArm(code=code):
            return Ratio(Apply("clip", g[code], low=floor, high=1.0), product(g[arm], pi[arm]))
        case OverlapWeighted():
            return Ratio(tilts(g)[arm], pi[arm])
    return Ratio(v, product(g[arm], pi[arm]))


def tilts(g: Sequence[Term]) -> tuple[Term, ...]:
    """Return h / g_a = (1/g_a) / sum_b 1/g_b for each arm, as the softmax of -log g: none is above 1."""
    if len(g) == 2:  # the sum of both is 1
        return g[1], g[0]
    minus_logs = tuple(-Apply("log", Apply("clip", each, low=TINY, high=1.0)) for each in g)
    return tuple(Kept(Softmax(minus_logs, a)) for a in range(len(g)))
