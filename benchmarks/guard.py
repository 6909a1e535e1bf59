"""The guard's share of a study: `python -m benchmarks.guard`.

Whole ATEs with 10 covariates over 4 silos under the default policy. "within" is the processor time of
`Guard.examine` over that of the run: it counts what is evaluated there for the first time and then kept
for the answer. "more" is how much longer a run takes than one without limits, in turns. Medians.

--rows N      rows over all silos (200,000)
--repeat N    runs per study (7)
--profile     list the functions of the guard that take the most time
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.protocol.guard import Guard
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of

SILOS = 4
NAMES = [f"x{j}" for j in range(10)]


def study_and_rows(rows: int, binary: bool, sums: Any) -> tuple[Plan, dict[str, object]]:
    """Return the plan of a study, and each silo's rows."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(len(NAMES), rows))
    a = rng.binomial(1, 1 / (1 + np.exp(-0.3 * X[:3].sum(axis=0))))
    score = 0.5 * a + 0.2 * X.sum(axis=0)
    if binary:
        y = rng.binomial(1, 1 / (1 + np.exp(-score))).astype(float)
    else:
        y = np.clip(score + rng.normal(size=rows), -15, 15)
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + " + " + ".join(NAMES)),
        treatment_model=ft.GLM(" + ".join(NAMES)),
        sums=sums,
        variables=ft.Variables(
            {
                "y": {"kind": "binary"} if binary else {"kind": "number", "range": (-15, 15)},
                "a": {"kind": "binary"},
                **{name: {"kind": "number", "range": (-10, 10)} for name in NAMES},
            }
        ),
    )
    columns: Mapping[str, Any] = {**dict(zip(NAMES, X, strict=True)), "a": a, "y": y}
    cuts = np.array_split(np.arange(rows), SILOS)
    parts = {str(m): {name: column[at] for name, column in columns.items()} for m, at in enumerate(cuts)}
    plan = study_plan(study, roster(list(parts)))
    tables = load_all(parts, schema_of(study))
    return plan, dict(tables)


class _Timed:
    """Adds up the processor time of a method."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._examine = Guard.examine

    def __enter__(self) -> _Timed:
        timed, examine = self, self._examine

        def measured(*arguments: Any) -> None:
            start = time.process_time()
            examine(*arguments)
            timed.seconds += time.process_time() - start

        Guard.examine = measured  # type: ignore[method-assign]  # for the time of the measurement
        return self

    def __exit__(self, *_: object) -> None:
        Guard.examine = self._examine  # type: ignore[method-assign]


def run(plan: Plan, rows: Mapping[str, object], policy: Policy) -> float:
    """Run a study; return the processor time."""
    parties = [Silo(name, plan, own, keeper=Keeper(policy=policy)) for name, own in rows.items()]
    start = time.process_time()
    Session(plan, InProcess(parties)).run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    print(f"| study, n = {options.rows:,} | run | guard: within | more |", "|---|--:|--:|--:|", sep="\n")
    for binary in (True, False):
        for sums in ("rounded", "exact"):
            plan, rows = study_and_rows(options.rows, binary, sums)
            run(plan, rows, Policy())  # compiled
            whole, within, more = [], [], []
            for _ in range(options.repeat):
                with _Timed() as timed:
                    whole.append(run(plan, rows, Policy()))
                within.append(timed.seconds / whole[-1])
                more.append(whole[-1] / run(plan, rows, UNGUARDED) - 1.0)
            name = f"{'binary' if binary else 'continuous'} outcome, {sums} sums"
            shares = (f"{100 * statistics.median(each):.0f} %" for each in (within, more))
            print(f"| {name} | {1000 * statistics.median(whole):.0f} ms | {' | '.join(shares)} |", flush=True)
            if options.profile:
                profile = cProfile.Profile()
                profile.runcall(run, plan, rows, Policy())
                pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
