"""What validation costs: a silo with the default policy, and one with a ledger too, beside one with neither.

    python -m benchmarks.validation [rows in a silo]

Two ways to tell. The guard's and the ledger's own time is taken within each round, the median of all
runs; and the same run is made with and without, in random order, the median of the ratios counting. A round
is to spend less than a tenth on validation. Journals are in memory and ledgers on disk without fsync: what
a medium takes to be sure is not validation.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.data import load_all
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.journal import MemoryJournal
from fedtmle_paper.two_arm import TwoArm

SILOS = ("north", "south")
REPEATS = 31
WAYS = ("bare", "checked", "with ledger")
COVARIATES = [f"x{j}" for j in range(10)]
STUDY = ft.Study(
    target=ft.ATE(outcome="outcome", treatment="treatment"),
    outcome_model=ft.GLM(" + ".join(["treatment", *COVARIATES])),
    treatment_model=ft.GLM(" + ".join(COVARIATES)),
    algorithm=ft.Coded(),
    variables=ft.Variables(
        {
            "outcome": {"kind": "number", "range": (-20, 20)},
            "treatment": {"kind": "binary"},
            **{name: {"kind": "number", "range": (-10, 10)} for name in COVARIATES},
        }
    ),
)
SMALL = replace(STUDY, outcome_model=ft.GLM("treatment"), treatment_model=ft.GLM("x0"))
TWO_ARM = TwoArm(outcome_bounds=(-10.0, 10.0), weight_ceiling=64.0)
MEAN = ft.Mean(bounds=(0.0, 20.0))
NEWTON = ft.Gradient(tolerance=1e-8, optimizer=ft.Newton())
Rows = dict[str, Any]


def cohort(n: int, rng: np.random.Generator) -> Rows:
    """Records of a study with ten covariates."""
    x = rng.normal(size=(len(COVARIATES), n))
    a = (rng.random(n) < 1 / (1 + np.exp(-0.3 * x[:5].sum(axis=0)))).astype(int)
    y = np.clip(0.2 * x.sum(axis=0) + a + rng.normal(size=n), -20, 20)
    return {**dict(zip(COVARIATES, x, strict=True)), "treatment": a, "outcome": y}


def arms(n: int, rng: np.random.Generator) -> Rows:
    """Rows of the two-arm problem."""
    w = rng.normal(size=n)
    g = 1 / (1 + np.exp(-0.6 * w))
    a = (rng.random(n) < g).astype(float)
    y = np.clip(1.0 + 2.0 * a + w + rng.normal(size=n), -9, 9)
    q1, q0 = np.clip(2.2 + 0.7 * w, -9, 9), np.clip(0.8 + 0.7 * w, -9, 9)
    return {"outcome": y, "treatment": a, "Q1": q1, "Q0": q0, "g": g}


def numbers(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.gamma(2.0, 1.0, size=n).clip(0, 20)


def of_study(study: ft.Study, n: int) -> tuple[Plan, Rows]:
    rng = np.random.default_rng(1)
    cohorts = {silo: cohort(n, rng) for silo in SILOS}
    return study_plan(study, roster(SILOS)), load_all(cohorts, schema_of(study))


def batches(n: int) -> ft.Gradient:
    """Twenty batches of a tenth of the pooled rows."""
    sgd = ft.StochasticGradientDescent(batch=len(SILOS) * n // 10, step=0.1, steps=20)
    return ft.Gradient(tolerance=1e-8, optimizer=sgd, max_updates=1)


def of_problem(problem: Any, law: Any, algorithm: Any, make: Callable[..., Any], n: int) -> tuple[Plan, Rows]:
    rng = np.random.default_rng(1)
    plan = Plan(program=TargetingProgram(problem=problem, law=law, algorithm=algorithm), roster=roster(SILOS))
    return plan, {silo: read_rows(problem, silo, make(n, rng)) for silo in SILOS}


def runs(n: int) -> Iterator[tuple[str, Plan, Rows]]:
    yield "study: ATE, GLMs of 10 columns, Coded", *of_study(STUDY, n)
    yield "study: ATE, GLMs of one column, Coded", *of_study(SMALL, n)
    for name, algorithm in {"Coded": ft.Coded(tolerance=1e-5), "Newton": NEWTON, "SGD": batches(n)}.items():
        yield f"TwoArm, {name}", *of_problem(TWO_ARM, TWO_ARM.start(), algorithm, arms, n)
    yield "Mean, Coded", *of_problem(MEAN, MEAN.start(3.0), ft.Coded(tolerance=1e-5), numbers, n)


@dataclass
class Step:
    """One request to one silo: seconds, and of those the guard's own and the ledger's."""

    phase: str
    spent: float
    checks: float
    ledger: float


class Timed(Silo):
    """A silo that remembers what its steps took, but the greeting and the comparison."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps: list[Step] = []
        self._own = {"checks": 0.0, "ledger": 0.0}
        for name in ("admit", "examine", "release", "charge"):
            setattr(self._guard, name, self._timed(getattr(self._guard, name), "checks"))
        self._records.note = self._timed(self._records.note, "ledger")

    def _timed(self, work: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()  # to read CPU time would take as long as most of this work
            result = work(*args, **options)
            self._own[what] += time.perf_counter() - begin
            return result

        return timed

    def _answer(self, query: Any, recorded: Any) -> Any:
        """What is found once, and the answer needs too, is not the guard's."""
        query.functionals  # noqa: B018 - by the grid of its sums
        for point in (point for member in query.members for point in member.evaluations()):
            submodel = self._rows.submodel(point.model, point.law, point.batch)
            if isinstance(submodel, GeneralisedLinear):
                submodel._rows  # noqa: B018
        return super()._answer(query, recorded)

    def step(self, request: bytes) -> bytes:
        self._own.update(checks=0.0, ledger=0.0)
        begin = time.perf_counter()
        reply = super().step(request)
        spent = time.perf_counter() - begin
        query = self._progress.query
        if query is not None and self.state.name == "ANSWERING":
            self.steps.append(Step(query.phase.value, spent, **self._own))
        return reply


def measure(plan: Plan, rows: Rows, way: str) -> list[list[Step]]:
    """The steps of each silo."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        parties = []
        for silo, own in rows.items():
            policy, ledger = UNGUARDED if way == "bare" else Policy(), None
            if way == "with ledger":
                ledger = opened.enter_context(closing(Ledger(Path(folder) / silo, sync=False)))
            keeper = Keeper(policy=policy, journal=MemoryJournal(), ledger=ledger)
            parties.append(Timed(silo, plan, own, keeper=keeper))
        gc.collect()
        gc.disable()  # else a collection falls into the same round of every run
        try:
            Session(plan, InProcess(parties)).run()
        finally:
            gc.enable()
    return [party.steps for party in parties]


def main() -> int:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(f"{n:,} rows in each of two silos, {REPEATS} runs each way. Shares of a round's time:")
    print("the guard's and the ledger's own, on average and in the worst round of the phase;")
    print("and what a run takes more with checks, and with checks and ledger, than with neither.\n")
    print(f"{'':<35}{'checks':>16}{'ledger':>16}{'run with':>16}")
    print(f"{'':<19}{'rounds':>7}{'of':>9}", end="")
    print(f"{'mean':>9}{'worst':>7}{'mean':>9}{'worst':>7}{'checks':>9}{'both':>7}")
    order = np.random.default_rng(1)
    for name, plan, rows in runs(n):
        print(name)
        measure(plan, rows, "with ledger")  # compiles
        gc.freeze()
        taken: dict[str, list[list[list[Step]]]] = {way: [] for way in WAYS}
        for _ in range(REPEATS):
            for way in order.permutation(WAYS).tolist():  # what comes first finds another machine
                taken[way].append(measure(plan, rows, way))
        phases = np.array([step.phase for step in taken["bare"][0][0]])
        bare, checked, kept = (_numbers(taken[way], "spent").sum(axis=(1, 2)) for way in WAYS)
        all_spent, checks, ledger = (
            np.median(_numbers(taken["with ledger"], of), axis=0).mean(axis=0)  # of runs, then of silos
            for of in ("spent", "checks", "ledger")
        )
        for phase in (*dict.fromkeys(phases), "all"):
            at = phases == phase if phase != "all" else np.full(len(phases), True)
            line = f"  {phase:<17}{at.sum():>7}{1e3 * all_spent[at].mean():>6.2f} ms"
            for own in (checks, ledger):
                mean, worst = own[at].sum() / all_spent[at].sum(), (own[at] / all_spent[at]).max()
                line += f"{mean:>9.1%}{worst:>7.1%}"
            if phase == "all":
                more, most = (np.median(way / bare) - 1 for way in (checked, kept))
                line += f"{more:>9.1%}{most:>7.1%}"
            print(line)
    return 0


def _numbers(runs: list[list[list[Step]]], of: str) -> np.ndarray:
    """A number of every step, shape (runs, silos, rounds)."""
    return np.array([[[getattr(step, of) for step in silo] for silo in run] for run in runs])


if __name__ == "__main__":
    raise SystemExit(main())
