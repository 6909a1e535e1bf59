"""The plan of a study: what every party derives from the study and the roster."""

from __future__ import annotations

import datetime

from fedtmle.algorithms.study import Study
from fedtmle.algorithms.study_flow import StudyProgram
from fedtmle.errors import InputError
from fedtmle.initial.superlearner import pilots
from fedtmle.protocol.learners import absent_pilot
from fedtmle.protocol.plan import Member, Plan
from fedtmle.studies.file import StudyFile


def study_plan(study: Study, silos: tuple[Member, ...], expires: datetime.date | None = None) -> Plan:
    """The plan that every party of a study derives from the study and the roster."""
    names = {member.name for member in silos}
    for pilot in (pilot for model in study.models.values() for pilot in pilots(model)):
        if pilot.at is not None and pilot.at not in names and not study.algorithm.pools_rows:
            raise InputError(absent_pilot(pilot.at))
    return Plan(program=StudyProgram(study=study), roster=silos, expires=expires)


def study_of(plan: Plan) -> Study:
    """Return the study that a plan is about."""
    if not isinstance(plan.program, StudyProgram):
        raise TypeError("this plan is not a study's")
    return plan.program.study


def file_plan(file: StudyFile) -> Plan:
    """The plan of a study file: its roster is the silos that the file lists, in its order."""
    members = tuple(Member(name=name, key=file.keys.get(name, b"")) for name in file.silos)
    return study_plan(file.study, members, file.expires)
