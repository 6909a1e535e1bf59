"""Follow-up on the study's public grid: the period in which each person was last seen, and what happened.

Period k is the time after edge k-1 and up to edge k; the first begins at 0. Within a period events come
before censoring: a person who is censored in period k was at risk of an event in all of it. A person who is
followed beyond the last edge is observed, without an event, through the last period.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import DataError
from fedtmle.model.table import Factor, Table
from fedtmle.model.types import IntArray

PERIOD = "period"  # the name of the period in formulas: a number and, as C(period), a factor


@final
@dataclass(frozen=True)
class Seen:
    """Each person's last period, counted from 1, and the cause of the event in it: 0 none, else from 1."""

    last: IntArray
    cause: IntArray

    def part(self, rows: slice) -> Seen:
        return Seen(self.last[rows], self.cause[rows])


@final
@dataclass(frozen=True, kw_only=True)
class FollowUp:
    """Which columns hold the follow-up, and the public grid.

    ``time`` is the time of the event or of the end of follow-up, ``event`` the column that says which: one
    of ``causes``, or ``censored``. ``entry`` is the time of entry on the same scale, None if time is counted
    from entry. With ``truncate``, follow-up after the last edge is cut off there; without, it is an error.
    ``subperiods`` consecutive periods of the grid are one period in formulas.
    """

    time: str
    event: str
    edges: tuple[float, ...]
    causes: tuple[str, ...]
    censored: str
    entry: str | None = None
    truncate: bool = False
    subperiods: int = 1

    @property
    def periods(self) -> int:
        return len(self.edges)

    def name(self, period: int) -> str:
        """Return the name of a period of the grid, counted from 1."""
        whole, part = divmod(period - 1, self.subperiods)
        of = "" if self.subperiods == 1 else f"part {part + 1} of "
        return f"{of}period {whole + 1}"

    def read(self, table: Table) -> Seen:
        """Return the follow-up of each row; `DataError` names the column and the number of rows, no value."""
        factor = table.factors[self.event]
        cause = factor.recode((self.censored, *self.causes))
        time = table.numeric[self.time]
        _refuse(np.isnan(time) & (cause > 0), f"column '{self.time}' is missing where '{self.event}' has one")
        _refuse(np.isnan(time), f"column '{self.time}' is missing")
        if self.entry is not None:
            entry = table.numeric[self.entry]
            _refuse(np.isnan(entry), f"column '{self.entry}' is missing")
            time = time - entry
            _refuse(time < 0, f"column '{self.time}' is before '{self.entry}', the time of entry,")
        _refuse(~((time >= 0) & (time < math.inf)), f"column '{self.time}' is negative or not finite")
        _refuse(cause < 0, f"column '{self.event}' is missing")
        beyond = time > self.edges[-1]
        if not self.truncate:
            _refuse(
                beyond,
                f"column '{self.time}' is beyond the end of the grid, {self.edges[-1]:g},",
                '; lengthen the grid, or set beyond = "truncate" to end follow-up there',
            )
        last = np.searchsorted(np.array(self.edges), time, side="left") + 1
        return Seen(np.minimum(last, self.periods), np.where(beyond, 0, cause))

    def long(self, table: Table, counts: IntArray) -> tuple[Table, IntArray]:
        """Return the person-periods 1..counts[i] of each row i, and the row of each.

        Formulas see the period in which a part of a period is, as a factor, and its end in periods.
        """
        starts = np.cumsum(counts) - counts
        rows = np.repeat(np.arange(table.n_rows), counts)
        period = np.arange(len(rows)) - starts[rows]
        taken, whole = table.take(rows), self.periods // self.subperiods
        long = Table(
            n_rows=len(rows),
            numeric={**taken.numeric, PERIOD: (period + 1.0) / self.subperiods},
            factors={**taken.factors, PERIOD: Factor(period // self.subperiods, period_levels(whole))},
            known_reach={**table.reach, PERIOD: float(whole)},
        )
        return long, rows


def grid_periods(long: Table, subperiods: int) -> IntArray:
    """Return the period of the grid of each person-period, counted from 1."""
    return np.rint(long.numeric[PERIOD] * subperiods).astype(np.int64)


def period_levels(periods: int) -> tuple[str, ...]:
    """Return the levels of C(period)."""
    return tuple(str(k + 1) for k in range(periods))


def _refuse(rows: np.ndarray, what: str, advice: str = "") -> None:
    count = int(np.count_nonzero(rows))
    if count:
        raise DataError(f"{what} in {count} row(s){advice}")
