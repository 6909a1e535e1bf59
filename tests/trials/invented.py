"""An invented CDM, and a second way to compute attrition and table: plain loops over its records.

Nothing here is shared with `fedtmle.trials.compile`.
"""

from __future__ import annotations

import datetime
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from fedtmle.trials import (
    AgeAtBaseline,
    AnyRecord,
    Censoring,
    ConceptSet,
    Criterion,
    Domain,
    LastMeasurement,
    Sex,
    TargetTrial,
    VisitCount,
)

Day = datetime.date
START = datetime.date(2010, 1, 1)
DRUG_A, DRUG_A_BRAND, DRUG_B, DRUG_C = 101, 102, 111, 121
ILL, ILL_MILD, ILL_SEVERE, EVENT = 201, 202, 203, 211
LAB, LAB_UNIT, OTHER_UNIT = 301, 310, 311
ANCESTORS = {101: (101, 102), 111: (111,), 121: (121,), 201: (201, 202, 203), 203: (203,), 211: (211,)}


@dataclass
class Person:
    """All records of one person."""

    id: int
    born: int
    gender: int
    observed: list[tuple[Day, Day]] = field(default_factory=list)
    drugs: list[tuple[Day, int]] = field(default_factory=list)
    conditions: list[tuple[Day, int]] = field(default_factory=list)
    visits: list[Day] = field(default_factory=list)
    labs: list[tuple[Day, int, float | None, int]] = field(default_factory=list)  # day, id, value, unit
    died: Day | None = None


def people(count: int = 1500, seed: int = 0) -> list[Person]:
    """Return invented people; many of their records fall on the edges of windows."""
    draw = random.Random(seed)  # noqa: S311 - invented records, the same everywhere
    edges = (0, 1, 29, 30, 31, 59, 60, 61, 89, 90, 91, 179, 180, 181, 364, 365, 366)
    everyone, lab_id = [], 0
    for number in range(1, count + 1):
        person = Person(id=number * 7, born=draw.randint(1930, 2000), gender=draw.choice((8507, 8532, 8551)))
        first = START + datetime.timedelta(draw.randint(400, 1500))

        def near(spread: int = 0, first: Day = first) -> Day:
            return first + datetime.timedelta(draw.choice(edges) * draw.choice((-1, 1)) + spread)

        for _ in range(draw.randint(0, 4)):
            person.drugs.append((near(), draw.choice((DRUG_A, DRUG_A_BRAND, DRUG_B, DRUG_B, DRUG_C))))
        for _ in range(draw.randint(0, 4)):
            person.conditions.append((near(), draw.choice((ILL, ILL_MILD, ILL_SEVERE, EVENT))))
        person.visits = [near() for _ in range(draw.randint(0, 5))]
        for _ in range(draw.randint(0, 4)):
            lab_id += 1
            value = None if draw.random() < 0.2 else draw.choice((0.1, 4.5, 1e-3, 120.25, 7.0))
            person.labs.append((near(), lab_id, value, draw.choice((LAB_UNIT, OTHER_UNIT))))
        begin = first - datetime.timedelta(draw.choice((0, 30, 180, 365, 700)))
        end = first + datetime.timedelta(draw.choice((0, 30, 90, 179, 180, 365, 900)))
        if draw.random() < 0.9:
            person.observed.append((begin, end))
        if draw.random() < 0.2:
            person.died = draw.choice((near(), end))
        everyone.append(person)
    return everyone


def write_cdm(path: Path) -> None:
    """Write the invented people as a CDM."""
    everyone = people()
    tables: dict[str, tuple[str, list[tuple[object, ...]]]] = {
        "person": ("person_id INTEGER, gender_concept_id INTEGER, year_of_birth INTEGER", []),
        "observation_period": (
            "person_id INTEGER, observation_period_start_date DATE, observation_period_end_date DATE",
            [],
        ),
        "drug_exposure": ("person_id INTEGER, drug_exposure_start_date DATE, drug_concept_id INTEGER", []),
        "condition_occurrence": (
            "person_id INTEGER, condition_start_date DATE, condition_concept_id INTEGER",
            [],
        ),
        "visit_occurrence": ("person_id INTEGER, visit_start_date DATE", []),
        "measurement": (
            "measurement_id INTEGER, person_id INTEGER, measurement_date DATE, "
            "measurement_concept_id INTEGER, value_as_number DOUBLE, unit_concept_id INTEGER",
            [],
        ),
        "death": ("person_id INTEGER, death_date DATE", []),
        "concept_ancestor": ("ancestor_concept_id INTEGER, descendant_concept_id INTEGER", []),
    }
    for person in everyone:
        tables["person"][1].append((person.id, person.gender, person.born))
        tables["observation_period"][1].extend((person.id, *period) for period in person.observed)
        tables["drug_exposure"][1].extend((person.id, *drug) for drug in person.drugs)
        tables["condition_occurrence"][1].extend((person.id, *condition) for condition in person.conditions)
        tables["visit_occurrence"][1].extend((person.id, day) for day in person.visits)
        for day, number, value, unit in person.labs:
            tables["measurement"][1].append((number, person.id, day, LAB, value, unit))
        if person.died is not None:
            tables["death"][1].append((person.id, person.died))
    for above, below in ANCESTORS.items():
        tables["concept_ancestor"][1].extend((above, each) for each in below)
    with duckdb.connect(str(path)) as connection:
        for name, (columns, rows) in tables.items():
            connection.execute(f"CREATE TABLE {name} ({columns})")
            frame = pd.DataFrame(rows)
            connection.register("frame", frame)
            connection.execute(f"INSERT INTO {name} SELECT * FROM frame")  # noqa: S608


# The second way.


@dataclass(frozen=True)
class Candidate:
    person: Person
    day: Day
    start: Day
    arms: tuple[int, ...]


def members(concepts: ConceptSet) -> set[int]:
    def closed(ids: tuple[int, ...]) -> set[int]:
        below = {each for i in ids for each in ANCESTORS.get(i, ())} if concepts.descendants else set()
        return {*ids, *below}

    return closed(concepts.ids) - closed(concepts.exclude)


def records(person: Person, domain: Domain, concepts: ConceptSet) -> list[Day]:
    among = members(concepts)
    kept = person.conditions if domain is Domain.CONDITION else person.drugs
    return [day for day, concept in kept if concept in among]


def between(day: Day, zero: Day, first: int | None, last: int) -> bool:
    offset = (day - zero).days
    return (first is None or offset >= first) and offset <= last


def expected(trial: TargetTrial, everyone: list[Person]) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the attrition's counts and the rows of the table, in the order of person_id."""
    counts = [len(everyone)]
    candidates = list(_candidates(trial, everyone, counts))

    def step(keep: Callable[[Candidate], bool]) -> None:
        candidates[:] = [c for c in candidates if keep(c)]
        counts.append(len({c.person.id for c in candidates}))

    counts.append(len({c.person.id for c in candidates}))
    exposed = {p.id: exposures(trial, p) for p in everyone}
    washout = trial.time_zero.washout_days
    reach = datetime.timedelta(washout or 10**5)
    step(lambda c: not any(c.day - reach <= day < c.day for day, _ in exposed[c.person.id]))
    step(lambda c: len(c.arms) == 1)
    rules = trial.eligibility
    if rules.age is not None:
        step(lambda c: rules.age[0] <= c.day.year - c.person.born <= rules.age[1])
    if rules.observation_days_before is not None:
        need = datetime.timedelta(rules.observation_days_before)
        step(lambda c: any(a <= c.day - need and c.day <= b for a, b in c.person.observed))
    for rule in rules.criteria:

        def meets(c: Candidate, rule: Criterion = rule) -> bool:
            days = records(c.person, rule.domain, rule.concepts)
            return any(between(day, c.day, rule.from_day, rule.to_day) for day in days) == rule.present

        step(meets)
    if trial.time_zero.condition is not None:
        step(lambda c: _at_landmark(trial, c))
    first: dict[int, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: (c.person.id, c.day)):
        first.setdefault(candidate.person.id, candidate)
    return counts, [_row(trial, c) for c in first.values()]


def exposures(trial: TargetTrial, person: Person) -> set[tuple[Day, int]]:
    return {
        (day, arm)
        for arm, strategy in enumerate(trial.strategies)
        for day in records(person, Domain.DRUG, strategy.drugs)
    }


def _candidates(trial: TargetTrial, everyone: list[Person], counts: list[int]) -> Iterator[Candidate]:
    condition = trial.time_zero.condition
    if condition is not None:
        counts.append(sum(bool(records(p, Domain.CONDITION, condition)) for p in everyone))
    for person in everyone:
        by_day: dict[Day, set[int]] = defaultdict(set)
        for day, arm in exposures(trial, person):
            by_day[day].add(arm)
        if condition is None:
            for day, arms in by_day.items():
                yield Candidate(person, day, day, tuple(sorted(arms)))
            continue
        days = records(person, Domain.CONDITION, condition)
        if days:
            zero, grace = min(days), trial.time_zero.grace_days
            begun = {a for day, arms in by_day.items() if 0 <= (day - zero).days <= grace for a in arms}
            if begun:
                yield Candidate(person, zero, zero + datetime.timedelta(grace), tuple(sorted(begun)))


def _at_landmark(trial: TargetTrial, c: Candidate) -> bool:
    if c.person.died is not None and c.person.died <= c.start:
        return False
    if trial.outcome.conditions is not None:
        days = records(c.person, Domain.CONDITION, trial.outcome.conditions)
        if any(c.day < day <= c.start for day in days):
            return False
    if trial.eligibility.observation_days_before is None:
        return True
    return any(a <= c.start <= b for a, b in c.person.observed)


def _row(trial: TargetTrial, c: Candidate) -> dict[str, object]:
    row: dict[str, object] = {
        "strategy": trial.strategies[c.arms[0]].name,
        **(
            {trial.outcome.name: _outcome(trial, c)}
            if trial.outcome.period_days is None
            else _time_to_event(trial, c)
        ),
    }
    for covariate in trial.covariates:
        row |= _covariate(covariate, c)
    return row


def _time_to_event(trial: TargetTrial, c: Candidate) -> dict[str, object]:
    """Walk through the days of follow-up until something happens."""
    died, outcome = c.person.died, trial.outcome
    events = (
        {died} if outcome.conditions is None else set(records(c.person, Domain.CONDITION, outcome.conditions))
    )
    switches = {day for day, arm in exposures(trial, c.person) if arm != c.arms[0]}
    observed_to = max((b for a, b in c.person.observed if a <= c.start <= b), default=None)
    ends = Censoring.END_OF_OBSERVATION in trial.censoring
    complete = ends and outcome.conditions is not None and died is not None and c.start < died <= observed_to
    complete = complete and died <= c.start + datetime.timedelta(outcome.days)
    event, number = 0.0, 0
    for number in range(outcome.days + 1):
        day = c.start + datetime.timedelta(number)
        if number and day in events:
            event = 1.0
            break
        if number and Censoring.SWITCH in trial.censoring and day in switches:
            break
        if ends and not complete and day == observed_to:
            break
    return {outcome.name: event, outcome.time: float(number)}


def _outcome(trial: TargetTrial, c: Candidate) -> float:
    last = c.start + datetime.timedelta(trial.outcome.days)

    def first(days: list[Day]) -> Day | None:
        return min((day for day in days if c.start < day <= last), default=None)

    death = first([] if c.person.died is None else [c.person.died])
    ends = Censoring.END_OF_OBSERVATION in trial.censoring
    observed_to = max((b for a, b in c.person.observed if a <= c.start <= b), default=None)
    if trial.outcome.conditions is None:
        event = death if death and not (ends and death > observed_to) else None
    else:
        event = first(records(c.person, Domain.CONDITION, trial.outcome.conditions))
    if Censoring.SWITCH in trial.censoring:
        switch = first([day for day, arm in exposures(trial, c.person) if arm != c.arms[0]])
        if switch and (event is None or switch < event):
            return float("nan")
    if ends and observed_to < last:
        complete = death is not None and death <= observed_to
        if trial.outcome.conditions is None and event is None:
            return float("nan")
        if trial.outcome.conditions is not None and not complete:
            return float("nan")
    return float(event is not None)


def _covariate(covariate: object, c: Candidate) -> dict[str, object]:
    person = c.person
    match covariate:
        case AgeAtBaseline(name=name):
            return {name: float(c.day.year - person.born)}
        case Sex(name=name):
            return {name: {8507: "male", 8532: "female"}.get(person.gender, "other")}
        case VisitCount(name=name):
            days, first, last = person.visits, covariate.from_day, covariate.to_day
        case AnyRecord(name=name):
            days = records(person, covariate.domain, covariate.concepts)
            first, last = covariate.from_day, covariate.to_day
        case LastMeasurement(name=name):
            taken = [
                (day, number, value)
                for day, number, value, unit in person.labs
                if value is not None
                and covariate.range[0] <= value <= covariate.range[1]
                and between(day, c.day, covariate.from_day, covariate.to_day)
                and (not covariate.units or unit in covariate.units)
            ]
            value = max(taken)[2] if taken else covariate.if_missing
            return {name: float(value), f"{name}_measured": float(bool(taken))}
    count = sum(between(day, c.day, first, last) for day in days)
    return {name: float(min(count, covariate.most) if isinstance(covariate, VisitCount) else count > 0)}
