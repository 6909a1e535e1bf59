"""What validation costs: a silo with the default policy, and one with a ledger too, beside one with neither.

    python -m benchmarks.validation [rows in a silo]

The same run is made in turns; of each round the least CPU time of several runs counts. A round is to
spend less than a tenth on validation. Journals are in memory and ledgers on disk without fsync: what a
medium takes to be sure is not validation.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.federation import InProcess
from fedtmle.runtime.journal import MemoryJournal
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import Session
from fedtmle.runtime.silo import Silo
from fedtmle.studies.plan import study_plan
from fedtmle.studies.schema import schema_of

SILOS = ("north", "south")
REPEATS = 9
WAYS = ("bare", "checked", "with ledger")
COVARIATES = [f"x{j}" for j in range(10)]
STUDY = ft.Study(
    target=ft.ATE(outcome="outcome", treatment="treatment", outcome_bounds=(-20.0, 20.0)),
    outcome_model=ft.GLM(" + ".join(["treatment", *COVARIATES])),
    treatment_model=ft.GLM(" + ".join(COVARIATES)),
    algorithm=ft.Coded(),
)
TWO_ARM = ft.TwoArm(outcome_bounds=(-10.0, 10.0), weight_ceiling=64.0)
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


def of_study(n: int) -> tuple[Plan, Rows]:
    rng = np.random.default_rng(1)
    return study_plan(STUDY, roster(SILOS)), load_all(
        {silo: cohort(n, rng) for silo in SILOS}, schema_of(STUDY)
    )


def of_problem(problem: Any, law: Any, algorithm: Any, make: Callable[..., Any], n: int) -> tuple[Plan, Rows]:
    rng = np.random.default_rng(1)
    plan = Plan(subject=problem, law=law, algorithm=algorithm, roster=roster(SILOS))
    return plan, {silo: read_rows(problem, silo, make(n, rng)) for silo in SILOS}


def runs(n: int) -> Iterator[tuple[str, Plan, Rows]]:
    yield "a study: ATE, GLMs, Coded", *of_study(n)
    for name, algorithm in {"Coded": ft.Coded(tolerance=1e-5), "Newton": NEWTON}.items():
        yield f"TwoArm, {name}", *of_problem(TWO_ARM, TWO_ARM.start(), algorithm, arms, n)
    yield "Mean, Coded", *of_problem(MEAN, MEAN.start(3.0), ft.Coded(tolerance=1e-5), numbers, n)


def measure(plan: Plan, rows: Rows, way: str) -> list[tuple[str, float]]:
    """The phase and the CPU seconds of each step of each silo, but the greeting and the comparison."""
    steps: list[tuple[str, float]] = []

    class Timed(Silo):
        def step(self, request: bytes) -> bytes:
            begin = time.process_time()
            reply = super().step(request)
            spent = time.process_time() - begin
            query = self._position.query
            if query is not None and self.state.name == "ANSWERING":
                steps.append((query.phase.value, spent))
            return reply

    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        parties = []
        for silo, own in rows.items():
            policy, ledger = Policy.unguarded() if way == "bare" else Policy(), None
            if way == "with ledger":
                ledger = opened.enter_context(closing(Ledger(Path(folder) / silo, sync=False)))
            keeper = Keeper(policy=policy, journal=MemoryJournal(), ledger=ledger)
            parties.append(Timed(silo, plan, own, keeper=keeper))
        Session(plan, InProcess(parties)).run()
    return steps


def main() -> int:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(f"{n:,} rows in each of two silos; CPU time of a silo's round, least of {REPEATS} runs;")
    print("the share of checks, and of checks and ledger, in a round that has them\n")
    print(f"{'':<27}{'phase':<12}{'rounds':>6}{'bare':>11}{'checks':>9}{'all':>8}{'worst':>8}")
    for name, plan, rows in runs(n):
        taken: dict[str, list[list[tuple[str, float]]]] = {way: [] for way in WAYS}
        for _ in range(REPEATS):
            for way, of in taken.items():
                of.append(measure(plan, rows, way))
        phases = np.array([phase for phase, _ in taken["bare"][0]])
        least = {
            way: np.min([[spent for _, spent in run] for run in of], axis=0) for way, of in taken.items()
        }
        for phase in (*dict.fromkeys(phases), "all"):
            at = phases == phase if phase != "all" else np.full(len(phases), True)
            bare, checked, kept = (least[way][at] for way in WAYS)
            of_round = [1 - bare.mean() / more.mean() for more in (checked, kept)]
            by_round = (1 - _rounds(bare) / _rounds(kept)).max()
            rounds = at.sum() // len(SILOS)
            shares = f"{of_round[0]:>9.1%}{of_round[1]:>8.1%}{by_round:>8.1%}"
            print(f"{name:<27}{phase:<12}{rounds:>6}{1e3 * bare.mean():>8.2f} ms{shares}")
    return 0


def _rounds(times: np.ndarray) -> np.ndarray:
    """The mean over silos of each round."""
    return times.reshape(-1, len(SILOS)).mean(axis=1)


if __name__ == "__main__":
    raise SystemExit(main())
