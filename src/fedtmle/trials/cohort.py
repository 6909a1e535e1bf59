"""A silo's database, and the cohort that a trial selects in it.

A cohort is read in one read-only transaction. Nothing is written to the database, and errors say what kind of
failure it was but never repeat the database's own message, which may quote a record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from fedtmle.data.convert import Cells, Numbers, UnreadableError
from fedtmle.data.database import MAX_ROWS, TIMEOUT, DatabaseQuery
from fedtmle.data.drivers import DatabaseError, Trouble, TwoQueries
from fedtmle.data.duck import RelationReader, open_database_file
from fedtmle.data.snapshot import open_query
from fedtmle.data.sql import DIALECTS, Dialect
from fedtmle.errors import DataError, InputError
from fedtmle.model.table import Factor
from fedtmle.model.types import Array
from fedtmle.protocol.policy import Policy
from fedtmle.trials.attrition import ArmCounts, Attrition
from fedtmle.trials.compile import CompiledTrial, compile_trial
from fedtmle.trials.records import CdmLayout
from fedtmle.trials.trial import TREATMENT_COLUMN, TargetTrial

if TYPE_CHECKING:
    import pandas as pd

TextArray = NDArray[np.object_]
TableColumns = dict[str, Array | TextArray]


@final
@dataclass(frozen=True, kw_only=True)
class Cdm:
    """A silo's OMOP common data model: a DuckDB file, or a PostgreSQL server.

    Parameters
    ----------
    name
        The silo's name.
    path
        A DuckDB file.
    url_env
        The environment variable that holds the URL of a server.
    url_file
        A file that holds the URL of a server.
    schema
        The schema of the tables. None is the connection's own.
    vocabulary_schema
        The schema of the vocabulary. None is ``schema``.
    part
        (index, count): only people whose person_id leaves the remainder ``index`` when divided by
        ``count``.
    timeout
        Seconds that a statement may take in PostgreSQL.
    max_rows
        The most rows that are read from PostgreSQL.
    policy
        The owner's policy. None if there is no silo file.
    silo_file
        The silo file that describes the database.

    Raises
    ------
    InputError
        Not exactly one of path, url_env and url_file is given.

    Examples
    --------
    >>> from pathlib import Path
    >>> ft.Cdm(name="north", path=Path("north.duckdb")).name
    'north'
    """

    name: str
    path: Path | None = None
    url_env: str | None = None
    url_file: Path | None = None
    schema: str | None = None
    vocabulary_schema: str | None = None
    part: tuple[int, int] | None = None
    timeout: float = TIMEOUT
    max_rows: int = MAX_ROWS
    policy: Policy | None = None
    silo_file: Path | None = None

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.path, self.url_env, self.url_file)) != 1:
            raise InputError("database: give exactly one of path, url_env and url_file")
        for key in ("path", "url_file"):  # text is converted to a path
            place = getattr(self, key)
            object.__setattr__(self, key, None if place is None else Path(place))
        self.layout  # noqa: B018 - raises what is wrong with the part

    @property
    def layout(self) -> CdmLayout:
        """Where the tables are, and which people take part."""
        return CdmLayout(schema=self.schema, vocabulary_schema=self.vocabulary_schema, part=self.part)

    @property
    def dialect(self) -> Dialect:
        """The SQL that the database speaks."""
        return DIALECTS["postgresql" if self.path is None else "duckdb"]

    def compile(self, trial: TargetTrial) -> CompiledTrial:
        """Return the statements of ``trial`` for this database."""
        return compile_trial(trial, self.layout)

    def sql(self, trial: TargetTrial) -> str:
        """Return the SQL that `read_cohort` runs here, for the owner to read beforehand."""
        return self.compile(trial).print(self.dialect)


@final
@dataclass(frozen=True, kw_only=True)
class Cohort:
    """A silo's table and the attrition. Rows are people, in the order of person_id, which is not a column.

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
        """A digest of the table's names and values; equal tables have the same digest in any database."""
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
    counts, table = cdm.dialect.print(compiled.attrition), cdm.dialect.print(compiled.table)
    reason = ""
    try:
        if cdm.path is not None:
            people, cells = _read_duckdb(cdm.path, counts, table, trial.columns)
        else:
            people, cells = _read_postgresql(cdm, counts, table, trial.columns)
    except UnreadableError as error:
        fix = error.fix
        if isinstance(error, DatabaseError):
            fix = _FIXES.get(error.trouble, fix)
        reason = f"the cohort cannot be read: {error.message}; {fix}"
    if reason:
        raise DataError(reason, silo=cdm.name)
    columns = {name: _values(cells[name]) for name in trial.columns}
    return Cohort(
        silo=cdm.name,
        columns=columns,
        attrition=Attrition(
            silo=cdm.name,
            steps=compiled.steps,
            people=people,
            arms=tuple(_arm_counts(trial, columns)),
        ),
    )


def _arm_counts(trial: TargetTrial, table: TableColumns) -> Iterator[ArmCounts]:
    outcome = np.asarray(table[trial.outcome.name], dtype=np.float64)
    if trial.outcome.period_days is not None:  # unknown for people who left before the last day
        time = np.asarray(table[trial.outcome.time], dtype=np.float64)
        outcome = np.where((outcome == 0) & (time < trial.outcome.days), np.nan, outcome)
    for strategy in trial.strategies:
        rows = outcome[np.asarray(table[TREATMENT_COLUMN] == strategy.name, dtype=bool)]
        yield ArmCounts(
            name=strategy.name,
            people=len(rows),
            events=int(np.nansum(rows)),
            unknown=int(np.isnan(rows).sum()),
        )


def _values(cells: Cells) -> Array | TextArray:
    """Return the cells of a column as an array."""
    if isinstance(cells, Numbers):
        return cells.values
    if not isinstance(cells, Factor):
        raise AssertionError("a column of a trial's table is neither numbers nor text")
    return np.asarray(np.array([*cells.levels, ""], dtype=object)[cells.codes])


# What to do about an error, where the statements are ours and not the owner's.
_PRINTED = "`fedtmle emulate --sql` prints the statements; run them with the database's own client to see why"
_FIXES = {
    Trouble.NO_TABLE: "check schema and vocabulary_schema, and that the CDM is whole",
    Trouble.NO_COLUMN: "check that the tables are those of the OMOP CDM, version 5.3 or 5.4",
    Trouble.SYNTAX: _PRINTED,
    Trouble.FAILED: _PRINTED,
    Trouble.TIMEOUT: "raise timeout of the database, and let its administrator run ANALYZE",
    Trouble.TOO_MANY: "raise max_rows of the database",
}


def _read_duckdb(
    path: Path, counts: str, table: str, names: Sequence[str]
) -> tuple[tuple[int, ...], Mapping[str, Cells]]:
    """Return the people of each step and the table's columns, from a DuckDB file."""
    import duckdb

    if not path.is_file():
        raise UnreadableError(f"there is no file {path}", "check database")
    with open_database_file(str(path)) as connection:
        message, fix = "", ""
        try:
            connection.execute("BEGIN TRANSACTION READ ONLY")
            people = tuple(int(count) for _, count in sorted(connection.sql(counts).fetchall()))
            failure = UnreadableError("the database failed", _PRINTED)
            _, cells = RelationReader(connection, connection.sql(table), failure).read(names)
            return people, cells
        except duckdb.CatalogException:
            message, fix = "a table of the CDM is missing", _FIXES[Trouble.NO_TABLE]
        except (duckdb.BinderException, duckdb.ConversionException):
            message = "a column of the CDM is missing, or holds values of another type"
            fix = _FIXES[Trouble.NO_COLUMN]
        except duckdb.OutOfMemoryException:
            message, fix = "memory did not suffice", "run it on a machine with more memory"
        except duckdb.Error:
            message, fix = "the database failed", _PRINTED
        raise UnreadableError(message, fix)  # outside of `except`: the cause may quote a record


# The planner has no statistics of named selects and expects few rows of each; nested loops over a whole
# cohort would then take hours. Every join has an equality, so that it can hash.
_SETTINGS = (
    "enable_nestloop = off",
    "work_mem = '256MB'",  # with less, a hash join spills to disk in thousands of parts
    "max_parallel_workers_per_gather TO DEFAULT",  # the table is in the order of person_id
)


def _read_postgresql(
    cdm: Cdm, counts: str, table: str, names: Sequence[str]
) -> tuple[tuple[int, ...], Mapping[str, Cells]]:
    """Return the people of each step and the table's columns, from a PostgreSQL server."""
    driver = TwoQueries(counts, _SETTINGS)
    source = DatabaseQuery(
        url_env=cdm.url_env,
        url_file=cdm.url_file,
        query=table,
        timeout=cdm.timeout,
        max_rows=cdm.max_rows,
        driver=driver,
    )
    with open_query(source) as reader:
        _, cells = reader.read(names)
    return tuple(int(people) for _, people in sorted(driver.rows)), cells
