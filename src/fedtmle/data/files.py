"""Tables in files: CSV, Parquet and DuckDB databases, opened read-only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedtmle.data.cells import AbstractStreamReader, UnreadableError
from fedtmle.data.delimited import csv_reader
from fedtmle.data.duck import RelationReader, attempt, connect
from fedtmle.data.mapping import Database

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation


@contextmanager
def open_file(path: Path) -> Iterator[AbstractStreamReader]:
    """A reader of a .csv or .parquet file."""
    kind = path.suffix.lower()
    if kind in (".duckdb", ".db"):
        raise UnreadableError(
            "a database alone does not say which table to read",
            "name database and table, or database and query, in a silo file",
        )
    if kind not in (".csv", ".parquet"):
        raise UnreadableError(
            "the file's extension is not known", "give .csv, .parquet or a silo file (.toml)"
        )
    _must_exist(path)
    pattern = re.sub(r"([*?\[])", r"[\1]", str(path))  # DuckDB takes a path for a glob pattern
    with connect(":memory:", read_only=False) as connection:
        if kind == ".csv":
            yield csv_reader(connection, path, pattern)
        else:
            failure = UnreadableError("the file cannot be read as Parquet", "check what wrote it")
            relation, _ = attempt(lambda: connection.read_parquet(pattern))
            if relation is None:
                raise failure
            yield RelationReader(connection, relation, failure)


@contextmanager
def open_database(database: Database) -> Iterator[AbstractStreamReader]:
    """A reader of a table or a query of a DuckDB file."""
    _must_exist(database.path)
    with connect(str(database.path), read_only=True) as connection:
        if database.query is not None:
            failure = UnreadableError("the silo's query failed", "run it in DuckDB at the silo to see why")
            yield RelationReader(connection, _select(connection, database.query, failure), failure)
        else:
            table = str(database.table)
            relation, _ = attempt(lambda: connection.table(table))
            if relation is None:
                raise UnreadableError("the database has no table of that name", "correct it in the silo file")
            failure = UnreadableError(
                "the table cannot be read", "check the database with DuckDB at the silo"
            )
            yield RelationReader(connection, relation, failure)


def _select(connection: DuckDBPyConnection, query: str, failure: UnreadableError) -> DuckDBPyRelation:
    """The silo's query, which must be one SELECT."""
    import duckdb

    statements, _ = attempt(lambda: connection.extract_statements(query))
    if statements is None:
        raise failure
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        raise UnreadableError("the silo's query is not one SELECT", "write one SELECT that yields the table")
    connection.execute("SET threads = 1")  # joins and groups would else come in another order each time
    relation, _ = attempt(lambda: connection.sql(query))
    if relation is None:
        raise failure
    return relation


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise UnreadableError("the file does not exist", "check the path")
    if not path.is_file():
        raise UnreadableError("this is not a file", "check the path")
