"""Tables in files: CSV, Parquet and DuckDB databases, opened read-only, and read with DuckDB.

The header of a CSV file gives the delimiter and the names, and all cells decide whether a column is numbers:
DuckDB's own detection looks at a sample and skips what does not fit it, while here nothing is skipped.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
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
from fedtmle.data.silofile import TABLES, CsvFile, Database
from fedtmle.model.table import Factor

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation


# Reading with DuckDB: connections that write nothing, errors that quote nothing, columns as arrays.

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


_DELIMITERS = ",;\t|"
_MISSING = ["", "NA"]


@contextmanager
def open_file(source: Path | CsvFile) -> Iterator[AbstractStreamReader]:
    """Open a .csv or .parquet file."""
    written = source if isinstance(source, CsvFile) else CsvFile(path=source)
    path = written.path
    kind = path.suffix.lower()
    if kind in (".duckdb", ".db"):
        raise UnreadableError(
            "a database alone does not say which table to read",
            "name database and table, or database and query, in a silo file",
        )
    if kind not in TABLES:
        raise UnreadableError(
            "the file's extension is not known", "give .csv, .parquet or a silo file (.toml)"
        )
    _must_exist(path)
    with _in_utf8(written) as readable, connect() as connection:
        pattern = re.sub(r"([*?\[])", r"[\1]", str(readable.path))  # DuckDB takes a path for a glob pattern
        if kind == ".csv":
            yield csv_reader(connection, readable, pattern)
        else:
            failure = UnreadableError("the file cannot be read as Parquet", "check what wrote it")
            relation, _ = attempt(lambda: connection.read_parquet(pattern))
            if relation is None:
                raise failure
            yield RelationReader(connection, relation, failure)


@contextmanager
def open_database(database: Database) -> Iterator[AbstractStreamReader]:
    """Open a table or a query of a DuckDB file."""
    _must_exist(database.path)
    with open_database_file(str(database.path)) as connection:
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
    """Return the result of the silo's query, which must be one SELECT."""
    import duckdb

    statements, _ = attempt(lambda: connection.extract_statements(query))
    if statements is None:
        raise failure
    if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
        raise UnreadableError("the silo's query is not one SELECT", "write one SELECT that yields the table")
    connection.execute("SET threads = 1")  # else joins and groups come in another order each time
    relation, _ = attempt(lambda: connection.sql(query))
    if relation is None:
        raise failure
    return relation


NO_FILE = "the file does not exist"


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise UnreadableError(NO_FILE, "check the path")
    if not path.is_file():
        raise UnreadableError("this is not a file", "check the path")


@contextmanager
def _in_utf8(file: CsvFile) -> Iterator[CsvFile]:
    """Yield the file itself, or a copy in UTF-8 that only its owner can read; delete the copy afterwards."""
    if file.encoding == "utf-8":
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="fedtmle-") as folder:
        copy = Path(folder) / "copy.csv"
        is_text = True
        try:
            with (
                file.path.open(encoding=file.encoding, newline="") as theirs,
                copy.open("w", encoding="utf-8", newline="") as ours,
            ):
                shutil.copyfileobj(theirs, ours)
        except (OSError, UnicodeError):
            is_text = False
        if not is_text:
            raise _malformed(None)
        yield replace(file, path=copy, encoding="utf-8")


def csv_reader(connection: DuckDBPyConnection, file: CsvFile, pattern: str) -> AbstractStreamReader:
    """Return a reader of a CSV file, whose path DuckDB knows as ``pattern``."""
    delimiter, names = _header(file)
    relation, line = attempt(
        lambda: connection.read_csv(
            pattern,
            auto_detect=False,
            header=True,
            columns={f"c{i}": "VARCHAR" for i in range(len(names))},
            delimiter=delimiter,
            quotechar='"',
            escapechar='"',
            na_values=_MISSING,
        )
    )
    if relation is None:
        raise _malformed(line)
    return _CSVReader(connection, relation, names, _numeral(file))


class _CSVReader(AbstractStreamReader):
    """A CSV file with a header.

    Empty cells and NA are missing, true and false are 1 and 0, and blanks around a cell are ignored.
    """

    def __init__(
        self,
        connection: DuckDBPyConnection,
        relation: DuckDBPyRelation,
        names: tuple[str, ...],
        numeral: Callable[[str], str],
    ) -> None:
        self._numeral = numeral
        self._connection = connection
        self._relation = relation
        self._names = names

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def quotable(self) -> tuple[str, ...]:
        # In a file without a header the first record is where names should be.
        plausible = all(re.match(r"[^\W\d]|\.|$", name) for name in self._names)
        return self._names if plausible else ()

    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        fetched, line = attempt(lambda: fetch(self._relation, *self._kinds(names)))
        if fetched is None:
            raise _malformed(line)
        return fetched

    def settle(self, names: Sequence[str]) -> Reading:
        kinds, line = attempt(lambda: self._kinds(names))
        if kinds is None:
            raise _malformed(line)
        numbers, texts = kinds
        by_name = {name: labels(self._relation, cell) for name, cell in texts.items()}
        return Reading(numbers=numbers, texts=texts, labels=by_name, others={})

    def batches(self, reading: Reading) -> Iterator[tuple[int, Mapping[str, Cells]]]:
        return stream(self._connection, self._relation, reading, _malformed(None))

    def _kinds(self, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the SQL of the columns that are numbers, and of the others."""
        cells = {name: f"c{self._names.index(name)}" for name in names}
        numbers = self._numbers(cells)
        # Blanks around numbers are harmless; elsewhere they are stripped, which may turn text into numbers.
        others = {name: _stripped(cell) for name, cell in cells.items() if name not in numbers}
        numbers |= self._numbers(others)
        return numbers, {name: cell for name, cell in others.items() if name not in numbers}

    def _number(self, cell: str) -> str:
        number = f"TRY_CAST({self._numeral(cell)} AS DOUBLE)"
        return f"CASE lower({cell}) WHEN 'true' THEN 1 WHEN 'false' THEN 0 ELSE {number} END"

    def _numbers(self, cells: Mapping[str, str]) -> dict[str, str]:
        """Return the SQL of those columns that are numbers."""
        if not cells:
            return {}
        # A column is numbers if all its cells are: a sample would be wrong about the rest.
        tests = ", ".join(f"count({cell}) = count({self._number(cell)})" for cell in cells.values())
        (numeric,) = self._relation.project(tests).fetchall()
        return {name: self._number(cells[name]) for name, yes in zip(cells, numeric, strict=True) if yes}


def _stripped(cell: str) -> str:
    """Return SQL that strips blanks and no-break spaces; an empty cell becomes NULL."""
    bare, missing = f"trim({cell}, ' ' || chr(160))", ", ".join(map(repr, _MISSING))
    return f"CASE WHEN {bare} IN ({missing}) THEN NULL ELSE {bare} END"


def _numeral(file: CsvFile) -> Callable[[str], str]:
    """Return the function from a cell's SQL to that of its numeral with a decimal point, or NULL if none."""
    if file.decimal == "." and not file.thousands:
        return lambda cell: cell
    group, point = re.escape(file.thousands), re.escape(file.decimal)
    grouped = rf"\d{{1,3}}({group}\d{{3}})+|" if file.thousands else ""
    pattern = rf"[+-]?({grouped}\d+)?({point}\d+)?([eE][+-]?\d+)?".replace("'", "''")
    quoted = file.thousands.replace("'", "''")

    def numeral(cell: str) -> str:
        bare = f"replace({cell}, '{quoted}', '')" if file.thousands else cell
        return (
            f"CASE WHEN regexp_full_match({cell}, '{pattern}') "
            f"THEN replace({bare}, '{file.decimal}', '.') END"
        )

    return numeral


def _header(file: CsvFile) -> tuple[str, tuple[str, ...]]:
    """Return the delimiter, which is the commonest candidate outside quotes, and the column names."""
    try:
        with file.path.open(encoding="utf-8-sig", newline="") as text:
            line = re.sub(r'"[^"]*"', "", text.readline())
            delimiter = max(_DELIMITERS, key=line.count)
            text.seek(0)
            names = next(csv.reader(text, delimiter=delimiter), [])
    except (OSError, UnicodeError, csv.Error):
        names = None
    if names is None:
        raise _malformed(None)
    if not names:
        raise UnreadableError("the file is empty", "give a file with a header and at least one row")
    return delimiter, tuple(names)


def _malformed(line: int | None) -> UnreadableError:
    return UnreadableError(
        "the file cannot be read as CSV",
        "check that it is UTF-8, or state its encoding in the silo file, that every row has as many cells as "
        "the header and that quotes are closed",
        line=line,
    )
