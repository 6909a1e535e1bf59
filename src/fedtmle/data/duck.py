"""Reading with DuckDB: connections that write nothing, errors that quote nothing, columns as arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fedtmle.data.convert import (
    DATES,
    OTHER,
    AbstractStreamReader,
    Cells,
    Numbers,
    Reading,
    UnreadableError,
    Unusable,
    dates,
)
from fedtmle.data.frames import text
from fedtmle.model.table import Factor

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

T = TypeVar("T")

_SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "temp_directory": "",  # records are never spilled to another file
    "autoinstall_known_extensions": False,  # nothing is fetched from a network
    "autoload_known_extensions": False,
}
_INTEGERS = ("tinyint", "smallint", "integer", "bigint", "hugeint")
_NUMBERS = {*_INTEGERS, *(f"u{name}" for name in _INTEGERS), "float", "double", "decimal", "boolean", "null"}
_TEXT = {"varchar", "enum", "uuid"}
_DATES = {"date", "timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns"}  # without a time zone
_VECTORS_PER_BATCH = 32  # a vector has 2,048 rows
_MOST_LABELS = 1 << 16  # most distinct labels of a streamed text column


@contextmanager
def open_database_file(path: str) -> Iterator[DuckDBPyConnection]:
    """Open a DuckDB database for reading, and close it afterwards."""
    import duckdb

    connection, _ = attempt(lambda: duckdb.connect(path, read_only=True, config=_SETTINGS))
    if connection is None:
        raise UnreadableError(
            "this cannot be opened as a DuckDB database",
            "check that it is one and that no program holds it open for writing",
        )
    with connection:
        _settle(connection)
        yield connection


@contextmanager
def connect() -> Iterator[DuckDBPyConnection]:
    """Open a connection for reading files and tables in memory.

    All such connections of a process share one empty database: to make one takes 25 ms, and a streamed table
    opens its file for every pass.
    """
    with _empty_database(os.getpid()).cursor() as connection:
        _settle(connection)
        yield connection


@lru_cache(maxsize=1)
def _empty_database(_process: int) -> DuckDBPyConnection:
    """Return the empty database of this process; a forked child needs its own, as it lacks the threads."""
    import duckdb

    return duckdb.connect(":memory:", config=_SETTINGS)


def _settle(connection: DuckDBPyConnection) -> None:
    connection.execute("SET enable_progress_bar = false")  # DuckDB must not write to the terminal
    connection.execute("SET enable_external_file_cache = false")  # a streamed file may exceed memory


def attempt(call: Callable[[], T]) -> tuple[T | None, int | None]:
    """Return the value of ``call`` and None, or None and the line of the file at which it failed, if known.

    DuckDB's messages quote rows, so none is passed on, not even as ``__context__``.
    """
    try:
        return call(), None
    except Exception as error:
        line = re.search(r"on Line: (\d+)", str(error))
        return None, int(line[1]) if line else None


def fetch(
    relation: DuckDBPyRelation, numbers: Mapping[str, str], texts: Mapping[str, str]
) -> tuple[int, dict[str, Cells]]:
    """Return the number of rows and the cells of SQL expressions by name, in one row order."""
    expressions = {**numbers, **texts}
    if not expressions:
        ((count,),) = relation.project("count(*)").fetchall()
        return count, {}
    # Names are replaced by positions, because DuckDB ignores the case of names.
    columns = relation.project(
        ", ".join(f"{expression} AS c{i}" for i, expression in enumerate(expressions.values()))
    ).fetchnumpy()
    cells: dict[str, Cells] = {}
    for i, name in enumerate(expressions):
        column = columns.pop(f"c{i}")
        if name in numbers:
            cells[name] = Numbers(np.ascontiguousarray(np.ma.filled(column, np.nan), dtype=np.float64))
        else:
            cells[name] = text(column)
        n_rows = len(column)
    return n_rows, cells


def labels(relation: DuckDBPyRelation, expression: str) -> tuple[str, ...]:
    """Return all labels of a text expression; raise an error if they are too many to be levels."""
    distinct = relation.project(f"{expression} AS c").filter("c IS NOT NULL").distinct()
    rows = distinct.order("c").limit(_MOST_LABELS + 1).fetchall()
    if len(rows) > _MOST_LABELS:
        raise UnreadableError(
            f"a text column has more than {_MOST_LABELS} different labels",
            "such a table cannot be streamed; leave out stream in the silo file",
        )
    return tuple(label for (label,) in rows)


def stream(
    connection: DuckDBPyConnection, relation: DuckDBPyRelation, reading: Reading, failure: UnreadableError
) -> Iterator[tuple[int, dict[str, Cells]]]:
    """Read the relation once in batches; text comes as codes of its labels."""
    coded = {
        name: f"CAST({expression} AS ENUM ({', '.join(map(_literal, reading.labels[name]))}))"
        for name, expression in reading.texts.items()
        if reading.labels[name]
    }
    expressions = {**reading.numbers, **coded}
    chosen = relation.project(
        ", ".join(f"{expression} AS c{i}" for i, expression in enumerate(expressions.values())) or "1 AS c0"
    )
    opened, line = attempt(lambda: connection.execute(chosen.sql_query()))
    if opened is None:
        raise _at(failure, line)
    while True:
        frame, line = attempt(lambda: opened.fetch_df_chunk(_VECTORS_PER_BATCH))
        if frame is None:
            raise _at(failure, line)
        if not len(frame):
            return
        cells: dict[str, Cells] = {}
        for i, name in enumerate(expressions):
            column = frame[f"c{i}"]
            if name in reading.dates:
                cells[name] = dates(column.to_numpy())
            elif name in reading.numbers:
                cells[name] = Numbers(np.ascontiguousarray(column.to_numpy(), dtype=np.float64))
            else:
                cells[name] = Factor(column.cat.codes.to_numpy().astype(np.int64), reading.labels[name])
        for name in reading.texts.keys() - coded.keys():
            cells[name] = Factor(np.full(len(frame), -1), ())
        yield len(frame), {**cells, **reading.others}


def _at(failure: UnreadableError, line: int | None) -> UnreadableError:
    return UnreadableError(failure.message, failure.fix, line=line or failure.line)


def _literal(label: str) -> str:
    return "'" + label.replace("'", "''") + "'"


class RelationReader(AbstractStreamReader):
    """A typed table: Parquet, a table of a database, or a query's result."""

    def __init__(
        self, connection: DuckDBPyConnection, relation: DuckDBPyRelation, failure: UnreadableError
    ) -> None:
        self._connection = connection
        self._relation = relation
        self._failure = failure  # what to say when DuckDB fails while it reads

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._relation.columns)

    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        numbers, texts, others = self._kinds(names)
        fetched, _ = attempt(lambda: fetch(self._relation, numbers, texts))
        if fetched is None:
            raise self._failure
        n_rows, cells = fetched
        for name in self._dates(names):
            column = cells[name]
            if isinstance(column, Numbers):
                cells[name] = dates(column.values)
        return n_rows, {**cells, **others}

    def settle(self, names: Sequence[str]) -> Reading:
        numbers, texts, others = self._kinds(names)
        by_name = {name: labels(self._relation, expression) for name, expression in texts.items()}
        return Reading(numbers=numbers, texts=texts, labels=by_name, others=others, dates=self._dates(names))

    def batches(self, reading: Reading) -> Iterator[tuple[int, Mapping[str, Cells]]]:
        return stream(self._connection, self._relation, reading, self._failure)

    def _kinds(self, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str], dict[str, Unusable]]:
        """Return the SQL of the numbers, the SQL of the texts, and the other columns."""
        types = {name: kind.id for name, kind in zip(self.names, self._relation.types, strict=True)}
        numbers = {name: f"CAST({quoted(name)} AS DOUBLE)" for name in names if types[name] in _NUMBERS}
        # Days from 1970.
        numbers |= {
            name: f"CAST(CAST({quoted(name)} AS DATE) - DATE '1970-01-01' AS DOUBLE)"
            for name in names
            if types[name] in _DATES
        }
        texts = {name: f"CAST({quoted(name)} AS VARCHAR)" for name in names if types[name] in _TEXT}
        known = {**numbers, **texts}
        return numbers, texts, {name: _other(types[name]) for name in names if name not in known}

    def _dates(self, names: Sequence[str]) -> frozenset[str]:
        """Return which of the named columns hold dates."""
        types = dict(zip(self.names, self._relation.types, strict=True))
        return frozenset(name for name in names if types[name].id in _DATES)


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _other(kind: str) -> Unusable:
    return DATES if kind.startswith(("date", "time", "interval")) else OTHER
