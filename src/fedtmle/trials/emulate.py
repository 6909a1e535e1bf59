"""Emulating a target trial: a cohort per silo, then the trial's study over the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from fedtmle.data import SiloFile
from fedtmle.errors import InputError
from fedtmle.protocol.policy import Policy
from fedtmle.results.result import StudyResult
from fedtmle.runtime.session import Progress
from fedtmle.studies.preflight import Preflight, preflight
from fedtmle.studies.run import run
from fedtmle.trials.attrition import Attrition, document_of
from fedtmle.trials.cohort import Cdm, Cohort, read_cohort
from fedtmle.trials.trial import TargetTrial


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
