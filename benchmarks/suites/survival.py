"""A risk difference by TMLE over person-periods: time by the number of periods, memory, and a Cox model.

The peers have no TMLE of time to an event. The Cox model of lifelines stands beside ours for scale: it fits
the same covariates to the same people, and estimates something else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pandas as pd

from benchmarks.table import Row

COVARIATES = [f"x{j}" for j in range(10)]
PERIODS = (6, 12, 24)
MOST_MEMORY = 3.0  # times the wide table


def people(n: int, periods: int) -> pd.DataFrame:
    """Return people with covariate-dependent treatment, events and censoring."""
    rng = np.random.default_rng(5)
    X = rng.uniform(-1, 1, size=(n, len(COVARIATES)))
    a = (rng.random(n) < 1 / (1 + np.exp(-X[:, 0]))).astype(float)
    last, event, inside = np.full(n, float(periods)), np.zeros(n), np.ones(n, dtype=bool)
    for t in range(1, periods + 1):
        now = inside & (rng.random(n) < 1 / (1 + np.exp(3.8 + 0.5 * a - 0.6 * X[:, 0] - 0.3 * X[:, 1])))
        last[now], event[now], inside = t, 1.0, inside & ~now
        lost = inside & (rng.random(n) < 1 / (1 + np.exp(4.2 - 0.5 * X[:, 0])))
        last[lost], inside = t, inside & ~lost
    return pd.DataFrame(X, columns=COVARIATES).assign(t=last, d=event, a=a)


def rows(quick: bool) -> Iterator[Row]:
    n = 10_000 if quick else 100_000
    before = None
    for periods in PERIODS:
        measured = subprocess.run(  # noqa: S603 - its own process, whose memory is asked
            [sys.executable, "-m", "benchmarks.suites.survival", str(n), str(periods)],
            check=True,
            capture_output=True,
            text=True,
        )
        found = json.loads(measured.stdout)
        yield Row(
            group="time to an event",
            what=f"RiskDifference, three GLMs, n = {n:.0e}, K = {periods}",
            against=f"K = {periods // 2}" if before else "",
            unit="s (CPU)",
            ours=found["cpu"],
            theirs=before,
            note=f"{found['rounds']} rounds",
        )
        yield Row(
            group="time to an event",
            what=f"memory beyond the wide table, n = {n:.0e}, K = {periods}",
            against="the wide table",
            unit="MB",
            ours=found["extra"],
            theirs=found["wide"],
            most=None if quick else MOST_MEMORY,
        )
        before = found["cpu"]
    yield _cox(n, PERIODS[-1], before)


def _cox(n: int, periods: int, ours: float | None) -> Row:
    import time

    from lifelines import CoxPHFitter

    data, start = people(n, periods), time.process_time()
    CoxPHFitter().fit(data, duration_col="t", event_col="d")
    return Row(
        group="time to an event",
        what=f"RiskDifference, n = {n:.0e}, K = {periods}",
        against="lifelines, Cox model",
        unit="s (CPU)",
        ours=ours,
        theirs=time.process_time() - start,
    )


def measure(n: int, periods: int) -> dict[str, float]:
    """Return CPU seconds, and the memory that a study takes beyond the caller's table, in MB."""
    import gc
    import threading
    import time

    import psutil

    import fedtmle as ft

    terms = " + ".join(COVARIATES)
    study = ft.Study(
        target=ft.RiskDifference(outcome="d", time="t", treatment="a", periods=periods),
        hazard_model=ft.GLM(f"a + {terms} + period"),
        censoring_model=ft.GLM(f"a + {terms}"),
        treatment_model=ft.GLM(terms),
        diagnostics=False,
        variables=ft.Variables(
            {
                "t": {"kind": "number", "range": (0, periods)},
                "d": {"kind": "binary"},
                "a": {"kind": "binary"},
                **{name: {"kind": "number", "range": (-1, 1)} for name in COVARIATES},
            }
        ),
    )
    data = people(n, periods)
    columns = {name: np.ascontiguousarray(data[name]) for name in data}
    del data
    ft.run(study, {"few": {name: column[:500] for name, column in columns.items()}})  # compiles
    gc.collect()
    process, done = psutil.Process(), threading.Event()
    at_rest = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    start = time.process_time()
    result = ft.run(study, {"all": columns})
    cpu = time.process_time() - start
    done.set()
    watching.join()
    return {
        "cpu": cpu,
        "extra": (peak - at_rest) / 1e6,
        "wide": sum(column.nbytes for column in columns.values()) / 1e6,
        "rounds": sum(result.document["account"]["rounds"].values()),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
