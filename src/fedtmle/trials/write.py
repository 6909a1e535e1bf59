"""A trial's study as files: `study.toml`, and for each silo its table and its silo file.

`fedtmle validate`, `fedtmle preflight` and `fedtmle run` read them, on this machine or on a deployment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from fedtmle.data.duck import connect
from fedtmle.data.sql import DIALECTS
from fedtmle.errors import InputError
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.studyfile.dictionary import entry, toml_text
from fedtmle.studyfile.file import study_plan
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.trials.cohort import Cdm, Cohort
from fedtmle.trials.counts import write_counts
from fedtmle.trials.file import TrialFile
from fedtmle.trials.trial import TREATMENT_COLUMN


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
    sections: dict[str, Mapping[str, object]] = {"silo": {"name": cdm.name}, "data": {"path": table}}
    if cdm.policy is not None:
        stated = {key.name: getattr(cdm.policy, key.name) for key in fields(Policy)}
        default = Policy()
        sections["policy"] = {key: value for key, value in stated.items() if value != getattr(default, key)}
    return "\n".join(f"[{name}]\n{_lines(section)}" for name, section in sections.items())


def _lines(section: Mapping[str, object]) -> str:
    return "".join(f"{toml_text(key)} = {toml_text(value)}\n" for key, value in section.items())


def _write_parquet(cohort: Cohort, path: Path) -> None:
    with connect() as connection:
        connection.register("cohort", cohort.frame())
        connection.execute(f"COPY cohort TO {DIALECTS['duckdb'].literal(str(path))} (FORMAT parquet)")
