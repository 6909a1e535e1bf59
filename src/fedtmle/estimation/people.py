"""The people of a study as terms: outcome, arms, weights, strata and clusters of one person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from fedtmle.errors import InputError
from fedtmle.programs.study import Study
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle_core.dictionary import Categorical, Dictionary
from fedtmle_core.leaves import Known, Level, Number
from fedtmle_core.terms import ONE, ZERO, Apply, Kept, Pick, Term, product, total


@final
@dataclass(frozen=True, kw_only=True)
class People:
    """The roles of a study as terms.

    ``outcome_bounds`` are those of the unit scale. ``treatment`` names the variable whose levels are the
    ``arms``; it is None where everyone is in the one arm.
    """

    y: Term  # on the unit scale, 0 where it was not observed
    observed: Term  # Delta, 0 or 1
    outcome_bounds: tuple[float, float]
    treatment: str | None
    arms: tuple[str, ...]
    taken: tuple[Term, ...]  # per arm, 0 or 1
    weight: Term | None  # as declared, or over the pooled mean after `relative_to`
    strata_levels: tuple[str, ...]
    strata: tuple[Term, ...]  # per level, 0 or 1
    cluster: str | None

    @classmethod
    def of(cls, study: Study, dictionary: Dictionary) -> People:
        """Return the people of a study, before anything is counted."""
        target = study.target
        is_followed = isinstance(target, AbstractTimeEffect)  # events are in periods: see `followup`
        strata_levels = study.levels[target.strata] if target.strata else ()
        return cls(
            y=ZERO if is_followed else _unit_scale(study, dictionary),
            observed=ONE if is_followed else known(dictionary, target.outcome),
            outcome_bounds=study.outcome_bounds,
            treatment=target.treatment,
            arms=target.arms,
            taken=levels(dictionary, target.treatment, target.arms) if target.treatment else (ONE,),
            weight=number(dictionary, study.weights) if study.weights else None,
            strata_levels=strata_levels,
            strata=levels(dictionary, target.strata, strata_levels) if target.strata else (),
            cluster=study.cluster,
        )

    @property
    def relative(self) -> Term:
        """The weight of a person, ONE if records have none."""
        return ONE if self.weight is None else self.weight

    @property
    def width(self) -> float:
        """The width of the outcome's bounds."""
        return self.outcome_bounds[1] - self.outcome_bounds[0]

    def relative_to(self, mean: float) -> People:
        """Return the people with their weights over the mean weight."""
        if self.weight is None:
            return self
        return replace(self, weight=Kept(total([self.weight], [1.0 / mean])))

    def completely_observed(self) -> People:
        """Return the people of whom no outcome is missing."""
        return replace(self, observed=ONE)

    def at_arm(self, per_arm: Sequence[Term]) -> Term:
        """Return the term of the arm taken, from a term for each arm."""
        return at_arm(self.treatment, self.taken, per_arm)


def at_arm(treatment: str | None, taken: Sequence[Term], per_arm: Sequence[Term]) -> Term:
    """Return the term of the level of ``treatment`` that a person has, from a term for each level."""
    if treatment is None or all(term == per_arm[0] for term in per_arm):
        return per_arm[0]
    some = [(has, term) for has, term in zip(taken, per_arm, strict=True) if term != ZERO]
    if len(some) == 1:  # the others are 0
        return product(*some[0])
    return Pick(treatment, tuple(per_arm))


def number(dictionary: Dictionary, name: str) -> Term:
    """Return a variable in its own unit; it is 0 where it is missing."""
    variable = dictionary.numeric(name)
    return Number(name, variable.exponent) * 2.0**variable.exponent


def levels(dictionary: Dictionary, name: str, named: Sequence[str]) -> tuple[Term, ...]:
    """Return the indicators of some levels of a variable; a number from 0 to 1 has the levels 0 and 1."""
    if not is_categorical(dictionary, name):
        if len(named) != 2:
            raise InputError(f"'{name}' is a number, which has no levels")
        upper = number(dictionary, name)
        return product(known(dictionary, name), 1.0 - Apply("step", upper, low=0.5)), upper
    places = {level: code for code, level in enumerate(dictionary.levels(name))}
    return tuple(Level(name, places[level]) for level in named)


def known(dictionary: Dictionary, name: str) -> Term:
    """Return 1 where a variable is known, else 0."""
    return Known(name, is_categorical(dictionary, name))


def is_categorical(dictionary: Dictionary, name: str) -> bool:
    """Return whether the dictionary has a categorical variable of this name."""
    return any(isinstance(each, Categorical) and each.name == name for each in dictionary.variables)


def _unit_scale(study: Study, dictionary: Dictionary) -> Term:
    """Return (y - low) / (high - low), 0 where y is missing."""
    low, high = study.outcome_bounds
    name = study.target.outcome
    raw, there = number(dictionary, name), known(dictionary, name)
    if (low, high) == (0.0, 1.0):
        return raw
    # The interval of the sum is wider than its values, which the clip does not change but for rounding.
    scaled = total([raw, there], [1.0 / (high - low), -low / (high - low)])
    return Kept(Apply("clip", scaled, low=0.0, high=1.0))
