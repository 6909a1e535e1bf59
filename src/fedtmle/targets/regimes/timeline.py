"""Columns by period: which columns hold a variable over time, who is at risk, and the rows of one period.

A table is wide: variable l has the columns l1, ..., lK. Within a period the order is

    covariates L_t, treatment A_t, censoring C_t, event Y_t   (a point outcome Y comes after C_K).

A person is at risk in period t without an event or censoring before it. In formulas and rules of period t, l
is the column of that period and lag1_l that of the period before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from fedtmle.errors import DataError
from fedtmle.model.table import AnyTable, Factor, PerTable, StreamedTable, Table, seen_through
from fedtmle_core import kernels
from fedtmle_core.types import Array, Bools

LAG = re.compile(r"lag([1-9][0-9]*)_(.+)")


class Lagged(NamedTuple):
    """A variable over time, ``lag`` periods before the present one."""

    name: str
    lag: int


@final
@dataclass(frozen=True)
class Followed:
    """Who is at risk in each period, and who of these is not censored in it; shape (periods, N)."""

    at_risk: Bools
    uncensored: Bools


@final
@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The columns of each variable over time, and which of these variables play a part.

    ``over_time`` has one column per period for each variable. ``censoring`` is 1 in the period in which a
    person is censored, None if nobody is. ``event`` is a binary variable over time, 1 in the period of the
    event; None for an outcome at the end, ``outcome``. ``fills`` is the value of a number that nobody has:
    in its declared range. Covariates that are ``imputed`` may be missing for people at risk.
    """

    over_time: Mapping[str, tuple[str, ...]]
    treatment: str
    outcome: str
    censoring: str | None = None
    event: str | None = None
    fills: Mapping[str, float] = field(default_factory=dict)
    imputed: frozenset[str] = frozenset()

    @property
    def periods(self) -> int:
        return len(self.over_time[self.treatment])

    def lagged(self, name: str) -> Lagged | None:
        """Return the variable over time that a name in a formula stands for; None if it is another column."""
        if name in self.over_time:
            return Lagged(name, 0)
        match = LAG.fullmatch(name)
        return Lagged(match[2], int(match[1])) if match and match[2] in self.over_time else None

    def is_there(self, name: str, period: int) -> bool:
        """Return whether a name has a value in a period: lags reach back to period 1 at most."""
        lagged = self.lagged(name)
        return lagged is None or lagged.lag < period

    def column(self, name: str, period: int) -> str:
        """Return the column that a name stands for in a period, counted from 1."""
        lagged = self.lagged(name)
        return name if lagged is None else self.over_time[lagged.name][period - 1 - lagged.lag]

    def variable_of(self, column: str) -> str | None:
        """Return the variable over time of which this is the column of a period; None if it is of none."""
        return next((name for name, columns in self.over_time.items() if column in columns), None)

    def period_of(self, column: str) -> int | None:
        """Return the period of a column of a variable over time, counted from 1; None for other columns."""
        name = self.variable_of(column)
        return None if name is None else self.over_time[name].index(column) + 1

    def names(self, period: int) -> Iterator[str]:
        """Yield every name of a variable over time that has a value in a period."""
        for name in self.over_time:
            yield name
            yield from (f"lag{lag}_{name}" for lag in range(1, period))

    def follow(self, table: Table) -> Followed:
        """Return who is at risk; `DataError` names a column that is missing where it must not be."""
        n, periods = table.n_rows, self.periods
        at_risk, uncensored = np.zeros((2, periods, n), dtype=bool)
        here = np.ones(n, dtype=bool)
        for t in range(1, periods + 1):
            at_risk[t - 1] = here
            for name in self.over_time:
                if name != self.event and name not in self.imputed:
                    self._require(table, self.column(name, t), here, f"at risk in period {t}")
            if self.censoring is not None:
                here = here & ~self._is_one(table, self.censoring, t)
            uncensored[t - 1] = here
            if self.event is not None:
                self._require(table, self.column(self.event, t), here, f"not censored by period {t}")
                here = here & ~self._is_one(table, self.event, t)
        if self.event is None:
            self._require(table, self.outcome, here, "not censored")
        return Followed(at_risk, uncensored)

    def event_in(self, table: Table, period: int) -> Bools:
        """Return who has the event in a period, of those at risk."""
        if self.event is None:
            return np.zeros(table.n_rows, dtype=bool)
        return self._is_one(table, self.event, period)

    def _is_one(self, table: Table, name: str, period: int) -> Bools:
        return np.asarray(table.numeric[self.column(name, period)] == 1.0)

    def _require(self, table: Table, column: str, people: Bools, who: str) -> None:
        if column in table.numeric:
            absent = np.isnan(table.numeric[column])
        elif column in table.factors:
            absent = table.factors[column].codes < 0
        else:  # no model and no rule reads it
            return
        count = int(np.count_nonzero(absent & people))
        if count:
            raise DataError(f"column '{column}' is missing in {count} row(s) of people who are {who}")


@final
@dataclass(frozen=True, kw_only=True)
class PeriodView:
    """The rows of a period: each variable over time by its name, with its value in the period.

    Where a value is missing because the person is not at risk, a value in the declared range takes its place;
    such rows have no weight in any fit.
    """

    timeline: Timeline
    period: int
    cache: PerTable[Table] = field(init=False, default_factory=PerTable, compare=False, repr=False)

    def of(self, rows: AnyTable) -> AnyTable:
        shown = seen_through(self.cache, rows, self.show)
        if isinstance(shown, StreamedTable):
            counts = dict(shown.factor_counts)
            for name, column in self._columns.items():
                if column in counts:
                    counts[name] = counts[column]
            return replace(shown, factor_counts=counts)
        return shown

    @cached_property
    def _columns(self) -> dict[str, str]:
        names = self.timeline.names(self.period)
        return {name: self.timeline.column(name, self.period) for name in names}

    def show(self, table: Table) -> Table:
        """Return the rows of the period."""
        numeric, factors, reach = dict(table.numeric), dict(table.factors), dict(table.reach)
        filled: dict[str, tuple[Array, float]] = {}
        for name, column in self._columns.items():
            if column in table.numeric:
                if column not in filled:
                    filled[column] = self._filled(table, name, column)
                numeric[name], reach[name] = filled[column]
            if column in table.factors:
                factor = table.factors[column]
                codes = factor.codes if (factor.codes >= 0).all() else np.maximum(factor.codes, 0)
                factors[name] = Factor(codes, factor.levels)
        return replace(table, numeric=numeric, factors=factors, known_reach=reach)

    def _filled(self, table: Table, name: str, column: str) -> tuple[Array, float]:
        """Return the values without missing ones, and their largest magnitude."""
        values, lagged = table.numeric[column], self.timeline.lagged(name)
        if not math.isnan(table.reach[column]) or lagged is None:
            return values, table.reach[column]
        filled = np.where(np.isnan(values), self.timeline.fills.get(lagged.name, 0.0), values)
        return filled, kernels.largest(filled)
