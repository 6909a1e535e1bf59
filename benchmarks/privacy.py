"""Coverage and width of the intervals of studies with privacy, by simulation: the table of docs/privacy.md.

    python -m benchmarks.privacy --replications 500 --out privacy.csv [--cells NAME ...]

A replication runs the product's own flow on simulated records: its queries, post-processing and interval. The
wire and the masks are left out, and the noise of all silos together is drawn at once as a rounded normal
variate, which at these variances (above 10^12 grid units) cannot be told from the sum of the silos' draws.
`tests/studies/test_private.py` checks that without noise this gives the numbers of `fedtmle.run`.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.model.exact import Sums
from fedtmle.model.types import Array
from fedtmle.programs.flow import StudyProgram
from fedtmle.protocol.outcome import Targeted
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.schema import schema_of

SILOS = 10
Columns = dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One simulated setting."""

    n: int
    p: int = 10
    epsilon: float = 1.0
    g_bounds: Literal["auto"] | float = "auto"
    kind: str = "binary"  # or rare, continuous, wrong g, wrong Q, trial, missing, strong

    @property
    def name(self) -> str:
        return f"{self.kind} n={self.n} p={self.p} eps={self.epsilon:g} g={self.g_bounds}"


def draw(cell: Cell, n: int, rng: np.random.Generator) -> tuple[Columns, float]:
    """Return records and the mean effect at their covariates: normal ones within 3 SD, and a binary one."""
    p, strength = cell.p, 2.0 if cell.kind == "strong" else 1.0
    x = np.clip(rng.standard_normal((p, n)), -3.0, 3.0)
    x[1] = x[1] > 0.3
    slopes_g = strength * np.array([0.4, -0.5, 0.3, *[0.1] * (p - 3)])
    slopes_q = strength * np.array([0.5, 0.6, -0.3, *[0.1] * (p - 3)])
    logit_g = -0.2 + slopes_g @ x + (0.3 * (x[0] ** 2 - 1.0) if cell.kind == "wrong g" else 0.0)
    g = np.full(n, 0.5) if cell.kind == "trial" else _expit(logit_g)
    level = -3.3 if cell.kind == "rare" else -0.6
    bend = 0.3 * (x[0] ** 2 - 1.0) if cell.kind == "wrong Q" else 0.0
    q = [_expit(level + slopes_q @ x + bend + 0.5 * a) for a in (0, 1)]
    a = (rng.random(n) < g).astype(np.float64)
    mean = np.where(a == 1, q[1], q[0])
    if cell.kind == "continuous":
        y = rng.beta(5 * mean, 5 * (1 - mean))
    else:
        y = (rng.random(n) < mean).astype(np.float64)
    if cell.kind == "missing":
        y[rng.random(n) > _expit(1.5 + 0.4 * x[0] - 0.2 * a)] = np.nan
    columns = {"a": a, "y": y, **{f"x{j}": x[j] for j in range(p)}}
    if cell.kind == "trial":
        columns["known"] = g
    return columns, float(np.mean(q[1] - q[0]))


def _expit(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))


def study_of(cell: Cell) -> ft.Study:
    """Return the study of a cell."""
    variables = {f"x{j}": {"kind": "number", "range": [-3, 3]} for j in range(cell.p)}
    variables |= {"x1": {"kind": "binary"}, "a": {"kind": "binary"}, "y": {"kind": "binary"}}
    if cell.kind == "continuous":
        variables["y"] = {"kind": "number", "range": [0, 1]}
    if cell.kind == "trial":
        variables["known"] = {"kind": "number", "range": [0.5, 0.5001]}
    terms = " + ".join(f"x{j}" for j in range(cell.p))
    return ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM(f"a + {terms}"),
        treatment_model=ft.Supplied("known") if cell.kind == "trial" else ft.GLM(terms),
        missingness_model=ft.GLM(f"a + {terms}") if cell.kind == "missing" else None,
        g_bounds=cell.g_bounds,
        variables=ft.Variables(variables),
        privacy=ft.Privacy(epsilon=cell.epsilon),
    )


def run_flow(
    study: ft.Study, columns: Columns, rng: np.random.Generator | None, silos: int = SILOS
) -> Targeted:
    """Run the flow of a study over pooled records; without a generator, the sums have no noise."""
    table = load_all({"all": columns}, schema_of(study))["all"]
    local = LocalRows("all", table, table.n_rows)
    flow = StudyProgram.of(study, [str(m) for m in range(silos)]).flow(table.n_rows)
    query = next(flow)
    while True:
        sums = query.answer(local)
        if rng is not None and query.noise is not None:
            deviation = math.sqrt(float(query.noise * silos))
            noise = rng.standard_normal(len(sums.units)) * deviation
            sums = Sums(
                tuple(u + round(e) for u, e in zip(sums.units, noise.tolist(), strict=True)), sums.shifts
            )
        try:
            query = flow.send(sums)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # mypy does not follow a generator's result


def simulate(cell: Cell, replications: int, seed: int = 1) -> dict[str, float | str]:
    """Return coverage, width and bias over some replications."""
    rng = np.random.default_rng([seed, cell.n, cell.p, round(100 * cell.epsilon)])
    truth = float(np.mean([draw(cell, 200_000, rng)[1] for _ in range(10)]))
    study, start, rows = study_of(cell), time.perf_counter(), []
    for _ in range(replications):
        outcome = run_flow(study, draw(cell, cell.n, rng)[0], rng)
        account = outcome.details.privacy  # type: ignore[attr-defined]  # of a study
        error = float(outcome.estimate.psi[0]) - truth
        std_error, sampling = math.sqrt(outcome.estimate.covariance[0, 0]), math.sqrt(account.sampling[0])
        rows.append((error, std_error, sampling, account.g_bound, float(bool(account.limits))))
    error, std_error, sampling, bound, labelled = np.array(rows).T
    return {
        "cell": cell.name,
        "replications": replications,
        "coverage": float(np.mean(np.abs(error) <= 1.96 * std_error)),
        "coverage_ignoring_noise": float(np.mean(np.abs(error) <= 1.96 * sampling)),
        "width": float(np.mean(std_error / sampling)),
        "bias_in_se": float(np.mean(error) / np.mean(std_error)),
        "sd_over_se": float(np.std(error) / np.mean(std_error)),
        "g_bound": float(np.mean(bound)),
        "labelled": float(np.mean(labelled)),
        "seconds": round((time.perf_counter() - start) / replications, 3),
    }


def cells() -> Iterator[Cell]:
    """Yield the settings of the table."""
    for n in (10_000, 30_000, 100_000):
        for epsilon in (0.5, 1.0, 2.0, 4.0):
            for p in (10, 5):
                yield Cell(n=n, p=p, epsilon=epsilon)
            yield Cell(n=n, epsilon=epsilon, g_bounds=0.1)
    for kind in ("rare", "continuous", "wrong g", "wrong Q", "trial", "missing", "strong"):
        for n in (10_000, 30_000):
            yield Cell(n=n, kind=kind)
    yield replace(Cell(n=30_000, kind="strong"), epsilon=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replications", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("privacy.csv"))
    parser.add_argument(
        "--cells", nargs="*", default=[], help="only the cells whose names contain one of these"
    )
    given = parser.parse_args()
    chosen = [c for c in cells() if not given.cells or any(part in c.name for part in given.cells)]
    with given.out.open("w", newline="", encoding="utf-8") as file:
        writer: csv.DictWriter[str] | None = None
        for cell in chosen:
            row = simulate(cell, given.replications)
            if writer is None:
                writer = csv.DictWriter(file, row)
                writer.writeheader()
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
            file.flush()
            print(row, file=sys.stderr)


if __name__ == "__main__":
    main()
