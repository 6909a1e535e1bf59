"""The rules by name: what becomes of a value, or of an object whose numbers depend on each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fedtmle_core.publish.counts import Flow, NotPublishableError, cells, cut, multiple
from fedtmle_core.publish.numbers import SE_DIGITS, digits, estimated, on_grid, step_above

Plain: TypeAlias = Any  # None, bool, int, float, str, or a list or dict (by text) of such
Document: TypeAlias = dict[str, Plain]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What a rule may look at: the floor, the exact document, and the published table of counts."""

    k: int
    document: Mapping[str, Plain]
    flow: Flow


@dataclass(frozen=True)
class Rule:
    """A rule by its name, in words for an officer."""

    name: str
    apply: Callable[[Plain, Whole], Plain]


@dataclass(frozen=True)
class Each:
    """A list, each item by the same rule."""

    item: Allowed


@dataclass(frozen=True)
class Named:
    """An object whose keys are names of the plan: silos, components, variables, levels."""

    item: Allowed


Allowed: TypeAlias = "Rule | Each | Named | Mapping[str, Allowed]"


def published(document: Document, allowed: Mapping[str, Allowed], whole: Whole) -> Document:
    """Return what goes out of a document: the keys on the list, each by its rule; all others stay."""
    return {key: _apply(item, allowed[key], whole) for key, item in document.items() if key in allowed}


def _apply(value: Plain, allowed: Allowed, whole: Whole) -> Plain:
    if value is None:
        return None
    if isinstance(allowed, Rule):
        return allowed.apply(value, whole)
    if isinstance(allowed, Each):
        return [_apply(item, allowed.item, whole) for item in _of(list, value)]
    if isinstance(allowed, Named):
        return {name: _apply(item, allowed.item, whole) for name, item in _of(dict, value).items()}
    return {
        key: _apply(item, allowed[key], whole) for key, item in _of(dict, value).items() if key in allowed
    }


def _of(kind: type, value: Plain) -> Plain:
    if not isinstance(value, kind):
        raise NotPublishableError(f"the list of what may be published has a {kind.__name__} here")
    return value


def deep(name: str, change: Callable[[float, Whole], float], *, words: bool = False) -> Rule:
    """Return the rule that changes each number, in lists and objects too; ``words`` may stay."""

    def apply(value: Plain, whole: Whole) -> Plain:
        if isinstance(value, list):
            return [apply(item, whole) for item in value]
        if isinstance(value, dict):
            return {name: apply(item, whole) for name, item in value.items()}
        if value is None or (words and isinstance(value, str)):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NotPublishableError("the list of what may be published has a number here")
        found = change(value, whole)
        return int(found) if isinstance(value, int) else found

    return Rule(name, apply)


def left_out(instead: Plain = None) -> Rule:
    """Return the rule of a key that stays at the hospitals; a reader finds ``instead``."""
    return Rule("left out", lambda _value, _whole: instead)


def computed(name: str, read: Callable[[Whole], Plain]) -> Rule:
    """Return the rule of a number that follows from published ones."""
    return Rule(name, lambda _value, whole: read(whole))


EXACT = Rule("as it is: a fact of the plan, or about hospitals", lambda value, _: value)
NOISED = Rule("as it is: noise protects it", lambda value, _: value)
NAMES = Rule("left out; the names remain", lambda value, _: dict.fromkeys(value))
ONE_DIGIT_UP = deep("one digit, rounded up", lambda value, _: digits(value, 1, up=True))
TWO_DIGITS = deep("two digits", lambda value, _: digits(value, 2), words=True)
TWO_DIGITS_UP = deep("two digits, rounded up", lambda value, _: digits(value, 2, up=True), words=True)
THREE_DIGITS = deep("three digits", lambda value, _: digits(value, 3), words=True)
HUNDREDTHS = deep("to a hundredth", lambda value, _: on_grid(value, 0.01))


# Counts.


def rounded(count: float, whole: Whole) -> int:
    """Return how many of the study's people a group has; a count of more is a multiple of k."""
    return cut(count, whole.flow.n, whole.k) if count <= whole.flow.n else multiple(count, whole.k)


def table(counts: Sequence[Plain], total: int, k: int) -> list[int | None]:
    """Return the cells of a table of so many people; those that are unknown stay so."""
    shown = iter(cells([count for count in counts if count is not None], total, k))
    return [None if count is None else next(shown) for count in counts]


def people_of(counts: Sequence[Plain]) -> float:
    """Return how many people a table has."""
    return float(sum(count for count in counts if count is not None))


def _tables(value: Plain, whole: Whole) -> Plain:
    """Return a table, or each of several: its total is one more rounded count."""
    if value and all(isinstance(item, list) for item in value):
        return [_tables(item, whole) for item in value]
    return table(value, rounded(people_of(value), whole), whole.k)


def _histogram(value: Document, whole: Whole) -> Document:
    """Return a histogram of the people of one arm, which add up to the arm if all hospitals show theirs."""
    arms = list(whole.document["arms"])
    total = rounded(people_of(value["counts"]), whole)
    if value["arm"] in arms and len(arms) == len(whole.flow.arms) and not any(value["hidden_in"]):
        total = whole.flow.arms[arms.index(value["arm"])]
    facts = {key: value[key] for key in ("probability_of", "arm", "edges", "hidden_in")}
    return {**facts, "counts": table(value["counts"], total, whole.k)}


def _at_risk(value: Plain, whole: Whole) -> Plain:
    """Return those at risk by period as groups of their arm."""
    return [
        [None if count is None else cut(count, arm, whole.k) for count in row]
        for row, arm in zip(value, whole.flow.arms, strict=True)
    ]


def _records(value: Plain, whole: Whole) -> Plain:
    """Return the people with an outcome behind a component: as the exact table has those of its arm."""
    observed = list(whole.document["observed_counts"])
    return whole.flow.observed[observed.index(value)] if value in observed else rounded(value, whole)


def _causes(value: Plain, whole: Whole) -> Plain:
    """Return events by arm and cause: the exact table's, unless some hospitals' are not among them."""
    if any(whole.document["events_hidden_in"]):
        return _tables(value, whole)
    return [list(part) for part in whole.flow.parts]


def _periods(value: Plain, whole: Whole) -> Plain:
    """Return people at risk by period as nested groups, and those who left as differences of these."""
    rows = []
    for period in value:
        stay = period["at_risk"] - period["censored"]
        chain = [rounded(left, whole) for left in (period["at_risk"], stay, stay - period["events"])]
        censored, events = chain[0] - chain[1], chain[1] - chain[2]
        shown = {"at_risk": chain[0], "censored": censored, "events": events}
        rows.append({"period": period["period"], **shown})
    return rows


COUNT = deep("rounded to multiples of k", rounded, words=True)
TABLE = Rule("a table, rounded to multiples of k", _tables)
HISTOGRAM = Rule(TABLE.name, _histogram)
AT_RISK = Rule(COUNT.name, _at_risk)
PERIODS = Rule(COUNT.name, _periods)
FLOW = "the exact table; 1 to k - 1 people become 0 or k"
RECORDS = Rule(FLOW, _records)
CAUSES = Rule(FLOW, _causes)


# Estimates, their intervals and tests.

TINY = 1e-12  # a smaller p-value is published as this: the sums behind it have no more digits
LIMITS = (("conf_low", "conf_high"), ("band_low", "band_high"))


def interval(row: Document, low: str, high: str) -> tuple[float, float]:
    """Return limits around the published estimate, at the exact ones' distance in standard errors.

    The distance is a quantile and tells nothing of the estimate. A limit that was cut off at a bound of the
    parameter is that bound. ``row`` is the exact one; an interval of a ratio is symmetric on the log scale.
    """
    value, exact, ends = row["estimate"], row["std_error"], (row[low], row[high])
    center, error = estimated(value, exact), digits(exact, SE_DIGITS)
    if exact <= 0:
        return center, center
    step = step_above(error / 100)
    if row.get("scale") == "ratio" and min(value, center, *ends) > 0:
        quantile = math.log(ends[1] / ends[0]) / 2 / (exact / value)
        factor = math.exp(quantile * error / center)
        return on_grid(center / factor, step), on_grid(center * factor, step)
    reach = [value - ends[0], ends[1] - value]
    width = max(reach) / exact * error
    limits = [center - width, center + width]
    for i, each in enumerate(reach):
        if each < max(reach) - 1e-6 * exact:  # cut off: only the other end is as far as the quantile says
            limits[i] = ends[i]
    return on_grid(limits[0], step), on_grid(limits[1], step)


def _estimate(row: Document, whole: Whole) -> Document:
    """Return a row of a table of estimates; ``scale`` decides where "no effect" is and what is symmetric."""
    shown: Document = {key: row[key] for key in ("estimand", "scale") if key in row}
    shown["estimate"] = estimated(row["estimate"], row["std_error"])
    shown["std_error"] = digits(row["std_error"], SE_DIGITS)
    for low, high in LIMITS:
        if low in row:
            shown[low], shown[high] = interval(row, low, high)
    if "p_value" in row:
        shown["p_value"] = None if row["p_value"] is None else _p_value(row, shown, whole)
    if "difference" in row:  # of a finer grid, in standard errors
        shown["difference"] = on_grid(row["difference"], 0.01)
    return {key: shown[key] for key in row if key in shown}


def _p_value(row: Document, shown: Document, whole: Whole) -> float:
    """Return the normal p-value of the published numbers; one digit of a p-value that is not normal."""
    center, error, is_ratio = shown["estimate"], shown["std_error"], row["scale"] == "ratio"
    if whole.document.get("imputation") or error <= 0 or (is_ratio and center <= 0):
        return max(TINY, digits(row["p_value"], 1))
    distance = abs(math.log(center)) * center if is_ratio else abs(center)
    return max(TINY, digits(math.erfc(distance / error / math.sqrt(2)), 3))


def _curve(curve: Document, whole: Whole) -> Document:
    """Return estimates by horizon with their intervals; the rest are the plan's words and horizons."""
    facts = ("arm", "population", "cause", "rule", "horizons", "times")
    arrays = ["estimate", "std_error", *(key for pair in LIMITS for key in pair if key in curve)]
    at = zip(*(curve[array] for array in arrays), strict=True)
    rows = [_estimate(dict(zip(arrays, values, strict=True)), whole) for values in at]
    shown = {array: [row[array] for row in rows] for array in arrays}
    return {key: shown.get(key, curve[key]) for key in curve if key in shown or key in facts}


def _psi(value: Plain, whole: Whole) -> Plain:
    errors = whole.document["std_error"]
    return [estimated(psi, error) for psi, error in zip(value, errors, strict=True)]


def _covariance(value: Plain, whole: Whole) -> Plain:
    """Return correlations to a hundredth times the published standard errors."""
    exact: list[float] = whole.document["std_error"]
    shown = [digits(error, SE_DIGITS) for error in exact]

    def entry(i: int, j: int) -> float:
        if min(exact[i], exact[j]) <= 0:
            return 0.0
        correlation = on_grid(value[i][j] / (exact[i] * exact[j]), 0.01)
        return digits(correlation * shown[i] * shown[j], 6)

    return [[entry(i, j) for j in range(len(exact))] for i in range(len(exact))]


def _wald(row: Document, _: Whole) -> Document:
    """Return a chi-squared test whose root, a distance in standard errors, has two decimals."""
    root = on_grid(math.sqrt(max(row["statistic"], 0.0)), 0.01)
    facts: Document = {key: row[key] for key in ("estimand", "model", "df") if key in row}
    return {**facts, "statistic": round(root * root, 4), "p_value": max(TINY, digits(row["p_value"], 1))}


def _ladder(value: Plain, whole: Whole) -> Plain:
    """Return the rungs that differ by nobody, or by k people, from the rung before.

    ``people``, by arm, says how many have a score below the rung's bound. Without it nobody is known to lie
    between two bounds only if nobody is below the study's own, and the rungs' estimates are the same.
    """
    rows = [rung["estimates"] for rung in value]
    if all("people" in rung for rung in value):
        kept = list(_apart([rung["people"] for rung in value], whole.k))
    else:
        kept = [not any(whole.document["truncated"]) and each == rows[0] for each in rows]
    return [
        {"bound": rung["bound"], "estimates": [_estimate(row, whole) for row in rung["estimates"]]}
        for rung, goes in zip(value, kept, strict=True)
        if goes
    ]


def _apart(people: Sequence[Sequence[int]], k: int) -> Iterator[bool]:
    """Yield whether each of these nested groups, by arm, differs by nobody or k from the last kept one."""
    last: Sequence[int] = [0] * len(people[0]) if people else []
    for counts in people:
        goes = all(gap == 0 or gap >= k for gap in map(int.__sub__, counts, last))
        last = counts if goes else last
        yield goes


ESTIMATE = Rule("to a hundredth of its standard error, with what follows from it", _estimate)
CURVE = Rule(ESTIMATE.name, _curve)
PSI = Rule(ESTIMATE.name, _psi)
COVARIANCE = Rule("correlations to a hundredth", _covariance)
WALD = Rule("its root to a hundredth, the p-value to one digit", _wald)
LADDER = Rule("rungs that differ by nobody or by k people", _ladder)
