"""A silo's database, the cohort that a trial selects in it, and the attrition.

A cohort is read in one read-only transaction. Nothing is written to the database, and errors say what kind of
failure it was but never repeat the database's own message, which may quote a record.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from fedtmle.data.convert import UnreadableError
from fedtmle.data.duck import connect
from fedtmle.errors import DataError, InputError
from fedtmle.model.types import Array
from fedtmle.protocol.guard import Policy
from fedtmle.trials.compile import CdmLayout, CompiledTrial, compile_trial
from fedtmle.trials.sql import DIALECTS, Dialect
from fedtmle.trials.trial import TREATMENT_COLUMN, TargetTrial

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
TextArray = NDArray[np.object_]
TableColumns = dict[str, Array | TextArray]


@final
@dataclass(frozen=True, kw_only=True)
class Cdm:
    """A silo's OMOP CDM: a DuckDB file, or a PostgreSQL server.

    A PostgreSQL connection (a URI or a libpq string) is read from an environment variable or from a file, so
    that no password is in a file of the study. ``policy`` is the owner's, None where there is no silo file.
    """

    name: str
    database: Path | None = None
    connection_variable: str | None = None
    connection_file: Path | None = None
    layout: CdmLayout = CdmLayout()
    policy: Policy | None = None
    timeout_seconds: float = 600.0  # for one statement; PostgreSQL only
    path: Path | None = None  # of the silo file

    def __post_init__(self) -> None:
        given = (self.database, self.connection_variable, self.connection_file)
        if sum(where is not None for where in given) != 1:
            raise InputError("database: give one of database, connection_variable and connection_file")
        if not self.timeout_seconds >= 1:
            raise InputError("timeout_seconds: expected a number of at least 1")

    @property
    def dialect(self) -> Dialect:
        """The SQL that the database speaks."""
        return DIALECTS["postgresql" if self.database is None else "duckdb"]

    def compile(self, trial: TargetTrial) -> CompiledTrial:
        """Return the statements of ``trial`` for this database."""
        return compile_trial(trial, self.layout)

    def sql(self, trial: TargetTrial) -> str:
        """Return the SQL that `read_cohort` runs here, for the owner to read before it does."""
        return self.compile(trial).print(self.dialect)


@final
@dataclass(frozen=True, kw_only=True)
class ArmCounts:
    """People of one arm: with the event, without it, and with an unknown outcome; None is not shown."""

    name: str
    people: int | None
    events: int | None
    unknown: int | None


@final
@dataclass(frozen=True, kw_only=True)
class Attrition:
    """How many people remain after each step, and the arms of the cohort; None is not shown.

    ``floor`` is the smallest number that is shown, None in the owner's own view.
    """

    silo: str
    steps: tuple[str, ...]
    people: tuple[int | None, ...]
    arms: tuple[ArmCounts, ...]
    floor: int | None = None

    def for_others(self, floor: int) -> Attrition:
        """Return the view for people other than the owner.

        A count is shown if it, and its difference to the next one shown, is 0 or at least ``floor``. The
        cohort's size is decided first, because a study discloses it anyway.
        """
        shown: list[int | None] = []
        later: int | None = None
        for count in reversed(self.people):
            gaps = [] if count is None else [count, *([] if later is None else [count - later])]
            told = count if count is not None and all(_tellable(gap, floor) for gap in gaps) else None
            later = later if told is None else told
            shown.append(told)
        arms = tuple(_arm_for_others(arm, floor) for arm in self.arms)
        if any(arm.people is None for arm in arms):  # the others and the total would tell it
            arms = tuple(ArmCounts(name=arm.name, people=None, events=None, unknown=None) for arm in arms)
        return Attrition(
            silo=self.silo, steps=self.steps, people=tuple(reversed(shown)), arms=arms, floor=floor
        )


def _tellable(count: int, floor: int) -> bool:
    return count == 0 or count >= floor


def _arm_for_others(arm: ArmCounts, floor: int) -> ArmCounts:
    people, events, unknown = arm.people or 0, arm.events or 0, arm.unknown or 0
    without = people - events - unknown
    if not _tellable(people, floor):
        return ArmCounts(name=arm.name, people=None, events=None, unknown=None)
    # If all or none had the event, a count would disclose everybody's outcome.
    if min(events, without) < floor or not _tellable(unknown, floor):
        return ArmCounts(name=arm.name, people=people, events=None, unknown=None)
    return arm


@final
@dataclass(frozen=True, kw_only=True)
class Cohort:
    """A silo's table, one row per person in the order of person_id (which is not in it), and the attrition.

    Columns are numbers (NaN where missing) or texts.
    """

    silo: str
    attrition: Attrition
    columns: Mapping[str, Array | TextArray]

    @property
    def n_rows(self) -> int:
        """The number of people."""
        return len(self.columns[TREATMENT_COLUMN])

    def frame(self) -> pd.DataFrame:
        """Return the table as a data frame."""
        import pandas as pd

        return pd.DataFrame(dict(self.columns))

    @property
    def digest(self) -> str:
        """A digest of the table's names and values; equal tables of any database have the same."""
        whole = hashlib.blake2b(digest_size=32)
        for name, column in self.columns.items():
            if column.dtype == np.float64:
                content = np.ascontiguousarray(column).tobytes()
            else:
                content = b"".join(len(t := text.encode()).to_bytes(8) + t for text in column)
            whole.update(hashlib.blake2b(name.encode()).digest() + hashlib.blake2b(content).digest())
        return whole.hexdigest()


def read_cohort(trial: TargetTrial, cdm: Cdm) -> Cohort:
    """Return the cohort that ``trial`` selects in a silo's database; its attrition is the owner's view."""
    compiled = cdm.compile(trial)
    with _open(cdm) as database:
        counts = database.rows(cdm.dialect.print(compiled.attrition))
        columns = database.columns(cdm.dialect.print(compiled.table))
    if len(columns) != len(trial.columns):
        raise AssertionError("the table has the trial's columns")
    table: TableColumns = {
        name: _texts(values) if name in trial.factors else _numbers(values)
        for name, values in zip(trial.columns, columns, strict=True)
    }
    return Cohort(
        silo=cdm.name,
        columns=table,
        attrition=Attrition(
            silo=cdm.name,
            steps=compiled.steps,
            people=tuple(people for _, people in sorted(counts)),
            arms=tuple(_arm_counts(trial, table)),
        ),
    )


def _arm_counts(trial: TargetTrial, table: TableColumns) -> Iterator[ArmCounts]:
    outcome = np.asarray(table[trial.outcome.name], dtype=np.float64)
    for strategy in trial.strategies:
        rows = outcome[np.asarray(table[TREATMENT_COLUMN] == strategy.name, dtype=bool)]
        yield ArmCounts(
            name=strategy.name,
            people=len(rows),
            events=int(np.nansum(rows)),
            unknown=int(np.isnan(rows).sum()),
        )


def _numbers(values: object) -> Array:
    return np.ascontiguousarray(np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan))


def _texts(values: object) -> TextArray:
    return np.array([str(value) for value in np.asarray(values, dtype=object)], dtype=object)


# Databases.


class _Database(Protocol):
    """A connection in a read-only transaction."""

    def rows(self, sql: str) -> list[tuple[int, int]]:
        """Return the rows of a query of two integers."""

    def columns(self, sql: str) -> Sequence[object]:
        """Return the columns of a query as arrays, in order."""


@contextmanager
def _open(cdm: Cdm) -> Iterator[_Database]:
    opened = _duckdb(cdm, cdm.database) if cdm.database is not None else _postgresql(cdm)
    with opened as database:
        yield database


def _failed(cdm: Cdm, reason: str) -> DataError:
    return DataError(
        f"the cohort cannot be read: {reason}. `fedtmle emulate --sql` prints the statements; the owner can "
        "run them to see the database's own message",
        silo=cdm.name,
    )


class _DuckDBDatabase:
    def __init__(self, cdm: Cdm, execute: Callable[[str], object]) -> None:
        self._cdm, self._execute = cdm, execute

    def rows(self, sql: str) -> list[tuple[int, int]]:
        return self._attempt(sql, "fetchall")  # type: ignore[return-value]  # two integers, as the SQL says

    def columns(self, sql: str) -> Sequence[object]:
        fetched = self._attempt(sql, "fetchnumpy")
        return list(fetched.values()) if isinstance(fetched, dict) else []

    def _attempt(self, sql: str, fetch: str) -> object:
        import duckdb

        reason = "the database failed"
        try:
            return getattr(self._execute(sql), fetch)()
        except duckdb.CatalogException:
            reason = "a table of the CDM is missing (check schema)"
        except duckdb.BinderException:
            reason = "a column of the CDM is missing, or has another type than the CDM's"
        except duckdb.ConversionException:
            reason = "a column of the CDM holds values of another type"
        except duckdb.OutOfMemoryException:
            reason = "memory did not suffice"
        except duckdb.Error:
            pass
        raise _failed(self._cdm, reason)  # outside of `except`: the cause may quote a record


@contextmanager
def _duckdb(cdm: Cdm, path: Path) -> Iterator[_Database]:
    if not path.is_file():
        raise DataError(f"there is no file {path}; check database", silo=cdm.name)
    reason = ""
    try:
        with connect(str(path), read_only=True) as connection:
            connection.execute("BEGIN TRANSACTION READ ONLY")
            yield _DuckDBDatabase(cdm, connection.execute)
            connection.execute("ROLLBACK")
    except UnreadableError as error:
        reason = f"{error.message}; {error.fix}"
    if reason:
        raise DataError(f"{path}: {reason}", silo=cdm.name)


# Classes of PostgreSQL's error codes, which tell what failed without a value.
_SQLSTATES = {
    "42P01": "a table of the CDM is missing (check schema)",
    "3F000": "the schema does not exist",
    "42703": "a column of the CDM is missing",
    "42501": "the account may not read a table",
    "28P01": "the server refused the password",
    "28000": "the server refused the account",
    "3D000": "the server has no such database",
    "57014": "a statement took longer than timeout_seconds",
    "22P02": "a column of the CDM holds values of another type",
}


class _PostgreSQLDatabase:
    def __init__(self, cdm: Cdm, cursor: _Cursor) -> None:
        self._cdm, self._cursor = cdm, cursor

    def rows(self, sql: str) -> list[tuple[int, int]]:
        steps, people = (np.asarray(column) for column in self.columns(sql))
        return [(int(step), int(count)) for step, count in zip(steps, people, strict=True)]

    def columns(self, sql: str) -> Sequence[object]:
        table = _attempt_postgresql(self._cdm, lambda: self._fetch(sql))
        return [column.to_numpy() for column in table.columns]

    def _fetch(self, sql: str) -> _ArrowTable:
        self._cursor.execute(sql)
        return self._cursor.fetch_arrow_table()


class _ArrowColumn(Protocol):
    def to_numpy(self) -> object: ...


class _ArrowTable(Protocol):
    @property
    def columns(self) -> Sequence[_ArrowColumn]: ...


class _Cursor(Protocol):
    """What is used of an ADBC cursor."""

    def execute(self, operation: str) -> object: ...
    def fetch_arrow_table(self) -> _ArrowTable: ...
    def close(self) -> None: ...


def _attempt_postgresql(cdm: Cdm, call: Callable[[], T]) -> T:
    import adbc_driver_manager

    reason = "the server failed, or cannot be reached"
    try:
        return call()
    except adbc_driver_manager.Error as error:
        reason = _SQLSTATES.get(str(error.sqlstate), reason)
    raise _failed(cdm, reason)  # outside of `except`: the cause may quote a record or a password


@contextmanager
def _postgresql(cdm: Cdm) -> Iterator[_Database]:
    try:
        from adbc_driver_postgresql import dbapi
    except ImportError:
        raise InputError(
            f"silo '{cdm.name}': PostgreSQL needs a driver; install it: pip install 'fedtmle[databases]'"
        ) from None
    where = _connection(cdm)
    connection = _attempt_postgresql(cdm, lambda: dbapi.connect(where, autocommit=True))
    with connection, connection.cursor() as cursor:

        def begin() -> None:
            cursor.execute("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(f"SET LOCAL statement_timeout = {int(1000 * cdm.timeout_seconds)}")
            # The planner has no statistics of named selects and expects a row or two of each; nested loops
            # over a whole cohort would then take hours. Every join has an equality, so that it can hash.
            cursor.execute("SET LOCAL enable_nestloop = off")
            cursor.execute("SET LOCAL work_mem = '256MB'")  # else a hash is spilled in thousands of parts

        _attempt_postgresql(cdm, begin)
        yield _PostgreSQLDatabase(cdm, cursor)
        _attempt_postgresql(cdm, lambda: cursor.execute("ROLLBACK"))


def _connection(cdm: Cdm) -> str:
    """Return the connection string, which is never shown."""
    if cdm.connection_variable is not None:
        where = os.environ.get(cdm.connection_variable, "")
        if not where.strip():
            raise InputError(
                f"silo '{cdm.name}': set the environment variable {cdm.connection_variable} to the "
                "connection, such as postgresql://user@host/database"
            )
        return where.strip()
    try:
        return Path(cdm.connection_file or "").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"silo '{cdm.name}': connection_file {cdm.connection_file} cannot be read") from None
