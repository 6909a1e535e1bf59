"""What a study of time to an event asks of its silos: responses of hazard models, and statistics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, final

import numpy as np

from fedtmle.initial.glm import AbstractResponse
from fedtmle.model.table import AbstractBins, AnyTable, Group, Table, over_blocks
from fedtmle.targets.diagnostics import shown_arms
from fedtmle.targets.effects.balance import ArmRows
from fedtmle.targets.effects.moments import probability_bins
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.effects.statistics import (
    AbstractLaidOutColumns,
    Block,
    TallyLayout,
    histogram_groups,
    histogram_sizes,
)
from fedtmle.targets.long import AbstractLongArmWeights, OverProblem
from fedtmle.targets.time.followup import FollowUp, Seen, grid_periods
from fedtmle.targets.time.problem import People, TimeProblem
from fedtmle_core import kernels
from fedtmle_core.types import Array, IntArray, exponent

# The responses of hazard models over person-periods, and hazards that are counted instead of modelled.

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


# The statistics that a study of time to an event asks of its silos, as values.

Result = TypeVar("Result")


@final
@dataclass(frozen=True, kw_only=True)
class TimeCounts(AbstractLaidOutColumns[Table]):
    """People and their weights by arm and stratum."""

    label = "count"

    columns: EffectColumns
    weight_exponent: int

    @cached_property
    def layout(self) -> TallyLayout:
        arms, strata, weight = self.columns.arms, self.columns.strata_levels, self.weight_exponent
        return TallyLayout(
            {
                "arm": Block(tuple(f"in arm {arm}" for arm in arms), 1),
                "stratum": Block(tuple(f"in stratum {level}" for level in strata), 1),
                "weight": Block(("weight",), weight),
                "arm weight": Block(tuple(f"weight in arm {arm}" for arm in arms), weight),
                "stratum weight": Block(tuple(f"weight in stratum {level}" for level in strata), weight),
            }
        )

    @property
    def judged(self) -> Sequence[int]:
        places = self.layout.places
        if not self.columns.weights:
            return ()
        return (*places["weight"], *places["arm weight"], *places["stratum weight"])

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        columns = self.columns
        weight, stratum = columns.weight(piece), columns.stratum(piece)
        values = np.zeros((len(self.exponents), piece.n_rows))
        part = self.layout.split(values)
        part["weight"][:] = weight
        for code in range(len(columns.arms)):
            taken = columns.taken(piece, code)
            part["arm"][code] = taken
            part["arm weight"][code] = taken * weight
        if stratum is not None:
            part["stratum"][:] = stratum == np.arange(len(columns.strata_levels))[:, None]
            part["stratum weight"][:] = part["stratum"] * weight
        return values


@final
@dataclass(frozen=True, kw_only=True)
class FollowUpColumns(AbstractLaidOutColumns[Table]):
    """Who is at risk at the horizon, by arm, who has an event of each cause, and who is censored."""

    label = "at risk at the last horizon, with an event of each cause, or censored"

    columns: EffectColumns
    follow_up: FollowUp
    horizon: int

    @cached_property
    def layout(self) -> TallyLayout:
        last = self.follow_up.name(self.horizon)
        return TallyLayout(
            {
                "at risk": Block(tuple(f"at risk in {last} in arm {arm}" for arm in self.columns.arms), 1),
                "events": Block(tuple(f"with event {cause}" for cause in self.follow_up.causes), 1),
                "censored": Block(("censored before the last period",), 1),
            }
        )

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        seen = self.follow_up.read(piece)
        values = np.zeros((len(self.exponents), piece.n_rows))
        part = self.layout.split(values)
        for code in range(len(self.columns.arms)):
            part["at risk"][code] = self.columns.taken(piece, code) * (seen.last >= self.horizon)
        for cause in range(len(self.follow_up.causes)):
            part["events"][cause] = seen.cause == cause + 1
        part["censored"][:] = self.follow_up.is_censored(seen)
        return values


@final
@dataclass(frozen=True, kw_only=True)
class EventBins(AbstractBins[Table]):
    """Per arm, how many people have no event, and how many have one of each cause.

    These are all people of the arm, and a silo shows them all or none: no count is the difference of others.
    """

    label = "people with and without each event, by arm"

    columns: EffectColumns
    follow_up: FollowUp

    @property
    def sizes(self) -> tuple[int, ...]:
        return (1 + len(self.follow_up.causes),) * len(self.columns.arms)

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def groups(self, piece: Table) -> list[Group]:
        cause, arm = self.follow_up.read(piece).cause.astype(np.uint8), self.columns.arm(piece)
        return [Group(bins=cause[arm == code]) for code in range(len(self.sizes))]


@final
@dataclass(frozen=True, kw_only=True)
class LifeTable(AbstractLaidOutColumns[Table]):
    """Weights at risk and of events in each arm and period, for hazards that are counted.

    ``causes`` are the causes whose hazards are counted, from 1, and 0 for censoring. People at risk of a
    cause have no event of an earlier one in the period, and those at risk of censoring none at all.
    """

    label = "count"

    columns: EffectColumns
    follow_up: FollowUp
    causes: tuple[int, ...]
    weight_mean: float
    weight_ceiling: float

    @cached_property
    def layout(self) -> TallyLayout:
        names = [
            f"in {self.follow_up.name(t + 1)} in arm {arm}"
            for arm in self.columns.arms
            for t in range(self.follow_up.periods)
        ]
        bound, blocks = exponent(self.weight_ceiling), {}
        for cause in self.causes:
            what = f"event {self.follow_up.causes[cause - 1]}" if cause else "censoring"
            blocks[f"at risk {cause}"] = Block(tuple(f"at risk of {what} {name}" for name in names), bound)
            blocks[f"events {cause}"] = Block(tuple(f"{what} {name}" for name in names), bound)
        return TallyLayout(blocks)

    @property
    def judged(self) -> Sequence[int]:
        """Weights, of which one may be a person's own; people at risk and their events have floors."""
        return range(len(self.names)) if self.columns.weights else ()

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        columns, seen = self.columns, self.follow_up.read(piece)
        weight = columns.relative_weight(piece, self.weight_mean)
        values = np.zeros((len(self.exponents), piece.n_rows))
        part, periods = self.layout.split(values), self.follow_up.periods
        for code in range(len(columns.arms)):
            taken = columns.taken(piece, code) * weight
            for t in range(1, periods + 1):
                place = code * periods + t - 1
                last = seen.last == t
                for cause in self.causes:
                    before = (seen.cause > 0) & ((seen.cause < cause) if cause else True)
                    part[f"at risk {cause}"][place] = taken * ((seen.last >= t) & ~(last & before))
                    part[f"events {cause}"][place] = taken * (last & (seen.cause == cause))
        return values


@final
@dataclass(frozen=True)
class TimeOverlapColumns(OverProblem[People], AbstractLaidOutColumns[People]):
    """Each group's weight omega in a person's last period at risk, and its square."""

    label = "inverse probability"

    problem: TimeProblem

    @cached_property
    def layout(self) -> TallyLayout:
        groups, h = range(len(self.problem.prepare.groups)), self.problem.ceiling
        return TallyLayout(
            {
                "omega": Block(tuple(f"omega_{s}" for s in groups), exponent(h)),
                "squares": Block(tuple(f"omega_{s}, squared" for s in groups), exponent(h * h)),
            }
        )

    @property
    def judged(self) -> Sequence[int]:
        return self.layout.places["omega"]

    def evaluate(self, piece: People) -> Array:
        world = piece.world(None, logits=np.empty(0))
        last = np.minimum(piece.seen.last, self.problem.prepare.periods) - 1
        omega = world.omega[:, last, np.arange(piece.n_rows)]
        if piece.weight is not None:
            omega = omega * piece.weight
        return np.concatenate([omega, omega * omega])


@final
@dataclass(frozen=True)
class TimeTruncationBins(OverProblem[People], AbstractBins[People]):
    """Per arm, how many people in it have a truncated probability in some period (bin 1)."""

    label = "how many people have a very low probability of treatment or follow-up"

    problem: TimeProblem

    @property
    def sizes(self) -> tuple[int, ...]:
        return (2,) * len(self.problem.prepare.columns.arms)

    def groups(self, piece: People) -> list[Group]:
        below = piece.world(None, logits=np.empty(0)).truncated
        return [Group(bins=(below & (piece.arm == arm)).astype(np.uint8)) for arm in range(len(self.sizes))]


@final
@dataclass(frozen=True)
class TimeArmWeights(AbstractLongArmWeights[People]):
    """Weighs people by the inverse of their arm's propensity score, truncated as in the first period."""

    problem: TimeProblem

    def weighed(self, people: People) -> ArmRows:
        g = kernels.chosen(people.g, people.arm)
        weight = np.ones(people.n_rows) if people.weight is None else people.weight
        bounded = np.maximum(g, max(self.problem.prepare.g_floor, 1.0 / self.ceiling))
        return ArmRows(table=people.table, arm=people.arm, weight=weight, inverse=1.0 / bounded)


@final
@dataclass(frozen=True)
class AtRiskBins(OverProblem[People], AbstractBins[People]):
    """Per arm, how many people leave between shown periods; those who complete the study are the last bin.

    People at risk in a shown period are those of its bin and of all later ones.
    """

    label = "people who leave between periods"
    of_leavers = True

    problem: TimeProblem
    shown: tuple[int, ...]

    @property
    def arms(self) -> int:
        return len(self.problem.prepare.columns.arms)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (len(self.shown) + 1,) * self.arms

    def groups(self, piece: People) -> list[Group]:
        seen, follow_up = piece.seen, self.problem.prepare.follow_up
        between = np.searchsorted(np.array(self.shown), seen.last, side="right") - 1
        completes = (seen.cause == 0) & (seen.last == follow_up.periods)
        bins = np.where(completes, len(self.shown), between).astype(np.uint8)
        return [Group(bins=bins[piece.arm == arm]) for arm in range(self.arms)]


@final
@dataclass(frozen=True)
class TimePropensityBins(OverProblem[People], AbstractBins[People]):
    """Histograms of the propensity scores, by observed arm."""

    label = "probabilities of treatment"
    on_a_scale = True

    problem: TimeProblem

    @property
    def arms(self) -> int:
        return len(self.problem.prepare.columns.arms)

    @property
    def sizes(self) -> tuple[int, ...]:
        return histogram_sizes(self.arms)

    def groups(self, piece: People) -> list[Group]:
        bins = probability_bins(piece.g[list(shown_arms(self.arms))])
        return histogram_groups(bins, piece.arm, self.arms)
