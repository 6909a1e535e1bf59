"""The demonstration: a real trial at eight hospitals, federated, masked, pooled, and on complete cases.

With a privacy budget, the study is run on the trial's infants and on as many more as noise needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedtmle.algorithms.gradient import Central, OneStep
from fedtmle.datasets import ihdp as ihdp_columns
from fedtmle.datasets import ihdp_variables
from fedtmle.initial.glm import GLM
from fedtmle.layout import Document, aligned, covariate_name, number, probability, wrapped
from fedtmle.model.budget import Privacy
from fedtmle.programs.noisy import LARGEST_INFLATION
from fedtmle.programs.study import Study
from fedtmle.protocol.policy import Policy
from fedtmle.studies.privacy_cost import PrivacyPlan
from fedtmle.studies.progress import live_progress
from fedtmle.studies.run import run
from fedtmle.targets.effects.estimands import ATE
from fedtmle.text.certificate import certificate
from fedtmle.text.preflight import cost_table, render_cost
from fedtmle.text.result import cells, cost, ladder, sensitivity
from fedtmle.text.result import render as render_result
from fedtmle_core.types import Array

BABY = "bw + nnhealth + sex + mlt_birt"  # birth weight, neonatal health, sex, twin or more
MOTHER = "momage + b_marr + mom_lths + mom_hs + mom_scoll + momblack + momhisp + cigs"
IHDP = Study(
    target=ATE(outcome="iqsb_36", treatment="treat"),
    outcome_model=GLM(f"treat + {BABY} + {MOTHER} + C(site)"),
    treatment_model=GLM("bw + C(site)"),  # randomised within hospitals and birth-weight groups
    missingness_model=GLM(f"treat + {BABY} + {MOTHER} + C(site)"),
    variables=ihdp_variables(),
)


def ihdp(*, as_json: bool, quiet: bool, observe: bool = False) -> Document:
    """Estimate the effect of early intervention on IQ at 36 months; print it and return the document.

    A model of missingness accounts for infants without an IQ score.
    """
    silos, complete = ihdp_silos(), ihdp_silos(complete=True)
    quiet = quiet or as_json
    federated = _study("all infants", IHDP, silos, quiet=quiet, release=tuple(silos), observe=observe)
    masked = _study("masked", replace(IHDP, aggregation="masked"), silos, quiet=quiet, policy=Policy())
    pooled = _study("pooled", replace(IHDP, algorithm=Central(tolerance=1e-10)), silos, quiet=quiet)
    complete_cases = _study("complete cases", replace(IHDP, missingness_model=None), complete, quiet=quiet)
    if as_json:
        others = {"masked": masked, "pooled": pooled, "complete_cases": complete_cases}
        beside = {name: document["estimates"] for name, document in others.items()}
        print(json.dumps({**federated, "beside": beside}))  # noqa: T201 - the command's output
    else:
        print("\n".join(_ihdp_lines(federated, masked, pooled, complete_cases)))  # noqa: T201 - the command's output
    return federated


def _study(
    title: str,
    study: Study,
    silos: Mapping[str, object],
    *,
    quiet: bool,
    release: tuple[str, ...] = (),
    observe: bool = False,
    policy: Policy | None = None,
) -> Document:
    with live_progress(title, quiet=quiet) as progress:
        return run(study, silos, progress=progress, release=release, observe=observe, policy=policy).document


def _ihdp_lines(
    federated: Document, masked: Document, pooled: Document, complete_cases: Document
) -> Iterator[str]:
    missing = federated["n"] - sum(federated["observed_counts"])
    yield "Early intervention for premature infants and their IQ at 36 months"
    yield from wrapped(
        f"The Infant Health and Development Program: {federated['n']} infants at "
        f"{len(federated['sizes'])} hospitals, {federated['arm_counts'][1]} of them with the intervention. "
        f"{missing} have no IQ score; a model of who was tested weights the others, so that all count."
    )
    yield ""
    rows = [["mean IQ", "infants", "with", "without", "effect", "SE", "95% interval", "p"]]
    for label, document in {
        "federated": federated,
        "masked": masked,
        "pooled": pooled,
        "complete cases": complete_cases,
    }.items():
        (row,) = document["estimates"]
        without, treated = (number(mean, 2) for mean in document["psi"])
        estimate = [number(row[key], 3) for key in ("estimate", "std_error")]
        interval = f"{number(row['conf_low'], 2)} to {number(row['conf_high'], 2)}"
        counts = [label, str(document["n"]), treated, without]
        rows.append([*counts, *estimate, interval, probability(row["p_value"])])
    yield from aligned(rows)
    yield ""
    gap = abs(federated["estimates"][0]["estimate"] - pooled["estimates"][0]["estimate"])
    yield from wrapped(
        "Federated: the hospitals keep their records. Masked: the same, and the server reads totals over all "
        f"hospitals only, each guarded by the default policy; {_rounds(masked)} rounds, not "
        f"{_rounds(federated)}. Pooled: the same study with all records in one place; "
        f"the two effects differ by {gap:.1g} points. Complete cases: federated, without the {missing}."
    )
    yield ""
    rows = [["hospital by hospital", "infants", "estimate", "std. error", "95% interval"]]
    rows += [[name, str(federated["sizes"][name]), *cells(by[0])] for name, by in federated["silos"].items()]
    yield from aligned(rows)
    for spread in federated["heterogeneity"]:
        summary = spread["summaries"][0]
        yield from wrapped(
            f"Each is the hospital's own TMLE. Heterogeneity: Q = {spread['Q']:.2f} on {spread['df']} df, "
            f"I2 = {spread['I2']:.0%}. Random-effects summary: {' / '.join(cells(summary)[:2])} (SE), "
            f"{cells(summary)[2]}; at another hospital {number(summary['prediction_low'], 2)} to "
            f"{number(summary['prediction_high'], 2)}."
        )
    yield ""
    yield from _checks(federated)
    yield ""
    yield from certificate(federated)
    yield ""
    yield from cost(federated)
    yield ""
    yield "Keeping data local is not in itself a privacy guarantee."


def _checks(document: Document) -> Iterator[str]:
    """Yield in a few lines how far the effect depends on overlap, bounds and unmeasured confounding."""
    yield from ladder(document)
    yield ""
    yield from sensitivity(document)
    # A covariate that some silos hide makes no claim about the balance of all.
    shown = [line for line in document["balance"]["covariates"] if not line["hidden_in"]]
    before, after = (
        max((abs(line[key][0]), covariate_name(line)) for line in shown)
        for key in ("differences", "weighted_differences")
    )
    yield from wrapped(
        f"Balance of the {len(shown)} covariates that every hospital may show: the largest standardised "
        f"difference is {before[0]:.2f} ({before[1]}), and {after[0]:.2f} ({after[1]}) with the weights. The "
        "report has the others, the Love plot, participant flow and Table 1."
    )


def _rounds(document: Document) -> int:
    return sum(document["account"]["rounds"].values())


def ihdp_silos(*, complete: bool = False) -> dict[str, dict[str, Array]]:
    """Return the infants of the eight hospitals, by column; ``complete`` drops those without an IQ score."""
    columns = ihdp_columns()
    keep = ~np.isnan(columns["iqsb_36"]) if complete else np.ones(len(columns["site"]), dtype=bool)
    return {
        f"hospital {site:.0f}": {
            name: cells[keep & (columns["site"] == site)] for name, cells in columns.items()
        }
        for site in np.unique(columns["site"])
    }


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
    yield render_cost(plan, cost_table(plan, SIZES), plan.smallest_n())
    yield ""
    yield f"The result of the study that is {TIMES} times as large:"
    yield ""
    yield render_result(private)
