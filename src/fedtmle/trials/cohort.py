"""A silo's database, the cohort that a trial selects in it, its attrition, and the counts to share.

A cohort is read in one read-only transaction. Nothing is written to the database, and errors say what kind of
failure it was but never repeat the database's own message, which may quote a record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedtmle.data.convert import Cells, Numbers, UnreadableError
from fedtmle.data.database import MAX_ROWS, TIMEOUT, DatabaseQuery
from fedtmle.data.drivers import DatabaseError, Trouble, TwoQueries
from fedtmle.data.files import RelationReader, open_database_file
from fedtmle.data.snapshot import open_query
from fedtmle.data.sql import DIALECTS, Dialect
from fedtmle.errors import DataError, InputError
from fedtmle.model.table import Factor
from fedtmle.protocol.policy import Policy
from fedtmle.results.result import StudyResult
from fedtmle.trials.compile import CompiledTrial, compile_trial
from fedtmle.trials.steps import CdmLayout
from fedtmle.trials.trial import PERSON_COLUMN, TREATMENT_COLUMN, TargetTrial, protocol
from fedtmle_core.journal import write_document
from fedtmle_core.publish import published_emulation
from fedtmle_core.types import Array

if TYPE_CHECKING:
    import pandas as pd


# The attrition of an emulated trial: the owner's view, the view of others, and both as plain data.


@final
@dataclass(frozen=True, kw_only=True)
class ArmCounts:
    """The people of one arm, those with the event, and those with an unknown outcome; None is not shown."""

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

        A count is shown if the count and its difference from the next shown count are each 0 or at least
        ``floor``. The last count, the size of the cohort, is decided first: a study discloses it anyway.
        """
        shown: list[int | None] = []
        later: int | None = None
        for count in reversed(self.people):
            gaps = [] if count is None else [count, *([] if later is None else [count - later])]
            may_show = count is not None and all(_may_show(gap, floor) for gap in gaps)
            later = count if may_show else later
            shown.append(count if may_show else None)
        arms = tuple(_arm_for_others(arm, floor) for arm in self.arms)
        if any(arm.people is None for arm in arms):  # the other arms and the total would disclose it
            arms = tuple(ArmCounts(name=arm.name, people=None, events=None, unknown=None) for arm in arms)
        return Attrition(
            silo=self.silo, steps=self.steps, people=tuple(reversed(shown)), arms=arms, floor=floor
        )


def _may_show(count: int, floor: int) -> bool:
    return count == 0 or count >= floor


def _arm_for_others(arm: ArmCounts, floor: int) -> ArmCounts:
    people, events, unknown = arm.people or 0, arm.events or 0, arm.unknown or 0
    without = people - events - unknown
    if not _may_show(people, floor):
        return ArmCounts(name=arm.name, people=None, events=None, unknown=None)
    # If all or none had the event, a count would disclose everybody's outcome.
    if min(events, without) < floor or not _may_show(unknown, floor):
        return ArmCounts(name=arm.name, people=people, events=None, unknown=None)
    return arm


def document_of(trial: TargetTrial, attrition: Mapping[str, Attrition]) -> dict[str, object]:
    """Return the trial's protocol and its attrition as plain data, for the saved result."""
    steps = next((view.steps for view in attrition.values()), compile_trial(trial).steps)
    floors = [view.floor for view in attrition.values() if view.floor is not None]
    return {
        "trial": trial.name,
        "days": trial.outcome.days,
        "censoring": [reason.value for reason in trial.censoring],
        "protocol": [asdict(component) for component in protocol(trial)],
        "labels": {name: variable.label for name, variable in trial.variables.items()},
        "steps": list(steps),
        "floor": max(floors, default=None),
        "silos": {
            name: {"people": list(silo.people), "arms": [asdict(arm) for arm in silo.arms]}
            for name, silo in attrition.items()
        },
    }


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
    home
        The institution's home that the silo file states. None is the account's own.

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
    home: Path | None = None

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

    Columns are numbers (NaN where missing) or texts. ``people`` are the identifiers, which stay at the silo.
    """

    silo: str
    attrition: Attrition
    columns: Mapping[str, Array | TextArray]
    people: TextArray = field(repr=False)

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
    reason, names = "", (*trial.columns, PERSON_COLUMN)
    try:
        if cdm.path is not None:
            people, cells = _read_duckdb(cdm.path, counts, table, names)
        else:
            people, cells = _read_postgresql(cdm, counts, table, names)
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
        people=_texts(cells[PERSON_COLUMN]),
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


def _texts(cells: Cells) -> TextArray:
    """Return cells that the statement gives as text; those of an empty table may look like numbers."""
    values = _values(cells)
    return np.asarray([str(value) for value in values], dtype=object)


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


# A silo's counts as a file: the part of the attrition that its owner shares in a deployed emulation.
#
# The owner of a silo writes the file with the table (`trials.emulate`). The counts in it are those above the
# owner's floor, so that the file may be sent to the coordinator, who adds it to the result.

FORMAT = "fedtmle trial counts 1"


class _Arm(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    people: int | None
    events: int | None
    unknown: int | None


class _Counts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: str
    trial: str  # the trial's digest
    silo: str
    floor: int
    people: list[int | None]
    arms: list[_Arm]


def write_counts(path: Path, trial: TargetTrial, cohort: Cohort, cdm: Cdm) -> None:
    """Write a silo's counts above its owner's floor (``min_cell``)."""
    floor = (cdm.policy or Policy()).min_cell
    view = cohort.attrition.for_others(floor)
    document = {
        "format": FORMAT,
        "trial": trial.digest,
        "silo": cdm.name,
        "floor": floor,
        "people": list(view.people),
        "arms": [
            {"name": arm.name, "people": arm.people, "events": arm.events, "unknown": arm.unknown}
            for arm in view.arms
        ],
    }
    write_document(path, document)


def read_counts(paths: Iterable[Path], trial: TargetTrial, silos: Sequence[str]) -> dict[str, Attrition]:
    """Return the attrition in the files by silo, above the strictest of their floors.

    A file of another trial, or of a silo that is not one of ``silos``, is refused.
    """
    views = [_read(path, trial, silos) for path in paths]
    for view in views:
        if [other.silo for other in views].count(view.silo) > 1:
            raise InputError(f"counts: two files are for silo '{view.silo}'; give only one of them")
    floor = max((view.floor or 0 for view in views), default=0)
    return {view.silo: view.for_others(floor) for view in sorted(views, key=lambda v: silos.index(v.silo))}


def _read(path: Path, trial: TargetTrial, silos: Sequence[str]) -> Attrition:
    try:
        counts = msgspec.json.decode(path.read_bytes(), type=_Counts)
    except (OSError, msgspec.MsgspecError):
        raise InputError(
            f"{path}: this is not a readable file of a silo's counts; its owner writes one with "
            "`fedtmle emulate trial.toml --silo ... --write folder`"
        ) from None
    steps = compile_trial(trial).steps
    arms = [strategy.name for strategy in trial.strategies]
    if counts.format != FORMAT or counts.trial != trial.digest:
        raise InputError(
            f"{path}: these counts belong to another trial or another version of it; the silo's owner "
            "must emulate the same trial file"
        )
    if counts.silo not in silos:
        raise InputError(f"{path}: the trial lists no silo '{counts.silo}'; it lists {', '.join(silos)}")
    if len(counts.people) != len(steps) or [arm.name for arm in counts.arms] != arms or counts.floor < 1:
        raise InputError(f"{path}: the counts are damaged; ask the silo's owner for them again")
    return Attrition(
        silo=counts.silo,
        steps=steps,
        people=tuple(counts.people),
        arms=tuple(ArmCounts(**msgspec.structs.asdict(arm)) for arm in counts.arms),
        floor=counts.floor,
    )


def with_counts(
    result: StudyResult, trial: TargetTrial, silos: Sequence[str], attrition: Mapping[str, Attrition]
) -> StudyResult:
    """Return the result of a deployed run of the trial's study, with the trial added to its document."""
    absent = [silo for silo in silos if silo not in attrition]
    emulation = {**document_of(trial, attrition), "not_shared": absent}
    if "published" in result.document:
        emulation = published_emulation(
            emulation, result.document["n"], result.document["published"]["floor"]
        )
    return StudyResult(document={**result.document, "emulation": emulation}, run=result.run)
