"""The list of what may be published: for each key of a result's document, its rule. The rest stays."""

from __future__ import annotations

from collections.abc import Mapping

from fedtmle_core.publish.counts import Flow, NotPublishableError, flow
from fedtmle_core.publish.groups import BALANCE, CALIBRATION, LEARNERS
from fedtmle_core.publish.rules import (
    AT_RISK,
    CAUSES,
    COUNT,
    COVARIANCE,
    CURVE,
    ESTIMATE,
    EXACT,
    FLOW,
    HISTOGRAM,
    HUNDREDTHS,
    LADDER,
    NAMES,
    NOISED,
    ONE_DIGIT_UP,
    PERIODS,
    PSI,
    RECORDS,
    TABLE,
    THREE_DIGITS,
    TWO_DIGITS,
    TWO_DIGITS_UP,
    WALD,
    Allowed,
    Document,
    Each,
    Named,
    Plain,
    Rule,
    Whole,
    computed,
    left_out,
    published,
    rounded,
)


def same(rule: Allowed, keys: str) -> dict[str, Allowed]:
    """Return keys that have one rule."""
    return dict.fromkeys(keys.split(), rule)


def sentences(known: Mapping[str, str | None], otherwise: str) -> Rule:
    """Return the rule of a list of sentences that may hold numbers.

    A sentence with one of the ``known`` phrases goes out: as it is, or as the sentence beside the phrase,
    which has no number. The others become the sentence ``otherwise``.
    """

    def apply(value: Plain, whole: Whole) -> Plain:
        shown = []
        for sentence in value:
            phrase = next((phrase for phrase in known if phrase in sentence), None)
            instead = otherwise if phrase is None else known[phrase]
            shown.append(sentence if sentence == whole.document["status_text"] else instead or sentence)
        return list(dict.fromkeys(shown))

    return Rule("a fixed list of sentences", apply)


WARNINGS = sentences(
    {
        "silos took part": None,
        "privacy: ": None,
        "A silo leaves once its own fit is zero": None,
        "is not small against the standard error": "the residual is not small against the standard error: "
        "the interval is not supported",
        "poor overlap": "poor overlap: the estimates rest on few records or on the bound of the propensity "
        "score",
        "but exact sums certify only": "exact sums do not certify the tolerance: declare a tighter range of "
        "the outcome, or a larger tolerance",
        "beyond what the models explain": "treatment or outcome differs between silos beyond what the "
        "models explain, and the silo is in no model: the estimate may be the effect of the silos. Add "
        "C(silo) to the formulas",
        "C(silo) predicts some response perfectly": "C(silo) predicts some response perfectly",
        "do not look like samples of one population": "the silos do not look like samples of one "
        "population: bounds on averages of local fits assume that they are",
    },
    "the run has a further warning, which its hospitals can read",
)
NOTES = sentences(
    {
        "so the missingness model was not needed": None,
        "so the censoring model is left out": None,
        "has no estimate of its own": None,
        "is from weakly penalised fits": None,
        "lowered a limit of its policy": None,
        "the study leaves out its diagnostics": None,
    },
    "the run has a further note, which its hospitals can read",
)
# Why a fit failed may name numbers.
REASON = Rule(
    "a fixed list of sentences", lambda value, _: "the fit on the finer grid failed" if value else ""
)
NOTE = (
    "counts are rounded so that nothing is of 1 to {most} people, and estimates to a hundredth of their "
    "standard errors; the exact numbers stay at the hospitals"
)


# What follows from the exact table.


def _with_outcome(whole: Whole) -> int:
    """Return who has an outcome; treatment over time divides the same people twice, and so rounds this."""
    if whole.flow.parts:
        return sum(whole.flow.observed)
    return rounded(whole.document["participants"]["with_outcome"], whole)


def _arm_counts(whole: Whole) -> list[int]:
    """Return the arms' counts; a rule of treatment over time is for everybody."""
    if "first_arms" in whole.document:
        return [whole.flow.n] * len(whole.document["arm_counts"])
    return list(whole.flow.arms)


def _observed(whole: Whole) -> list[int]:
    return list(whole.flow.observed) or [_with_outcome(whole)] * len(whole.document["observed_counts"])


def _first_arms(whole: Whole) -> dict[str, int]:
    return dict(zip(whole.document["first_arms"], whole.flow.arms, strict=True))


def _truncated_share(whole: Whole) -> list[float]:
    return [round(rounded(c, whole) / whole.flow.n, 4) for c in whole.document["truncated"]]


N = computed(FLOW, lambda whole: whole.flow.n)

# An emulated trial: the plan, and what owners share of their hospitals.
EMULATION: dict[str, Allowed] = {
    **same(EXACT, "trial days censoring protocol labels steps floor not_shared"),
    "silos": COUNT,
    "table1": left_out(),
}
RESULT: dict[str, Allowed] = {
    # The plan. `g_floor` is its number, or a public function of n.
    **same(
        EXACT, "format version versions plan question study lowered absent arms names g_floor uncovered grid"
    ),
    "weight_bound": EXACT,
    # Estimates.
    **same(Each(ESTIMATE), "estimates simultaneous"),
    **same(Each(CURVE), "curves rules"),
    "psi": PSI,
    "covariance": COVARIANCE,
    "std_error": THREE_DIGITS,
    "interaction": Each(WALD),
    "ladder": LADDER,
    "finer_grid": {**same(EXACT, "subperiods periods"), "estimates": Each(ESTIMATE), "reason": REASON},
    "sensitivity": Each(
        {
            **same(EXACT, "estimand conversion"),
            **same(TWO_DIGITS, "e_value e_value_interval risk_ratio bias_scale"),
            **same(HUNDREDTHS, "robustness_value robustness_value_interval"),
        }
    ),
    "imputation": {
        **same(EXACT, "datasets sweeps"),
        "estimands": Each(
            {
                "estimand": EXACT,
                "df": TWO_DIGITS,
                **same(HUNDREDTHS, "missing_information increase_in_variance"),
            }
        ),
    },
    # What hospitals release of their own accord, and what follows from it; tests of their differences.
    **same(Named(Each(ESTIMATE)), "silos without"),
    "heterogeneity": THREE_DIGITS,
    "personalized": Named({"retired_at": left_out(), "n_rows": COUNT, "estimates": Each(ESTIMATE)}),
    "site_tests": Each(WALD),
    # Counts.
    "participants": {
        "records": computed(FLOW, lambda whole: whole.flow.n + whole.flow.omitted),
        "omitted": computed(FLOW, lambda whole: whole.flow.omitted),
        "analysed": N,
        "with_outcome": computed(FLOW, _with_outcome),
    },
    "n": N,
    "arm_counts": computed(FLOW, _arm_counts),
    "observed_counts": computed(FLOW, _observed),
    "first_arms": computed(FLOW, _first_arms),
    "event_counts": CAUSES,
    **same(EXACT, "events_hidden_in truncated_hidden"),
    "missing": Named({"count": COUNT, "of": COUNT, "handled": EXACT}),
    **same(COUNT, "truncated effective_sizes"),
    "at_risk": {**same(EXACT, "periods hidden_in"), "counts": AT_RISK},
    "periods": PERIODS,
    "adherence": Each(
        {
            **same(EXACT, "rule hidden_in weight_edges weights_hidden_in"),
            **same(COUNT, "at_risk followers"),
            "weight_counts": TABLE,
        }
    ),
    "sizes": NAMES,
    "active": Each({"silos": EXACT, "people": COUNT}),
    "overlap": {
        **same(EXACT, "is_poor thresholds"),
        "truncated_share": computed(COUNT.name, _truncated_share),
        "components": Each(
            {"name": EXACT, "effective": COUNT, "records": RECORDS, "largest_share": ONE_DIGIT_UP}
        ),
    },
    # Groups.
    "balance": BALANCE,
    "learners": LEARNERS,
    "diagnostics": {
        "overlap": Each(HISTOGRAM),
        "outcome_fit": {
            **same(Named(HUNDREDTHS), "r_squared deviance_explained"),
            "calibration": CALIBRATION,
        },
        "eif_mean": ONE_DIGIT_UP,
    },
    "privacy": NOISED,
    "emulation": EMULATION,
    # The run.
    **same(EXACT, "residual_kind status status_text converged rounds steps updates"),
    "convergence": {"reason": EXACT, "estimands": Each({"estimand": EXACT, "bound": ONE_DIGIT_UP})},
    "fits": {
        **same(EXACT, "accuracy"),
        "largest": ONE_DIGIT_UP,
        "models": Each({"model": EXACT, "effect": ONE_DIGIT_UP}),
    },
    "residual": ONE_DIGIT_UP,
    "bits": TWO_DIGITS,
    "account": {
        "rounds": EXACT,
        **same(TWO_DIGITS, "bits_up bits_down bytes_up bytes_down"),
        "by_round": left_out({"phases": [], "up": {}, "down": []}),
    },
    "certificate": {
        **same(EXACT, "coordinates assumptions"),
        **same(TWO_DIGITS_UP, "tolerance residual_bound arithmetic residual_bounds spacing history_bits"),
        **same(TWO_DIGITS_UP, "checks distance remainder"),
        "smoothness": {"value": TWO_DIGITS, "basis": EXACT, "by_step": left_out([])},
        "constants": left_out([]),
        **same(left_out(), "descent averaging"),
    },
    "retired_at": left_out({}),
    "transcript": left_out(),
    "trajectory": left_out(
        {"points": [], "accepted": [], "residual": [], "loss": None, "loss_by_round": None}
    ),
    "warnings": WARNINGS,
    "notes": NOTES,
}


def result_flow(document: Document, k: int) -> Flow:
    """Return the exact table of a result: those left out, the arms, and in each those with an outcome."""
    n, omitted = int(document["n"]), int(document["participants"]["omitted"])
    arms = [int(count) for count in (document.get("first_arms") or {}).values() or document["arm_counts"]]
    by_cause = None if any(document.get("events_hidden_in") or ()) else document.get("event_counts")
    parts: list[list[int]] = by_cause or [[count] for count in document["observed_counts"]]
    if document.get("privacy"):  # counts have noise, and need not add up
        return Flow(omitted=omitted, n=n, arms=tuple(arms), parts=tuple(map(tuple, parts)))
    if "first_arms" in document:  # who has an outcome at the end is no part of an arm of period 1
        return flow(k, n=n, omitted=omitted, arms=arms if document["first_arms"] else [])
    return flow(k, n=n, omitted=omitted, arms=arms, parts=[[int(count) for count in part] for part in parts])


def published_result(document: Document, k: int) -> Document:
    """Return what goes out of a study's result for the floor ``k``, which ``published`` and a note state."""
    if k < 1:
        raise NotPublishableError("floor: expected at least 1")
    if "published" in document:
        raise NotPublishableError("this result is published already")
    shown = published(document, RESULT, Whole(k=k, document=document, flow=result_flow(document, k)))
    return {**shown, "notes": [*shown["notes"], NOTE.format(most=k - 1)], "published": {"floor": k}}


def published_emulation(emulation: Document, n: int, k: int) -> Document:
    """Return what goes out of an emulated trial's document, which joins the published result of n people."""
    return published(emulation, EMULATION, Whole(k=k, document={}, flow=Flow(omitted=0, n=n, arms=())))
