"""Target trials emulated on OMOP databases: the trial, its SQL, the cohorts and the effect.

from fedtmle import trials

trial = trials.TargetTrial(name=..., strategies=..., outcome=trials.TrialOutcome(...), ...)
emulated = trials.emulate(trial, {"north": trials.Cdm(name="north", url_env="NORTH_CDM", schema="cdm")})
emulated.result
"""

from __future__ import annotations

from fedtmle.trials.cohort import ArmCounts, Attrition, Cdm, Cohort, read_cohort
from fedtmle.trials.elements import (
    AgeAtBaseline,
    AnyRecord,
    Censoring,
    ConceptSet,
    Criterion,
    Domain,
    Eligibility,
    LastMeasurement,
    Sex,
    TimeZero,
    TreatmentStrategy,
    TrialOutcome,
    VisitCount,
)
from fedtmle.trials.emulate import Emulation, emulate
from fedtmle.trials.file import TrialFile, read_trial
from fedtmle.trials.trial import TargetTrial

__all__ = [
    "AgeAtBaseline",
    "AnyRecord",
    "ArmCounts",
    "Attrition",
    "Cdm",
    "Censoring",
    "Cohort",
    "ConceptSet",
    "Criterion",
    "Domain",
    "Eligibility",
    "Emulation",
    "LastMeasurement",
    "Sex",
    "TargetTrial",
    "TimeZero",
    "TreatmentStrategy",
    "TrialFile",
    "TrialOutcome",
    "VisitCount",
    "emulate",
    "read_cohort",
    "read_trial",
]
