"""Figures about the people of a study, and the sections about treatment over time.

The figures show balance, estimates by truncation bound, curves, adherence and weights; the sections show
periods, who followed the rules, and their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedtmle.layout import Document, decreasing, element, scrolling, share, table, text
from fedtmle.report import charts, series
from fedtmle.report.charts import (
    CHARACTER,
    ROW,
    Canvas,
    Draw,
    Scale,
    is_wide,
    label,
    linear,
    name_column,
    shortened,
    ticks,
    x_axis,
)
from fedtmle.report.series import FollowedShares, Horizons, Love, Weights
from fedtmle.text.result import interval_title

BALANCED = 0.1  # standard deviations: the usual limit for a difference that needs no attention
COLOURS = 4  # number of curve colours in the style sheet; the curves after these are dashed
LINE = 18.0  # height of a line of a legend
AtRisk = Sequence[tuple[float, str]]  # times and numbers


def love(data: Love) -> Draw:
    """Draw standardised differences, one row per covariate: open dots before weighting, filled ones after."""

    def draw(width: float) -> Canvas:
        left, right, top = name_column(data.names, width), width - 12, 8.0
        bottom = top + ROW * len(data.names)
        canvas = Canvas(width, bottom + 66)
        known = [abs(v) for values in (data.unweighted, data.weighted) for v in values if v is not None]
        most = max([2.2 * BALANCED, *(value * 1.05 for value in known)])
        x = linear(-most, most, left, right)
        canvas.rect(x(-BALANCED), top, x(BALANCED) - x(-BALANCED), bottom - top, "usual", "within 0.1")
        x_axis(canvas, x, ticks(-most, most, 6 if is_wide(width) else 4), top, bottom)
        canvas.line(x(0), top, x(0), bottom, "null")
        for i, name in enumerate(data.names):
            y = top + ROW * (i + 0.5)
            canvas.text(0, y + 4, shortened(name, left - 8), "name")
            before, after = data.unweighted[i], data.weighted[i]
            pale = " pale" if data.is_partial[i] else ""
            if before is None and after is None:
                canvas.text(x(0), y + 4, "hidden", "tick", "middle")
            if before is not None:
                canvas.circle(x(before), y, 4.0, f"dot step{pale}", f"{name}: {before:+.2f} unweighted")
            if after is not None:
                canvas.circle(x(after), y, 4.0, f"dot silo{pale}", f"{name}: {after:+.2f} weighted")
        words = "standardised difference" if is_wide(width) else "difference (sd)"
        canvas.text((left + right) / 2, bottom + 36, words, "axis", "middle")
        canvas.circle(left + 6, bottom + 54, 4.0, "dot step")
        canvas.text(left + 16, bottom + 58, "unweighted", "tick")
        canvas.circle(left + 102, bottom + 54, 4.0, "dot silo")
        canvas.text(left + 112, bottom + 58, "weighted", "tick")
        return canvas

    return draw


def ladder(rows: Sequence[tuple[str, float, float, float]], null: float | None, axis: str) -> Draw:
    """Draw estimates with their intervals, one row per bound on the propensity score."""

    def draw(width: float) -> Canvas:
        left, right, top = name_column([row[0] for row in rows], width), width - 12, 8.0
        bottom = top + ROW * len(rows)
        canvas = Canvas(width, bottom + 42)
        ends = [end for _, _, low, high in rows for end in (low, high)] + ([] if null is None else [null])
        x = linear(min(ends), max(ends), left, right)
        x_axis(canvas, x, ticks(min(ends), max(ends), 6 if is_wide(width) else 4), top, bottom)
        if null is not None:
            canvas.line(x(null), top, x(null), bottom, "null")
        for i, (name, estimate, low, high) in enumerate(rows):
            y = top + ROW * (i + 0.5)
            canvas.text(0, y + 4, shortened(name, left - 8), "name")
            canvas.line(x(low), y, x(high), y, "whisker silo")
            canvas.circle(
                x(estimate), y, 4.0, "dot silo", f"{name}: {estimate:.4g} ({low:.4g} to {high:.4g})"
            )
        canvas.text((left + right) / 2, bottom + 36, axis, "axis", "middle")
        return canvas

    return draw


def curves(drawn: Sequence[Document], axis: str, begin: float = 0.0, at_risk: Sequence[AtRisk] = ()) -> Draw:
    """Draw the estimate at each horizon, joined by lines, one colour per arm, with the simultaneous band.

    Every curve has the value ``begin`` at time 0. The numbers at risk are written below the name of their
    arm, at their times; a single row of numbers is that of everyone.
    """
    keys = ("estimate", "band_low", "band_high")
    drawn = [
        {**curve, "times": [0.0, *curve["times"]], **{key: [begin, *curve[key]] for key in keys}}
        for curve in drawn
    ]
    is_by_arm = len(at_risk) == len(drawn)

    def draw(width: float) -> Canvas:
        left, right, top, bottom = 46.0, width - 16, 10.0, 250.0
        lines = len(drawn) + (len(at_risk) if is_by_arm else 2 * bool(at_risk))
        canvas = Canvas(width, bottom + 44 + LINE * lines)
        times = [time for curve in drawn for time in curve["times"]]
        ends = [v for curve in drawn for key in ("band_low", "band_high") for v in curve[key]]
        low, high = min([0.0, *ends]), max(ends)
        x, y = linear(0.0, max(times), left, right), linear(low, high, bottom, top)
        x_axis(canvas, x, ticks(0.0, max(times), 6 if is_wide(width) else 4), top, bottom)
        _y_axis(canvas, y, low, high, left, right)
        for k, curve in enumerate(drawn):
            _band(canvas, curve, x, y, k)
            points = _points(curve["times"], curve["estimate"], x, y)
            canvas.curve(points, _curve(k))
            estimated = list(zip(points, curve["times"], curve["estimate"], strict=True))[1:]
            for (at, height), time, value in estimated:
                canvas.circle(at, height, 2.5, _dot(k), f"{curve['name']}, {time:g}: {value:.4g}")
        canvas.text((left + right) / 2, bottom + 34, axis, "axis", "middle")
        place = bottom + 56
        if at_risk:
            canvas.text(right, place, "people at risk", "tick", "end")
        if at_risk and not is_by_arm:
            place += LINE
            _numbers(canvas, at_risk[0], x, place)
            place += LINE
        for k, curve in enumerate(drawn):
            _key(canvas, str(curve["name"]), k, left, right - 90 * (is_by_arm and not k), place)
            place += LINE
            if is_by_arm:
                _numbers(canvas, at_risk[k], x, place)
                place += LINE
        return canvas

    return draw


def _numbers(canvas: Canvas, numbers: AtRisk, x: Scale, y: float) -> None:
    """Write numbers at their times, as many as have room."""
    longest = max(len(number) for _, number in numbers) * CHARACTER + 6
    last = -longest
    for time, number in numbers:
        if x(time) - last >= longest:
            canvas.text(x(time), y, number, "tick", "middle")
            last = x(time)


def followed(shown: Sequence[FollowedShares]) -> Draw:
    """Draw the shares of those at risk who have followed each rule so far, one line per rule."""

    def draw(width: float) -> Canvas:
        left, right, top, bottom = 46.0, width - 12, 10.0, 210.0
        canvas = Canvas(width, bottom + 44 + LINE * len(shown))
        last = max((period for each in shown for period in each.periods), default=1)
        x, y = linear(0.5, last + 0.5, left, right), linear(0.0, 1.0, bottom, top)
        step = -(-last // (12 if is_wide(width) else 6))
        x_axis(canvas, x, [float(t) for t in range(1, last + 1, step)], top, bottom)
        for value in ticks(0.0, 1.0, 5):
            canvas.line(left, y(value), right, y(value), "grid")
            canvas.text(left - 6, y(value) + 4, f"{value:.0%}", "tick", "end")
        for k, each in enumerate(shown):
            points = _points(each.periods, each.shares, x, y)
            if points:
                canvas.curve(points, _curve(k))
            for (at, height), period, followed_by in zip(points, each.periods, each.shares, strict=True):
                canvas.circle(at, height, 2.5, _dot(k), f"{each.rule}, period {period}: {followed_by:.0%}")
            _key(canvas, each.rule, k, left, right, bottom + 56 + LINE * k)
        canvas.text((left + right) / 2, bottom + 34, "period", "axis", "middle")
        return canvas

    return draw


def weights(data: Weights) -> Draw:
    """Draw the weights of a rule's followers by period: a bar per bin, whose length is the bin's share.

    The longest bar is as wide as its column. The last period is always among those drawn.
    """

    def draw(width: float) -> Canvas:
        left, right, top = 76.0, width - 12, 8.0
        bottom = top + ROW * len(data.bins)
        canvas = Canvas(width, bottom + 42)
        last = len(data.counts)
        step = -(-last // (12 if is_wide(width) else 6))
        periods = range(last, 0, -step)[::-1]
        column = (right - left) / len(periods)
        for b, name in enumerate(reversed(data.bins)):
            canvas.text(left - 6, top + ROW * (b + 0.5) + 4, name, "tick", "end")
        for k, period in enumerate(periods):
            start = left + column * k
            canvas.line(start, top, start, bottom, "grid")
            mark = "+" if data.is_partial[period - 1] and data.counts[period - 1] else ""
            canvas.text(start + column / 2, bottom + 16, f"{period}{mark}", "tick", "middle")
            if data.counts[period - 1] is None:
                canvas.text(start + column / 2, (top + bottom) / 2 + 4, "hidden", "tick", "middle")
            for b, height in enumerate(reversed(data.shares(period))):
                if height:
                    told = f"period {period}, weight {data.bins[-1 - b]}: {height:.0%}"
                    length = max((column - 4) * height / data.largest, 1.0)
                    canvas.rect(start, top + ROW * b + 3, length, ROW - 6, "bar seen", told)
        canvas.text((left + right) / 2, bottom + 34, "period", "axis", "middle")
        return canvas

    return draw


def _y_axis(canvas: Canvas, y: Scale, low: float, high: float, left: float, right: float) -> None:
    for value in ticks(low, high, 5):
        canvas.line(left, y(value), right, y(value), "grid")
        canvas.text(left - 6, y(value) + 4, label(value), "tick", "end")


def _curve(k: int) -> str:
    return f"curve arm{k % COLOURS}" + (" dashed" if k >= COLOURS else "")


def _dot(k: int) -> str:
    return f"dot arm{k % COLOURS}"


def _key(canvas: Canvas, name: str, k: int, left: float, right: float, y: float) -> None:
    """Write a line of a legend: a piece of the curve and its name."""
    canvas.line(left, y - 4, left + 22, y - 4, _curve(k))
    canvas.text(left + 30, y, shortened(name, right - left - 40), "tick")


def horizons(data: Horizons) -> Draw:
    """Draw a comparison by horizon: bars are pointwise intervals, the band holds for all horizons at once."""

    def draw(width: float) -> Canvas:
        left, right, top, bottom = 46.0, width - 12, 10.0, 230.0
        canvas = Canvas(width, bottom + 44)
        ends = [*data.band_low, *data.band_high, *([] if data.null is None else [data.null])]
        x = linear(0.5, data.horizons[-1] + 0.5, left, right)
        y = linear(min(ends), max(ends), bottom, top)
        step = -(-data.horizons[-1] // (12 if is_wide(width) else 6))
        x_axis(canvas, x, [float(h) for h in range(1, data.horizons[-1] + 1, step)], top, bottom)
        _y_axis(canvas, y, min(ends), max(ends), left, right)
        if data.null is not None:
            canvas.line(left, y(data.null), right, y(data.null), "null")
        band = {"times": data.horizons, "band_low": data.band_low, "band_high": data.band_high}
        _band(canvas, band, x, y, 0)
        points = _points(data.horizons, data.estimate, x, y)
        canvas.curve(points, "curve arm0")
        for (at, height), horizon, value, low, high in zip(
            points, data.horizons, data.estimate, data.low, data.high, strict=True
        ):
            canvas.line(at, y(low), at, y(high), "whisker silo")
            canvas.circle(at, height, 3.5, "dot arm0", f"{horizon}: {value:.4g} ({low:.4g} to {high:.4g})")
        canvas.text((left + right) / 2, bottom + 34, "horizon, in periods", "axis", "middle")
        return canvas

    return draw


def _band(canvas: Canvas, curve: Document, x: Scale, y: Scale, style: int) -> None:
    upper = _points(curve["times"], curve["band_high"], x, y)
    lower = _points(curve["times"], curve["band_low"], x, y)
    outline = "L".join(f"{a:.1f} {b:.1f}" for a, b in [*upper, *reversed(lower)])
    canvas.path(f"M{outline}Z", f"band arm{style % COLOURS}")


def _points(times: Sequence[float], values: Sequence[float], x: Scale, y: Scale) -> list[tuple[float, float]]:
    return [(x(time), y(value)) for time, value in zip(times, values, strict=True)]


def participants(document: Document) -> str:
    """Return the numbers at risk, censored and with the event in each period, and the records by silo."""
    periods = document["periods"]
    head = ["", *(f"period {each['period']}" for each in periods)]
    rows = [["at risk", *(f"{each['at_risk']:,}" for each in periods)]]
    for key, words in (("censored", "censored in it"), ("events", "with the event in it")):
        if any(each[key] for each in periods):
            rows.append(
                [words, *(f"{each[key]:,} ({share(each[key], each['at_risk'])})" for each in periods)]
            )
    by_silo = [
        [silo, "not disclosed" if size is None else f"{size:,}"] for silo, size in document["sizes"].items()
    ]
    numbers = scrolling(table(["silo", "records"], by_silo), "Records by silo")
    return scrolling(table(head, rows), "Participants") + element(
        "details", text("summary", "Records by silo") + numbers
    )


def risks(document: Document) -> str:
    """Return the risk under each rule by period, with the numbers at risk, and comparisons by horizon."""
    drawn = [each for each in document.get("rules") or () if len(each["horizons"]) > 1]
    if not drawn:
        return ""
    same = [
        {**each, "times": each["horizons"], "name": series.rule(document, each["rule"])} for each in drawn
    ]
    ends = "; ".join(f"{each['name']} {each['estimate'][-1]:.3f}" for each in same)
    last = max(drawn[0]["horizons"])
    at_risk = [(each["period"] - 1.0, f"{each['at_risk']:,}") for each in document["periods"][:last]]
    html = charts.figure(
        curves(same, "period", at_risk=[at_risk]),
        title=f"Risk of {series.outcome(document)} by period and rule; bands hold for all at once",
        description=f"At the last horizon: {ends}.",
        key="rules",
    )
    return html + by_horizon(document)


def by_horizon(document: Document) -> str:
    """Draw each comparison over its horizons, such as a difference of risks or of restricted means."""
    html = ""
    for k, data in enumerate(series.by_horizon(document)):
        if data.null is None or len(data.horizons) < 2:
            continue
        ends = zip(data.horizons, data.estimate, data.low, data.high, strict=True)
        description = "; ".join(
            f"at {h}: {value:.4g} ({low:.4g} to {high:.4g})" for h, value, low, high in ends
        )
        title = (
            f"{data.estimand} by horizon; bars are {interval_title(document)}s, the band holds for all "
            "horizons at once"
        )
        html += charts.figure(horizons(data), title=title, description=description, key=f"horizon-{k}")
    return html


def adherence(document: Document) -> str:
    """Return how many of those at risk have followed each rule so far."""
    shown = document.get("adherence")
    if not shown:
        return ""
    numbers = {
        series.rule(document, each["rule"]): decreasing(each["followers"], each["hidden_in"])
        for each in shown
    }
    html = text(
        "p",
        "People at risk in a period who have been treated as the rule says in each period so far and are not "
        "censored. The estimate of a rule rests on them.",
    )
    drawn = [replace(each, rule=series.rule(document, each.rule)) for each in series.adherence(document)]
    html += charts.figure(
        followed(drawn),
        title="Share of those at risk who have followed the rule so far",
        description=" ".join(f"{rule}: {', '.join(counts)}." for rule, counts in numbers.items()),
        key="adherence",
    )
    periods = max(map(len, numbers.values()))
    head = ["rule", *(f"period {t + 1}" for t in range(periods))]
    rows = [[rule, *counts, *[""] * (periods - len(counts))] for rule, counts in numbers.items()]
    return html + element(
        "details", text("summary", "The numbers") + scrolling(table(head, rows), "Adherence")
    )


def followers_weights(document: Document) -> str:
    """Return the distribution of the cumulative weights of each rule's followers, period by period."""
    shown = series.weights(document)
    if not shown:
        return ""
    bound = document.get("weight_bound")
    limit = f"They are truncated at {bound:.3g}." if bound else "They are not truncated."
    html = text(
        "p",
        "Cumulative inverse probability weights of those who have followed the rule so far, by period. A bar "
        "is the share of these people with weights in its row; the longest is as wide as its column. "
        f"Large weights of a few people make an estimate uncertain. {limit}",
    )
    tables = ""
    for k, each in enumerate(shown):
        name = series.rule(document, each.rule)
        title = f"Weights under the rule: {name}"
        last = each.counts[-1]
        told = "" if last is None else f" {', '.join(map(str, last))} of these people in the last period."
        html += charts.figure(
            weights(each),
            title=f"{title} (the longest bar is {each.largest:.0%} of them)",
            description=f"Rows of weights: {', '.join(each.bins)}.{told}",
            key=f"weights-{k}",
        )
        rows = [
            [
                f"{t}{'+' if partial else ''}",
                *(["hidden"] * len(each.bins) if counts is None else [f"{count:,}" for count in counts]),
            ]
            for t, (counts, partial) in enumerate(zip(each.counts, each.is_partial, strict=True), 1)
        ]
        tables += scrolling(table(["period", *each.bins], rows, caption=title), title)
    note = "A silo adds the people of a bin that has few to a neighbouring bin."
    if any(map(any, (each.is_partial for each in shown))):
        note += " +: some silos hide this period; hidden: all do."
    return html + text("p", note, class_="soft") + element("details", text("summary", "The numbers") + tables)
