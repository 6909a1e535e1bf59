"""Coverage and width of the intervals of studies with privacy, by simulation: the table of docs/privacy.md.

    python -m benchmarks.privacy --replications 500 --out privacy.csv [--settings NAME ...] [--seed K]
    python -m benchmarks.privacy --table docs/privacy/coverage.csv

Settings whose lines the file has already are not run again, so that a table can be made in several goes.
``--table`` prints a file's lines with 10 covariates as the table of docs/privacy.md.

A replication runs the product's own flow on simulated records: its queries, post-processing and interval. The
wire and the masks are left out, sums are added in floats (`benchmarks.private_records`), and the noise of all
silos together is drawn at once as a rounded normal variate, which at these variances (above 10^12 grid units)
cannot be told from the sum of the silos' draws. `tests/studies/test_private.py` checks that without noise
this gives the numbers of `fedtmle.run`.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fedtmle as ft
from benchmarks.private_records import Columns, Records, expit, floats
from fedtmle.data import load_all
from fedtmle.programs.flow import StudyProgram
from fedtmle.protocol.outcome import Targeted
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array

SILOS = 10
KINDS = ("binary", "rare", "continuous", "wrong g", "wrong Q", "trial", "missing", "strong", "strata")
Row = dict[str, float | str]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One simulated setting."""

    n: int
    p: int = 10
    epsilon: float = 1.0
    g_bounds: Literal["auto"] | float = "auto"
    kind: str = "binary"  # one of KINDS

    @property
    def name(self) -> str:
        return f"{self.kind} n={self.n} p={self.p} g={self.g_bounds}"


def draw(cell: Cell, n: int, rng: np.random.Generator) -> tuple[Columns, Array]:
    """Return records and the mean effect at their covariates: normal ones within 3 SD, and a binary one.

    With strata, which the binary covariate gives, the mean effects are those of everyone and in each.
    """
    p, strength = cell.p, 2.0 if cell.kind == "strong" else 1.0
    x = np.clip(rng.standard_normal((p, n)), -3.0, 3.0)
    x[1] = x[1] > 0.3
    slopes_g = strength * np.array([0.4, -0.5, 0.3, *[0.1] * (p - 3)])
    slopes_q = strength * np.array([0.5, 0.6, -0.3, *[0.1] * (p - 3)])
    logit_g = -0.2 + slopes_g @ x + (0.3 * (x[0] ** 2 - 1.0) if cell.kind == "wrong g" else 0.0)
    g = np.full(n, 0.5) if cell.kind == "trial" else expit(logit_g)
    level = -3.3 if cell.kind == "rare" else -0.6
    bend = 0.3 * (x[0] ** 2 - 1.0) if cell.kind == "wrong Q" else 0.0
    q = [expit(level + slopes_q @ x + bend + 0.5 * a) for a in (0, 1)]
    a = (rng.random(n) < g).astype(np.float64)
    mean = np.where(a == 1, q[1], q[0])
    if cell.kind == "continuous":
        y = rng.beta(5 * mean, 5 * (1 - mean))
    else:
        y = (rng.random(n) < mean).astype(np.float64)
    if cell.kind == "missing":
        y[rng.random(n) > expit(1.5 + 0.4 * x[0] - 0.2 * a)] = np.nan
    columns = {"a": a, "y": y, **{f"x{j}": x[j] for j in range(p)}}
    if cell.kind == "trial":
        columns["known"] = g
    effect = q[1] - q[0]
    groups = [np.ones(n, dtype=bool), *([x[1] == 0, x[1] == 1] if cell.kind == "strata" else [])]
    return columns, np.array([effect[group].mean() for group in groups])


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
        target=ft.ATE(outcome="y", treatment="a", strata="x1" if cell.kind == "strata" else None),
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
    """Run the flow of a study over pooled records, with the product's own sums."""
    table = load_all({"all": columns}, schema_of(study))["all"]
    local = LocalRows("all", table, table.n_rows)
    return answered(study, table.n_rows, lambda query: query.answer(local), rng, silos)


def answered(
    study: ft.Study,
    n: int,
    answer: Callable[[Any], Sums],  # of the study's queries
    rng: np.random.Generator | None,
    silos: int = SILOS,
) -> Targeted:
    """Run the flow of a study whose sums ``answer`` gives; without a generator they have no noise."""
    flow = StudyProgram.of(study, [str(m) for m in range(silos)]).flow(n)
    query = next(flow)
    while True:
        sums = answer(query)
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


def simulate(setting: Cell, epsilons: Sequence[float], replications: int, seed: int) -> list[Row]:
    """Return coverage, width and bias for each epsilon, all of them on the same simulated records."""
    kind = zlib.crc32(f"{setting.kind} {setting.g_bounds}".encode())
    rng = np.random.default_rng([seed, setting.n, setting.p, kind])
    truth = np.mean([draw(setting, 200_000, rng)[1] for _ in range(10)], axis=0)
    cells = [replace(setting, epsilon=epsilon) for epsilon in epsilons]
    studies = [(study_of(cell), [_Tally(cell, k) for k in range(len(truth))]) for cell in cells]
    start = time.process_time()
    with floats():
        for _ in range(replications):
            records = Records(draw(setting, setting.n, rng)[0])
            for study, tallies in studies:
                outcome = answered(study, setting.n, records.sums, rng)
                for tally, value in zip(tallies, truth.tolist(), strict=True):
                    tally.add(outcome, value)
    seconds = (time.process_time() - start) / replications / len(cells)
    rows = [tally.row() for _, tallies in studies for tally in tallies]
    return [{**row, "seed": seed, "seconds": round(seconds, 3)} for row in rows]


class _Tally:
    """The errors, standard errors and labels of one coordinate in the replications of one cell."""

    def __init__(self, cell: Cell, coordinate: int) -> None:
        self.cell, self.coordinate = cell, coordinate
        self.rows: list[tuple[float, ...]] = []

    def add(self, outcome: Targeted, truth: float) -> None:
        account = outcome.details.privacy  # type: ignore[attr-defined]  # of a study
        k = self.coordinate
        error = float(outcome.estimate.psi[k]) - truth
        std_error, sampling = math.sqrt(outcome.estimate.covariance[k, k]), math.sqrt(account.sampling[k])
        self.place = account.places[k]
        self.rows.append((error, std_error, sampling, account.g_bound, float(bool(account.limits))))

    def row(self) -> Row:
        error, std_error, sampling, bound, labelled = np.array(self.rows).T
        covered = np.abs(error) <= 1.96 * std_error
        promised = labelled == 0.0
        return {
            "kind": self.cell.kind,
            "place": self.place,
            "n": self.cell.n,
            "p": self.cell.p,
            "g_bounds": str(self.cell.g_bounds),
            "epsilon": self.cell.epsilon,
            "replications": len(error),
            "coverage": float(np.mean(covered)),
            "labelled": float(np.mean(labelled)),
            "coverage_unlabelled": float(np.mean(covered[promised])) if promised.any() else math.nan,
            "coverage_ignoring_noise": float(np.mean(np.abs(error) <= 1.96 * sampling)),
            "width": float(np.mean(std_error / sampling)),
            "bias_in_se": float(np.mean(error / std_error)),
            "sd_in_se": float(np.std(error / std_error)),
            "g_bound": float(np.mean(bound)),
        }


def settings() -> Iterator[Cell]:
    """Yield the settings of the table, each for every epsilon."""
    for p in (10, 5):
        for n in (10_000, 30_000, 100_000):
            yield Cell(n=n, p=p)
            if p == 10:
                yield Cell(n=n, p=p, g_bounds=0.1)
            for kind in KINDS[1:]:
                yield Cell(n=n, p=p, kind=kind)


WORDS = {
    "binary": "binary",
    "rare": "rare (5 %)",
    "continuous": "a number in a range",
    "wrong g": "wrong model of treatment",
    "wrong Q": "wrong model of the outcome",
    "trial": "a trial, g known",
    "missing": "some 20 % missing outcomes",
    "strong": "strong covariates",
    "strata": "two strata: everyone",
    "strata in 0": "62 % in this stratum",
    "strata in 1": "38 % in this one",
}


def first_lines(path: Path) -> list[dict[str, str]]:
    """Return the lines of a file of results that are the table's own, without those that confirm others."""
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["replications"] == "500"]


def markdown(path: Path) -> list[str]:
    """Return the lines of the table of docs/privacy.md: 10 covariates, the bound on g chosen by the rule."""
    cells: dict[tuple[str, str], dict[float, str]] = {}
    for row in first_lines(path):
        if row["p"] == "10" and row["g_bounds"] == "auto":
            star = " *" if float(row["labelled"]) >= 0.5 else ""
            cell = f"{100 * float(row['coverage']):.1f} %, {float(row['width']):.2f}{star}"
            key = f"{row['kind']} {row['place']}".strip(), row["n"]
            cells.setdefault(key, {})[float(row["epsilon"])] = cell
    lines = []
    for kind, words in WORDS.items():
        sizes = sorted((int(n) for name, n in cells if name == kind))
        for n in sizes:
            found = cells[kind, str(n)]
            name = words if n == sizes[0] else ""
            lines.append(f"| {name} | {n:,} | {' | '.join(found[e] for e in sorted(found))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replications", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epsilons", type=float, nargs="*", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--out", type=Path, default=Path("privacy.csv"))
    parser.add_argument(
        "--settings", nargs="*", default=[], help="only the settings whose names contain one of these"
    )
    parser.add_argument("--table", type=Path, help="print this file's lines as a table, and run nothing")
    given = parser.parse_args()
    if given.table:
        sys.stdout.write("".join(f"{line}\n" for line in markdown(given.table)))
        return
    chosen = [c for c in settings() if not given.settings or any(part in c.name for part in given.settings)]
    done = set()
    if given.out.exists():
        with given.out.open(newline="", encoding="utf-8") as file:
            done = {(row["kind"], row["n"], row["p"], row["g_bounds"]) for row in csv.DictReader(file)}
    for setting in chosen:
        if (setting.kind, str(setting.n), str(setting.p), str(setting.g_bounds)) in done:
            continue
        rows = simulate(setting, given.epsilons, given.replications, given.seed)
        is_new = not given.out.exists()
        with given.out.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            if is_new:
                writer.writeheader()
            for row in rows:
                writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
                print(row, file=sys.stderr)


if __name__ == "__main__":
    main()
