"""Checking a study, its silo files and their data together, so that all complaints come at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from warnings import catch_warnings, simplefilter

import numpy as np

from fedtmle.data import Database, DatabaseQuery, DataErrors, Schema, SiloFile, load, read_silo_file
from fedtmle.data.drivers import WriteAccessWarning
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.model.table import AnyTable
from fedtmle.studyfile.file import StudyFile, StudyFileErrors, read_study
from fedtmle.studyfile.schema import check_streams, schema_of
from fedtmle.studyfile.toml import Lines, near


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing to mend, with the file and line where they are known."""

    message: str
    file: str | None = None
    line: int | None = None
    silo: str | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        return f"{place}: {self.message}" if place else self.message


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What was checked: the study if it could be read, each readable silo's table, and the complaints.

    ``warnings`` are about what may be meant as it is.
    """

    file: StudyFile | None
    schema: Schema | None
    tables: Mapping[str, AnyTable]
    complaints: tuple[Complaint, ...]
    warnings: tuple[Complaint, ...] = ()


def validate(path: str | Path) -> Validation:
    """Checks the study file, the silo files it names and, where the study is readable, their data."""
    file, schema = None, None
    silos: Mapping[str, Path] = {}
    found: list[Complaint] = []
    try:
        file = read_study(path)
        silos = file.silos
        schema = schema_of(file.study)
    except StudyFileErrors as errors:
        found += complaints(errors)
        silos = errors.silos
        schema = None if errors.study is None else schema_of(errors.study)
    except FedTMLEError as error:
        found += complaints(error)
    tables: dict[str, AnyTable] = {}
    absent: list[set[str]] = []
    accounts: list[Complaint] = []
    for name, source in silos.items():
        with catch_warnings(record=True) as raised:
            simplefilter("always", WriteAccessWarning)
            try:
                if schema is not None:
                    tables[name] = load(source, schema, silo=name)
                elif source.suffix.lower() == ".toml":
                    read_silo_file(source)
            except DataErrors as errors:
                found += complaints(errors.at(name))
                absent.append({p.column for p in errors.problems if p.column and "has no column" in p.what})
        accounts += [Complaint(message=str(w.message), file=str(source), silo=name) for w in raised]
    files = _silo_files(silos)
    found += _misnamed(files)
    if schema is not None and len(absent) == len(silos) > 1:
        found += _nobodys(set.intersection(*absent), Path(path), silos, schema)
    if file is not None and len(tables) == len(silos):
        found += _empty_arms(file, tables)
        try:
            check_streams(file.study, tables)
        except InputError as error:
            found += complaints(error)
    return Validation(
        file=file,
        schema=schema,
        tables=tables,
        complaints=tuple(found),
        warnings=(*accounts, *_read_twice(Path(path), silos, files)),
    )


def _silo_files(silos: Mapping[str, Path]) -> dict[str, SiloFile]:
    """The silo files that can be read; whatever is wrong with the others is told where data are loaded."""
    files = {}
    for name, source in silos.items():
        if source.suffix.lower() == ".toml":
            with suppress(DataErrors):
                files[name] = read_silo_file(source)
    return files


def _misnamed(files: Mapping[str, SiloFile]) -> list[Complaint]:
    """Silo files that belong, by what they say, to another silo than the study lists them for."""
    return [
        Complaint(
            message=f"the silo is called '{file.name}' here and '{name}' in the study; write the same name, "
            "or list that silo's own file",
            file=str(file.path),
            line=Lines(file.path.read_text(encoding="utf-8")).of(("silo", "name")),
            silo=name,
        )
        for name, file in files.items()
        if file.name != name
    ]


def _read_twice(study: Path, silos: Mapping[str, Path], files: Mapping[str, SiloFile]) -> list[Complaint]:
    """Data that two silos list: the records would count twice."""
    first: dict[object, str] = {}
    found = []
    for name, source in silos.items():
        data = files[name].data if name in files else source
        where = data.place if isinstance(data, DatabaseQuery) else data
        key: object = data
        if isinstance(data, Path):
            key = data.resolve()
        elif isinstance(data, Database):
            where, key = data.path, replace(data, path=data.path.resolve())
        if key in first:
            message = (
                f"silos '{first[key]}' and '{name}' read the same data, {where}: each record counts twice"
            )
            line = Lines(study.read_text(encoding="utf-8")).of(("silos", name))
            found.append(Complaint(message=message, file=str(study), line=line, silo=name))
        first.setdefault(key, name)
    return found


def _nobodys(names: set[str], path: Path, silos: Mapping[str, Path], schema: Schema) -> list[Complaint]:
    """Columns that no silo has: misspelt in the study, most likely."""
    known = {name for name in schema.names if name not in names}
    for source in silos.values():
        if source.suffix.lower() == ".toml":
            known |= set(read_silo_file(source).columns)
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for name in sorted(names):
        word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        line = next((k for k, text in enumerate(lines, start=1) if word.search(text.partition("#")[0])), None)
        message = f"no silo has a column '{name}'{near(name, known)}"
        found.append(Complaint(message=message, file=str(path), line=line))
    return found


def complaints(error: FedTMLEError) -> list[Complaint]:
    """An error's parts, each with its place."""
    if isinstance(error, StudyFileErrors):
        return [Complaint(message=m.what, file=m.file, line=m.line) for m in error.mistakes]
    if isinstance(error, DataErrors):
        found = []
        for problem in error.problems:
            silo = problem.silo and f"silo '{problem.silo}'"
            column = problem.column and f"column '{problem.column}'"
            rows = "" if problem.rows is None else f" in {problem.rows} row{'' if problem.rows == 1 else 's'}"
            told = f"{problem.what}{rows}; {problem.fix}"
            message = ": ".join(part for part in (silo, column, told) if part)
            found.append(Complaint(message=message, file=problem.file, line=problem.line, silo=problem.silo))
        return found
    return [Complaint(message=str(error))]


def _empty_arms(file: StudyFile, tables: Mapping[str, AnyTable]) -> list[Complaint]:
    """Arms in which no silo has an observed outcome."""
    target = file.study.target
    seen = [0] * len(target.arms)
    for block in (block for table in tables.values() for block in table.blocks()):
        observed = ~np.isnan(block.numeric[target.outcome])
        arm = (
            block.factors[target.treatment].recode(target.arms)
            if target.treatment
            else np.zeros(block.n_rows)
        )
        for code in range(len(seen)):
            seen[code] += int((observed & (arm == code)).sum())
    return [
        Complaint(message=f"no silo has an observed outcome in arm '{arm}'", file=str(file.path))
        for arm, count in zip(target.arms, seen, strict=True)
        if not count
    ]
