"""Long tables, with one row per person and period, read as wide ones with one row per person.

The hospital's column sev gives the wide columns sev1, ..., sevK, its value in each period; sev, if it is the
same in all rows of a person that have it; and sev_last, its value in the person's last row. People are in the
order of their identifiers, so that the order of rows in the source does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.data.convert import AbstractReader, Cells, Numbers, UnreadableError
from fedtmle.data.silofile import LongTable
from fedtmle.model.table import Factor
from fedtmle.model.types import Array, Bools, IntArray

LAST = "_last"
ANY, LATEST = 0, -1  # stand for any period, and for a person's last row
MOST_PERIODS = 1_000  # more are probably dates or identifiers


@final
@dataclass(frozen=True)
class _Layout:
    """The ``person`` and the ``period`` of each row of a long table, both counted from 0."""

    person: IntArray
    period: IntArray
    people: int
    periods: int

    @cached_property
    def last(self) -> IntArray:
        """The last row of each person."""
        rows = np.lexsort((self.period, self.person))
        ends = np.flatnonzero(np.diff(self.person[rows], append=self.people))
        return rows[ends]


class LongReader(AbstractReader):
    """Reads a long table as a wide one."""

    def __init__(self, long: LongTable, rows: AbstractReader) -> None:
        self._long = long
        self._rows = rows
        for part, name in (("person", long.person), ("period", long.period)):
            if rows.names.count(name) != 1:
                raise UnreadableError(
                    f"the table must have exactly one column '{name}' for the {part} of each row",
                    f"correct {part}",
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._columns)

    @property
    def quotable(self) -> tuple[str, ...]:
        return self.names if self._rows.quotable else ()

    def read(self, names: Sequence[str]) -> tuple[int, dict[str, Cells]]:
        layout, places = self._layout, dict(self._columns)
        return layout.people, {
            name: _placed(self._cells[places[name][0]], *places[name], layout) for name in names
        }

    @cached_property
    def _cells(self) -> Mapping[str, Cells]:
        """The cells of all columns, read together because a database sends its rows once."""
        return self._rows.read(self._rows.names)[1]

    @cached_property
    def _columns(self) -> list[tuple[str, tuple[str, int]]]:
        """The wide columns by name: the long column that each comes from, and the period of its value."""
        places = [("", ANY), (LAST, LATEST), *((str(t), t) for t in range(1, self._layout.periods + 1))]
        keys = (self._long.person, self._long.period)
        columns = [
            (f"{column}{suffix}", (column, where))
            for column in self._rows.names
            if column not in keys
            for suffix, where in places
        ]
        return [*columns, (f"{self._long.period}{LAST}", (self._long.period, LATEST))]

    @cached_property
    def _layout(self) -> _Layout:
        """The person and period of each row; refuse rows that lack either, and two rows for one period."""
        period = _whole(self._cells[self._long.period], self._long.period)
        person = _identified(self._cells[self._long.person], self._long.person)
        periods = int(period.max(initial=0))
        layout = _Layout(person, period - 1, int(person.max(initial=-1)) + 1, periods)
        twice = len(person) - len(np.unique(person * max(periods, 1) + layout.period))
        if twice:
            raise UnreadableError(
                f"{_rows(twice)} with the person and the period of another row",
                "give one row for each person and period",
            )
        return layout


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _whole(cells: Cells, name: str) -> IntArray:
    """Return the numbers of the periods, which are 1, 2, and so on."""
    fix = "number the periods 1, 2, ... in every row"
    if not isinstance(cells, Numbers):
        raise UnreadableError(f"column '{name}' does not hold numbers of periods", fix)
    values = cells.values
    good = (values >= 1) & (values <= MOST_PERIODS) & (values == np.floor(values))  # NaN is not good
    bad = int(np.count_nonzero(~good))
    if bad:
        raise UnreadableError(f"column '{name}' is not the number of a period in {_rows(bad)}", fix)
    return values.astype(np.int64)


def _identified(cells: Cells, name: str) -> IntArray:
    """Return the position of each row's person among all people, who are in the order of identifiers."""
    if isinstance(cells, Numbers):
        missing = np.isnan(cells.values)
        people = np.unique(cells.values, return_inverse=True)[1]
    elif isinstance(cells, Factor):
        missing = cells.codes < 0
        rank = np.empty(len(cells.levels), dtype=np.int64)
        rank[np.argsort(np.array(cells.levels, dtype=object), kind="stable")] = np.arange(len(cells.levels))
        people = np.unique(rank[cells.codes], return_inverse=True)[1] if len(rank) else cells.codes
    else:
        raise UnreadableError(
            f"column '{name}' does not hold identifiers of people", "give numbers or text there"
        )
    count = int(np.count_nonzero(missing))
    if count:
        raise UnreadableError(
            f"column '{name}' is missing in {_rows(count)}", "give an identifier of the person in every row"
        )
    return people.reshape(-1).astype(np.int64)


def _placed(cells: Cells, column: str, where: int, layout: _Layout) -> Cells:
    """Return one value per person: from a period, from the last row, or the one that all rows agree on."""
    if isinstance(cells, Numbers):
        rows = _chosen(cells.values, np.isnan(cells.values), column, where, layout)
        return Numbers(np.append(cells.values, np.nan)[rows])
    if isinstance(cells, Factor):
        rows = _chosen(cells.codes, cells.codes < 0, column, where, layout)
        return Factor(np.append(cells.codes, -1)[rows], cells.levels)
    return cells


def _chosen(values: Array | IntArray, missing: Bools, name: str, where: int, layout: _Layout) -> IntArray:
    """Return the row that holds each person's value, or -1 if there is none."""
    if where == LATEST:
        return layout.last
    rows = np.flatnonzero(~missing if where == ANY else layout.period == where - 1)
    chosen = np.full(layout.people, -1, dtype=np.int64)
    chosen[layout.person[rows]] = rows
    if where == ANY:
        differs = values[chosen[layout.person[rows]]] != values[rows]
        people = len(np.unique(layout.person[rows][differs]))
        if people:
            raise UnreadableError(
                f"column '{name}' differs between the rows of {people} of the people",
                f"map a column of one period, as '{name}1', or '{name}{LAST}'",
            )
    return chosen
