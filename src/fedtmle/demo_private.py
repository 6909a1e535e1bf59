"""The demonstration with differential privacy: the trial's infants, and as many more as noise needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedtmle.algorithms.one_step import OneStep
from fedtmle.demo import BABY, IHDP, MOTHER, ihdp_silos
from fedtmle.initial.glm import GLM
from fedtmle.layout import Document, aligned, number, wrapped
from fedtmle.model.budget import Privacy
from fedtmle.model.types import Array
from fedtmle.programs.noisy_closing import LARGEST_INFLATION
from fedtmle.programs.study import Study
from fedtmle.studies.privacy_cost import PrivacyPlan
from fedtmle.studies.run import run
from fedtmle.text.privacy_cost import cost_table, render
from fedtmle.text.progress import live_progress
from fedtmle.text.result import render as render_result

TIMES = 100  # how many times as large as the trial
SEED = 26
SIZES = (1_000, 10_000, 100_000, 1_000_000)  # numbers of records in the planning table
OUTCOME_MEAN, OUTCOME_SD, OBSERVED, TREATED = (
    88.0,
    17.0,
    0.9,
    0.4,
)  # assumptions of the plan; a pilot study would give them


def ihdp_private(epsilon: float, *, as_json: bool, quiet: bool) -> Document:
    """Estimate the effect on IQ with noise, in the trial and in one a hundred times as large.

    The infants of the larger trial are drawn from the real ones, with replacement. Print both results beside
    those without noise; return the document of the larger one with noise.
    """
    study = replace(
        IHDP,
        outcome_model=GLM(f"treat + {BABY} + {MOTHER}"),  # an indicator of each hospital would cost most
        treatment_model=GLM("bw"),
        missingness_model=GLM(f"treat + {BABY} + {MOTHER}"),
        privacy=Privacy(epsilon=epsilon),
    )
    plain = replace(study, privacy=None, algorithm=OneStep(), aggregation="auto", diagnostics=False)
    infants, many = ihdp_silos(), enlarged(ihdp_silos())
    documents: dict[str, Document] = {}
    for name, silos in (("the trial", infants), (f"{TIMES} times as large", many)):
        for noise, each in (("without noise", plain), ("with noise", study)):
            with live_progress(f"{name}, {noise}", quiet=quiet or as_json) as progress:
                documents[f"{name}, {noise}"] = run(each, silos, progress=progress).document
    private = documents[f"{TIMES} times as large, with noise"]
    if as_json:
        beside = {name: document["estimates"] for name, document in documents.items()}
        print(json.dumps({**private, "beside": beside}))  # noqa: T201 - the command's output
    else:
        print("\n".join(_lines(study, documents, private)))  # noqa: T201 - the command's output
    return private


def enlarged(silos: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, Array]]:
    """Return silos a hundred times as large, with records drawn from their own with replacement."""
    rng, larger = np.random.default_rng(SEED), {}
    for name, columns in silos.items():
        n = len(columns["site"])
        rows = rng.integers(0, n, TIMES * n)
        larger[name] = {column: values[rows] for column, values in columns.items()}
    return larger


def _lines(study: Study, documents: Mapping[str, Document], private: Document) -> Iterator[str]:
    budget = private["privacy"]
    yield "Early intervention for premature infants and their IQ at 36 months, with noise"
    yield from wrapped(
        f"({budget['epsilon']:g}, {budget['delta']:g})-differential privacy of one infant. Trial: the Infant "
        f"Health and Development Program, {documents['the trial, with noise']['n']} infants at 8 hospitals. "
        f"{TIMES} times as large: infants drawn from the real ones with replacement, which shows what noise "
        "costs a large study; it is no new evidence."
    )
    yield ""
    rows = [["", "infants", "effect", "SE", "95% interval"]]
    for name, document in documents.items():
        (row,) = document["estimates"]
        interval = f"{number(row['conf_low'], 2)} to {number(row['conf_high'], 2)}"
        cells = [number(row["estimate"], 2), number(row["std_error"], 2), interval]
        rows.append([name, f"{document['n']:,}", *cells])
    yield from aligned(rows)
    yield ""
    for name in dict.fromkeys(name.partition(",")[0] for name in documents):
        with_noise = documents[f"{name}, with noise"]
        wider = (
            with_noise["estimates"][0]["std_error"]
            / documents[f"{name}, without noise"]["estimates"][0]["std_error"]
        )
        verdict = (
            f"; {with_noise['n']} infants are too few for this budget" if wider > LARGEST_INFLATION else ""
        )
        yield from wrapped(f"{name}: noise makes the interval {wider:.3g} times as wide{verdict}.")
    yield ""
    yield "What a plan from the study alone says beforehand (`fedtmle budget`):"
    yield ""
    plan = PrivacyPlan(
        study=study,
        silos=len(private["sizes"]),
        treated=TREATED,
        outcome_mean=OUTCOME_MEAN,
        outcome_sd=OUTCOME_SD,
        observed=OBSERVED,
    )
    yield render(plan, cost_table(plan, SIZES), plan.smallest_n())
    yield ""
    yield f"The result of the study that is {TIMES} times as large:"
    yield ""
    yield render_result(private)
