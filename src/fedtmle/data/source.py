"""A table read in passes: the first checks every row and gathers the levels, the others give blocks."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedtmle.data.convert import (
    AbstractReader,
    AbstractStreamReader,
    Cells,
    Converter,
    Numbers,
    UnreadableError,
    in_order,
)
from fedtmle.data.files import open_database, open_file
from fedtmle.data.frames import frame_reader
from fedtmle.data.schema import DataErrors, Findings, Kind, Problem, Schema
from fedtmle.data.silofile import ColumnMap, Database, SiloFile, read_silo_file
from fedtmle.errors import DataError, InputError
from fedtmle.model import kernels
from fedtmle.model.table import AnyTable, Factor, StreamedTable, Table
from fedtmle.model.types import Array

Batches = Callable[[], Iterator[tuple[Table, Findings]]]  # one pass, each batch beside what is wrong with it


def streamed(batches: Batches, findings: Findings) -> StreamedTable:
    """The table behind ``batches``; what is wrong with it goes to ``findings``."""
    n_rows = 0
    counts: dict[str, Counter[str]] = {}  # of each factor's labels
    digests: dict[str, Any] = {}  # by column, so that batches leave no trace in them
    for batch, found in batches():
        findings.merge(found)
        n_rows += batch.n_rows
        for name, column in batch.numeric.items():
            digests.setdefault(f"numeric {name}", hashlib.blake2b()).update(column.data)
        for name, factor in batch.factors.items():
            counts.setdefault(name, Counter()).update(dict(zip(factor.levels, factor.counts, strict=True)))
            hashed = np.array([_hash(level) for level in factor.levels] + [0], dtype=np.uint64)
            digests.setdefault(f"factor {name}", hashlib.blake2b()).update(hashed[factor.codes].data)
    in_levels = {name: {level: rows[level] for level in in_order(rows)} for name, rows in counts.items()}
    levels = {name: tuple(rows) for name, rows in in_levels.items()}

    def read() -> Iterator[Table]:
        for batch, found in batches():
            found.settle()
            factors = {
                name: Factor(own.recode(levels[name]), levels[name]) for name, own in batch.factors.items()
            }
            yield Table(n_rows=batch.n_rows, numeric=batch.numeric, factors=factors)

    whole = hashlib.blake2b(digest_size=32)
    for name in sorted(digests):
        whole.update(name.encode() + digests[name].digest())
    return StreamedTable(n_rows=n_rows, factor_counts=in_levels, digest=whole.digest(), read=read)


def _hash(label: str) -> int:
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest())


# `load`: a silo's source and the study's schema in, a `Table` or every problem out.


def load(
    source: object,
    schema: Schema,
    *,
    silo: str,
    mapping: Mapping[str, ColumnMap | str] | None = None,
    copy: bool = True,
) -> AnyTable:
    """The columns of ``schema`` from a silo's own source, or `DataErrors` with all that is wrong.

    A source is a pandas or polars frame, a mapping of arrays, the path of a .csv, .parquet or silo
    file (.toml), a `Database` or a `SiloFile`. ``mapping`` gives the hospital's columns by the
    study's names; a silo file brings its own, and says whether the table is streamed. Without ``copy``
    columns in memory may be the owner's own, for a caller that is done with them when it returns.
    """
    stream = False
    if isinstance(source, str | os.PathLike):
        source = Path(source)
    if isinstance(source, Path) and source.suffix.lower() == ".toml":
        source = _silo_file(source, silo)
    if isinstance(source, SiloFile):
        if mapping is not None:
            raise InputError(f"silo '{silo}': a silo file brings its own mapping; give no other")
        mapping, stream, source = source.columns, source.stream, source.data
    findings = Findings(silo=silo, file=_file(source))
    maps = _maps(schema, mapping or {}, findings)
    table: AnyTable | None = None
    try:
        if stream:
            table = _stream(source, schema, silo, maps, findings)
        else:
            with _open(source, silo, copy) as reader:
                table = _read(reader, schema, maps, findings)
    except UnreadableError as error:
        findings.add(error.what, error.fix, line=error.line)
    if table is None or findings.problems:
        raise DataErrors(findings.problems)
    return table


def check_readable(silo: SiloFile) -> None:
    """Opens a silo's own source and reads no record; `DataErrors` says why it cannot be opened."""
    findings = Findings(silo=silo.name, file=_file(silo.data))
    try:
        with _open(silo.data, silo.name) as reader:
            if not reader.names:
                findings.add("the table has no columns", "check that this is the right table")
    except UnreadableError as error:
        findings.add(error.what, error.fix, line=error.line)
    findings.settle()


def load_all(sources: Mapping[str, object], schema: Schema) -> dict[str, AnyTable]:
    """The tables of all silos by name, or one `DataErrors` with the problems of all.

    Columns of a frame may be its own: a study that is run here is over before its owner changes them.
    """
    tables: dict[str, AnyTable] = {}
    problems: list[Problem] = []
    for silo, source in sources.items():
        try:
            tables[silo] = load(source, schema, silo=silo, copy=False)
        except DataErrors as errors:
            problems += errors.problems
    if problems:
        raise DataErrors(problems)
    return tables


def _silo_file(path: Path, silo: str) -> SiloFile:
    try:
        return read_silo_file(path)
    except DataErrors as errors:
        mistakes = errors.at(silo)
    raise mistakes


def _file(source: object) -> str | None:
    path = source.path if isinstance(source, Database) else source
    return str(path) if isinstance(path, Path) else None


def _maps(schema: Schema, mapping: Mapping[str, ColumnMap | str], findings: Findings) -> dict[str, ColumnMap]:
    """The hospital's column of every name the study asks; names not mentioned stay the same."""
    maps: dict[str, ColumnMap] = {}
    for name in schema.names:
        mapped = mapping.get(name, name)
        maps[name] = ColumnMap(column=mapped) if isinstance(mapped, str) else mapped
    for theirs, count in Counter(mapped.column for mapped in maps.values()).items():
        if count > 1:
            names = " and ".join(f"'{name}'" for name, mapped in maps.items() if mapped.column == theirs)
            what = f"the study's columns {names} are all mapped to the hospital's '{theirs}'"
            findings.add(what, "map each to its own column")
    return maps


@contextmanager
def _open(source: object, silo: str, copy: bool = True) -> Iterator[AbstractReader]:
    """A reader of any kind of source."""
    frame = frame_reader(source, copy=copy)
    if frame is not None:
        yield frame
    elif isinstance(source, Path):
        with open_file(source) as reader:
            yield reader
    elif isinstance(source, Database):
        with open_database(source) as reader:
            yield reader
    else:
        raise InputError(
            f"silo '{silo}': a source is a pandas or polars frame, a mapping of arrays, a path, "
            f"a Database or a SiloFile, not {type(source).__name__}"
        )


def _read(
    reader: AbstractReader, schema: Schema, maps: Mapping[str, ColumnMap], findings: Findings
) -> Table | None:
    """The table as far as it can be read; what is wrong with it goes to ``findings``."""
    known = _known(reader, schema, maps, findings)
    if not known:
        return None
    n_rows, cells = reader.read(_theirs(known, maps))
    if n_rows == 0:
        findings.add("the table has no rows", "give at least one row, or leave the silo out of the study")
        return None
    return _converted(n_rows, cells, known, schema, maps, findings)


def _stream(
    source: object, schema: Schema, silo: str, maps: Mapping[str, ColumnMap], findings: Findings
) -> StreamedTable | None:
    """The same, for a table that is read again at every pass."""
    file = Path(_file(source) or "")
    with _open(source, silo) as reader:
        known = _known(reader, schema, maps, findings)
        if not known or not isinstance(reader, AbstractStreamReader):
            return None
        reading = reader.settle(_theirs(known, maps))
    written = _stamp(file)

    def batches() -> Iterator[tuple[Table, Findings]]:
        """One pass, each batch beside what is wrong with it."""
        if _stamp(file) != written:
            raise DataError(f"silo '{silo}', file '{file}': it changed while the study ran; start again")
        try:
            with _open(source, silo) as reader:
                if isinstance(reader, AbstractStreamReader):
                    for n_rows, cells in reader.batches(reading):
                        found = Findings(silo=silo, file=str(file))
                        yield _converted(n_rows, cells, known, schema, maps, found), found
        except UnreadableError as error:
            problem = Problem(what=error.what, fix=error.fix, line=error.line, silo=silo, file=str(file))
            raise DataErrors([problem]) from None

    table = streamed(batches, findings)
    if table.n_rows == 0:
        findings.add("the table has no rows", "give at least one row, or leave the silo out of the study")
    return table


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _known(
    reader: AbstractReader, schema: Schema, maps: Mapping[str, ColumnMap], findings: Findings
) -> list[str]:
    return [name for name in schema.names if _is_there(reader, name, maps[name].column, findings)]


def _theirs(known: Sequence[str], maps: Mapping[str, ColumnMap]) -> list[str]:
    return list(dict.fromkeys(maps[name].column for name in known))


def _converted(
    n_rows: int,
    cells: Mapping[str, Cells],
    known: Sequence[str],
    schema: Schema,
    maps: Mapping[str, ColumnMap],
    findings: Findings,
) -> Table:
    """The hospital's cells as the study's columns."""
    numeric: dict[str, Array] = {}
    factors: dict[str, Factor] = {}
    reach: dict[str, float] = {}
    kernels.done(_look, [own for own in cells.values() if isinstance(own, Numbers)])
    for name in known:
        converter = Converter(name=name, mapped=maps[name], findings=findings)
        translated = converter.translate(cells[maps[name].column])
        if translated is None:
            continue
        for column in schema[name]:
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


def _look(numbers: Numbers) -> None:
    """Finds the largest of them, which it keeps: side by side is faster than one by one."""
    numbers.reach  # noqa: B018


def _is_there(reader: AbstractReader, name: str, theirs: str, findings: Findings) -> bool:
    """Whether the source has the hospital's column, once."""
    count = reader.names.count(theirs)
    if count > 1:
        findings.add(f"the table has {count} columns '{theirs}'", "rename all but one", column=name)
    elif count == 0:
        findings.add(f"the table has no column '{theirs}'", _suggestion(theirs, reader), column=name)
    return count == 1


def _suggestion(theirs: str, reader: AbstractReader) -> str:
    if not reader.quotable:
        return "check that the first line of the file holds the column names"
    by_fold = {name.casefold(): name for name in reader.quotable}
    near = [by_fold[fold] for fold in difflib.get_close_matches(theirs.casefold(), by_fold)]
    question = f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
    return f"{question}map it in [columns] of the silo file"
