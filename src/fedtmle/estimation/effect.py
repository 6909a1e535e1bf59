"""An effect at one point in time as terms: all that targeting, closing sums and diagnostics read of a person.

Per arm a the terms are functions of W alone; "at the arm taken" are functions of (A, W) that are 0 where the
outcome was not observed. Probabilities and predictions are those before targeting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.estimation.people import at_arm
from fedtmle.targets.effects.components import Component
from fedtmle_core.terms import ONE, Term


@final
@dataclass(frozen=True, kw_only=True)
class EffectTerms:
    """The terms of one person that an effect at one point in time is made of.

    ``H`` is d E[v | W] / (max(g pi, floor) P(v)), the inverse probability weight of a component.
    """

    arms: tuple[str, ...]
    components: tuple[Component, ...]
    y: Term  # on the unit scale of the outcome's bounds, 0 where it was not observed
    observed: Term  # Delta: 1 where the outcome was observed; ONE if nobody's is missing
    taken: tuple[Term, ...]  # per arm: 1 for who has it
    weight: Term | None  # over the pooled mean weight; None if records have no weights
    g: tuple[Term, ...]  # per arm: the propensity score, before truncation
    pi: tuple[Term, ...]  # per arm: the probability that the outcome is observed, before truncation
    q: tuple[Term, ...]  # per arm: the initial prediction on the unit scale
    v: tuple[Term, ...]  # per component: the indicator of the population over its share, v / P(v)
    d: tuple[tuple[Term, ...], ...]  # per component and arm: the regime's probability d(a | W)
    H: tuple[Term, ...]  # per component: at the arm taken
    H_arm: tuple[tuple[Term, ...], ...]  # per component and arm
    truncated: tuple[Term, ...]  # per arm: 1 where a component's g pi is below ``floor``
    floor: float
    outcome_bounds: tuple[float, float]
    treatment: str | None = None  # the variable whose levels are the arms; None: everyone is in the one arm
    cluster: str | None = None  # the identifier of clusters, if there are any

    @property
    def overall(self) -> int:
        """How many components are of the first population: everyone, unless the effect is of others."""
        first = self.components[0].population
        return sum(1 for component in self.components if component.population == first)

    @property
    def width(self) -> float:
        """The width of the outcome's bounds."""
        return self.outcome_bounds[1] - self.outcome_bounds[0]

    def at_arm(self, per_arm: Sequence[Term]) -> Term:
        """Return the term of the arm taken, from a term for each arm."""
        return at_arm(self.treatment, self.taken, per_arm)

    @property
    def weights(self) -> Term:
        """The relative weight, ONE if records have none."""
        return ONE if self.weight is None else self.weight
