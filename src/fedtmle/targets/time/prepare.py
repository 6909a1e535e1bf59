"""From a table and fitted hazards to the worlds of a time-to-event problem, at one silo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.errors import DataError
from fedtmle.initial.crossfit import Fitted, Folds
from fedtmle.model import kernels
from fedtmle.model.table import Table
from fedtmle.model.types import Array, Bools, Codes
from fedtmle.targets.effects.components import AbstractPopulation, AbstractRegime
from fedtmle.targets.effects.prepare import EffectColumns, arm_probabilities
from fedtmle.targets.time.followup import FollowUp, Seen

MARGIN = 2.0**-60  # hazards are truncated this far inside (0, 1)


@final
@dataclass(frozen=True)
class RegimeGroup:
    """A regime in a population, and the population's share P(v) of the pooled weight."""

    regime: AbstractRegime
    population: AbstractPopulation
    share: float


@final
@dataclass(frozen=True, kw_only=True)
class TimePreparation:
    """Evaluate hazards, propensity scores and censoring on people, and compute their weights omega.

    ``events`` has one fitted hazard per cause, in the order of the causes; ``censoring`` is the hazard of
    censoring, None if nobody is censored before the last period. ``horizon`` is the last period of any
    functional. ``used`` are the columns that the models over person-periods need.
    """

    columns: EffectColumns
    follow_up: FollowUp
    groups: tuple[RegimeGroup, ...]
    events: tuple[Fitted, ...]
    censoring: Fitted | None
    treatment: tuple[Fitted, ...]
    horizon: int
    g_floor: float
    weight_mean: float
    used: frozenset[str]
    folds: Folds | None = None

    @property
    def periods(self) -> int:
        return self.horizon

    @property
    def causes(self) -> int:
        return len(self.follow_up.causes)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The number of each group's population: populations are fluctuated apart from each other."""
        populations = list(dict.fromkeys(group.population for group in self.groups))
        return tuple(populations.index(group.population) for group in self.groups)

    @cached_property
    def arms_needed(self) -> tuple[int, ...]:
        return tuple(range(len(self.columns.arms)))

    def mark(self, table: Table) -> Table:
        """Return the whole table with the folds of its rows, if the models are cross-fitted."""
        return table if self.folds is None else self.folds.mark(table)

    def people(self, table: Table) -> People:
        return People(self, table)

    def hazards(self, model: Fitted, table: Table, periods: int) -> Array:
        """Return the hazard of each person in each period, shape (periods, N)."""
        counts = np.full(table.n_rows, periods)
        long, _ = self.follow_up.long(self._thin(table), counts)
        predicted = model.predict(long)
        if not np.isfinite(predicted).all():
            raise DataError("a hazard model's prediction is not finite in some person-periods")
        return np.ascontiguousarray(predicted.reshape(table.n_rows, periods).T)

    def _thin(self, table: Table) -> Table:
        """Return the table with the columns that the models over person-periods need."""
        return replace(
            table,
            numeric={name: column for name, column in table.numeric.items() if name in self.used},
            factors={
                name: factor
                for name, factor in table.factors.items()
                if name in self.used or name.startswith("\0")
            },
            known_reach=table.reach,
        )

    def propensities(self, table: Table) -> Array:
        """Return g_a, shape (arms, N)."""
        fits = [model.predict(table) for model in self.treatment]
        return arm_probabilities(fits, len(self.columns.arms), slice(0, table.n_rows))


@final
class People:
    """Consecutive people of one table: what was seen of them, and their worlds."""

    def __init__(self, preparation: TimePreparation, table: Table) -> None:
        self.preparation, self.table = preparation, table

    @property
    def n_rows(self) -> int:
        return self.table.n_rows

    @cached_property
    def seen(self) -> Seen:
        return self.preparation.follow_up.read(self.table)

    @cached_property
    def arm(self) -> Codes:
        return self.preparation.columns.arm(self.table)

    @cached_property
    def at_risk(self) -> Bools:
        """Who is at risk of each cause in each period, (causes, periods, N)."""
        prepare, seen = self.preparation, self.seen
        period = np.arange(1, prepare.periods + 1)[:, None]
        cause = np.arange(1, prepare.causes + 1)[:, None, None]
        earlier = (seen.last == period) & (seen.cause > 0) & (seen.cause < cause)
        return np.asarray((seen.last >= period) & ~earlier)

    @cached_property
    def events(self) -> Array:
        """1 where an event of a cause happens in a period, (causes, periods, N)."""
        prepare, seen = self.preparation, self.seen
        period = np.arange(1, prepare.periods + 1)[:, None]
        cause = np.arange(1, prepare.causes + 1)[:, None, None]
        return np.asarray((seen.last == period) & (seen.cause == cause), dtype=np.float64)

    @cached_property
    def weight(self) -> Array | None:
        """The observation weights over their pooled mean; None without any."""
        columns = self.preparation.columns
        if columns.weights is None:
            return None
        return columns.relative_weight(self.table, self.preparation.weight_mean)

    @cached_property
    def indicators(self) -> list[Array]:
        """v/P(v) of each group."""
        stratum = self.preparation.columns.stratum(self.table)
        return [
            group.population.indicator(self.table, self.arm, stratum, lambda: self.g) / group.share
            for group in self.preparation.groups
        ]

    @cached_property
    def g(self) -> Array:
        return self.preparation.propensities(self.table)

    def in_arm(self, arm: int | None) -> Table:
        """Return the table with everyone in one arm, or as it is."""
        return self.table if arm is None else self.preparation.columns.in_arm(self.table, arm)

    def logits(self, arm: int | None) -> Array:
        """Return the initial logits of the hazards in the world of one arm, or of each person's own arm."""
        prepare, world = self.preparation, self.in_arm(arm)
        hazards = np.stack([prepare.hazards(model, world, prepare.periods) for model in prepare.events])
        bounded, logits = np.empty(hazards.size), np.empty(hazards.size)
        kernels.bound(hazards.reshape(-1), MARGIN, 1.0 - MARGIN, bounded, logits)
        return logits.reshape(hazards.shape)

    def uncensored(self, arm: int | None) -> Array:
        """Return G(t-), the probability of not being censored before each period, (periods, N)."""
        prepare = self.preparation
        G = np.ones((prepare.periods, self.n_rows))
        if prepare.censoring is not None and prepare.periods > 1:
            hazard = prepare.hazards(prepare.censoring, self.in_arm(arm), prepare.periods - 1)
            np.cumprod(1.0 - hazard, axis=0, out=G[1:])
        return G

    def world(self, arm: int | None, logits: Array | None = None) -> World:
        """Return the world of one arm, or of each person's own, at the start or with the given logits."""
        omega, truncated = self._omega(arm)
        if logits is None:
            start = self.logits(arm)
            logits = np.broadcast_to(start, (max(self.preparation.blocks) + 1, *start.shape))
        return World(self, omega, truncated, logits)

    def _omega(self, arm: int | None) -> tuple[Array, Bools]:
        prepare, G = self.preparation, self.uncensored(arm)
        omega = np.zeros((len(prepare.groups), *G.shape))
        truncated = np.zeros(self.n_rows, dtype=bool)
        for a in prepare.arms_needed if arm is None else (arm,):
            here = (self.arm == a) if arm is None else np.ones(self.n_rows, dtype=bool)
            g, pi = self.g[:, None, :], np.broadcast_to(G, (len(prepare.columns.arms), *G.shape))
            for s, group in enumerate(prepare.groups):
                d = group.regime.probabilities(self.table, prepare.columns.arms)[a]
                if not d.any():
                    continue
                v = self.indicators[s] * group.share
                expected, probability = group.population.ratio(v[None, :], a, g, pi, prepare.g_floor)
                probability = np.broadcast_to(probability, G.shape)
                weight = (d * here) * expected / group.share / np.maximum(probability, prepare.g_floor)
                omega[s] += weight
                below = (probability < prepare.g_floor).any(axis=0)
                truncated |= below & here & (d > 0)
        return omega, truncated


@final
@dataclass(frozen=True)
class World:
    """Hazards and weights of people in the world of one arm, or of each person's own arm.

    ``omega`` has shape (groups, periods, N), ``logits`` (populations, causes, periods, N); ``truncated`` says
    whose probability of the arm and of not being censored was truncated in some period.
    """

    people: People
    omega: Array
    truncated: Bools
    logits: Array

    def with_logits(self, logits: Array) -> World:
        return World(self.people, self.omega, self.truncated, logits)
