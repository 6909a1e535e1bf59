"""The rules of publication: what each does to a value, or to an object whose numbers depend on each other.

`publish` has the arithmetic and why it holds; `allowed` says which key has which rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

from fedtmle_core.publish import (
    SE_DIGITS,
    Document,
    NotPublishableError,
    Plain,
    Rule,
    Whole,
    cells,
    chi2_tail,
    cut,
    digits,
    estimated,
    multiple,
    on_grid,
    p_value,
    step_above,
    student_tail,
)


def _number(value: Plain) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotPublishableError("the list of what may be published has a number here")
    return value


def _deep(change: Callable[[float], float]) -> Callable[[Plain, Whole], Plain]:
    """Return a rule's function that changes each number of a value, of lists in it, and of named values."""

    def apply(value: Plain, whole: Whole) -> Plain:
        if value is None:
            return None
        if isinstance(value, list):
            return [apply(item, whole) for item in value]
        if isinstance(value, dict):
            return {name: apply(item, whole) for name, item in value.items()}
        found = change(_number(value))
        return int(found) if isinstance(value, int) else found

    return apply


EXACT = Rule("as it is: a fact of the plan, or about hospitals", lambda value, _: value)
NOISED = Rule("as it is: noise protects it", lambda value, _: value)


def left_out(instead: Plain = None) -> Rule:
    """Return the rule of a key that stays at the hospitals; a reader finds ``instead``."""
    return Rule("left out", lambda _value, _whole: instead)


NAMES = Rule("left out; their names remain", lambda value, _: dict.fromkeys(value))
ONE_DIGIT_UP = Rule("one digit, rounded up", _deep(lambda value: digits(value, 1, up=True)))
TWO_DIGITS = Rule("two digits", _deep(lambda value: digits(value, 2)))
HUNDREDTHS = Rule("to a hundredth", _deep(lambda value: on_grid(value, 0.01)))
HUNDREDTHS_UP = Rule("to a hundredth, rounded up", _deep(lambda value: math.ceil(value * 100) / 100))


# Counts.


def _coarse(value: Plain, whole: Whole) -> Plain:
    if isinstance(value, list):
        return [None if item is None else _coarse(item, whole) for item in value]
    if isinstance(value, dict):
        return {name: None if item is None else _coarse(item, whole) for name, item in value.items()}
    return cut(_number(value), whole.flow.n, whole.k)


def table(counts: Sequence[Plain], total: int, k: int) -> list[int | None]:
    """Return the cells of a table of so many people; those that are unknown stay so."""
    shown = iter(cells([_number(count) for count in counts if count is not None], total, k))
    return [None if count is None else next(shown) for count in counts]


def people_of(counts: Sequence[Plain]) -> float:
    """Return how many people a table has."""
    return sum(_number(count) for count in counts if count is not None)


def _tables(value: Plain, whole: Whole) -> Plain:
    """Return a table, or each of several: its total is one more rounded count."""
    if value and all(isinstance(item, list) for item in value):
        return [_tables(item, whole) for item in value]
    return table(value, cut(people_of(value), whole.flow.n, whole.k), whole.k)


def _histogram(value: Document, whole: Whole) -> Document:
    """Return a histogram of the people of one arm, which add up to the arm if all hospitals show theirs."""
    arms = list(whole.document["arms"])
    total = cut(people_of(value["counts"]), whole.flow.n, whole.k)
    if value["arm"] in arms and len(arms) == len(whole.flow.arms) and not any(value["hidden_in"]):
        total = whole.flow.arms[arms.index(value["arm"])]
    return {**value, "counts": table(value["counts"], total, whole.k)}


def _at_risk(value: Plain, whole: Whole) -> Plain:
    """Return those at risk by period as groups of their arm."""
    arms = whole.flow.arms
    return [
        [None if count is None else cut(_number(count), arm, whole.k) for count in row]
        for row, arm in zip(value, arms, strict=True)
    ]


def _share(value: Plain, whole: Whole) -> Plain:
    """Return shares of all people, computed from the counts as they are published."""
    del value
    counts: list[int] = _coarse(whole.document["truncated"], whole)
    return [round(count / whole.flow.n, 4) for count in counts]


COUNT = Rule("rounded to multiples of k", _coarse)
TABLE = Rule("a table, rounded to multiples of k", _tables)
HISTOGRAM = Rule(TABLE.name, _histogram, frozenset(["probability_of", "arm", "edges", "counts", "hidden_in"]))
AT_RISK = Rule(COUNT.name, _at_risk)
TRUNCATED_SHARE = Rule(COUNT.name, _share)
FLOW = "the exact table; 1 to k - 1 people become 0 or k"


def flow_rule(read: Callable[[Whole], Plain]) -> Rule:
    """Return the rule of a count that the exact table has."""
    return Rule(FLOW, lambda _value, whole: read(whole))


def _same_arms(value: Plain, whole: Whole) -> Plain:
    """Return the arms' counts as the exact table has them, or everybody where there are no arms."""
    arms = list(whole.flow.arms)
    return arms if len(arms) == len(value) else [whole.flow.n] * len(value)


def _records(value: Plain, whole: Whole) -> Plain:
    """Return the people with an outcome behind a component: as the exact table has those of its arm."""
    observed = list(whole.document.get("observed_counts") or ())
    if value in observed:
        return whole.flow.observed[observed.index(value)]
    return _coarse(value, whole)


SAME_ARMS = Rule(FLOW, _same_arms)
SAME_OBSERVED = Rule(FLOW, _records)


def _causes(value: Plain, whole: Whole) -> Plain:
    """Return events by arm and cause: the exact table's, unless some hospitals' are not among them."""
    if any(whole.document.get("events_hidden_in") or ()):
        return _tables(value, whole)
    return [list(part) for part in whole.flow.parts]


CAUSES = Rule(FLOW, _causes)


def _periods(value: Plain, whole: Whole) -> Plain:
    """Return people at risk by period as nested groups, and those who left as differences of these."""
    chain: list[int] = []
    for period in value:
        left = _number(period["at_risk"])
        for key in ("censored", "events"):
            chain.append(cut(left, whole.flow.n, whole.k))
            left -= _number(period[key])
        chain.append(cut(left, whole.flow.n, whole.k))
    return [
        {
            "period": period["period"],
            "at_risk": chain[3 * t],
            "censored": chain[3 * t] - chain[3 * t + 1],
            "events": chain[3 * t + 1] - chain[3 * t + 2],
        }
        for t, period in enumerate(value)
    ]


PERIODS = Rule(
    "nested groups, rounded to multiples of k",
    _periods,
    frozenset(["period", "at_risk", "censored", "events"]),
)


def _shared(value: Document, whole: Whole) -> Document:
    """Return a hospital's counts by step and arm, which its owner shares, as groups of the first."""
    first = value["people"][0] if value["people"] else None
    everyone = 0 if first is None else multiple(_number(first), whole.k)

    def shown(count: Plain) -> int | None:
        return None if count is None else cut(_number(count), everyone, whole.k)

    arms = [
        {"name": arm["name"], **{key: shown(arm[key]) for key in ("people", "events", "unknown")}}
        for arm in value["arms"]
    ]
    return {"people": [shown(count) for count in value["people"]], "arms": arms}


SHARED = Rule(COUNT.name, _shared, frozenset(["people", "arms"]))


# Estimates, their intervals and tests.


def _degrees(name: Plain, whole: Whole) -> float | None:
    """Return the degrees of freedom of an interval by Rubin's rules; None for a normal one."""
    imputation = whole.document.get("imputation") or {}
    return next((each["df"] for each in imputation.get("estimands", ()) if each["estimand"] == name), None)


def interval(row: Document, low: str, high: str, error: float, *, is_ratio: bool) -> tuple[float, float]:
    """Return limits around a published estimate, at the exact ones' distance in standard errors.

    The distance is a quantile, of which two decimals go out. A limit that was cut off at a bound of the
    parameter is that bound. ``row`` is the exact one; ``error`` is the published standard error.
    """
    value, exact = _number(row["estimate"]), _number(row["std_error"])
    ends = _number(row[low]), _number(row[high])
    center = estimated(value, exact)
    if exact <= 0:
        return center, center
    if is_ratio and min(value, center, *ends) > 0:
        spread, reach = exact / value, math.log(ends[1] / ends[0]) / 2
        width = round(reach / spread, 2) * (error / center)
        limits = center * math.exp(-width), center * math.exp(width)
    else:
        reach = max(value - ends[0], ends[1] - value)
        width = round(reach / exact, 2) * error
        limits = center - width, center + width
        cut = 1e-6 * exact
        if value - ends[0] < reach - cut:  # only the other end is as far as the quantile says
            limits = max(limits[0], on_grid(ends[0], step_above(error))), limits[1]
        if ends[1] - value < reach - cut:
            limits = limits[0], min(limits[1], on_grid(ends[1], step_above(error)))
    step = step_above(error / 100)
    return on_grid(limits[0], step), on_grid(limits[1], step)


LIMITS = (("conf_low", "conf_high"), ("prediction_low", "prediction_high"), ("band_low", "band_high"))
_ROW = {"estimand", "estimate", "std_error", "conf_low", "conf_high", "p_value", "scale"}


def _estimate(row: Document, whole: Whole, df: float | None = None) -> Document:
    """Return a row of a table of estimates; ``scale`` decides where "no effect" is and what is symmetric."""
    value, error = _number(row["estimate"]), _number(row["std_error"])
    is_ratio = row.get("scale") == "ratio"
    center, shown_error = estimated(value, error), digits(error, SE_DIGITS)
    shown: Document = {key: row[key] for key in ("estimand", "method", "scale") if key in row}
    shown |= {"estimate": center, "std_error": shown_error}
    for low, high in LIMITS:
        if low in row:
            shown[low], shown[high] = interval(row, low, high, shown_error, is_ratio=is_ratio)
    if "p_value" in row:
        df = _degrees(row.get("estimand"), whole) if df is None else df
        shown["p_value"] = _p_of(row, center, shown_error, df, is_ratio=is_ratio)
    if "difference" in row:
        shown["difference"] = on_grid(_number(row["difference"]), 0.01)
    if "tau2" in row:
        shown |= {"tau2": digits(row["tau2"], 2), "I2": on_grid(row["I2"], 0.01)}
    return {key: shown[key] for key in row if key in shown}


def _p_of(row: Document, center: float, error: float, df: float | None, *, is_ratio: bool) -> float | None:
    if row["p_value"] is None:
        return None
    if error <= 0 or (is_ratio and center <= 0):
        return 1.0 if center == is_ratio else TINY_P
    distance = abs(math.log(center)) / (error / center) if is_ratio else abs(center) / error
    return p_value(student_tail(distance, df))


TINY_P = p_value(0.0)
ESTIMATE = Rule(
    "to a hundredth of its standard error, with what follows from it",
    _estimate,
    frozenset(_ROW | {"difference"}),
)


def _curve(curve: Document, whole: Whole) -> Document:
    """Return estimates by horizon with their intervals; the rest are the plan's words and horizons."""
    arrays = ["estimate", "std_error", *(key for pair in LIMITS for key in pair if key in curve)]
    rows = [
        dict(zip(arrays, values, strict=True)) for values in zip(*(curve[a] for a in arrays), strict=True)
    ]
    shown = [_estimate(row, whole) for row in rows]
    facts = {key: curve[key] for key in curve if key in CURVE_FACTS}
    return {**facts, **{array: [row[array] for row in shown] for array in arrays}}


CURVE_FACTS = {"arm", "population", "cause", "rule", "horizons", "times"}
CURVE = Rule(
    ESTIMATE.name,
    _curve,
    frozenset({*CURVE_FACTS, "estimate", "std_error", *(key for pair in LIMITS for key in pair)}),
)


def _errors(whole: Whole) -> list[float]:
    return [_number(each) for each in whole.document.get("std_error") or ()]


def _psi(value: Plain, whole: Whole) -> Plain:
    return [estimated(_number(psi), error) for psi, error in zip(value, _errors(whole), strict=True)]


def _covariance(value: Plain, whole: Whole) -> Plain:
    """Return correlations to a hundredth times the published standard errors."""
    exact = _errors(whole)
    shown = [digits(error, SE_DIGITS) for error in exact]

    def entry(i: int, j: int) -> float:
        if exact[i] <= 0 or exact[j] <= 0:
            return 0.0
        correlation = 1.0 if i == j else round(_number(value[i][j]) / (exact[i] * exact[j]), 2)
        return digits(correlation * shown[i] * shown[j], 6)

    return [[entry(i, j) for j in range(len(exact))] for i in range(len(exact))]


def _by_component(value: Plain, whole: Whole) -> Plain:
    """Return means of the influence function on the grids of their components' estimates."""
    errors = dict(zip(whole.document.get("names") or (), _errors(whole), strict=True))
    largest = max(errors.values(), default=0.0)  # where only a contrast was targeted
    return {name: estimated(_number(mean), errors.get(name, largest)) for name, mean in value.items()}


STD_ERROR = Rule("three digits", _deep(lambda value: digits(value, SE_DIGITS)))
PSI = Rule(ESTIMATE.name, _psi)
COVARIANCE = Rule("correlations to a hundredth", _covariance)
EIF_MEAN = Rule(ESTIMATE.name, _by_component)


def _wald(row: Document, statistic: str) -> Document:
    """Return a chi-squared test whose root, a distance in standard errors, has two decimals."""
    root = round(math.sqrt(max(_number(row[statistic]), 0.0)), 2)
    return {statistic: round(root * root, 4), "p_value": p_value(chi2_tail(root * root, int(row["df"])))}


WALD = Rule(
    "its root to a hundredth, the p-value from that",
    lambda row, _: {
        **{k: row[k] for k in ("estimand", "model", "df") if k in row},
        **_wald(row, "statistic"),
    },
    frozenset(["estimand", "model", "statistic", "df", "p_value"]),
)


def _spread(row: Document, whole: Whole) -> Document:
    """Return the heterogeneity of estimates that hospitals released, and their random-effects summaries."""
    scale = next(
        (
            each["scale"]
            for each in whole.document.get("estimates") or ()
            if each["estimand"] == row["estimand"]
        ),
        "value",
    )
    shown = {key: row[key] for key in ("estimand", "silos", "df")}
    summaries = [_estimate({**each, "scale": scale}, whole, df=row["df"]) for each in row["summaries"]]
    for each in summaries:
        del each["scale"]
    by_silo = {key: {s: on_grid(v, 0.01) for s, v in row[key].items()} for key in ("distance", "weights")}
    shown |= {**_wald(row, "Q"), "I2": on_grid(row["I2"], 0.01), "tau2": digits(row["tau2"], 2)}
    return {**shown, **by_silo, "summaries": summaries}


SPREAD = Rule(
    ESTIMATE.name,
    _spread,
    frozenset(["estimand", "silos", "Q", "df", "p_value", "I2", "tau2", "distance", "weights", "summaries"]),
)


def _ratio(value: Plain, whole: Whole) -> Plain:
    """Return a risk ratio and its limits: of a hundredth of the standard error that they imply."""
    ratio, low, high = map(_number, value)
    confidence = ((whole.document.get("study") or {}).get("options") or {}).get("confidence", 0.95)
    if min(ratio, low, high) <= 0:
        return None
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    error = ratio * math.log(high / low) / 2 / z
    row = {"estimate": ratio, "std_error": error, "low": low, "high": high}
    return [estimated(ratio, error), *interval(row, "low", "high", digits(error, SE_DIGITS), is_ratio=True)]


RATIO = Rule(ESTIMATE.name, _ratio)


def _ladder(value: Plain, whole: Whole) -> Plain:
    """Return the rungs that differ by nobody, or by k people, from the rung before.

    ``people``, by arm, says how many have a score below the rung's bound. Without it nobody is known to lie
    between two bounds only if nobody is below the study's own, and the rungs' estimates are the same.
    """
    nobody = not any(whole.document.get("truncated") or [1])
    shown, last = [], None
    for rung in value:
        counted = rung.get("people")
        if last is None:
            goes = nobody or (counted is not None and all(c == 0 or c >= whole.k for c in counted))
        elif counted is not None and last.get("people") is not None:
            gaps = [after - before for before, after in zip(last["people"], counted, strict=True)]
            goes = all(gap == 0 or gap >= whole.k for gap in gaps)
        else:
            goes = nobody and rung["estimates"] == last["estimates"]
        if goes:
            last = rung
            rows = [_estimate(row, whole) for row in rung["estimates"]]
            shown.append({"bound": rung["bound"], "estimates": rows})
    return shown


LADDER = Rule(
    "rungs that differ by nobody or by k people", _ladder, frozenset(["bound", "estimates", "people"])
)


# Means and shares of groups.


def _mean_step(sd: float, people: float) -> float:
    """Return what one person can change a mean at most: |x - mean| <= sd sqrt(n - 1) (Samuelson 1968)."""
    return step_above(digits(sd, 2) / math.sqrt(people))


def not_dominated(mean: float, sd: float, people: float, low: float, high: float) -> bool:
    """Return whether nobody can be more than half of the sums above ``low``, below ``high``, and of squares.

    One person's part of these is at most high - low, and its square.
    """
    width = high - low
    least = min(mean - low, high - mean) * people
    return least >= 2 * width and people * sd * sd >= 2 * width * width


def _line(line: Document, whole: Whole, counts: Sequence[float], effective: float) -> Document:
    """Return a covariate's line: shares in multiples of k, means by `_mean_step`, or neither."""
    shown = {key: line[key] for key in ("name", "level", "label", "level_label", "unit", "hidden_in")}
    arms = len(counts)
    none: list[float | None] = [None] * arms
    means, weighted, sds = list(none), list(none), list(none)
    variable = ((whole.document.get("study") or {}).get("variables") or {}).get(line["name"]) or {}
    for a, (mean, w_mean, people) in enumerate(
        zip(line["means"], line["weighted_means"], counts, strict=True)
    ):
        if mean is None or line["hidden_in"] or people < whole.k:
            continue
        few = min(people, effective) if effective > 0 else people
        if line["sds"] is None:
            means[a] = round(cut(mean * people, int(people), whole.k) / people, 4)
            if w_mean is not None:
                weighted[a] = min(1.0, on_grid(w_mean, step_above(1 / few)))
            continue
        sd, bounds = line["sds"][a], variable.get("range")
        if sd is None or bounds is None or not not_dominated(mean, sd, people, *bounds):
            continue
        means[a], sds[a] = on_grid(mean, _mean_step(sd, people)), digits(sd, 2)
        if w_mean is not None:
            weighted[a] = on_grid(w_mean, _mean_step(sd, few))
    shown |= {"means": means, "sds": None if line["sds"] is None else sds, "weighted_means": weighted}
    scales = [
        digits(abs((mean - line["means"][0]) / difference), 2) if mean is not None and difference else None
        for mean, difference in zip(line["means"][1:], line["differences"], strict=True)
    ]
    for key, by in (("differences", means), ("weighted_differences", weighted)):
        shown[key] = [
            None if b is None or by[0] is None or not scale else on_grid((b - by[0]) / scale, 0.01)
            for b, scale in zip(by[1:], scales, strict=True)
        ]
    return {key: shown[key] for key in line if key in shown}


def _balance(value: Document, whole: Whole) -> Document:
    counts = [_number(count) for count in value["counts"]]
    sizes = [size for size in (whole.document.get("effective_sizes") or {}).values() if size]
    shown = {
        "reference": value["reference"],
        "arms": value["arms"],
        "counts": _same_arms(value["counts"], whole),
        "is_complete": value["is_complete"],
        "covariates": [_line(line, whole, counts, min(sizes, default=0.0)) for line in value["covariates"]],
    }
    return {key: shown[key] for key in value if key in shown}


BALANCE = Rule(
    "means to what one person can change at most, shares in multiples of k",
    _balance,
    frozenset(["reference", "arms", "counts", "is_complete", "covariates"]),
)


def _calibration(value: Document, whole: Whole) -> Document:
    """Return bins of outcomes, joined until each has k people and no mean is one person's."""
    low, high = map(_number, whole.facts["outcome_bounds"])
    width, binary = high - low, whole.facts.get("response") == "binary"
    names = ("observed", "initial", "targeted")
    bins = len(value["counts"])
    empty: Document = {"counts": [None] * bins, **{name: [None] * bins for name in names}}
    joined: list[tuple[int, float, dict[str, float]]] = []
    place, people, sums = 0, 0.0, dict.fromkeys(names, 0.0)

    def enough(people: float, sums: Mapping[str, float]) -> bool:
        needed = {"observed": whole.k if binary else 2, "initial": 2, "targeted": 2}
        return people >= whole.k and all(min(sums[n], people - sums[n]) >= needed[n] - 1e-6 for n in names)

    largest = 0.0
    for b, count in enumerate(value["counts"]):
        if not count:
            continue
        if count > largest:
            place, largest = b, count
        people += count
        sums = {n: sums[n] + count * (_number(value[n][b]) - low) / width for n in names}
        if enough(people, sums):
            joined.append((place, people, sums))
            people, sums, largest = 0.0, dict.fromkeys(names, 0.0), 0.0
    if people and joined:  # too few are left: they go to the last bin
        place, before, held = joined.pop()
        joined.append((place, before + people, {n: held[n] + sums[n] for n in names}))
    shown = dict(empty)
    if joined:
        shown["counts"] = [0] * bins
        everyone = sum(count for _, count, _ in joined)
        shown_total = cut(everyone, whole.flow.n, whole.k)
        if whole.flow.parts and not any(value["hidden_in"]):
            shown_total = whole.flow.with_outcome  # the bins divide those with an outcome
        rounded_cells = cells([count for _, count, _ in joined], shown_total, whole.k)
        for (at, count, total), rounded in zip(joined, rounded_cells, strict=True):
            shown["counts"][at] = rounded
            for n in names:
                step = step_above((whole.k if binary and n == "observed" else 1) * width / count)
                shown[n] = [*shown[n]]
                shown[n][at] = min(max(on_grid(low + width * total[n] / count, step), low), high)
    edges = [min(max(on_grid(edge, step_above(width / 100)), low), high) for edge in value["edges"]]
    return {**{"edges": edges, "hidden_in": value["hidden_in"]}, **shown}


CALIBRATION = Rule(
    "bins of k people; means to what one person can change at most",
    _calibration,
    frozenset(["edges", "counts", "hidden_in", "observed", "initial", "targeted"]),
)


def _risk(value: Plain, whole: Whole) -> Plain:
    """Return learners with their weights, and losses to what one record can change at most."""
    folds = max((each["fold"] or 1 for each in value), default=1)
    low, high = whole.facts["outcome_bounds"]
    rows = []
    for each in value:
        largest = (high - low) ** 2 if each["model"] == "outcome" else 1.0
        step = step_above(largest * folds / whole.flow.n)
        row = {key: each[key] for key in ("model", "arm", "fold", "learner", "text")}
        rows.append({**row, "weight": on_grid(each["weight"], 0.01), "risk": on_grid(each["risk"], step)})
    return rows


LEARNERS = Rule(
    "weights to a hundredth, losses to what one person can change at most",
    _risk,
    frozenset(["model", "arm", "fold", "learner", "text", "weight", "risk"]),
)


# Sentences.


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
            shown.append(sentence if sentence == whole.document.get("status_text") else instead or sentence)
        return list(dict.fromkeys(shown))

    return Rule("a fixed list of sentences", apply)
