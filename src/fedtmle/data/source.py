"""`load`: a silo's source and the study's schema in, a `Table` or every problem out."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedtmle.data.cells import AbstractReader, Cells, UnreadableError
from fedtmle.data.convert import Converter
from fedtmle.data.files import open_database, open_file
from fedtmle.data.frames import frame_reader
from fedtmle.data.problems import DataErrors, Findings, Problem
from fedtmle.data.schema import Kind, Schema
from fedtmle.data.silofile import ColumnMap, Database, SiloFile, read_silo_file
from fedtmle.errors import InputError
from fedtmle.model.table import Factor, Table
from fedtmle.model.types import Array


def load(
    source: object, schema: Schema, *, silo: str, mapping: Mapping[str, ColumnMap | str] | None = None
) -> Table:
    """The columns of ``schema`` from a silo's own source, or `DataErrors` with all that is wrong.

    A source is a pandas or polars frame, a mapping of arrays, the path of a .csv, .parquet or silo
    file (.toml), a `Database` or a `SiloFile`. ``mapping`` gives the hospital's columns by the
    study's names; a silo file brings its own.
    """
    if isinstance(source, str | os.PathLike) and Path(source).suffix.lower() == ".toml":
        source = _silo_file(Path(source), silo)
    if isinstance(source, SiloFile):
        if mapping is not None:
            raise InputError(f"silo '{silo}': a silo file brings its own mapping; give no other")
        source, mapping = source.data, source.columns
    maps = _maps(schema, mapping or {})
    findings = Findings(silo=silo, file=_file(source))
    table = None
    try:
        with _open(source) as reader:
            known = _known(reader, maps, findings)
            n_rows, cells = reader.read([maps[name].column for name in known])
            table = _table(n_rows, cells, schema, {name: maps[name] for name in known}, findings)
    except UnreadableError as error:
        findings.add(error.what, error.fix, line=error.line)
    findings.settle()
    ...


def load_all(sources: Mapping[str, object], schema: Schema) -> dict[str, Table]:
    """The tables of all silos by name, or one `DataErrors` with the problems of all."""
    tables: dict[str, Table] = {}
    problems: list[Problem] = []
    for silo, source in sources.items():
        try:
            tables[silo] = load(source, schema, silo=silo)
        except DataErrors as errors:
            problems += errors.problems
    if problems:
        raise DataErrors(problems)
    return tables
