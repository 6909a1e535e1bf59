"""Reading a silo's table: `load` takes a source and the study's schema, and returns a table or every defect.

A table is held in memory, or it is streamed: the first pass checks every row and gathers the levels of its
factors, and each later pass reads the source again in blocks.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtmle.data.convert import (
    AbstractReader,
    AbstractStreamReader,
    Cells,
    Converter,
    Numbers,
    UnreadableError,
    in_order,
    relabel,
)
from fedtmle.data.database import DatabaseQuery, sqlite_query
from fedtmle.data.files import NO_FILE, open_database, open_file
from fedtmle.data.frames import LongReader, frame_reader
from fedtmle.data.people import Watcher
from fedtmle.data.silofile import (
    Column,
    ColumnMap,
    CsvFile,
    Database,
    Kind,
    LongTable,
    Schema,
    SiloFile,
    read_silo_file,
)
from fedtmle.data.snapshot import QueryReader, Snapshot, open_query
from fedtmle.defects import DataErrors, Defect, Defects
from fedtmle.errors import DataError, InputError
from fedtmle.initial.variables import TIME_UNITS, conversion, time_unit
from fedtmle.model.table import AnyTable, Factor, StreamedTable, Table
from fedtmle_core.parallel import done
from fedtmle_core.people import Basis, Census, Digester
from fedtmle_core.types import Array, Bools

Batches = Callable[[], Iterator[tuple[Table, Defects]]]  # one pass: each batch with its defects
NO_ROWS = ("the table has no rows", "give at least one row, or leave the silo out of the study")


def load(
    source: object,
    schema: Schema,
    *,
    silo: str,
    mapping: Mapping[str, ColumnMap | str] | None = None,
    copy: bool = True,
) -> AnyTable:
    """Return the columns of ``schema`` from a silo's source; raise `DataErrors` with all defects.

    ``source`` is a pandas or polars frame, a mapping of arrays, the path of a .csv, .parquet or silo file
    (.toml), a `Database`, a `DatabaseQuery`, a `LongTable` or a `SiloFile`. ``mapping`` gives the hospital's
    columns by the study's names; a silo file has its own mapping, and says whether the table is streamed.
    Without ``copy``, columns of a frame may be shared with it: the caller must not change the frame while the
    table is in use.
    """
    return _loaded(source, schema, silo=silo, mapping=mapping, copy=copy, watcher=None)


def load_people(
    file: SiloFile, schema: Schema, *, digester: Digester, bases: Sequence[Basis]
) -> tuple[AnyTable, Census]:
    """Return the columns of ``schema`` from the table of a silo file, and whose rows these are.

    The people and the columns are of one reading. ``bases`` are those of earlier studies, which are judged
    too as far as the table still has their columns.
    """
    watcher = Watcher(digester=digester, person=file.person, bases=bases)
    table = _loaded(file, schema, silo=file.name, mapping=None, copy=True, watcher=watcher)
    return table, watcher.census()


def _loaded(
    source: object,
    schema: Schema,
    *,
    silo: str,
    mapping: Mapping[str, ColumnMap | str] | None,
    copy: bool,
    watcher: Watcher | None,
) -> AnyTable:
    stream, named_by = False, None
    if isinstance(source, str | os.PathLike):
        source = Path(source)
    if isinstance(source, Path) and source.suffix.lower() == ".toml":
        source = silo_file_of(source, silo)
    if isinstance(source, SiloFile):
        if mapping is not None:
            raise InputError(f"silo '{silo}': a silo file brings its own mapping; give no other")
        named_by = source.path
        mapping, stream, source = source.columns, source.stream, source.data
    if isinstance(source, Database):
        source = sqlite_query(source.path, source.table, source.query) or source
    defects = Defects(silo=silo, file=_path_of(source))
    absent = [column for column in schema.columns if _is_absent((mapping or {}).get(column.name))]
    for name in dict.fromkeys(column.name for column in absent if not column.may_be_missing):
        defects.add(
            f"the silo file declares column '{name}' absent, but the study needs it",
            "give the column, or let the study declare what to do where it is missing",
            column=name,
        )
    schema = Schema(tuple(column for column in schema.columns if column not in absent)) if absent else schema
    columns = Columns.of(schema, mapping or {}, defects)
    table: AnyTable | None = None
    try:
        if stream:
            table = _load_streamed(source, columns, silo, defects, watcher)
        else:
            with _open(source, silo, copy) as reader:
                table = _load_whole(reader, columns, defects, watcher)
    except UnreadableError as error:
        defects.add(error.message, _fix(error, named_by), line=error.line)
    defects.raise_if_any()
    if table is None:
        raise AssertionError("no defect was recorded for a table that cannot be read")
    return with_absent(table, absent)


def _is_absent(column: ColumnMap | str | None) -> bool:
    return isinstance(column, ColumnMap) and column.absent


def with_absent(table: AnyTable, absent: Sequence[Column]) -> AnyTable:
    """Return the table with columns that the silo does not have: missing in every row."""
    if not absent:
        return table
    if isinstance(table, StreamedTable):
        read = table.read
        counts: dict[str, Mapping[str, int]] = {
            column.name: {} for column in absent if column.kind is Kind.FACTOR
        }
        return replace(
            table,
            factor_counts={**table.factor_counts, **counts},
            read=lambda: (_with_absent(batch, absent) for batch in read()),
        )
    return _with_absent(table, absent)


def _with_absent(table: Table, absent: Sequence[Column]) -> Table:
    numeric, factors = dict(table.numeric), dict(table.factors)
    for column in absent:
        if column.kind is Kind.FACTOR:
            factors[column.name] = Factor(np.full(table.n_rows, -1, dtype=np.int64), ())
        else:
            numeric[column.name] = np.full(table.n_rows, np.nan)
    return Table(n_rows=table.n_rows, numeric=numeric, factors=factors)


def load_all(sources: Mapping[str, object], schema: Schema) -> dict[str, AnyTable]:
    """Return the tables of all silos by name; raise one `DataErrors` with the defects of all.

    Columns of a frame are shared with it, because a study that runs in this process ends before its owner
    can change them.
    """
    tables: dict[str, AnyTable] = {}
    defects: list[Defect] = []
    for silo, source in sources.items():
        try:
            tables[silo] = load(source, schema, silo=silo, copy=False)
        except DataErrors as errors:
            defects += errors.defects
    if defects:
        raise DataErrors(defects)
    return tables


def read_cells(source: object) -> tuple[int, Mapping[str, Cells]]:
    """Return the number of rows and all columns of a table as they are.

    ``source`` is a frame, a mapping of arrays, the path of a .csv or .parquet file, or the data of a
    silo file.
    """
    if isinstance(source, str | os.PathLike):
        source = Path(source)
    if isinstance(source, Database):
        source = sqlite_query(source.path, source.table, source.query) or source
    defects = Defects(silo="", file=_path_of(source))
    try:
        with _open(source, "") as reader:
            return reader.read(reader.names)
    except UnreadableError as error:
        defects.add(error.message, error.fix, line=error.line)
    defects.raise_if_any()
    raise AssertionError("no defect was recorded for a table that cannot be read")


def check_readable(silo: SiloFile) -> None:
    """Open a silo's source without reading a record; raise `DataErrors` if it cannot be opened."""
    defects = Defects(silo=silo.name, file=_path_of(silo.data))
    try:
        with _open(silo.data, silo.name) as reader:
            if not reader.names:
                defects.add("the table has no columns", "check that this is the right table")
    except UnreadableError as error:
        defects.add(error.message, _fix(error, silo.path), line=error.line)
    defects.raise_if_any()


def _fix(error: UnreadableError, named_by: Path | None) -> str:
    """Return what to do; for a file that does not exist, also which silo file names it."""
    if named_by is None or error.message != NO_FILE:
        return error.fix
    return f"correct its path in [data] of {named_by}; it is relative to the folder of that file"


def silo_file_of(path: Path, silo: str) -> SiloFile:
    """Return the silo file at ``path``; its defects name ``silo``."""
    try:
        return read_silo_file(path)
    except DataErrors as errors:
        of_silo = errors.at(silo)
    raise of_silo


def _path_of(source: object) -> str | None:
    if isinstance(source, LongTable):
        return _path_of(source.data)
    path = source.path if isinstance(source, Database | CsvFile) else source
    return str(path) if isinstance(path, str | Path) else None


def _maps(schema: Schema, mapping: Mapping[str, ColumnMap | str], defects: Defects) -> dict[str, ColumnMap]:
    """Return the hospital's column for every name of the study; a name without a mapping stays the same."""
    maps: dict[str, ColumnMap] = {}
    for name in schema.names:
        mapped = mapping.get(name, name)
        given = ColumnMap(column=mapped) if isinstance(mapped, str) else mapped
        try:
            maps[name] = _in_our_unit(given, next((c.unit for c in schema[name] if c.unit), ""))
        except InputError as error:
            message, _, fix = str(error).rpartition("; ")
            defects.add(message, fix, column=name)
            maps[name] = given
    # A date may be the end of one difference and the start of another.
    for theirs, count in Counter(each.column for each in maps.values() if each.column).items():
        if count > 1:
            names = " and ".join(f"'{name}'" for name, mapped in maps.items() if mapped.column == theirs)
            message = f"the study's columns {names} are all mapped to the hospital's '{theirs}'"
            defects.add(message, "map each to its own column")
    return maps


def _in_our_unit(mapped: ColumnMap, unit: str) -> ColumnMap:
    """Return the column with the scale and shift that follow from its named unit or difference of dates."""
    if mapped.is_difference:
        if mapped.converts:
            raise InputError("is a difference of dates, which has no scale; its unit is the dictionary's")
        if time_unit(unit) is None:
            raise InputError(
                f"is a difference of dates, and the dictionary's unit is {unit or 'not declared'}; declare "
                f"{' or '.join(TIME_UNITS)} in the study"
            )
        scale, shift = conversion("days", unit)
    elif mapped.unit:
        scale, shift = conversion(mapped.unit, unit, mapped.molar_mass)
    else:
        return mapped
    return replace(mapped, scale=scale, shift=shift, unit="", molar_mass=None)


@contextmanager
def _open(source: object, silo: str, copy: bool = True) -> Iterator[AbstractReader]:
    """Open a reader of any kind of source."""
    frame = frame_reader(source, copy=copy)
    if frame is not None:
        yield frame
    elif isinstance(source, Path | CsvFile):
        with open_file(source) as reader:
            yield reader
    elif isinstance(source, DatabaseQuery | Snapshot):
        with open_query(source) as reader:
            yield reader
    elif isinstance(source, Database):
        with open_database(source) as reader:
            yield reader
    elif isinstance(source, LongTable):
        inner = Path(source.data) if isinstance(source.data, str) else source.data
        with _open(inner, silo, copy) as rows:
            yield LongReader(source, rows)
    else:
        raise InputError(
            f"silo '{silo}': a source is a pandas or polars frame, a mapping of arrays, a path, "
            f"a Database, a DatabaseQuery, a LongTable or a SiloFile, not {type(source).__name__}"
        )


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns that a study asks for, and the hospital's column behind each of their names."""

    schema: Schema
    maps: Mapping[str, ColumnMap]

    @classmethod
    def of(cls, schema: Schema, mapping: Mapping[str, ColumnMap | str], defects: Defects) -> Columns:
        """Return the columns of a schema under the hospital's mapping; add its defects."""
        return cls(schema=schema, maps=_maps(schema, mapping, defects))

    def available(self, reader: AbstractReader, defects: Defects) -> list[str]:
        """Return the study's names whose column the source has exactly once; add a defect for the others."""
        names = []
        for name in self.schema.names:
            counts = {theirs: reader.names.count(theirs) for theirs in self.maps[name].sources}
            if set(counts.values()) == {1}:
                names.append(name)
            for theirs, count in counts.items():
                if count > 1:
                    defects.add(
                        f"the table has {count} columns '{theirs}'", "rename all but one", column=name
                    )
                elif count == 0:
                    verb = "map it" if theirs == name else "correct it"
                    fix = _suggestion(theirs, reader, verb)
                    defects.add(f"the table has no column '{theirs}'", fix, column=name)
        return names

    def theirs(self, names: Sequence[str]) -> list[str]:
        """Return the hospital's columns behind ``names``, each once."""
        return list(dict.fromkeys(theirs for name in names for theirs in self.maps[name].sources))

    def convert(
        self, n_rows: int, cells: Mapping[str, Cells], names: Sequence[str], defects: Defects
    ) -> Table:
        """Return the hospital's cells as the study's columns ``names``."""
        numeric: dict[str, Array] = {}
        factors: dict[str, Factor] = {}
        reach: dict[str, float] = {}
        done(_cache_reach, [column for column in cells.values() if isinstance(column, Numbers)])
        for name in names:
            converter = Converter(name=name, mapped=self.maps[name], defects=defects)
            parts = [cells[theirs] for theirs in self.maps[name].sources]
            translated = converter.difference(*parts) if len(parts) > 1 else converter.translate(*parts)
            if translated is None:
                continue
            for column in self.schema[name]:
                if column.kind is Kind.FACTOR:
                    factor = converter.factor(translated, column)
                    factors |= {} if factor is None else {name: factor}
                else:
                    values = converter.numeric(translated, column)
                    numeric |= {} if values is None else {name: values}
                    if isinstance(translated, Numbers):
                        reach[name] = translated.reach
        known_reach = reach if reach.keys() == numeric.keys() else None
        return Table(n_rows=n_rows, numeric=numeric, factors=factors, known_reach=known_reach)


def _cache_reach(numbers: Numbers) -> None:
    """Compute and cache the column's largest magnitude; called for several columns in parallel."""
    numbers.reach  # noqa: B018


def _suggestion(theirs: str, reader: AbstractReader, verb: str) -> str:
    if not reader.quotable:
        return "check that the first line of the file holds the column names"
    by_fold = {name.casefold(): name for name in reader.quotable}
    near = [by_fold[fold] for fold in difflib.get_close_matches(theirs.casefold(), by_fold)]
    question = f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
    return f"{question}{verb} in [columns] of the silo file"


def _load_whole(
    reader: AbstractReader, columns: Columns, defects: Defects, watcher: Watcher | None
) -> Table | None:
    """Return the table as far as it can be read."""
    names = columns.available(reader, defects)
    if not names:
        return None
    theirs = columns.theirs(names)
    n_rows, cells = reader.read(theirs if watcher is None else watcher.settle(reader.names, theirs))
    if n_rows == 0:
        defects.add(*NO_ROWS)
        return None
    if watcher is not None:
        watcher.add(n_rows, cells)
    return columns.convert(n_rows, cells, names, defects)


def _load_streamed(
    source: object, columns: Columns, silo: str, defects: Defects, watcher: Watcher | None
) -> StreamedTable | None:
    """Return a table that reads its source again at every pass."""
    label = _path_of(source)
    with _open(source, silo) as reader:
        names = columns.available(reader, defects)
        theirs = columns.theirs(names)
        watched = [] if watcher is None or not names else watcher.settle(reader.names, theirs)
        if names and isinstance(reader, QueryReader):  # every pass reads one copy of the rows
            source = reader.copy(watched or theirs)
            reading, watching = source.settle(theirs), source.settle(watched or theirs)
        elif names and isinstance(reader, AbstractStreamReader):
            reading, watching = reader.settle(theirs), reader.settle(watched or theirs)
        else:
            return None
    file = _file_of_passes(source)
    version = _file_version(file)

    def batches() -> Iterator[tuple[Table, Defects]]:
        """Read the source once."""
        if _file_version(file) != version:
            raise DataError(f"silo '{silo}', file '{file}': it changed while the study ran; start again")
        try:
            with _open(source, silo) as reader:
                if isinstance(reader, AbstractStreamReader):
                    for n_rows, cells in reader.batches(reading):
                        of_batch = Defects(silo=silo, file=label)
                        yield columns.convert(n_rows, cells, names, of_batch), of_batch
        except UnreadableError as error:
            defect = Defect(message=error.message, fix=error.fix, line=error.line, silo=silo, file=label)
            raise DataErrors([defect]) from None

    if watcher is not None:
        with _open(source, silo) as reader:
            if isinstance(reader, AbstractStreamReader):
                for n_rows, cells in reader.batches(watching):
                    watcher.add(n_rows, cells)
    table = streamed(batches, defects)
    if table.n_rows == 0:
        defects.add(*NO_ROWS)
    return table


def restricted(table: AnyTable, kept: Bools, schema: Schema) -> AnyTable:
    """Return the table that `load` would return if only the ``kept`` rows were there."""
    if kept.all():
        return table
    declared = {column.name for column in schema.columns if column.levels is not None}
    if isinstance(table, StreamedTable):
        read = table.read

        def batches() -> Iterator[tuple[Table, Defects]]:
            first = 0
            for batch in read():
                yield _some(batch, kept[first : first + batch.n_rows], declared), Defects()
                first += batch.n_rows

        return streamed(batches, Defects())
    return _some(table, kept, declared)


def _some(table: Table, kept: Bools, declared: Collection[str]) -> Table:
    """Return some rows; levels that the study does not declare, and nobody has, are left out."""
    some = table.take(np.flatnonzero(kept))
    factors = {
        name: factor if name in declared else relabel(factor.codes, factor.levels)
        for name, factor in some.factors.items()
    }
    return Table(n_rows=some.n_rows, numeric=some.numeric, factors=factors)


def _file_of_passes(source: object) -> Path:
    """Return the file that the passes over a streamed source read."""
    if isinstance(source, DatabaseQuery):
        return Path(source.snapshot or "")
    return source.path if isinstance(source, Snapshot) else Path(_path_of(source) or "")


def _file_version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def streamed(batches: Batches, defects: Defects) -> StreamedTable:
    """Return the table behind ``batches``, after one pass that adds its defects to ``defects``."""
    n_rows = 0
    counts: dict[str, Counter[str]] = {}  # rows by label of each factor
    seen: dict[str, set[tuple[str, ...]]] = {}  # levels of each factor in each batch
    digests: dict[str, hashlib.blake2b] = {}  # one per column, so that the size of batches does not matter
    for batch, of_batch in batches():
        defects.merge(of_batch)
        n_rows += batch.n_rows
        for name, column in batch.numeric.items():
            digests.setdefault(f"numeric {name}", hashlib.blake2b()).update(column.data)
        for name, factor in batch.factors.items():
            seen.setdefault(name, set()).add(factor.levels)
            counts.setdefault(name, Counter()).update(dict(zip(factor.levels, factor.counts, strict=True)))
            digests.setdefault(f"factor {name}", hashlib.blake2b()).update(hashed_levels(factor).data)
    # Declared levels are the same in every batch, in the study's order. Others are sorted, as in one table.
    levels = {
        name: next(iter(seen[name])) if len(seen[name]) == 1 else tuple(in_order(rows))
        for name, rows in counts.items()
    }
    in_levels = {name: {level: counts[name][level] for level in levels[name]} for name in counts}

    def read() -> Iterator[Table]:
        for batch, of_batch in batches():
            of_batch.raise_if_any()
            factors = {
                name: Factor(factor.recode(levels[name]), levels[name])
                for name, factor in batch.factors.items()
            }
            yield Table(n_rows=batch.n_rows, numeric=batch.numeric, factors=factors)

    whole = hashlib.blake2b(digest_size=32)
    for name in sorted(digests):
        whole.update(name.encode() + digests[name].digest())
    return StreamedTable(n_rows=n_rows, factor_counts=in_levels, digest=whole.digest(), read=read)


def hashed_levels(factor: Factor) -> NDArray[np.uint64]:
    """Return a hash of each row's level, 0 where it is missing: the same whatever codes the levels have."""
    hashes = [hashlib.blake2b(level.encode(), digest_size=8).digest() for level in factor.levels]
    return np.array([*map(int.from_bytes, hashes), 0], dtype=np.uint64)[factor.codes]
