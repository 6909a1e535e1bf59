"""The certificate and the disclosures in plain language: what is proved, assumed and disclosed."""

from __future__ import annotations

from collections.abc import Iterator

from fedtmle.layout import Document, phase_rounds
from fedtmle.runtime.certificate import OPEN
from fedtmle.text.certificate import (
    NOT_COVERED,
    convergence,
    history,
    privacy_budget,
    privacy_cost,
    private_certificate,
)

TARGETING = {
    "Coded": "the silo's mean gradient, rounded to a public grid, as a difference from its last message",
    "Adaptive": "the silo's mean gradient and its own fit of the fluctuation, rounded to a public grid",
    "Gradient": "exact sums over the silo's records of the gradient; for Newton steps, of the curvature too",
    "LocalAverage": "the silo's own fit of the fluctuation, and exact sums of the influence function",
    "Personalized": "the silo's own fit of the fluctuation, zero once it has retired",
    "Central": "nothing beyond the records themselves, which are in one place",
}
MODELS = (
    "counts by arm, and what fits the models: sums of gradients and curvatures, rounded unless the study "
    "asks for exact sums; whole models if a learner sends them"
)
PHASES = {
    "nuisance": ("models", MODELS),
    "calibration": (
        "calibration",
        "sums for preliminary standard errors; the curvature for the grid",
    ),
    "closing": ("closing", "sums for the estimate and its covariance, at the final fit"),
    "diagnostics": (
        "diagnostics",
        "counts and means by bin, with bins of few records added to a neighbour; sums of the outcome fit",
    ),
}


def proved(document: Document) -> Iterator[str]:
    """Yield the statements that hold for any data, if the parties followed the protocol."""
    stated = document["certificate"] or {}
    bound, tolerance = stated.get("residual_bound"), stated.get("tolerance")
    if document.get("privacy"):
        yield private_certificate(document)
    elif bound is None or tolerance is None:
        yield f"Nothing is proved about the pooled estimating equation: {document['status_text']}."
    else:
        errors = [row["std_error"] for row in document["estimates"] if row["std_error"]]
        relative = f", which is {bound / min(errors):.1g} of the smallest standard error" if errors else ""
        yield (
            "The equation that the analysis of pooled records solves (the mean of the efficient influence "
            f"function is zero) holds over all silos to within {bound:.2g}{relative}. "
            f"The tolerance was {tolerance:.2g}."
        )
        if document["residual_kind"] == "certified bound":
            yield "The bound includes all rounding. It follows from the integers that the silos sent."
        else:
            yield "This was computed from exact sums over all silos; it depends on no estimated constant."
        if not document["converged"]:
            yield f"The run stopped early: {document['status_text']}."
        yield from filter(None, (convergence(document), *history(document)))
    yield (
        "Every bit in the account was counted when it was sent, and the silos that took part until the end "
        "confirmed that they all received the same broadcasts."
    )


def assumed(document: Document) -> Iterator[str]:
    """Yield the assumptions that no computation on these records can check."""
    study = document.get("study")
    if study:
        yield from study["target"]["assumptions"]
        if "missingness" in study["models"]:
            yield "Whether an outcome is missing depends only on what the missingness model uses."
        yield (
            "The models are right, or are learned fast enough (the remainder is small against the standard "
            "error); which of them may be wrong is for the target's own documentation."
            if "brought" in study["target"]
            else "For the estimate: the outcome model or the models of treatment and missingness are right. "
            "For the interval: all of them are, or are learned fast enough (the remainder is small against "
            "the standard error)."
        )
        yield "Records are independent" + (
            f" between clusters of {study['options']['cluster']}." if study["options"]["cluster"] else "."
        )
    smoothness = (document["certificate"] or {}).get("smoothness")
    if smoothness:
        uses = "It affects the number of rounds; the bound on the residual does not depend on it."
        yield f"The smoothness constant {smoothness['value']:.4g} is {smoothness['basis']}. {uses}"
    for line in (document["certificate"] or {}).get("assumptions", []):
        yield (
            "The theorems' bounds on rounds and bits need two constants that this run did not measure; "
            "they are marked open in the table."
            if line == OPEN
            else f"{line[:1].upper()}{line[1:]}."
        )
    yield "The silos computed with the records they described, and the server pooled as the protocol says."


def messages(document: Document) -> Iterator[tuple[str, str]]:
    """Yield each phase with the contents of a silo's message."""
    algorithm = document["study"]["algorithm"]["kind"] if "study" in document else ""
    contents = {**PHASES, "targeting": ("targeting", TARGETING.get(algorithm, "what the algorithm asks for"))}
    for phase in phase_rounds(document["account"], list(contents)):
        yield contents[phase]


def disclosed(document: Document) -> Iterator[str]:
    """Yield sentences about what the silos disclosed."""
    released, silos = document.get("silos", {}), document["sizes"]
    seen = (
        "The silos' sums were masked: the server and the silos read totals over all silos only, unless all "
        "silos but one share what they know."
        if None in silos.values()
        else "The server saw each silo's answers by themselves, not only their sum."
    )
    privacy = document.get("privacy")
    if privacy:
        yield (
            "The sums have noise for differential privacy: one record, whatever it holds, changes the "
            "probability of any set of published results by at most a factor of "
            f"exp({privacy['epsilon']:g}) and {privacy['delta']:g}. Not covered are {NOT_COVERED}."
        )
        yield f"Budget: {privacy_budget(document)}."
        yield f"Cost: {privacy_cost(document)}."
    yield (
        f"{seen} Sums over few records, or many sums over the same records, can reveal something about "
        "single records. Keeping data local is not in itself a privacy guarantee."
    )
    if released:
        shown = f"{len(released)} of {len(silos)} silos"
        yield f"The owners of {shown} allow their own estimate to be shown, and it is."
    else:
        yield "No silo's own estimate is shown: no owner allows it, or none was asked."
    yield "Every silo disclosed how many records it has."
