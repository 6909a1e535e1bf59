"""The Q of time to an event: hazards by cause and period, moved along the clever covariates of functionals.

A functional sum_{j,t} L_j(t) F_j(t) of the cumulative incidences pays A_l(t) = sum_{s>=t} L_l(s) for an event
of cause l in period t. Its EIF given the covariates is (see `targets.time.followup`)

    sum_t omega(t) sum_l c_l(t) 1(at risk of l in t) [dN_l(t) - q_l(t)],   c_l = A_l - v_l,

v_l(t) the expected payment after period t's causes up to l. With s = 1 - q the hazards' recursion is

    c_{l-1}(t) = A_{l-1}(t) - A_l(t) + s_l(t) c_l(t),   c_L(t-1) = A_L(t-1) - A_1(t) + s_1(t) c_1(t),

so that the covariate of a risk is a running product of s. Since 0 <= s <= 1, an interval that holds A_l - v
for all v between the least and the largest payment leads to one that does: public intervals do not widen
from period to period.

Here the hazards are zeta = logit s = -logit q, and the submodel is a logistic regression of having no event,

    zeta(eps) = zeta + sum_r eps_r omega_r c_r.

The covariates move with the hazards, so that a law is the sequence of the accepted fluctuations, replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, final

import numpy as np

from fedtmle.estimation.eif import EIF, Influence
from fedtmle.estimation.fluctuated import AbstractFluctuated, Law
from fedtmle.estimation.followup import Periods
from fedtmle.targets.time.followup import Functional, payments
from fedtmle_core.blocks import Layer
from fedtmle_core.terms import ONE, ZERO, Apply, Constant, Kept, Term, product, total
from fedtmle_core.types import Array, Family

LINK_REACH = 64.0  # a logit moved further than this is a runaway fluctuation, not a fit

ByPeriod: TypeAlias = tuple[tuple[Term, ...], ...]  # by cause (or group) and period
History: TypeAlias = tuple[tuple[float, ...], ...]


@final
@dataclass(frozen=True, kw_only=True)
class Strand:
    """Initial hazards and weights of everyone in one world: that of an arm, or of each person's own.

    ``zeta`` has the logit of having no event, by cause and period. The weight of group s in period t is
    omega_s(t) = shares[s] inverses[s][t]: d E[v | W] / P(v), and 1 / max(g G(t-), floor).
    """

    zeta: ByPeriod
    shares: tuple[Term, ...]
    inverses: ByPeriod


@final
@dataclass(frozen=True, kw_only=True)
class Group:
    """A regime in a population: d(a | W) per arm, v / P(v), and the number of its population."""

    d: tuple[Term, ...]
    v: Term
    population: int


@final
@dataclass(frozen=True, kw_only=True)
class FluctuatedHazards(AbstractFluctuated):
    """Functionals under regimes in populations, in the order of the groups, then of the functionals.

    Each population has hazards and a fluctuation of its own, so that asking for strata leaves the estimates
    of everyone as they are. ``arms`` are the worlds of the arms, and ``own`` is everyone's own.
    """

    is_common = False
    divides_by_n = True  # Greenwood's variance where there are no covariates

    labels: tuple[str, ...]
    functionals: tuple[Functional, ...]
    periods: Periods
    horizon: int  # the last period of any functional
    groups: tuple[Group, ...]
    own: Strand
    arms: tuple[Strand, ...]
    weight: Term  # ONE if records have none
    cluster: str | None = None

    @cached_property
    def paid(self) -> Array:
        """A_l(t) of each functional, shape (functionals, causes, periods)."""
        return payments(self.functionals, self.horizon)

    @cached_property
    def reach(self) -> float:
        """A bound of every covariate c, and of every value of a functional."""
        return float(max(self.paid.max(), 0.0) - min(self.paid.min(), 0.0))

    @property
    def outcome_bounds(self) -> tuple[float, float]:
        return 0.0, self.reach

    @property
    def family(self) -> Family:
        return Family.LOGISTIC

    @cached_property
    def combination(self) -> tuple[tuple[float, ...], ...]:  # type: ignore[override]
        return tuple(tuple(row) for row in np.eye(len(self.groups) * len(self.functionals)).tolist())

    def admits(self, eps: Array) -> bool:
        return bool((np.abs(eps) * self.reach <= LINK_REACH).all())

    def layers(self, law: Law) -> tuple[Layer, ...]:
        return tuple(
            self._layer(law, population, cause, t)
            for population in range(self._populations)
            for t in reversed(range(self.horizon))  # in the order in which covariates are computed
            for cause in reversed(range(self._causes))
        )

    def _layer(self, law: Law, population: int, cause: int, t: int) -> Layer:
        c = self._own_covariates(law.history, population)
        X = [
            product(self.own.shares[s], self._weighted(s, c[f][cause][t], t)) if at == population else ZERO
            for s, at, f in self._places
        ]
        return Layer(
            X=tuple(X),
            offset=self.own_zeta(law.history, population)[cause][t],
            y=self._stays[cause][t],
            w=product(self.weight, self._at_risk[cause][t]),
        )

    def eif(self, law: Law) -> EIF:
        influences = []
        for s, group in enumerate(self.groups):
            scores = self._scores(law.history, s)
            for f, score in enumerate(scores):
                mean = total(
                    [
                        product(d, self._value(law.history, group.population, a, f))
                        for a, d in enumerate(group.d)
                        if d != ZERO
                    ]
                )
                influences.append(Influence(score=product(self.own.shares[s], score), mean=mean, v=group.v))
        return EIF.of(influences, weight=self.weight, width=1.0, cluster=self.cluster)

    # What was seen of a person.

    @property
    def _causes(self) -> int:
        return len(self.periods.ends)

    @cached_property
    def _populations(self) -> int:
        return 1 + max(group.population for group in self.groups)

    @cached_property
    def _places(self) -> tuple[tuple[int, int, int], ...]:
        """The group, population and functional of each coordinate."""
        return tuple(
            (s, group.population, f)
            for s, group in enumerate(self.groups)
            for f in range(len(self.functionals))
        )

    @cached_property
    def _at_risk(self) -> ByPeriod:
        return tuple(
            tuple(self.periods.at_risk_of(cause, t + 1) for t in range(self.horizon))
            for cause in range(self._causes)
        )

    @cached_property
    def _stays(self) -> ByPeriod:
        """1 without an event of the cause in the period."""
        return tuple(
            tuple(1.0 - self.periods.event(cause, t + 1) for t in range(self.horizon))
            for cause in range(self._causes)
        )

    def _scores(self, history: History, s: int) -> list[Term]:
        """Return sum_t 1/(g G(t-)) sum_l c_l(t) (dN_l(t) - q_l(t)) at risk, of each functional."""
        population = self.groups[s].population
        key = history, population, self.own.inverses[s]
        if key not in self._made_scores:
            zeta = self.own_zeta(history, population)
            residuals = [
                [product(self._at_risk[cause][t], none - self._stays[cause][t]) for t, none in enumerate(row)]
                for cause, row in enumerate(chances_of(zeta))
            ]
            self._made_scores[key] = [
                total(
                    [
                        product(self._weighted(s, c[cause][t], t), residuals[cause][t])
                        for t in reversed(range(self.horizon))
                        for cause in reversed(range(self._causes))
                    ]
                )
                for c in self._own_covariates(history, population)
            ]
        return self._made_scores[key]

    @cached_property
    def _made_scores(self) -> dict[tuple[History, int, tuple[Term, ...]], list[Term]]:
        return {}

    def _weighted(self, s: int, c: Term, t: int) -> Term:
        return product(self.own.inverses[s][t], c)

    # Hazards at a law.

    def own_zeta(self, history: History, population: int) -> ByPeriod:
        """Return everyone's own hazards at a law; they stay in memory, where the next law moves on from."""
        key = history, population
        if key not in self._made_zeta:
            if history:
                before = self.own_zeta(history[:-1], population)
                c = self._own_covariates(history[:-1], population)
                zeta = self._moved(self.own, before, c, history[-1], population)
            else:
                zeta = self.own.zeta
            self._made_zeta[key] = tuple(tuple(map(Kept, row)) for row in zeta)
        return self._made_zeta[key]

    @cached_property
    def _made_zeta(self) -> dict[tuple[History, int], ByPeriod]:
        return {}

    def _own_covariates(self, history: History, population: int) -> tuple[ByPeriod, ...]:
        key = history, population
        if key not in self._made_covariates:
            self._made_covariates[key] = self.covariates(chances_of(self.own_zeta(history, population)))
        return self._made_covariates[key]

    @cached_property
    def _made_covariates(self) -> dict[tuple[History, int], tuple[ByPeriod, ...]]:
        return {}

    def _value(self, history: History, population: int, a: int, f: int) -> Term:
        """Return v_0(1) = A_1(1) - s_1(1) c_1(1), a functional given covariates, in the world of an arm."""
        key = history, population, a
        if key not in self._made_values:
            strand, zeta = self.arms[a], self.arms[a].zeta
            for eps in history:
                zeta = self._moved(strand, zeta, self.covariates(chances_of(zeta)), eps, population)
            chances = chances_of(zeta)
            self._made_values[key] = [
                float(paid[0, 0]) - _times(chances[0][0], c[0][0])
                for paid, c in zip(self.paid, self.covariates(chances), strict=True)
            ]
        return self._made_values[key][f]

    @cached_property
    def _made_values(self) -> dict[tuple[History, int, int], list[Term]]:
        return {}

    def _moved(
        self,
        strand: Strand,
        zeta: ByPeriod,
        c: Sequence[ByPeriod],
        eps: Sequence[float],
        population: int,
    ) -> ByPeriod:
        """Return hazards after one accepted fluctuation, given their covariates."""
        moves: dict[int, list[tuple[int, float]]] = {}
        for (s, at, f), move in zip(self._places, eps, strict=True):
            if at == population and move and strand.shares[s] != ZERO:
                moves.setdefault(s, []).append((f, move))

        def moved(cause: int, t: int) -> Term:
            # Groups with the same probabilities, such as both arms in everyone's own world, share an inverse.
            along: dict[Term, list[Term]] = {}
            for s, listed in moves.items():
                covariate = total([c[f][cause][t] for f, _ in listed], [move for _, move in listed])
                along.setdefault(strand.inverses[s][t], []).append(product(strand.shares[s], covariate))
            return total(
                [zeta[cause][t], *(product(inverse, total(terms)) for inverse, terms in along.items())]
            )

        return tuple(tuple(moved(cause, t) for t in range(self.horizon)) for cause in range(self._causes))

    def covariates(self, chances: ByPeriod) -> tuple[ByPeriod, ...]:
        """Return c_l(t) of each functional from the chances s of having no event."""
        return tuple(_covariates(paid, chances) for paid in self.paid)


def chances_of(zeta: ByPeriod) -> ByPeriod:
    """Return s = 1 - q."""
    return tuple(tuple(Apply("expit", each) for each in row) for row in zeta)


def _covariates(paid: Array, chances: ByPeriod) -> ByPeriod:
    """Return c_l(t) of a functional that pays A_l(t), by the recursion from the last period back."""
    causes, periods = paid.shape
    found: list[list[Term]] = [[ZERO] * periods for _ in range(causes)]
    later: Term = ZERO  # s c of the cause, or the period, after this one
    paid_later = 0.0
    for t in reversed(range(periods)):
        for cause in reversed(range(causes)):
            here = float(paid[cause, t])
            found[cause][t] = _plus(later, here - paid_later)
            later, paid_later = _times(chances[cause][t], found[cause][t]), here
    return tuple(map(tuple, found))


def _times(chance: Term, c: Term) -> Term:
    """Return s c, where c may be a number."""
    if isinstance(c, Constant):
        return total([chance], [c.value])
    return product(chance, c)


def _plus(term: Term, number: float) -> Term:
    if term == ZERO:
        return Constant(number) if number else ZERO
    return total([term, ONE], [1.0, number])
