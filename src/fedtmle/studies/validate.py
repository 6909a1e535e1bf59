"""Checking a study file, its silo files and their data together, so that all defects are reported at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from warnings import catch_warnings, simplefilter

import numpy as np

from fedtmle.data import (
    CountedTable,
    CsvFile,
    Database,
    DatabaseQuery,
    DataErrors,
    Kind,
    LongTable,
    Schema,
    SiloFile,
    check,
    load,
    read_silo_file,
)
from fedtmle.data.convert import fitting_units, is_at_edge
from fedtmle.data.drivers import WriteAccessWarning
from fedtmle.defects import Defect, Lines, near
from fedtmle.errors import DataError, FedTMLEError, InputError, RefusedError
from fedtmle.model.table import AnyTable, StreamedTable, Table
from fedtmle.programs.study import Study
from fedtmle.protocol.looks import LookGroups
from fedtmle.protocol.policy import Policy
from fedtmle.studies.home import policy_of, session_policy, silo_file
from fedtmle.studies.preflight import differing_silos
from fedtmle.studies.preview import conflicts_of, obstacles
from fedtmle.studies.run import run
from fedtmle.studyfile.file import StudyFile, StudyFileErrors, file_plan, read_study, study_here
from fedtmle.studyfile.schema import check_follow_up, check_streaming, schema_of
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect

MOST_REHEARSED = 200_000  # records: a study of more takes long to rehearse


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The result of `validate`.

    ``file`` and ``schema`` are the study and the columns that it reads, None if the study cannot be read.
    ``tables`` has the table of each silo without a defect, or its counts: a streamed table of PostgreSQL is
    checked in the database. A study with ``defects`` cannot run; ``warnings`` are about what may be intended.
    """

    file: StudyFile | None
    schema: Schema | None
    tables: Mapping[str, AnyTable | CountedTable]
    defects: tuple[Defect, ...]
    warnings: tuple[Defect, ...] = ()


def validate(path: str | Path) -> Validation:
    """Check the study file at ``path``, the silo files that it lists and their data.

    No defect stops the search for others, except that data cannot be checked without a readable target and
    models. A study without such defects is rehearsed on this machine: whatever would stop it, or make a
    silo's policy refuse it, is a defect too. Nothing leaves this machine, and a defect names files, lines,
    columns, levels and counts of rows, never a record's value.

    Parameters
    ----------
    path
        The study file.

    Returns
    -------
    Validation
        The defects, and the study if there are none. Nothing is raised for a defect.

    Examples
    --------
    >>> ft.validate("example/study.toml").defects
    ()
    """
    file, study, schema = None, None, None
    silos: Mapping[str, Path] = {}
    defects: list[Defect] = []
    try:
        file = read_study(path)
        silos, study = file.silos, file.study
        schema = schema_of(study)
    except StudyFileErrors as errors:
        defects += defects_of(errors)
        silos, study = errors.silos, errors.study
        schema = None if study is None else schema_of(study)
    except FedTMLEError as error:
        defects += defects_of(error)
    tables: dict[str, AnyTable | CountedTable] = {}
    absent: list[set[str]] = []
    warnings: list[Defect] = []
    for name, source in silos.items():
        with catch_warnings(record=True) as raised:
            simplefilter("always", WriteAccessWarning)
            try:
                if schema is not None and study is not None:
                    tables[name] = _checked(study, schema, source, name)
                elif source.suffix.lower() == ".toml":
                    read_silo_file(source)
            except DataErrors as errors:
                defects += defects_of(errors.at(name))
                absent.append({d.column for d in errors.defects if d.column and "has no column" in d.message})
        texts = dict.fromkeys(str(warning.message) for warning in raised)
        warnings += [Defect(message=message, file=str(source), silo=name) for message in texts]
    files = _silo_files(silos)
    defects += _misnamed(files)
    if schema is not None and len(absent) == len(silos) > 1:
        defects += _absent_everywhere(set.intersection(*absent), Path(path), files, schema)
    if file is not None and len(tables) == len(silos):
        defects += _empty_arms(file, tables)
        try:
            check_streaming(file.study, [name for name, table in tables.items() if _streams(table)])
            check_follow_up(file.study, {k: t for k, t in tables.items() if not isinstance(t, CountedTable)})
            study_here(file)
        except (InputError, DataError) as error:
            defects += defects_of(error)
        held = _held(tables)
        if held and not defects:
            defects += _obstacles(file, held)
        if not defects:
            about = differing_silos(file.study, _held(tables))
            warnings += [Defect(message=warning, file=str(path)) for warning in about]
    return Validation(
        file=file,
        schema=schema,
        tables=tables,
        defects=tuple(defects),
        warnings=(
            *warnings,
            *lone_table(Path(path), silos),
            *_read_twice(Path(path), silos, files),
            *_at_edges(schema, _held(tables)),
        ),
    )


def lone_table(study: Path, silos: Mapping[str, Path]) -> list[Defect]:
    """Return a warning if the study has one silo that nobody refuses, because it has no silo file."""
    if len(silos) != 1 or any(source.suffix.lower() == ".toml" for source in silos.values()):
        return []
    message = (
        "only one silo is listed. This machine runs the study all the same, because a table without a silo "
        f"file has no policy. A hospital refuses a study of fewer than {Policy().min_silos} silos "
        "(min_silos)"
    )
    line = Lines(study.read_text(encoding="utf-8")).of(("silos", *silos))
    fix = "list the others before the study is sent to hospitals"
    return [Defect(message=message, fix=fix, file=str(study), line=line)]


def _held(tables: Mapping[str, AnyTable | CountedTable]) -> dict[str, Table]:
    """Return the tables if all are in memory: one that is streamed may take long to read often."""
    held = {name: table for name, table in tables.items() if isinstance(table, Table)}
    return held if len(held) == len(tables) else {}


def _checked(study: Study, schema: Schema, source: Path, name: str) -> AnyTable | CountedTable:
    """Return a silo's table, or its counts; those of times and events are checked together, row by row."""
    target = study.target
    if isinstance(target, AbstractTimeEffect | AbstractRegimeEffect):
        return load(source, schema, silo=name)
    return check(source, schema, silo=name, outcome=target.outcome, treatment=target.treatment)


def _streams(table: AnyTable | CountedTable) -> bool:
    return isinstance(table, StreamedTable | CountedTable)


def _silo_files(silos: Mapping[str, Path]) -> dict[str, SiloFile]:
    """Return the silo files that can be read; the defects of the others are found when data are loaded."""
    files = {}
    for name, source in silos.items():
        if source.suffix.lower() == ".toml":
            with suppress(DataErrors):
                files[name] = read_silo_file(source)
    return files


def _misnamed(files: Mapping[str, SiloFile]) -> list[Defect]:
    """Return a defect for each silo file that states another name than the study lists it by."""
    return [
        Defect(
            message=f"the silo is called '{file.name}' here and '{name}' in the study",
            fix="write the same name, or list that silo's own file",
            file=str(file.path),
            line=Lines(file.path.read_text(encoding="utf-8")).of(("silo", "name")),
        )
        for name, file in files.items()
        if file.name != name
    ]


def _read_twice(study: Path, silos: Mapping[str, Path], files: Mapping[str, SiloFile]) -> list[Defect]:
    """Return a warning for each two silos that list the same data, whose records would count twice."""
    first: dict[object, str] = {}
    warnings = []
    for name, source in silos.items():
        data: object = files[name].data if name in files else source
        if isinstance(data, LongTable):
            data = data.data
        where = data.place if isinstance(data, DatabaseQuery) else data
        key: object = data
        if isinstance(data, Path):
            key = data.resolve()
        elif isinstance(data, Database | CsvFile):
            where, key = data.path, replace(data, path=data.path.resolve())
        if key in first:
            message = (
                f"silos '{first[key]}' and '{name}' read the same data, {where}: each record counts twice"
            )
            line = Lines(study.read_text(encoding="utf-8")).of(("silos", name))
            warnings.append(Defect(message=message, file=str(study), line=line))
        first.setdefault(key, name)
    return warnings


def _absent_everywhere(
    names: set[str], path: Path, files: Mapping[str, SiloFile], schema: Schema
) -> list[Defect]:
    """Return a defect for each column that no silo has, which the study probably misspells."""
    mapped = {name for file in files.values() for name in file.columns}
    known = mapped | {name for name in schema.names if name not in names}
    lines = path.read_text(encoding="utf-8").splitlines()
    defects = []
    for name in sorted(names):
        word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        line = next((k for k, text in enumerate(lines, start=1) if word.search(text.partition("#")[0])), None)
        message = f"no silo has a column '{name}'{near(name, known)}"
        defects.append(Defect(message=message, file=str(path), line=line))
    return defects


def _obstacles(file: StudyFile, tables: Mapping[str, Table]) -> list[Defect]:
    """Return what would stop the study or make a silo refuse it; a rehearsal finds what else there is."""
    policies = {name: policy_of(source) or session_policy() for name, source in file.silos.items()}
    study = study_here(file)
    groups = LookGroups.of(file.silos, file.colluders) if study.aggregation == "masked" else LookGroups()
    defects = obstacles(study, tables, policies, groups=groups)
    if defects or sum(table.n_rows for table in tables.values()) > MOST_REHEARSED:
        return defects
    try:
        with catch_warnings():
            simplefilter("ignore", WriteAccessWarning)  # `validate` has noted it
            run(study, file.silos, colluders=file.colluders)
            return _conflicts(file, tables)
    except RefusedError as refused:
        return [Defect(message=f"the study would stop: {refused}", file=str(file.path))]
    except FedTMLEError as error:
        return defects_of(error)


def _conflicts(file: StudyFile, tables: Mapping[str, Table]) -> list[Defect]:
    """Return why a silo would refuse the study after earlier ones, or because it discloses too much."""
    try:
        plan = file_plan(file)
    except InputError:  # a masked study without the silos' keys has no plan yet
        return []
    silos = {name: silo_file(source) for name, source in file.silos.items()}
    return [
        Defect(message=conflict.text, silo=name)
        for name, silo in silos.items()
        if silo is not None
        for conflict in conflicts_of(plan, silo, tables[name].n_rows)
    ]


def _at_edges(schema: Schema | None, tables: Mapping[str, AnyTable]) -> list[Defect]:
    """Return a warning for each column that lies at the edge of its declared range, as in another unit."""
    warnings = []
    for column in () if schema is None else schema.columns:
        if column.bounds is None or column.kind is not Kind.NUMERIC:
            continue
        low, high = column.bounds
        for silo, table in tables.items():
            values = np.concatenate([block.numeric[column.name] for block in table.blocks()])
            if not is_at_edge(values, low, high):
                continue
            units = fitting_units(values, low, high)
            fix = f": {'; '.join(units)}" if units else ""
            warnings.append(
                Defect(
                    message="nearly all values are at the edge of the declared range",
                    fix=f"check the unit in the silo file{fix}, or declare a narrower range",
                    silo=silo,
                    column=column.name,
                )
            )
    return warnings


def defects_of(error: FedTMLEError) -> list[Defect]:
    """Return the defects that an error reports, or its message as one defect."""
    if isinstance(error, StudyFileErrors | DataErrors):
        return list(error.defects)
    return [Defect(message=str(error))]


def _empty_arms(file: StudyFile, tables: Mapping[str, AnyTable | CountedTable]) -> list[Defect]:
    """Return a defect for each arm in which no silo has an observed outcome."""
    target = file.study.target
    if file.study.timeline is not None:  # a rehearsal checks who follows each rule
        return []
    observed_counts = [0] * len(target.arms)
    counted = [table for table in tables.values() if isinstance(table, CountedTable)]
    for code, level in enumerate(target.arms):
        known = [table.known.get(level, 0) if target.treatment else table.n_known for table in counted]
        observed_counts[code] += sum(known)
    held = [table for table in tables.values() if not isinstance(table, CountedTable)]
    for block in (block for table in held for block in table.blocks()):
        observed = np.ones(block.n_rows, dtype=bool)
        if target.outcome in block.numeric:  # an event is a factor, and never missing
            observed = ~np.isnan(block.numeric[target.outcome])
        arm = (
            block.factors[target.treatment].recode(target.arms)
            if target.treatment
            else np.zeros(block.n_rows)
        )
        for code in range(len(observed_counts)):
            observed_counts[code] += int((observed & (arm == code)).sum())
    return [
        Defect(message=f"no silo has an observed outcome in arm '{arm}'", file=str(file.path))
        for arm, count in zip(target.arms, observed_counts, strict=True)
        if not count
    ]
