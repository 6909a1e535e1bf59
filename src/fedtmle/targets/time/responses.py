"""The responses of hazard models over person-periods, and hazards that are counted instead of modelled."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from fedtmle.initial.glm import AbstractResponse
from fedtmle.model.table import Table
from fedtmle.model.types import Array, IntArray
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.time.followup import FollowUp, Seen, grid_periods

RESPONSE = "\0response"  # the column of person-periods that holds their response


class AbstractPeriodResponse(AbstractResponse):
    """A response in each person-period at risk; weights are those of the person."""

    columns: EffectColumns
    follow_up: FollowUp
    weight_mean: float

    @abstractmethod
    def at_risk(self, seen: Seen) -> tuple[IntArray, IntArray]:
        """Return each person's last period at risk, and the period whose response is 1 (0 if none)."""

    @property
    def periods(self) -> int:
        return self.follow_up.periods

    @property
    def every_row(self) -> EveryPeriod:
        return EveryPeriod(follow_up=self.follow_up)

    def expand(self, table: Table) -> tuple[Table, IntArray]:
        counts, happened = self.at_risk(self.follow_up.read(table))
        long, rows = self.follow_up.long(table, counts)
        period = grid_periods(long, self.follow_up.subperiods)
        y = (period == happened[rows]).astype(np.float64)
        reach = {**long.reach, RESPONSE: 1.0}
        return replace(long, numeric={**long.numeric, RESPONSE: y}, known_reach=reach), counts

    def of(self, table: Table) -> tuple[Array, Array]:
        return table.numeric[RESPONSE], self.columns.relative_weight(table, self.weight_mean)


@final
@dataclass(frozen=True, kw_only=True)
class EveryPeriod(AbstractResponse):
    """The response 1, of weight 1, in every person-period at risk."""

    follow_up: FollowUp

    @property
    def periods(self) -> int:
        return self.follow_up.periods

    @property
    def every_row(self) -> EveryPeriod:
        return self

    def expand(self, table: Table) -> tuple[Table, IntArray]:
        counts = self.follow_up.read(table).last
        return self.follow_up.long(table, counts)[0], counts

    def of(self, table: Table) -> tuple[Array, Array]:
        ones = np.broadcast_to(np.float64(1.0), (table.n_rows,))
        return ones, ones


@final
@dataclass(frozen=True, kw_only=True)
class EventResponse(AbstractPeriodResponse):
    """An event of one cause in a period, among those at risk without an event of an earlier cause in it.

    ``cause`` is counted from 1. The hazards of the causes are conditional in this order, so that their sum
    never exceeds 1.
    """

    columns: EffectColumns
    follow_up: FollowUp
    weight_mean: float
    cause: int

    def at_risk(self, seen: Seen) -> tuple[IntArray, IntArray]:
        earlier = (seen.cause > 0) & (seen.cause < self.cause)
        return seen.last - earlier, np.where(seen.cause == self.cause, seen.last, 0)


@final
@dataclass(frozen=True, kw_only=True)
class CensoringResponse(AbstractPeriodResponse):
    """Censoring in a period before the last, among those at risk without an event in it."""

    columns: EffectColumns
    follow_up: FollowUp
    weight_mean: float

    def at_risk(self, seen: Seen) -> tuple[IntArray, IntArray]:
        final = self.follow_up.periods - 1
        counts = np.minimum(seen.last - (seen.cause > 0), final)
        return counts, np.where((seen.cause == 0) & (seen.last <= final), seen.last, 0)


@final
@dataclass(frozen=True, kw_only=True)
class CountedHazard:
    """A hazard by arm and period alone: events over people at risk, ``hazards[arm][period]``."""

    columns: EffectColumns
    hazards: tuple[tuple[float, ...], ...]
    subperiods: int

    def predict(self, table: Table) -> Array:
        """Return the hazard of each person-period, shape (N,)."""
        arm, period = self.columns.arm(table), grid_periods(table, self.subperiods)
        return np.asarray(np.array(self.hazards)[arm, period - 1])
