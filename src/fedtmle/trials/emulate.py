"""Emulating a target trial: a cohort per silo, then the trial's study over the tables, here or as files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import final

from fedtmle.data import SiloFile
from fedtmle.data.files import connect
from fedtmle.data.sql import DIALECTS
from fedtmle.errors import InputError
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.results.result import StudyResult
from fedtmle.runtime.session import Progress
from fedtmle.studies.preflight import Preflight, preflight
from fedtmle.studies.run import run
from fedtmle.studyfile.draft import entry, toml_text
from fedtmle.studyfile.file import study_plan
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.trials.cohort import Attrition, Cdm, Cohort, document_of, read_cohort, write_counts
from fedtmle.trials.file import TrialFile
from fedtmle.trials.trial import PERSON_COLUMN, TREATMENT_COLUMN, TargetTrial


@final
@dataclass(frozen=True, kw_only=True)
class Emulation:
    """The result of a trial's study, and descriptions of its cohort.

    ``attrition`` has the attrition of each silo as people other than its owner may see it. ``table1``
    describes the cohort of all silos by strategy.
    """

    trial: TargetTrial
    attrition: Mapping[str, Attrition]
    table1: Preflight
    result: StudyResult


def emulate(
    trial: TargetTrial,
    silos: Mapping[str, Cdm],
    *,
    threads: int = 1,
    progress: Progress | None = None,
    cohorts: Mapping[str, Cohort] | None = None,
) -> Emulation:
    """Read the cohort of every silo and run the trial's study over the tables, in one process.

    Parameters
    ----------
    trial
        The trial.
    silos
        The databases, by silo.
    threads
        The number of silos that compute at the same time.
    progress
        Called after every round.
    cohorts
        Cohorts that were read before.

    Returns
    -------
    Emulation
        The trial, its attrition, Table 1 and the result. The result's document has the first three under the
        key ``emulation``.

    Raises
    ------
    InputError
        There is no silo, or an argument is wrong.
    DataErrors
        The records of a silo cannot be used.
    ProtocolError
        A silo refused, or the run could not be completed.

    Examples
    --------
    >>> try:
    ...     ft.emulate("trial.toml", {})
    ... except ft.InputError as error:
    ...     print(error)
    silos: expected at least one silo
    """
    if not silos:
        raise InputError("silos: expected at least one silo")
    if cohorts is None:
        cohorts = {name: read_cohort(trial, cdm) for name, cdm in silos.items()}
    attrition = shown_attrition(cohorts, silos)
    sources = {name: _source(cohorts[name], cdm) for name, cdm in silos.items()}
    table1 = preflight(trial.study, sources)
    result = run(trial.study, sources, threads=threads, progress=progress)
    described = {**table1.to_dict(), "overlap": None}  # the result has its own overlap
    emulation = {**document_of(trial, attrition), "table1": json.loads(json.dumps(described))}
    document = {**result.document, "emulation": emulation}
    return Emulation(
        trial=trial,
        attrition=attrition,
        table1=table1,
        result=StudyResult(document=document, run=result.run),
    )


def _source(cohort: Cohort, cdm: Cdm) -> object:
    """Return the source that `run` reads: the table, with the owner's policy if there is one."""
    if cdm.policy is None:
        return cohort.columns
    return SiloFile(
        path=cdm.silo_file or Path(cdm.name),
        name=cdm.name,
        data=cohort.columns,  # type: ignore[arg-type]  # `load` reads a mapping of columns as well
        columns={},
        policy=cdm.policy,
    )


def shown_attrition(cohorts: Mapping[str, Cohort], silos: Mapping[str, Cdm]) -> dict[str, Attrition]:
    """Return every silo's attrition, with counts below the largest ``min_cell`` of the silos hidden."""
    floor = max((silos[name].policy or Policy()).min_cell for name in cohorts)
    return {name: cohort.attrition.for_others(floor) for name, cohort in cohorts.items()}


# A trial's study as files: `study.toml`, and for each silo its table and its silo file.
#
# `fedtmle validate`, `fedtmle preflight` and `fedtmle run` read them, on this machine or on a deployment.


def write_study(file: TrialFile, cohorts: Mapping[str, Cohort], folder: Path) -> list[Path]:
    """Write the study and the given silos' tables into ``folder``, and return the files.

    A folder that holds a study is refused. The tables are records: a new folder is readable by its owner
    alone.
    The owner of one silo writes only that silo's table with `--silo`; the study file lists all silos. Next to
    each table is a file with the counts of the attrition that its owner may share.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    study = folder / "study.toml"
    if study.exists():
        raise InputError(f"{study}: the file exists already; choose another folder")
    names = _file_names(file.names)
    study.write_text(study_text(file), encoding="utf-8")
    written = [study]
    for name, cohort in cohorts.items():
        table, silo = folder / f"{names[name]}.parquet", folder / f"{names[name]}.toml"
        _write_parquet(cohort, table)
        silo.write_text(_silo_text(file.silos[name], table.name), encoding="utf-8")
        counts = folder / f"{names[name]}.counts.json"
        write_counts(counts, file.trial, cohort, file.silos[name])
        written += [table, silo, counts]
    return written


def _file_names(silos: Sequence[str]) -> dict[str, str]:
    """Return a file name per silo: the silo's name if it is plain, else one with a number."""
    return {
        name: name if re.fullmatch(r"[A-Za-z0-9_-]{1,50}", name) and name != "study" else f"silo-{index}"
        for index, name in enumerate(silos, start=1)
    }


def study_text(file: TrialFile) -> str:
    """Return the text of the study file of the trial's study, which is the same for every party."""
    names = _file_names(file.names)
    trial, target = file.trial, file.trial.study.target
    models = file.study_sections.get("models", {})
    sections: dict[str, Mapping[str, object]] = {
        "target": {
            "kind": type(target).__name__,
            "outcome": target.outcome,
            **_time_keys(target),
            "treatment": TREATMENT_COLUMN,
        },
        "variables": {name: entry(variable) for name, variable in trial.variables.items()},
        "models": {**{role: {"formula": f} for role, f in trial.default_formulas.items()}, **models},
        **{name: section for name, section in file.study_sections.items() if name != "models"},
        "silos": {name: f"{names[name]}.toml" for name in file.names},
    }
    return "\n".join(f"[{name}]\n{_lines(section)}" for name, section in sections.items())


def study_plan_of(file: TrialFile) -> Plan:
    """Return the plan of the trial's study over all silos of the trial."""
    return study_plan(file.trial.study, roster(file.names))


def _time_keys(target: AbstractEffect) -> dict[str, object]:
    if not isinstance(target, AbstractTimeEffect):
        return {}
    grid = {"periods": target.periods, "period_length": target.period_length}
    return {"time": target.time, **grid, "horizons": list(target.horizons)}


def _silo_text(cdm: Cdm, table: str) -> str:
    home = {} if cdm.home is None else {"home": str(cdm.home)}
    data = {"path": table, "person": PERSON_COLUMN}
    sections: dict[str, Mapping[str, object]] = {"silo": {"name": cdm.name, **home}, "data": data}
    if cdm.policy is not None:
        stated = {key.name: getattr(cdm.policy, key.name) for key in fields(Policy)}
        default = Policy()
        sections["policy"] = {key: value for key, value in stated.items() if value != getattr(default, key)}
    return "\n".join(f"[{name}]\n{_lines(section)}" for name, section in sections.items())


def _lines(section: Mapping[str, object]) -> str:
    return "".join(f"{toml_text(key)} = {toml_text(value)}\n" for key, value in section.items())


def _write_parquet(cohort: Cohort, path: Path) -> None:
    with connect() as connection:
        connection.register("cohort", cohort.frame().assign(**{PERSON_COLUMN: cohort.people}))
        connection.execute(f"COPY cohort TO {DIALECTS['duckdb'].literal(str(path))} (FORMAT parquet)")
