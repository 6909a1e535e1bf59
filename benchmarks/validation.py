"""What validation costs: guard, journal and ledger against the whole of a silo's rounds.

    python -m benchmarks.validation [rows]

Both are measured in the same run, so the share does not depend on how busy the machine is. The journal
is in memory and the ledger on disk without fsync: what a medium takes to be sure is not validation.
The default policy is in force.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.protocol.guard import Guard
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.federation import InProcess
from fedtmle.runtime.journal import MemoryJournal
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.rows import LocalRows, read_rows
from fedtmle.runtime.session import Session
from fedtmle.runtime.silo import Silo

TWO_ARM = ft.TwoArm(outcome_bounds=(-10.0, 10.0), weight_ceiling=64.0)
MEAN = ft.Mean(bounds=(0.0, 20.0))
RUNS = {
    "TwoArm, Coded": (TWO_ARM, TWO_ARM.start(), ft.Coded(tolerance=1e-5)),
    "TwoArm, Gradient": (TWO_ARM, TWO_ARM.start(), ft.Gradient(tolerance=1e-5)),
    "TwoArm, Gradient by Newton": (
        TWO_ARM,
        TWO_ARM.start(),
        ft.Gradient(tolerance=1e-8, optimizer=ft.Newton()),
    ),
    "Mean, Coded": (MEAN, MEAN.start(3.0), ft.Coded(tolerance=1e-5)),
    "Mean, Gradient": (MEAN, MEAN.start(3.0), ft.Gradient(tolerance=1e-5)),
}
REPEATS = 7
PARTS: tuple[tuple[str, type[Any], str], ...] = (
    ("guard", Guard, "open"),
    ("guard", Guard, "admit"),
    ("guard", Guard, "examine"),
    ("guard", Guard, "examine_answer"),
    ("prepared", LocalRows, "_at"),  # what the round needs anyway, whoever asks for it first
    ("order", Silo, "_out_of_order"),
    ("order", Silo, "_standing"),
    ("journal", MemoryJournal, "append"),
    ("ledger", Ledger, "add"),
    ("round", Silo, "step"),
)


def rows(n: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Rows of the two-arm problem, and of the mean."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=n)
    g = 1 / (1 + np.exp(-0.6 * w))
    a = (rng.random(n) < g).astype(float)
    y = np.clip(1.0 + 2.0 * a + w + rng.normal(size=n), -9, 9)
    q1, q0 = np.clip(2.2 + 0.7 * w, -9, 9), np.clip(0.8 + 0.7 * w, -9, 9)
    return {"outcome": y, "treatment": a, "Q1": q1, "Q0": q0, "g": g}, rng.gamma(2.0, 1.0, size=n).clip(0, 20)


class Stopwatch:
    """CPU time by part, without what another part took within it; one table for each step of each silo."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._open: list[float] = []

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if part == "round":
                self.steps.append(defaultdict(float))
            self._open.append(0.0)
            before = time.process_time()
            try:
                return function(*args, **options)
            finally:
                spent = time.process_time() - before
                within = self._open.pop()
                self.steps[-1][part] += spent - within
                if self._open:
                    self._open[-1] += spent

        return call


def measure(name: str, n: int, silos: int) -> list[dict[str, float]]:
    """Seconds by part, in each step of each silo."""
    problem, law, algorithm = RUNS[name]
    two_arm, mean = rows(n, 1)
    cuts = np.array_split(np.arange(n), silos)
    raw = [{k: v[cut] for k, v in two_arm.items()} if problem is TWO_ARM else mean[cut] for cut in cuts]
    names = [f"silo {m}" for m in range(silos)]
    plan = Plan(subject=problem, law=law, algorithm=algorithm, roster=roster(names))
    watch = Stopwatch()
    plain = [(owner, method, getattr(owner, method)) for _, owner, method in PARTS]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        parties = []
        for silo, own in zip(names, raw, strict=True):
            ledger = opened.enter_context(closing(Ledger(Path(folder) / f"{silo}.jsonl", sync=False)))
            keeper = Keeper(policy=Policy(), journal=MemoryJournal(), ledger=ledger)
            parties.append(Silo(silo, plan, read_rows(problem, silo, own), keeper=keeper))
        try:
            for part, owner, method in PARTS:
                setattr(owner, method, watch.timed(getattr(owner, method), part))
            Session(plan, InProcess(parties)).run()
        finally:
            for owner, method, function in plain:
                setattr(owner, method, function)
    return watch.steps


def least(name: str, n: int) -> list[dict[str, float]]:
    """The least of several runs, part by part: what the work takes when nothing disturbs it."""
    measure(name, 1_000, 2)  # compiles what has to be compiled
    runs = [measure(name, n, 2) for _ in range(REPEATS)]
    return [
        {part: min(run[k].get(part, 0.0) for run in runs) for part in runs[0][k]} for k in range(len(runs[0]))
    ]


def row(name: str, steps: list[dict[str, float]]) -> str:
    whole = sum(sum(step.values()) for step in steps)
    guard, journal, ledger = (
        sum(step.get(part, 0.0) for step in steps for part in parts) / whole
        for parts in (("guard", "order"), ("journal",), ("ledger",))
    )
    shares = (guard, journal, ledger, guard + journal + ledger)
    return f"{name:<36}{1e3 * whole / len(steps):>9.2f}" + "".join(f"{share:>9.1%}" for share in shares)


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(f"n = {n:,} in two silos; CPU time of a silo's rounds, least of {REPEATS} runs\n")
    print(f"{'':<36}{'ms/round':>9}{'guard':>9}{'journal':>9}{'ledger':>9}{'all':>9}")
    for name in RUNS:
        steps = least(name, n)
        rounds = steps[2:-4]  # two silos: without the opening, the close and the comparison
        print(row(f"{name}, all rounds", rounds))
        print(row("    but the closing one", rounds[:-2]))


if __name__ == "__main__":
    main()
