"""The list of what may be published: for each key of a result's document, its rule. The rest stays."""

from __future__ import annotations

from fedtmle_core.publish import (
    Allowed,
    Document,
    Each,
    Flow,
    Named,
    NotPublishableError,
    Whole,
    cut,
    flow,
    published,
)
from fedtmle_core.rules import (
    AT_RISK,
    BALANCE,
    CALIBRATION,
    CAUSES,
    COUNT,
    COVARIANCE,
    CURVE,
    EIF_MEAN,
    ESTIMATE,
    EXACT,
    HISTOGRAM,
    HUNDREDTHS,
    HUNDREDTHS_UP,
    LADDER,
    LEARNERS,
    NAMES,
    NOISED,
    ONE_DIGIT_UP,
    PERIODS,
    PSI,
    RATIO,
    SAME_OBSERVED,
    SHARED,
    SPREAD,
    STD_ERROR,
    TABLE,
    TRUNCATED_SHARE,
    TWO_DIGITS,
    WALD,
    flow_rule,
    left_out,
    sentences,
)

WARNINGS = sentences(
    {
        "silos took part": None,
        "is not small against the standard error": "the residual is not small against the standard error: "
        "the interval is not supported",
        "poor overlap": "poor overlap: the estimates rest on few records or on the bound of the propensity "
        "score",
        "privacy: ": None,
        "A silo leaves once its own fit is zero": None,
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


def _arm_counts(whole: Whole) -> list[int]:
    """Return the arms' counts; a rule of treatment over time is for everybody."""
    if "first_arms" in whole.document:
        return [whole.flow.n] * len(whole.document["arm_counts"])
    return list(whole.flow.arms)


def _observed(whole: Whole) -> list[int]:
    return list(whole.flow.observed) or [_with_outcome(whole)] * len(whole.document["observed_counts"])


def _with_outcome(whole: Whole) -> int:
    """Return who has an outcome; treatment over time divides the same people twice, and so rounds this."""
    if whole.flow.parts:
        return whole.flow.with_outcome
    return cut(whole.document["participants"]["with_outcome"], whole.flow.n, whole.k)


def _first_arms(whole: Whole) -> dict[str, int]:
    return dict(zip(whole.document["first_arms"], whole.flow.arms, strict=True))


INITIAL_TARGETED: Allowed = {"initial": HUNDREDTHS, "targeted": HUNDREDTHS}
BITS: Allowed = Named(Named(TWO_DIGITS))

CERTIFICATE: Allowed = {
    "tolerance": TWO_DIGITS,
    "residual_bound": ONE_DIGIT_UP,
    "arithmetic": ONE_DIGIT_UP,
    "residual_bounds": ONE_DIGIT_UP,
    "smoothness": {"value": TWO_DIGITS, "basis": EXACT, "by_step": left_out([])},
    "spacing": TWO_DIGITS,
    "coordinates": EXACT,
    "history_bits": TWO_DIGITS,
    "assumptions": EXACT,
    "checks": Each(
        {
            "name": EXACT,
            "realised": TWO_DIGITS,
            "bound": TWO_DIGITS,
            "slack": TWO_DIGITS,
            "statement": EXACT,
            "basis": EXACT,
        }
    ),
    "constants": left_out([]),
    "descent": left_out(),
    "averaging": left_out(),
    "distance": {"bounds": ONE_DIGIT_UP, "reason": EXACT},
    "remainder": {
        "level": EXACT,
        "initial_bits": TWO_DIGITS,
        "history_bits": TWO_DIGITS,
        "residual": ONE_DIGIT_UP,
        "process": TWO_DIGITS,
        "largest_share": TWO_DIGITS,
        "envelope_constant": TWO_DIGITS,
        "envelope": TWO_DIGITS,
        "rows_needed": TWO_DIGITS,
        "process_alone": TWO_DIGITS,
        "envelope_alone": TWO_DIGITS,
        "std_error": TWO_DIGITS,
        "condition_process": TWO_DIGITS,
        "condition_envelope": TWO_DIGITS,
    },
}

EMULATION: dict[str, Allowed] = {
    **dict.fromkeys(["trial", "days", "censoring", "protocol", "labels", "steps", "floor"], EXACT),
    "silos": Named(SHARED),
    "not_shared": EXACT,
    "table1": left_out(),
}

RESULT: dict[str, Allowed] = {
    # The plan.
    **dict.fromkeys(
        ["format", "version", "versions", "plan", "question", "study", "lowered", "absent"], EXACT
    ),
    "arms": EXACT,
    "names": EXACT,
    "g_floor": EXACT,  # the plan's number, or a public function of n
    "uncovered": EXACT,
    # Estimates.
    "estimates": Each(ESTIMATE),
    "simultaneous": Each(ESTIMATE),
    "psi": PSI,
    "covariance": COVARIANCE,
    "std_error": STD_ERROR,
    "interaction": Each(WALD),
    "curves": Each(CURVE),
    "rules": Each(CURVE),
    "ladder": LADDER,
    "finer_grid": {
        "subperiods": EXACT,
        "periods": EXACT,
        "estimates": Each(ESTIMATE),
        "reason": EXACT,
    },
    "sensitivity": Each(
        {
            "estimand": EXACT,
            "e_value": TWO_DIGITS,
            "e_value_interval": TWO_DIGITS,
            "risk_ratio": RATIO,
            "conversion": EXACT,
            "robustness_value": HUNDREDTHS,
            "robustness_value_interval": HUNDREDTHS,
            "bias_scale": TWO_DIGITS,
        }
    ),
    "imputation": {
        "datasets": EXACT,
        "sweeps": EXACT,
        "estimands": Each(
            {
                "estimand": EXACT,
                "df": TWO_DIGITS,
                "missing_information": HUNDREDTHS,
                "increase_in_variance": HUNDREDTHS,
            }
        ),
    },
    # What hospitals release of their own accord.
    "silos": Named(Each(ESTIMATE)),
    "without": Named(Each(ESTIMATE)),
    "heterogeneity": Each(SPREAD),
    "personalized": Named({"retired_at": left_out(), "n_rows": COUNT, "estimates": Each(ESTIMATE)}),
    "site_tests": Each(WALD),
    # Counts.
    "participants": {
        "records": flow_rule(lambda whole: whole.flow.records),
        "omitted": flow_rule(lambda whole: whole.flow.omitted),
        "analysed": flow_rule(lambda whole: whole.flow.n),
        "with_outcome": flow_rule(_with_outcome),
    },
    "n": flow_rule(lambda whole: whole.flow.n),
    "arm_counts": flow_rule(_arm_counts),
    "observed_counts": flow_rule(_observed),
    "event_counts": CAUSES,
    "first_arms": flow_rule(_first_arms),
    "events_hidden_in": EXACT,
    "missing": Named({"count": COUNT, "of": COUNT, "handled": EXACT}),
    "truncated": COUNT,
    "truncated_hidden": EXACT,
    "effective_sizes": COUNT,
    "grid": EXACT,
    "at_risk": {"periods": EXACT, "counts": AT_RISK, "hidden_in": EXACT},
    "periods": PERIODS,
    "weight_bound": EXACT,
    "adherence": Each(
        {
            "rule": EXACT,
            "at_risk": COUNT,
            "followers": COUNT,
            "hidden_in": EXACT,
            "weight_edges": EXACT,
            "weight_counts": TABLE,
            "weights_hidden_in": EXACT,
        }
    ),
    "sizes": NAMES,
    "active": Each({"silos": EXACT, "people": COUNT}),
    "overlap": {
        "is_poor": EXACT,
        "thresholds": EXACT,
        "truncated_share": TRUNCATED_SHARE,
        "components": Each(
            {"name": EXACT, "effective": COUNT, "records": SAME_OBSERVED, "largest_share": HUNDREDTHS_UP}
        ),
    },
    # Groups.
    "balance": BALANCE,
    "learners": LEARNERS,
    "diagnostics": {
        "overlap": Each(HISTOGRAM),
        "outcome_fit": {
            "r_squared": INITIAL_TARGETED,
            "deviance_explained": INITIAL_TARGETED,
            "calibration": CALIBRATION,
        },
        "eif_mean": EIF_MEAN,
    },
    "privacy": NOISED,
    # An emulated trial: the plan, and what owners share of their hospitals.
    "emulation": EMULATION,
    # The run.
    "convergence": {"reason": EXACT, "estimands": Each({"estimand": EXACT, "bound": ONE_DIGIT_UP})},
    "fits": {
        "accuracy": EXACT,
        "largest": ONE_DIGIT_UP,
        "models": Each({"model": EXACT, "effect": ONE_DIGIT_UP}),
    },
    "residual": ONE_DIGIT_UP,
    "residual_kind": EXACT,
    "status": EXACT,
    "status_text": EXACT,
    "converged": EXACT,
    "rounds": EXACT,
    "steps": EXACT,
    "updates": EXACT,
    "bits": TWO_DIGITS,
    "account": {
        "rounds": EXACT,
        "bits_up": BITS,
        "bits_down": BITS,
        "bytes_up": Named(TWO_DIGITS),
        "bytes_down": Named(TWO_DIGITS),
        "by_round": left_out({"phases": [], "up": {}, "down": []}),
    },
    "certificate": CERTIFICATE,
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
    if "published" in document:
        raise NotPublishableError("this result is published already")
    shown = published(document, RESULT, Whole(k=k, document=document, flow=result_flow(document, k)))
    notes = [*shown["notes"], NOTE.format(most=k - 1)]
    return {**shown, "notes": notes, "published": {"floor": k}}


NOTE = (
    "counts are rounded so that nothing is of 1 to {most} people, and estimates to a hundredth of their "
    "standard errors; the exact numbers stay at the hospitals"
)


def published_emulation(emulation: Document, k: int) -> Document:
    """Return what goes out of an emulated trial's document, which joins a published result."""
    return published(emulation, EMULATION, Whole(k=k, document={}, flow=Flow(omitted=0, n=0, arms=())))
