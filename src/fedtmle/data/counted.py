"""Checking a table in its database: the counts of its defects are computed there, and no row leaves it.

`load` converts every cell and counts those that do not fit the study's schema. Here the database first counts
cells that are treated alike: equal values of a column with few distinct ones, and numbers of one class
(missing, infinite, outside the bounds, not a count). One value of each class then goes through the same
`Converter`, which counts it as often as it occurs, so that both ways find the same defects.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np

from fedtmle.data.convert import NUMERAL, Cells, Converter, Numbers, UnreadableError, Unusable
from fedtmle.data.database import MAX_ROWS, DatabaseQuery, read_url
from fedtmle.data.drivers import DatabaseError, Trouble, TwoQueries, driver_of, postgresql
from fedtmle.data.silofile import Column, ColumnMap, Kind, Schema, SiloFile
from fedtmle.data.snapshot import QueryReader, open_query
from fedtmle.data.source import NO_ROWS, Columns, load, silo_file_of
from fedtmle.data.sql import (
    DIALECTS,
    Aggregate,
    Aggregated,
    AllOf,
    AnyOf,
    CaseWhen,
    CastTo,
    Expression,
    FloorOf,
    GroupingOf,
    Infix,
    Inverse,
    IsNaN,
    IsNull,
    Operator,
    Ref,
    Select,
    Source,
    SqlType,
    Statement,
    Value,
)
from fedtmle.defects import DataErrors, Defect, Defects
from fedtmle.errors import InputError
from fedtmle.model.table import AnyTable, Factor
from fedtmle_core.types import IntArray

MOST_VALUES = 20_000  # distinct values of all columns; a table with more is read row by row
_ROWS = "rows of the silo"  # name of the select that holds the owner's query
_CLASSES = ("missing", "infinite", "fits", "outside", "broken", "both")
_NONE = Value(None)
# Failures that counting may cause, such as an overflow, although the rows can be read.
_PERHAPS_OURS = {Trouble.FAILED, Trouble.SYNTAX}


@final
@dataclass(frozen=True, kw_only=True)
class CountedTable:
    """The sizes of a table that was checked in its database.

    ``n_known`` is the number of rows whose outcome is not missing; ``known`` divides it by the levels of the
    treatment.
    """

    n_rows: int
    n_known: int
    known: Mapping[str, int]


def check(
    source: object, schema: Schema, *, silo: str, outcome: str, treatment: str | None
) -> AnyTable | CountedTable:
    """Check a silo's table against the study's schema; raise `DataErrors` with all defects.

    A streamed table of PostgreSQL is counted in the database where that is possible; any other is loaded.
    ``outcome`` and ``treatment`` are columns of the schema.
    """
    if isinstance(source, Path) and source.suffix.lower() == ".toml":
        source = silo_file_of(source, silo)
    query = source.data if isinstance(source, SiloFile) and source.stream else None
    if isinstance(query, DatabaseQuery) and query.snapshot is None and query.driver is None:
        url, _ = read_url(query)
        if url is not None and _is_postgresql(url):
            defects = Defects(silo=silo)
            maps = source.columns if isinstance(source, SiloFile) else {}
            columns = Columns.of(schema, maps, defects)
            counted, unreadable = None, None
            try:
                counted = _count(query, columns, defects, outcome=outcome, treatment=treatment)
            except UnreadableError as error:
                unreadable = Defect(message=error.message, fix=error.fix, line=error.line, silo=silo)
            if unreadable is not None:
                raise DataErrors([unreadable])  # outside of `except`: the cause may quote a record
            if counted is not None:
                defects.raise_if_any()
                return counted
    return load(source, schema, silo=silo)


def _is_postgresql(url: str) -> bool:
    try:
        return driver_of(url) is postgresql
    except DatabaseError:
        return False


def _count(
    query: DatabaseQuery, columns: Columns, defects: Defects, *, outcome: str, treatment: str | None
) -> CountedTable | None:
    """Add the defects of a query's rows; return None if the rows have to be read instead."""
    with open_query(query) as reader:
        names = columns.available(reader, defects)
        kinds = reader.kinds(columns.theirs(names)) if isinstance(reader, QueryReader) else {}
    plan = _plan(names, columns, kinds, outcome)
    counts = None if plan is None else _read(plan, query)
    if counts is None:
        return None
    n_rows, n_known, cells = counts
    if n_rows == 0:
        defects.add(*NO_ROWS)
        return CountedTable(n_rows=0, n_known=0, known={})
    known: dict[str, int] = {}
    for name in names:
        column, weights, with_outcome = cells[name]
        converter = Converter(name=name, mapped=columns.maps[name], defects=defects, weights=weights)
        translated = converter.translate(column)
        for asked in columns.schema[name]:
            if translated is not None and asked.kind is not Kind.FACTOR:
                converter.numeric(translated, asked)
            elif translated is not None:
                factor = converter.factor(translated, asked)
                if factor is not None and name == treatment:
                    known = _by_level(factor, with_outcome)
    return CountedTable(n_rows=n_rows, n_known=n_known, known=known)


def _read(plan: _Plan, query: DatabaseQuery) -> tuple[int, int, dict[str, Counted]] | None:
    """Return the rows, those with an outcome, and the counted cells; None if the database cannot count."""
    try:
        n_rows, n_known, cells = plan.read(query)
    except DatabaseError as error:
        if error.trouble not in _PERHAPS_OURS:
            raise
        return None
    if n_rows > query.max_rows:
        raise DatabaseError(Trouble.TOO_MANY, rows=query.max_rows)
    return None if cells is None else (n_rows, n_known, cells)


def _by_level(factor: Factor, counts: IntArray) -> dict[str, int]:
    return {level: int(counts[factor.codes == code].sum()) for code, level in enumerate(factor.levels)}


# The two statements.

Counted = tuple[Cells, IntArray, IntArray]  # distinct cells, their rows, and those rows with a known outcome


@final
@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The columns that are counted by class and those counted by value, with their places in ``cells``."""

    cells: Select
    classes: Mapping[str, tuple[tuple[Expression, ...], Expression]]  # by name: the conditions and the number
    values: Mapping[str, str]  # place by name
    unusable: Mapping[str, Unusable]
    known: Expression  # whether a row's outcome is known

    def read(self, query: DatabaseQuery) -> tuple[int, int, dict[str, Counted] | None]:
        """Return the rows, those with an outcome, and the counted cells; None if these are too many."""
        driver = TwoQueries(_text(query.sql, self._by_class()))
        text = _text(query.sql, self._by_value())
        grouped = replace(query, query=text, table=None, max_rows=MAX_ROWS, driver=driver)
        wanted = [*self.values.values(), "grouped", "n", "known"]
        with open_query(grouped) as reader:
            n_groups, columns = reader.read(wanted)
        (row,) = driver.rows
        n_rows, n_known, counts = int(row[0]), int(row[1]), list(row[2:])
        if n_groups > MOST_VALUES:
            return n_rows, n_known, None
        empty = np.zeros(0, dtype=np.int64)
        cells: dict[str, Counted] = {
            name: (content, np.array([n_rows]), empty) for name, content in self.unusable.items()
        }
        for name in self.classes:
            numbers = [counts.pop(0) for _ in range(2 * len(_CLASSES))]
            weights = np.array([int(count) for count in numbers[::2]], dtype=np.int64)
            examples = [np.nan if value is None else float(value) for value in numbers[1::2]]
            present = weights > 0
            example = Numbers(np.array(examples, dtype=np.float64)[present])
            cells[name] = (example, weights[present], empty)
        sets, rows, known = (_integers(columns[key]) for key in ("grouped", "n", "known"))
        everything = (1 << len(self.values)) - 1
        for index, (name, place) in enumerate(self.values.items()):
            mine = sets == everything - (1 << (len(self.values) - 1 - index))
            column = columns[place]
            if isinstance(column, Numbers):
                column = Numbers(column.values[mine])
            elif isinstance(column, Factor):
                column = Factor(column.codes[mine], column.levels)
            cells[name] = (column, rows[mine], known[mine])
        return n_rows, n_known, cells

    def _by_class(self) -> Statement:
        """Return the statement that counts the rows of each class of each number, with one value of it."""
        counted: list[tuple[str, Expression]] = [
            ("n", Aggregated(Aggregate.COUNT, Value(1))),
            ("known", Aggregated(Aggregate.COUNT, CaseWhen(((self.known, Value(1)),), _NONE))),
        ]
        for conditions, number in self.classes.values():
            for condition in conditions:
                one = CaseWhen(((condition, Value(1)),), _NONE)
                example = CaseWhen(((condition, number),), _NONE)
                counted.append((f"k{len(counted)}", Aggregated(Aggregate.COUNT, one)))
                counted.append((f"k{len(counted)}", Aggregated(Aggregate.MIN, example)))
        body = Select(columns=tuple(counted), source=Source("cells", "c"))
        return Statement((("cells", self.cells),), body)

    def _by_value(self) -> Statement:
        """Return the statement that counts the rows of each value, separately for each column."""
        places = tuple(Ref("c", place) for place in self.values.values())
        known = CaseWhen(((self.known, Value(1)),), _NONE)
        columns: tuple[tuple[str, Expression], ...] = (
            *((place.column, place) for place in places),
            ("grouped", GroupingOf(places) if places else Value(0)),
            ("n", Aggregated(Aggregate.COUNT, Value(1))),
            ("known", Aggregated(Aggregate.COUNT, known)),
        )
        body = Select(
            columns=columns,
            source=Source("cells", "c"),
            group_by=places,
            each_by_itself=True,
            limit=MOST_VALUES + 1,
        )
        return Statement((("cells", self.cells),), body)


def _integers(cells: Cells) -> IntArray:
    if not isinstance(cells, Numbers):
        raise AssertionError("the counts that a database returns must be numbers")
    return cells.values.astype(np.int64)


def _text(owners: str, statement: Statement) -> str:
    """Return the SQL of a statement that reads the owner's query as a named select."""
    dialect = DIALECTS["postgresql"]
    named = f"{dialect.identifier(_ROWS)} AS (\n{owners}\n)"
    return f"WITH {named},\n{dialect.print(statement).removeprefix('WITH ')}"


def _plan(
    names: Sequence[str], columns: Columns, kinds: Mapping[str, str | Unusable], outcome: str
) -> _Plan | None:
    """Return how to count the columns, or None if they cannot be counted in the database."""
    chosen: list[tuple[str, Expression]] = []
    classes: dict[str, tuple[tuple[Expression, ...], Expression]] = {}
    values: dict[str, str] = {}
    unusable: dict[str, Unusable] = {}
    known: Expression = AllOf(())  # a missing outcome column is a defect, found elsewhere
    for index, name in enumerate(names):
        mapped, asked = columns.maps[name], columns.schema[name]
        if mapped.is_difference:
            return None
        kind, place = kinds[mapped.column], f"c{index}"
        if isinstance(kind, Unusable):
            unusable[name] = kind
            continue
        cell: Expression = Ref("r", mapped.column)
        if kind == "boolean":
            cell = CastTo(cell, SqlType.INTEGER)
        is_text = kind == "text"
        try:
            DIALECTS["postgresql"].identifier(mapped.column)
        except InputError:  # a name that PostgreSQL would truncate
            return None
        chosen.append((place, CastTo(cell, SqlType.TEXT if is_text else SqlType.DOUBLE)))
        ref = Ref("c", place)
        if name == outcome:
            if is_text and mapped.missing:
                return None
            known = Inverse(IsNull(ref) if is_text else _is_missing(ref, mapped))
        if is_text or mapped.levels is not None or any(_by_value(column) for column in asked):
            if any(map(_is_identifier, asked)):
                return None
            values[name] = place
        else:
            classes[name] = (_conditions(ref, mapped, asked[0]), ref)
    if not chosen:
        return None
    cells = Select(columns=tuple(chosen), source=Source(_ROWS, "r"))
    return _Plan(cells=cells, classes=classes, values=values, unusable=unusable, known=known)


def _by_value(column: Column) -> bool:
    return column.kind in (Kind.FACTOR, Kind.BINARY)


def _is_identifier(column: Column) -> bool:
    """Whether a column may have as many labels as there are rows."""
    return column.kind is Kind.FACTOR and column.levels is None


def _is_missing(number: Expression, mapped: ColumnMap) -> Expression:
    codes = [float(code.strip()) for code in mapped.missing if NUMERAL.fullmatch(code.strip())]
    are_codes = [Infix(number, Operator.EQUAL, Value(code)) for code in codes]
    return AnyOf((IsNull(number), IsNaN(number), *are_codes))


def _conditions(number: Expression, mapped: ColumnMap, column: Column) -> tuple[Expression, ...]:
    """Return a condition for each of `_CLASSES`; exactly one of them holds in each row."""
    largest = sys.float_info.max
    missing = _is_missing(number, mapped)
    infinite = AnyOf(
        (
            Infix(number, Operator.ABOVE, Value(largest)),
            Infix(number, Operator.BELOW, Value(-largest)),
        )
    )
    value = number
    if mapped.converts:
        scaled = Infix(number, Operator.TIMES, Value(float(mapped.scale)))
        value = Infix(scaled, Operator.PLUS, Value(float(mapped.shift)))
    low, high = column.bounds or (-math.inf, math.inf)
    outside = AnyOf(
        (
            *((Infix(value, Operator.BELOW, Value(float(low))),) if math.isfinite(low) else ()),
            *((Infix(value, Operator.ABOVE, Value(float(high))),) if math.isfinite(high) else ()),
        )
    )
    broken: Expression = AnyOf(())
    if column.kind is Kind.COUNT:
        fraction = Inverse(Infix(value, Operator.EQUAL, FloorOf(value)))
        broken = AnyOf((Infix(value, Operator.BELOW, Value(0)), fraction))
    is_class = CaseWhen(
        (
            (missing, Value(0)),
            (infinite, Value(1)),
            (AllOf((outside, broken)), Value(5)),
            (broken, Value(4)),
            (outside, Value(3)),
        ),
        Value(2),
    )
    return tuple(Infix(is_class, Operator.EQUAL, Value(index)) for index in range(len(_CLASSES)))
