"""Rounds and bits of whole studies: rounded sums, the default, beside exact ones.

    python -m benchmarks.communication              the table of docs/benchmarks.md
    python -m benchmarks.communication --random N   N random studies, of `tests/attacks/honest.py`

A random study is compared with the same one with exact sums: the estimates must be within 1e-6 standard
errors and both certificates of each other, and a study that finishes with exact sums must finish and take at
most 1.2 times the rounds.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.attacks.honest import FLOORS, honest
from tests.declare import declare

import fedtmle as ft
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.errors import FedTMLEError
from fedtmle.programs.flow import StudyProgram
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.query import Phase
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan

Columns = Mapping[str, np.ndarray]
MOST_ROUNDS = 1.2  # times those of exact sums
ACCURACY = 1e-6  # standard errors


def _split(data: Columns, count: int, seed: int = 1) -> dict[str, Columns]:
    n = len(next(iter(data.values())))
    parts = np.array_split(np.random.default_rng(seed).permutation(n), count)
    return {
        f"silo {m + 1}": {name: column[part] for name, column in data.items()} for m, part in enumerate(parts)
    }


def _nhefs() -> tuple[ft.Study, Columns]:
    from tests.effects.test_nhefs import nhefs, study

    data = nhefs()
    return replace(study(data), algorithm=ft.Coded()), data


def _wide(covariates: int, n: int) -> tuple[ft.Study, Columns]:
    """A study with many covariates, correlated, some of them binary."""
    rng = np.random.default_rng(40)
    latent = rng.normal(size=(n, 5)) @ rng.normal(size=(5, covariates)) / 2 + rng.normal(size=(n, covariates))
    binary = np.arange(covariates) % 3 == 0
    x = np.where(binary, latent > 0, np.clip(latent, -12, 12))
    slope = rng.normal(size=covariates) / np.sqrt(covariates)
    a = (rng.random(n) < 1 / (1 + np.exp(-0.5 * (x @ slope)))).astype(int)
    y = np.clip(5 + a + x @ slope + rng.normal(size=n), -20, 30)
    names = [f"x{j + 1}" for j in range(covariates)]
    right = " + ".join(names)
    columns = {name: x[:, j] for j, name in enumerate(names)}
    ranges: dict[str, Any] = {name: "binary" if binary[j] else (-12, 12) for j, name in enumerate(names)}
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM(f"a + {right}"),
        treatment_model=ft.GLM(right),
        variables=declare(a="binary", y=(-20, 30), **ranges),
    )
    return study, {"a": a, "y": y, **columns}


def cases() -> Iterator[tuple[str, ft.Study, Mapping[str, Any], tuple[str, ...]]]:
    """Yield the studies of the table: a name, the study, the silos, and those that release their estimate."""
    hospitals = ihdp_silos()
    yield "IHDP, 8 hospitals, own estimates released (demo)", IHDP, hospitals, tuple(hospitals)
    yield "IHDP, 8 hospitals", IHDP, hospitals, ()
    nhefs, data = _nhefs()
    for count in (5, 10):
        yield f"NHEFS, {count} silos", nhefs, _split(data, count), ()
    wide, data = _wide(40, 8000)
    yield "40 covariates, 20 silos, n = 8,000", wide, _split(data, 20), ()
    learner = ft.SuperLearner(
        (ft.GLM("treat + bw + nnhealth"), ft.GLM("treat * bw + nnhealth + momage + C(site)")), folds=5
    )
    learned = replace(IHDP, outcome_model=learner)
    yield "IHDP, super learner of 2 GLMs, 5 folds", learned, hospitals, ()


def table() -> None:
    """Print the rows of the table."""
    print(
        "| study | exact sums: rounds | kbit | rounded: rounds | kbit | difference / SE |",
        "|---|--:|--:|--:|--:|--:|",
        sep="\n",
    )
    for name, study, silos, release in cases():
        cost, rows = [], []
        for sums in ("exact", "auto"):
            document = ft.run(replace(study, sums=sums), silos, release=release).document
            account = document["account"]
            bits = sum(
                count
                for key in ("bits_up", "bits_down")
                for by in account[key].values()
                for count in by.values()
            )
            cost += [f"{sum(account['rounds'].values())}", f"{bits / 1000:,.0f}"]
            rows.append(document["estimates"][0])
        gap = abs(rows[1]["estimate"] - rows[0]["estimate"]) / rows[0]["std_error"]
        print(f"| {name} | {' | '.join(cost)} | {gap:.1e} |", flush=True)


def _finish(study: ft.Study, rows: Mapping[str, Any], plan: Any) -> Finished | str:
    plan = study_plan(study, plan.roster)
    parties = [Silo(name, plan, own, keeper=Keeper(policy=FLOORS)) for name, own in rows.items()]
    try:
        return Session(plan, InProcess(parties)).run()
    except FedTMLEError as error:
        return type(error).__name__


def random_studies(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield how each random study fared with rounded and with exact sums."""
    for seed in range(first, first + count):
        plan, rows = honest(seed, kinds=("study",))
        if not isinstance(plan.program, StudyProgram):
            raise TypeError("a random study is a study")
        study = replace(plan.program.study, algorithm=ft.Coded())
        near, exact = (_finish(replace(study, sums=sums), rows, plan) for sums in ("rounded", "exact"))
        row: dict[str, Any] = {"seed": seed}
        if isinstance(near, str) or isinstance(exact, str):
            ends = [end if isinstance(end, str) else "finished" for end in (exact, near)]
            yield {**row, "verdict": "same end" if ends[0] == ends[1] else f"{ends[0]} -> {ends[1]}"}
            continue
        one, two = near.outcome, exact.outcome
        if not isinstance(one, Targeted) or not isinstance(two, Targeted):
            raise TypeError("a study by Coded is targeted")
        errors = np.sqrt(np.diag(two.estimate.covariance))
        allowed = ACCURACY * errors + one.certificate.residual_bound + two.certificate.residual_bound
        gaps = np.abs(one.estimate.psi - two.estimate.psi)
        rounds = [sum(each.account.rounds.values()) for each in (near, exact)]
        bits = [each.account.bits(*Phase) for each in (near, exact)]
        verdict = "holds" if (gaps <= allowed).all() else "too far"
        if rounds[0] > MOST_ROUNDS * rounds[1]:
            verdict += ", too many rounds"
        yield {
            **row,
            "verdict": verdict,
            "gap": float((gaps / errors).max()),
            "share": float((gaps / allowed).max()),
            "rounds": rounds[0],
            "exact_rounds": rounds[1],
            "bits": bits[0],
            "exact_bits": bits[1],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=0, help="compare so many random studies")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--csv", type=Path, help="write the random studies there")
    options = parser.parse_args()
    if not options.random:
        table()
        return
    rows = []
    for row in random_studies(options.first, options.random):
        rows.append(row)
        if row["verdict"] not in ("holds", "same end"):
            print(row, flush=True)
    print(Counter(row["verdict"] for row in rows))
    done = [row for row in rows if "gap" in row]
    for key in ("gap", "share"):
        print(
            f"{key}: median {np.median([r[key] for r in done]):.2g}, largest {max(r[key] for r in done):.2g}"
        )
    print(f"rounds: largest ratio {max(r['rounds'] / r['exact_rounds'] for r in done):.2f}")
    print(f"bits: mean ratio {np.mean([r['bits'] / r['exact_bits'] for r in done]):.3f}")
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(done[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
