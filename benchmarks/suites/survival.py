"""A risk difference by TMLE over person-periods: time by the number of periods, memory, and two peers.

No Python peer has a TMLE of time to an event. Beside ours stand the Cox model of lifelines, which fits the
same covariates to the same people and estimates something else, and zEpid's weights of treatment and
censoring with a weighted Kaplan-Meier curve per arm, which estimate the same from two of our three models,
without a standard error.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import psutil

from benchmarks.table import Row

COVARIATES = [f"x{j}" for j in range(10)]
TERMS = " + ".join(COVARIATES)
PERIODS = (6, 12, 24)
MOST_MEMORY = 3.0  # times the wide table
GROUP = "time to an event"


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
        found = _apart("ours", n, periods)
        yield Row(
            group=GROUP,
            what=f"RiskDifference, three GLMs, n = {n:.0e}, K = {periods}",
            against=f"K = {periods // 2}" if before else "",
            unit="s (CPU)",
            ours=found["cpu"],
            theirs=before,
            note=f"{found['rounds']:.0f} rounds",
        )
        yield Row(
            group=GROUP,
            what=f"memory beyond the wide table, n = {n:.0e}, K = {periods}",
            against="the wide table",
            unit="MB",
            ours=found["extra"],
            theirs=found["wide"],
            most=None if quick else MOST_MEMORY,
        )
        before = found["cpu"]
    for name, label in {"cox": "lifelines, Cox model", "weighted": "zEpid, IPTW and IPCW"}.items():
        theirs = _apart(name, n, PERIODS[-1])
        what = f"RiskDifference, n = {n:.0e}, K = {PERIODS[-1]}"
        yield Row(
            group=GROUP, what=what, against=label, unit="s (CPU)", ours=found["cpu"], theirs=theirs["cpu"]
        )
        what = f"memory beyond the wide table, n = {n:.0e}, K = {PERIODS[-1]}"
        yield Row(
            group=GROUP, what=what, against=label, unit="MB", ours=found["extra"], theirs=theirs["extra"]
        )


def _apart(what: str, n: int, periods: int) -> dict[str, float]:
    """Return what `measure` finds in a process of its own, whose memory is asked."""
    command = [sys.executable, "-m", "benchmarks.suites.survival", what, str(n), str(periods)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own
    return dict(json.loads(done.stdout.splitlines()[-1]))


Columns = dict[str, np.ndarray]


def ours(columns: Columns, periods: int) -> dict[str, float]:
    """Run the study, on two GLMs over person-periods and one over people."""
    import fedtmle as ft

    study = ft.Study(
        target=ft.RiskDifference(outcome="d", time="t", treatment="a", periods=periods),
        hazard_model=ft.GLM(f"a + {TERMS} + period"),
        censoring_model=ft.GLM(f"a + {TERMS}"),
        treatment_model=ft.GLM(TERMS),
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
    document = ft.run(study, {"all": columns}).document
    return {
        "rounds": sum(document["account"]["rounds"].values()),
        "estimate": document["estimates"][0]["estimate"],
    }


def cox(columns: Columns, periods: int) -> dict[str, float]:
    """Fit the Cox model of lifelines to the same covariates."""
    from lifelines import CoxPHFitter

    del periods
    fit = CoxPHFitter().fit(pd.DataFrame(columns), duration_col="t", event_col="d")
    return {"estimate": float(fit.params_["a"])}


def weighted(columns: Columns, periods: int) -> dict[str, float]:
    """Estimate the risk difference by zEpid's weights of treatment and censoring over person-periods."""
    from zepid.causal.ipw import IPCW, IPTW

    wide = pd.DataFrame(columns)
    treatment = IPTW(wide, treatment="a", outcome="d")
    treatment.treatment_model(TERMS, stabilized=False, print_results=False)
    treatment.marginal_structural_model("a")
    treatment.fit()
    last = wide["t"].to_numpy().astype(int)
    rows = np.repeat(np.arange(len(wide)), last)
    long = wide.iloc[rows].reset_index(drop=True)
    long["period"] = np.arange(len(rows)) - np.repeat(np.cumsum(last) - last, last) + 1
    long["id"], long["event"] = rows, long["d"] * (long["period"] == long["t"])
    long["w"] = np.asarray(treatment.iptw)[rows]
    censoring = IPCW(long, idvar="id", time="period", event="event")
    censoring.regression_models(f"a + {TERMS}", "period", print_results=False)
    censoring.fit()
    long["w"] *= censoring.Weight
    sums = long.assign(e=long["w"] * long["event"]).groupby(["a", "period"])[["w", "e"]].sum()
    hazard = (sums["e"] / sums["w"]).unstack("period").to_numpy()[:, :periods]
    risk = 1.0 - np.prod(1.0 - hazard, axis=1)
    return {"estimate": float(risk[1] - risk[0])}


PROGRAMS: dict[str, Callable[[Columns, int], dict[str, float]]] = {
    "ours": ours,
    "cox": cox,
    "weighted": weighted,
}


def measure(what: str, n: int, periods: int) -> dict[str, Any]:
    """Return CPU seconds, and the memory that a program takes beyond the caller's table, in MB."""
    program, data = PROGRAMS[what], people(n, periods)
    columns = {name: np.ascontiguousarray(data[name]) for name in data}
    del data
    program({name: column[:500] for name, column in columns.items()}, periods)  # imports and compiles
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
    found = program(columns, periods)
    cpu = time.process_time() - start
    done.set()
    watching.join()
    wide = sum(column.nbytes for column in columns.values())
    return {"cpu": cpu, "extra": (peak - at_rest) / 1e6, "wide": wide / 1e6, **found}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
