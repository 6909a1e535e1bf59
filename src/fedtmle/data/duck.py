"""DuckDB as a reader: connections that write nothing, errors that tell nothing, columns as arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fedtmle.data.cells import DATES, OTHER, AbstractReader, Cells, Numbers, UnreadableError
from fedtmle.data.frames import text

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


@contextmanager
def connect(path: str, *, read_only: bool) -> Iterator[DuckDBPyConnection]:
    """An open database, closed afterwards; ":memory:" for reading other files."""
    import duckdb

    connection, _ = attempt(lambda: duckdb.connect(path, read_only=read_only, config=_SETTINGS))
    if connection is None:
        raise UnreadableError(
            "this cannot be opened as a DuckDB database",
            "check that it is one and that no program holds it open for writing",
        )
    with connection:
        yield connection


def attempt(call: Callable[[], T]) -> tuple[T | None, int | None]:
    """What ``call`` returns, or None and the line of the file at which it failed, if that is known.

    DuckDB's messages quote rows, so none goes on, not even as ``__context__``.
    """
    try:
        return call(), None
    except Exception as error:
        line = re.search(r"on Line: (\d+)", str(error))
        return None, int(line[1]) if line else None


def fetch(
    relation: DuckDBPyRelation, numbers: Mapping[str, str], texts: Mapping[str, str]
) -> tuple[int, dict[str, Cells]]:
    """The number of rows and the cells of SQL expressions by name, in one query: one row order."""
    expressions = {**numbers, **texts}
    if not expressions:
        ((count,),) = relation.project("count(*)").fetchall()
        return count, {}
    # Names are replaced by positions: DuckDB would take "Age" and "age" for one.
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


class RelationReader(AbstractReader):
    """A typed table: Parquet, a table of a database, or a query's result."""

    def __init__(self, relation: DuckDBPyRelation, failure: UnreadableError) -> None:
        self._relation = relation
        self._failure = failure  # what to say when DuckDB fails while it reads

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._relation.columns)

    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        types = {name: kind.id for name, kind in zip(self.names, self._relation.types, strict=True)}
        numbers = {name: f"CAST({quoted(name)} AS DOUBLE)" for name in names if types[name] in _NUMBERS}
        texts = {name: f"CAST({quoted(name)} AS VARCHAR)" for name in names if types[name] in _TEXT}
        fetched, _ = attempt(lambda: fetch(self._relation, numbers, texts))
        if fetched is None:
            raise self._failure
        n_rows, cells = fetched
        others = {name: _other(types[name]) for name in names if name not in cells}
        return n_rows, {**cells, **others}


def quoted(name: str) -> str:
    """A name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _other(kind: str) -> Cells:
    return DATES if kind.startswith(("date", "time", "interval")) else OTHER
