"""Means and shares of groups: covariates by arm, outcomes by bin, learners' losses.

One person of n can change a mean by (high - low)/n at most, where values have declared bounds, and by the
standard deviation over sqrt(n), since |x - mean| <= sd sqrt(n - 1) (Samuelson 1968). A mean is rounded to
that.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedtmle_core.publish.counts import cells, cut
from fedtmle_core.publish.numbers import digits, on_grid, step_above
from fedtmle_core.publish.rules import Document, Plain, Rule, Whole, rounded


def not_dominated(mean: float, sd: float, people: float, low: float, high: float) -> bool:
    """Return whether nobody can be more than half of the sums above ``low``, below ``high``, and of squares.

    One person's part of these is at most high - low, and its square.
    """
    width = high - low
    least = min(mean - low, high - mean) * people
    return least >= 2 * width and people * sd * sd >= 2 * width * width


def same_arms(counts: Sequence[int], whole: Whole) -> list[int]:
    """Return the arms' counts as the exact table has them, or everybody where there are no arms."""
    arms = list(whole.flow.arms)
    return arms if len(arms) == len(counts) else [whole.flow.n] * len(counts)


def _balance(value: Document, whole: Whole) -> Document:
    effective = min((size for size in whole.document["effective_sizes"].values() if size > 0), default=1.0)
    lines = [_line(line, whole, value["counts"], effective) for line in value["covariates"]]
    facts = {key: value[key] for key in ("reference", "arms", "is_complete")}
    return {**facts, "counts": same_arms(value["counts"], whole), "covariates": lines}


def _line(line: Document, whole: Whole, counts: Sequence[int], effective: float) -> Document:
    """Return a covariate's line by arm; what only some hospitals show is left out."""
    bounds = whole.document["study"]["variables"].get(line["name"], {}).get("range")
    is_share = line["sds"] is None
    means, weighted, sds = zip(
        *(
            _arm(line, a, people, min(people, effective), bounds, whole)
            if line["means"][a] is not None and not line["hidden_in"] and people >= whole.k
            else (None, None, None)
            for a, people in enumerate(counts)
        ),
        strict=True,
    )
    # The exact lines divide by a standard deviation, which follows from any difference that is not 0.
    scales = [
        digits(abs((mean - line["means"][0]) / difference), 2) if mean is not None and difference else None
        for mean, difference in zip(line["means"][1:], line["differences"], strict=True)
    ]

    def apart(by: Sequence[float | None]) -> list[float | None]:
        return [
            None if b is None or by[0] is None or not scale else on_grid((b - by[0]) / scale, 0.01)
            for b, scale in zip(by[1:], scales, strict=True)
        ]

    facts = {key: line[key] for key in ("name", "level", "label", "level_label", "unit", "hidden_in")}
    shown = {"means": list(means), "sds": None if is_share else list(sds), "weighted_means": list(weighted)}
    return {**facts, **shown, "differences": apart(means), "weighted_differences": apart(weighted)}


def _arm(
    line: Document, a: int, people: int, effective: float, bounds: Plain, whole: Whole
) -> tuple[float | None, float | None, float | None]:
    """Return the mean, weighted mean and standard deviation in one arm; a share is a count over the arm."""
    mean, weighted = line["means"][a], line["weighted_means"][a]
    if line["sds"] is None:
        shown = round(cut(mean * people, people, whole.k) / people, 4)
        return shown, None if weighted is None else on_grid(weighted, step_above(1 / effective)), None
    sd = line["sds"][a]
    if sd is None or bounds is None or not not_dominated(mean, sd, people, *bounds):
        return None, None, None
    steps = [step_above(digits(sd, 2) / size**0.5) for size in (people, effective)]
    return on_grid(mean, steps[0]), None if weighted is None else on_grid(weighted, steps[1]), digits(sd, 2)


MEANS = ("observed", "initial", "targeted")


def _calibration(value: Document, whole: Whole) -> Document:
    """Return bins of outcomes, joined until each has k people and no mean of it is mostly one person's."""
    target = whole.document["study"]["target"]
    (low, high), binary = target["outcome_bounds"], target["response"] == "binary"
    width, size = high - low, len(value["counts"])
    shown: Document = {name: [None] * size for name in ("counts", *MEANS)}
    bins = _joined(value, low, width, whole.k if binary else 2, whole.k)
    if bins:
        total = rounded(sum(people for _, people, _ in bins), whole)
        if whole.flow.parts and not any(value["hidden_in"]):
            total = sum(whole.flow.observed)  # the bins divide those with an outcome
        shown["counts"] = [0] * size
        counts = cells([people for _, people, _ in bins], total, whole.k)
        for (at, people, sums), count in zip(bins, counts, strict=True):
            shown["counts"][at] = count
            for name, part in zip(MEANS, sums, strict=True):
                persons = whole.k if binary and name == "observed" else 1  # a count in multiples of k
                mean = on_grid(low + width * part / people, step_above(persons * width / people))
                shown[name][at] = min(max(mean, low), high)
    edges = [min(max(on_grid(edge, step_above(width / 100)), low), high) for edge in value["edges"]]
    return {"edges": edges, "hidden_in": value["hidden_in"], **shown}


def _joined(
    value: Document, low: float, width: float, needed: float, k: int
) -> list[tuple[int, float, list[float]]]:
    """Return joined bins: where most of their people were, how many they are, and sums of `MEANS` in widths.

    Nobody is more than 1 of a sum, of it or of what is missing to all being at the other bound. So each is at
    least 2; that of a binary outcome, a count, at least k.
    """
    found: list[tuple[int, float, list[float]]] = []
    place, largest, people, sums = 0, 0, 0.0, [0.0] * len(MEANS)
    for b, count in enumerate(value["counts"]):
        if not count:
            continue
        place, largest = (b, count) if count > largest else (place, largest)
        people += count
        sums = [s + count * (value[name][b] - low) / width for s, name in zip(sums, MEANS, strict=True)]
        least = [min(each, people - each) for each in sums]
        if people >= k and least[0] >= needed - 1e-6 and min(least) >= 2:
            found.append((place, people, sums))
            place, largest, people, sums = 0, 0, 0.0, [0.0] * len(MEANS)
    if people and found:  # those that are too few at the end join the last bin
        at, before, held = found.pop()
        found.append((at, before + people, [a + b for a, b in zip(held, sums, strict=True)]))
    return found


def _learners(value: Plain, whole: Whole) -> Plain:
    """Return learners with their weights, and losses to what one record can change at most."""
    folds = max((each["fold"] or 1 for each in value), default=1)
    low, high = whole.document["study"]["target"]["outcome_bounds"]
    rows = []
    for each in value:
        largest = (high - low) ** 2 if each["model"] == "outcome" else 1.0
        facts = {key: each[key] for key in ("model", "arm", "fold", "learner", "text")}
        risk = on_grid(each["risk"], step_above(largest * folds / whole.flow.n))
        rows.append({**facts, "weight": on_grid(each["weight"], 0.01), "risk": risk})
    return rows


BALANCE = Rule("means to what one person can change at most, shares in multiples of k", _balance)
CALIBRATION = Rule("bins of k people; means to what one person can change at most", _calibration)
LEARNERS = Rule("weights to a hundredth, losses to what one person can change at most", _learners)
