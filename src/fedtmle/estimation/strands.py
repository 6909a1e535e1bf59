"""Fitted models of a time to an event in each world: hazards, G(t-) and inverse probabilities as terms.

    omega_r(t) = d_r(a | W) E[v_r | W] / (max(g_a(W) G_a(t- | W), floor) P(v_r))

with G(t-) the probability of not being censored before period t, a running product of 1 - the hazard of
censoring. In the world of an arm a person has its hazards and weights; in their own, those of the arm taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, final

from fedtmle.estimation.components import indicator, ratio, rule
from fedtmle.estimation.followup import Periods, by_period
from fedtmle.estimation.hazards import ByPeriod, FluctuatedHazards, Group, Strand
from fedtmle.estimation.people import People
from fedtmle.estimation.regression import CrossFit, Fit
from fedtmle.estimation.weights import LEAST_FLOOR
from fedtmle.estimation.worlds import World
from fedtmle.targets.time.followup import Functional
from fedtmle.targets.time.problem import RegimeGroup
from fedtmle_core.dictionary import Dictionary
from fedtmle_core.terms import ONE, ZERO, Apply, Constant, Kept, Pick, Term, product, total

FARTHEST = 41.5888308335967  # log(2^60): hazards are kept this far inside (0, 1), on the scale of logits


class Model(Protocol):
    """A fitted model of a response in each period."""

    def mean(self, world: World) -> Term: ...


@final
@dataclass(frozen=True)
class CountedHazard:
    """A hazard by arm and period alone: events over people at risk."""

    term: Term

    @classmethod
    def of(cls, treatment: str | None, hazards: Sequence[Sequence[float]]) -> CountedHazard:
        """Return the hazard of each arm and period of the grid, ``hazards[arm][t - 1]``."""
        periods = range(len(hazards[0]))
        arms = [tuple(Constant(arm[t]) for arm in hazards) for t in periods]
        return cls(by_period([arm[0] if treatment is None else Pick(treatment, arm) for arm in arms]))

    def mean(self, world: World) -> Term:
        return world.of(self.term)


def zetas(model: Model, worlds: Sequence[World]) -> tuple[Term, ...]:
    """Return -logit of a hazard in several worlds: their part in common is a term of its own."""
    if isinstance(model, Fit):
        return tuple(Apply("clip", -eta, low=-FARTHEST, high=FARTHEST) for eta in predictors(model, worlds))
    if isinstance(model, CrossFit):
        by_fold = [zetas(each, worlds) for each in model.fits]
        return tuple(
            total([product(fold, zeta) for fold, zeta in zip(model.folds, of_world, strict=True)])
            for of_world in zip(*by_fold, strict=True)
        )
    return tuple(_zeta(model.mean(world)) for world in worlds)


def _zeta(hazard: Term) -> Term:
    if hazard in (ZERO, ONE):
        return Constant(FARTHEST if hazard == ZERO else -FARTHEST)
    return -Apply("logit", Apply("clip", hazard, low=2.0**-60, high=1.0 - 2.0**-53))


def predictors(fit: Fit, worlds: Sequence[World]) -> tuple[Term, ...]:
    """Return linear predictors in several worlds, the sum of the columns that do not differ computed once."""
    design, (betas,) = fit.regression.design, fit.coefficients
    by_world = [world.of_all(design.columns) for world in worlds]
    factors = [beta * factor for beta, factor in zip(betas, design.factors, strict=True)]
    same = [all(column == each[0] for column in each) for each in zip(*by_world, strict=True)]
    common = total(
        [column for column, is_same in zip(by_world[0], same, strict=True) if is_same],
        [factor for factor, is_same in zip(factors, same, strict=True) if is_same],
    )
    found = []
    for columns in by_world:
        others = [(c, f) for c, f, is_same in zip(columns, factors, same, strict=True) if not is_same]
        constant = sum(c.value * f for c, f in others if isinstance(c, Constant))
        listed = [(c, f) for c, f in others if not isinstance(c, Constant)]
        found.append(total([common, ONE, *(c for c, _ in listed)], [1.0, constant, *(f for _, f in listed)]))
    return tuple(found)


@final
@dataclass(frozen=True, kw_only=True)
class Timed:
    """A study of time to an event with its fitted models: everything of a person before targeting.

    ``events`` has a model for each cause, in the order of the causes; ``censoring`` is None if nobody is
    censored before the last period. ``g`` are propensity scores, per arm; ``worlds`` those of the arms.
    """

    people: People
    periods: Periods
    horizon: int
    dictionary: Dictionary
    events: tuple[Model, ...]
    censoring: Model | None
    g: tuple[Term, ...]
    worlds: tuple[World, ...]
    regimes: tuple[RegimeGroup, ...]
    floor: float

    @property
    def least(self) -> float:
        """The floor of g G, also where a study asks for none."""
        return self.floor or LEAST_FLOOR

    def fluctuated(self, labels: tuple[str, ...], functionals: tuple[Functional, ...]) -> FluctuatedHazards:
        """Return the Q of some functionals."""
        return FluctuatedHazards(
            labels=labels,
            functionals=functionals,
            periods=self.periods,
            horizon=self.horizon,
            groups=self.groups,
            own=self.own,
            arms=self.arms,
            weight=self.people.relative,
            cluster=self.people.cluster,
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        populations = list(dict.fromkeys(each.population for each in self.regimes))
        return tuple(
            Group(
                d=rule(each.regime, self.people.arms, self.dictionary),
                v=member * (1.0 / each.share),
                population=populations.index(each.population),
            )
            for each, member in zip(self.regimes, self._members, strict=True)
        )

    @cached_property
    def own(self) -> Strand:
        """Everyone's own world; its weights are those of the arm taken, and stay in memory."""
        at_arm = self.people.at_arm
        return Strand(
            zeta=self._zetas(World({})),
            shares=tuple(Kept(at_arm(each)) for each in zip(*(arm.shares for arm in self.arms), strict=True)),
            inverses=tuple(
                tuple(Kept(at_arm(each)) for each in zip(*by_arm, strict=True))
                for by_arm in zip(*(arm.inverses for arm in self.arms), strict=True)
            ),
        )

    @cached_property
    def arms(self) -> tuple[Strand, ...]:
        """The world of each arm."""
        found = []
        for a, world in enumerate(self.worlds):
            weighed = [self._weighed(s, a) for s in range(len(self.regimes))]
            inverses = [
                tuple(Apply("inverse", product(chance, g), low=self.least) for g in self._uncensored[a])
                for _, chance in weighed
            ]
            found.append(
                Strand(
                    zeta=self._zetas(world),
                    shares=tuple(share for share, _ in weighed),
                    inverses=tuple(inverses),
                )
            )
        return tuple(found)

    @cached_property
    def truncated(self) -> Term:
        """Return 1 for whose g G is below the floor in some period, in their own arm: G falls."""
        if not self.floor:
            return ZERO
        is_below = []
        for s, group in enumerate(self.groups):
            last = [product(self._weighed(s, a)[1], G[-1]) for a, G in enumerate(self._uncensored)]
            is_above = self.people.at_arm([Apply("step", chance, low=self.floor) for chance in last])
            is_below.append(product(Apply("sign", self.people.at_arm(group.d)), 1.0 - is_above))
        return 1.0 - product(*(1.0 - each for each in dict.fromkeys(is_below)))

    @cached_property
    def _members(self) -> tuple[Term, ...]:
        return tuple(indicator(each.population, self.people, self.g) for each in self.regimes)

    def _weighed(self, s: int, a: int) -> tuple[Term, Term]:
        """Return d E[v | W] / P(v) in an arm, and its probability without that of being censored."""
        group = self.regimes[s]
        everyone = [ONE] * len(self.people.arms)
        expected, chance = ratio(group.population, self._members[s], a, self.g, everyone, self.least)
        d = rule(group.regime, self.people.arms, self.dictionary)[a]
        return product(d, expected) * (1.0 / group.share), chance

    def _zetas(self, world: World) -> ByPeriod:
        worlds = [world.and_also(self.periods.world(t + 1)) for t in range(self.horizon)]
        return tuple(zetas(model, worlds) for model in self.events)

    @cached_property
    def _uncensored(self) -> tuple[tuple[Term, ...], ...]:
        """G(t-) in each period, by arm."""
        return tuple(map(self._uncensored_in, self.worlds))

    def _uncensored_in(self, world: World) -> tuple[Term, ...]:
        if self.censoring is None:
            return (ONE,) * self.horizon
        worlds = [world.and_also(self.periods.world(t + 1)) for t in range(self.horizon - 1)]
        G: list[Term] = [ONE]
        for zeta in zetas(self.censoring, worlds) if worlds else ():
            stays = Apply("expit", zeta)
            G.append(stays if G[-1] == ONE else product(G[-1], stays))
        return tuple(G)
