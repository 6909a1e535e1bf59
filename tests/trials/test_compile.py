"""Attrition and table of every rule, against plain loops over invented records, on both databases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtmle.trials import (
    AgeAtBaseline,
    AnyRecord,
    Censoring,
    ConceptSet,
    Criterion,
    Domain,
    Eligibility,
    LastMeasurement,
    Sex,
    TargetTrial,
    TimeZero,
    TreatmentStrategy,
    TrialOutcome,
    VisitCount,
)
from fedtmle.trials.cohort import Cdm, read_cohort
from tests.trials import invented as record

DRUG_A = ConceptSet(name="a", ids=(record.DRUG_A,))
DRUG_B = ConceptSet(name="b", ids=(record.DRUG_B,))
DRUG_C = ConceptSet(name="c", ids=(record.DRUG_C,))
ILL = ConceptSet(name="ill", ids=(record.ILL,))
NOT_SEVERE = ConceptSet(name="not severe", ids=(record.ILL,), exclude=(record.ILL_SEVERE,))
ILL_ITSELF = ConceptSet(name="ill itself", ids=(record.ILL,), descendants=False)
EVENT = ConceptSet(name="event", ids=(record.EVENT,))
LAB = ConceptSet(name="lab", ids=(record.LAB,))

BASE = TargetTrial(
    name="base",
    strategies=(
        TreatmentStrategy(name="drug b", drugs=DRUG_B),
        TreatmentStrategy(name="drug a", drugs=DRUG_A),
    ),
    outcome=TrialOutcome(name="event", days=180, conditions=EVENT),
    covariates=(
        AgeAtBaseline(name="age"),
        Sex(name="sex"),
        VisitCount(name="visits", from_day=-365, most=2),
        VisitCount(name="visits_long_ago", from_day=-365, to_day=-60),
        AnyRecord(name="ill", domain=Domain.CONDITION, concepts=ILL, from_day=-90),
        AnyRecord(name="mild", domain=Domain.CONDITION, concepts=NOT_SEVERE),
        AnyRecord(name="ill_itself", domain=Domain.CONDITION, concepts=ILL_ITSELF, to_day=-1),
        AnyRecord(name="drug_c", domain=Domain.DRUG, concepts=DRUG_C, from_day=-180, to_day=-30),
        LastMeasurement(name="lab", concepts=LAB, range=(0.1, 100), if_missing=5.5, from_day=-365),
        LastMeasurement(
            name="unit", concepts=LAB, range=(-1, 200), if_missing=-0.1, units=(record.LAB_UNIT,)
        ),
    ),
)
OBSERVED = Eligibility(observation_days_before=0)
BOTH = (Censoring.END_OF_OBSERVATION, Censoring.SWITCH)
DEATH = TrialOutcome(name="death", days=365)
TIME = replace(BASE.outcome, period_days=30, horizons=(60, 180))
AT_ILLNESS = TimeZero(condition=ILL, grace_days=60)
STRICT = Eligibility(
    age=(30, 60),
    observation_days_before=180,
    criteria=(
        Criterion(domain=Domain.CONDITION, concepts=NOT_SEVERE, present=True, from_day=-365),
        Criterion(domain=Domain.DRUG, concepts=DRUG_C, present=False, from_day=-90, to_day=-1),
    ),
)
THREE = (*BASE.strategies, TreatmentStrategy(name="drug c", drugs=DRUG_C))
TRIALS = {
    "base": BASE,
    "three arms": replace(BASE, strategies=THREE),
    "strict": replace(BASE, eligibility=STRICT),
    "washout": replace(
        BASE, time_zero=TimeZero(washout_days=30), eligibility=Eligibility(observation_days_before=30)
    ),
    "washout, strict": replace(BASE, time_zero=TimeZero(washout_days=90), eligibility=STRICT),
    "end of observation": replace(BASE, eligibility=OBSERVED, censoring=(Censoring.END_OF_OBSERVATION,)),
    "switch": replace(BASE, censoring=(Censoring.SWITCH,)),
    "both": replace(BASE, eligibility=OBSERVED, censoring=BOTH),
    "death": replace(BASE, outcome=DEATH),
    "death, end": replace(
        BASE, outcome=DEATH, eligibility=OBSERVED, censoring=(Censoring.END_OF_OBSERVATION,)
    ),
    "death, both": replace(BASE, outcome=DEATH, eligibility=OBSERVED, censoring=BOTH),
    "time": replace(BASE, outcome=TIME),
    "time, end": replace(BASE, outcome=TIME, eligibility=OBSERVED, censoring=(Censoring.END_OF_OBSERVATION,)),
    "time, both": replace(BASE, outcome=TIME, eligibility=OBSERVED, censoring=BOTH),
    "time, death, both": replace(
        BASE, outcome=replace(DEATH, period_days=73), eligibility=OBSERVED, censoring=BOTH
    ),
    "time, grace, both": replace(
        BASE, outcome=TIME, time_zero=AT_ILLNESS, eligibility=OBSERVED, censoring=BOTH
    ),
    "grace": replace(BASE, time_zero=AT_ILLNESS),
    "grace, both": replace(BASE, time_zero=AT_ILLNESS, eligibility=OBSERVED, censoring=BOTH),
    "grace, death": replace(BASE, time_zero=AT_ILLNESS, outcome=DEATH),
}


def check(trial: TargetTrial, cdm: Cdm, everyone: list[record.Person]) -> None:
    counts, rows = record.expected(trial, everyone)
    cohort = read_cohort(trial, cdm)
    assert list(cohort.attrition.people) == counts
    assert len(cohort.attrition.steps) == len(counts)
    assert list(cohort.columns) == list(trial.columns) == list(rows[0])
    assert cohort.n_rows == len(rows) == counts[-1]
    for name, column in cohort.columns.items():
        wanted = [row[name] for row in rows]
        if trial.variables[name].kind == "category":
            assert column.tolist() == wanted, name
        else:
            np.testing.assert_array_equal(column, np.array(wanted, dtype=float), err_msg=name)
    outcome = cohort.columns[trial.outcome.name]
    assert sum(arm.events for arm in cohort.attrition.arms) == np.nansum(outcome)
    assert sum(arm.unknown for arm in cohort.attrition.arms) == sum(map(partial(is_unknown, trial), rows))


def is_unknown(trial: TargetTrial, row: dict[str, Any]) -> bool:
    if trial.outcome.period_days is None:
        return bool(np.isnan(row[trial.outcome.name]))
    return row[trial.outcome.name] == 0.0 and row[trial.outcome.time] < trial.outcome.days


@pytest.mark.parametrize("name", TRIALS)
def test_attrition_and_table_are_those_of_plain_loops(name: str, invented: Path) -> None:
    everyone = record.people()
    check(TRIALS[name], Cdm(name="north", path=invented), everyone)
    part = Cdm(name="north", path=invented, part=(1, 3))
    check(TRIALS[name], part, [person for person in everyone if person.id % 3 == 1])


def test_the_invented_records_exercise_the_rules() -> None:
    """Every rule removes somebody, and every kind of outcome occurs."""
    everyone = record.people()
    for trial in TRIALS.values():
        _, rows = record.expected(trial, everyone)
        outcomes = [row[trial.outcome.name] for row in rows]
        assert 0.0 in outcomes
        assert 1.0 in outcomes
        assert len(rows) > 30
        assert any(is_unknown(trial, row) for row in rows) == bool(trial.censoring)
        values = {name: {row[name] for row in rows} for name in ("visits", "lab", "unit")}
        assert max(values["visits"]) == 2.0
        assert {1e-3, 120.25} < values["unit"]
        assert {0.1, 4.5} < values["lab"] <= {0.1, 4.5, 5.5, 7.0}
    counts, _ = record.expected(TRIALS["strict"], everyone)
    losses = [earlier - later for earlier, later in pairwise(counts)]
    assert losses.pop(1) == 0  # everybody who has a drug has a first one
    assert min(losses) > 0


@pytest.mark.parametrize("name", TRIALS)
def test_postgresql_gives_the_same_bytes(
    name: str, invented: Path, postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVENTED_CDM", postgresql)
    there = Cdm(name="north", url_env="INVENTED_CDM", schema="invented")
    here = read_cohort(TRIALS[name], Cdm(name="north", path=invented))
    cohort = read_cohort(TRIALS[name], there)
    assert cohort.attrition == here.attrition
    assert cohort.digest == here.digest
    assert cohort.frame().to_csv() == here.frame().to_csv()
