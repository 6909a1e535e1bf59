"""Weights: propensity scores, floors and the clever covariate H of each mean, as terms.

    H_r(a, W) = d_r(a | W) E[v_r | W] / (max(g_a pi_a, floor) P(v_r))

The floor bounds H for everyone, by its interval: nothing about the largest weight is declared or looked up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from fedtmle.estimation.components import TINY, indicator, ratio, rule
from fedtmle.estimation.people import People
from fedtmle.targets.effects.components import Component
from fedtmle_core import graph, kernels
from fedtmle_core.dictionary import Dictionary
from fedtmle_core.terms import ONE, ZERO, Apply, Kept, Softmax, Term, product, total

LEAST_FLOOR = 2.0**-12  # of g pi where a study asks for no bound: H must have one, 4096
LARGEST_FLOOR = 0.5  # a higher one would truncate the likelier of two arms


def score_bound(rule: Literal["auto"] | float | None, observed: float) -> float:
    """Return the bound on g pi: "auto" is 5/(sqrt(n) log n), n the observed outcomes, as in R's tmle.

    None means no bound: 0 is returned, and weights have `LEAST_FLOOR`, below which nobody may be.
    """
    n = max(observed, 2.0)
    floor = 5.0 / (math.sqrt(n) * kernels.log(n)) if rule == "auto" else float(rule or 0.0)
    return min(floor, LARGEST_FLOOR)


def arm_probabilities(fits: Sequence[Term], arms: int) -> tuple[Term, ...]:
    """Return the propensity score of each arm, from the predictions of the fits of g.

    With a fit for each arm, of one arm against the rest, g_a is that of arm a over the sum; the classes
    of a multinomial fit are so already. With one fewer, the reference has the remaining probability.
    """
    if arms == 1:
        return (ONE,)
    if len(fits) < arms:
        kept = tuple(map(Kept, fits))
        return (Kept(Apply("clip", 1.0 - total(kept), low=0.0, high=1.0)), *kept)
    if any(isinstance(term, Softmax) for term in graph.ordered(fits)):
        return tuple(map(Kept, fits))
    inverse = Apply("inverse", total(fits), low=TINY)
    return tuple(Kept(Apply("clip", product(fit, inverse), low=0.0, high=1.0)) for fit in fits)


@final
@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of each component: d(a | W), v / P(v), and H per arm and at the arm taken."""

    d: tuple[tuple[Term, ...], ...]
    v: tuple[Term, ...]
    H_arm: tuple[tuple[Term, ...], ...]
    H: tuple[Term, ...]  # 0 where the outcome was not observed
    truncated: tuple[Term, ...]  # per arm: 1 where a component's g pi is below the floor


def weigh(
    people: People,
    components: Sequence[Component],
    dictionary: Dictionary,
    *,
    g: Sequence[Term],
    pi: Sequence[Term],
    floor: float,
    shares: Sequence[float],
) -> Weights:
    """Return the weights of components whose populations have these shares P(v)."""
    arms, floor = range(len(people.arms)), floor or LEAST_FLOOR
    d: list[tuple[Term, ...]] = []
    v: list[Term] = []
    H_arm: list[tuple[Term, ...]] = []
    below: list[list[Term]] = [[] for _ in arms]
    for component, share in zip(components, shares, strict=True):
        regime = rule(component.regime, people.arms, dictionary)
        member = indicator(component.population, people, g)
        H: list[Term] = [ZERO for _ in arms]
        for a in arms:
            if regime[a] == ZERO:
                continue
            expected, chance = ratio(component.population, member, a, g, pi, floor)
            weight = product(regime[a], expected, Kept(Apply("inverse", chance, low=floor)))
            H[a] = weight * (1.0 / share)
            is_below = 1.0 - Apply("step", chance, low=floor)
            below[a].append(product(Apply("sign", regime[a]), is_below) if regime[a] != ONE else is_below)
        d.append(regime)
        v.append(member * (1.0 / share))
        H_arm.append(tuple(H))
    return Weights(
        d=tuple(d),
        v=tuple(v),
        H_arm=tuple(H_arm),
        H=tuple(Kept(product(people.at_arm(H), people.observed)) for H in H_arm),
        truncated=tuple(_any(list(dict.fromkeys(each))) for each in below),
    )


def _any(indicators: Sequence[Term]) -> Term:
    """Return 1 where one of some indicators is 1."""
    if len(indicators) < 2:
        return indicators[0] if indicators else ZERO
    return 1.0 - product(*(1.0 - each for each in indicators))
