"""Examples of every kind of query: one registry that the tests and the fuzzers read.

Each example was asked and answered in a real run, so no test constructs a query by hand. A new kind of query
needs a run in `RUNS` that asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import GradientBoostedTrees
from fedtmle.model.table import Factor, Table
from fedtmle.protocol.codes import AbstractCode, Memory
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import AbstractQuery, Query
from fedtmle.runtime.certificate import heard_rounds, replay
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from tests import kinds
from tests.declare import declare
from tests.initial.silos import VARIABLES, pooled_table, split, trial
from tests.runtime.faults import CASES, key_of

Run = tuple[Plan, Mapping[str, Any]]

MOST = 3  # examples of one kind: the widths of their payloads differ
TREES = GradientBoostedTrees("x", rounds=2, depth=1, min_leaf=10)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A query, the silos' answers, and the pooled value. ``memory`` is the uplink's before the answers."""

    name: str
    run: str  # a key of `RUNS`
    query: Query
    answers: tuple[Any, ...]
    pooled: Any
    memory: Memory

    @property
    def kind(self) -> type[Query]:
        return type(self.query)

    @property
    def answer_code(self) -> AbstractCode[Any]:
        return self.query.answer_code.after(self.memory)

    @property
    def pooled_code(self) -> AbstractCode[Any]:
        return self.query.pooled_code


def _study(outcome_model: Any, **options: Any) -> Run:
    study = trial(outcome_model, algorithm=ft.Coded(tolerance=0.1), **options)
    tables = split(pooled_table(240, 4), 2)
    return study_plan(study, roster(list(tables))), tables


def _clusters() -> Run:
    """Twelve clusters of twenty rows, most of which have rows in both silos."""
    study = trial(GLM("a + x"), algorithm=ft.Coded(tolerance=0.1), cluster="family", cluster_scope="spanning")
    table = pooled_table(240, 4)
    family = Factor(np.arange(240) % 12, tuple(f"family {k}" for k in range(12)))
    whole = Table(n_rows=240, numeric=table.numeric, factors={**table.factors, "family": family})
    tables = split(whole, 2)
    return study_plan(study, roster(list(tables))), tables


def _populations() -> Run:
    """Local fits are averaged, so the silos' populations are compared."""
    study = trial(GLM("a + x"), algorithm=ft.LocalAverage(tolerance=0.1))
    tables = split(pooled_table(240, 4), 2)
    return study_plan(study, roster(list(tables))), tables


def _missing() -> Run:
    """Some values of x and some treatments are missing."""
    declared = {
        **VARIABLES,
        "x": replace(VARIABLES["x"], missing="impute"),
        "a": replace(VARIABLES["a"], missing="omit"),
    }
    study = trial(GLM("C(a) + x"), algorithm=ft.Coded(tolerance=0.1), variables=ft.Variables(declared))
    table = pooled_table(240, 4)
    lost = np.where(np.arange(240) % 9 == 0, np.nan, table.numeric["x"])
    arms = Factor(np.where(np.arange(240) % 11 == 0, -1, table.factors["a"].codes), ("0", "1"))
    tables = split(table.with_numeric("x", lost).with_factor("a", arms), 2)
    return study_plan(study, roster(list(tables))), tables


def _private() -> Run:
    """Sums with noise, to a trusted server."""
    privacy = ft.Privacy(epsilon=2.0, server="trusted")
    study = trial(GLM("a + x"), algorithm=ft.OneStep(), privacy=privacy)
    tables = split(pooled_table(240, 4), 2)
    return study_plan(study, roster(list(tables))), tables


def _times() -> Run:
    """Time to an event in four periods."""
    study = ft.Study(
        target=ft.Risk(outcome="event", time="time", treatment="a", periods=4, period_length=1.0),
        hazard_model=GLM("a + x"),
        treatment_model=GLM("1"),
        algorithm=ft.Coded(tolerance=0.1),
        variables=declare(event="binary", time=(0, 4), a="binary", x=(-8, 8)),
        diagnostics=False,
    )
    rng = np.random.default_rng(4)
    time, a, x = rng.uniform(0, 4, 240), rng.permutation(np.arange(240) % 2), rng.standard_normal(240)
    records = {"time": time, "event": 1.0 * (rng.random(240) < 0.3), "a": 1.0 * a, "x": x.clip(-4, 4)}
    data = {f"s{m}": {name: column[m::2] for name, column in records.items()} for m in range(2)}
    return study_plan(study, roster(list(data))), dict(load_all(data, schema_of(study)))


LEARNERS = (GLM("a + x + C(site)"), ft.Pilot(TREES, at="s1"), ft.PerSilo(TREES))
RUNS: dict[str, Callable[[], Run]] = {
    **{name: case for name, case in CASES.items() if not case()[0].is_masked},
    "learners": lambda: _study(ft.SuperLearner(LEARNERS, folds=2)),
    "pilot's trees": lambda: _study(ft.Pilot(TREES, at="s1")),
    "pilot's coefficients": lambda: _study(ft.Pilot(GLM("a + x + C(site)"), at="s1")),
    "clusters": _clusters,
    "populations": _populations,
    "missing values": _missing,
    "privacy": _private,
    "times": _times,
    "masked": CASES["study, relayed"],
    "gains": CASES["study, gains"],
}


def silos_of(plan: Plan, rows: Mapping[str, Any]) -> list[Silo]:
    """The silos of a run, unguarded, with keys if the plan has some."""
    keys = {name: key_of(name) for name in rows}
    keepers = {name: Keeper(key=key, mask_key=key.mask_key) for name, key in keys.items()}
    return [
        Silo(name, plan, own, keeper=keepers[name] if plan.is_masked else None) for name, own in rows.items()
    ]


def _recorded(name: str, plan: Plan, rows: Mapping[str, Any]) -> Iterator[Example]:
    """Run a plan and follow it again: each query with its answers and the pooled value."""
    finished = run_embedded(plan, silos_of(plan, rows))
    memory: Memory = {}  # of the first silo's uplink; alike in shape on every one
    number = 0
    own = (
        [replay(plan, rows[silo], finished.transcript, silo).answered for silo in plan.silos]
        if plan.is_masked
        else []
    )
    for k, heard in enumerate(heard_rounds(plan, finished.transcript, finished.sizes)):
        answers = tuple(heard.answers.values()) or tuple(answered[k].answer for answered in own)
        for query, *parts, whole in _parts(heard.query, *answers, heard.pooled):
            number += 1
            yield Example(
                name=f"{type(query).__name__} {number} of '{name}'",
                run=name,
                query=query,
                answers=tuple(parts),
                pooled=whole,
                memory=memory,
            )
        memory = {**memory, **heard.query.answer_code.memory(answers[0])}


def _parts(query: Query, *values: Any) -> Iterator[tuple[Any, ...]]:
    """The query with its answers and its pooled value, then the queries that it is made of with theirs."""
    yield query, *values
    if query.members != (query,):
        yield from zip(query.members, *(query.split(value) for value in values), strict=True)


@cache
def examples() -> tuple[Example, ...]:
    """At most `MOST` examples of each kind of query, from the first runs that ask it."""
    found: dict[type[Query], list[Example]] = {}
    for name, run in RUNS.items():
        for example in _recorded(name, *run()):
            found.setdefault(example.kind, []).append(example)
    return tuple(example for known in found.values() for example in known[:MOST])


def without_example() -> set[str]:
    """Return the names of the concrete kinds of query that no run asks."""
    return kinds.without_example(AbstractQuery, [example.kind for example in examples()])
