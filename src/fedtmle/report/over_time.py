"""Sections of the report about treatment over time: periods, who followed the rules, and their weights."""

from __future__ import annotations

from collections.abc import Sequence

from fedtmle.layout import Document, share
from fedtmle.report import charts, clinical, wording
from fedtmle.report.charts import Draw, is_wide, x_axis
from fedtmle.report.svg import Canvas, label, linear, shortened, ticks
from fedtmle.runtime.markup import element, scrolling, table, text

CURVES = 4  # number of curve styles in the style sheet


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
    by_silo = [[silo, f"{size:,}"] for silo, size in document["sizes"].items()]
    numbers = scrolling(table(["silo", "records"], by_silo), "Records by silo")
    return scrolling(table(head, rows), "Participants") + element(
        "details", text("summary", "Records by silo") + numbers
    )


def risks(document: Document) -> str:
    """Return the risk under each rule by period, for an event with several horizons."""
    drawn = [each for each in document.get("rules") or () if len(each["horizons"]) > 1]
    if not drawn:
        return ""
    same = [{**each, "times": each["horizons"], "name": each["rule"]} for each in drawn]
    ends = "; ".join(f"{each['rule']} {each['estimate'][-1]:.3f}" for each in drawn)
    return charts.figure(
        clinical.curves(same, "period"),
        title=f"Risk of {wording.outcome(document)} by period and rule",
        description=f"At the last horizon: {ends}. Bands hold for all periods and rules at once.",
        key="rules",
    )


def adherence(document: Document) -> str:
    """Return how many of those at risk have followed each rule so far."""
    shown = document.get("adherence")
    if not shown:
        return ""
    description = " ".join(f"{each['rule']}: {', '.join(_counts(each))}." for each in shown)
    html = text(
        "p",
        "People at risk in a period who have been treated as the rule says in each period so far and are not "
        "censored. The estimate of a rule rests on them.",
    )
    html += charts.figure(
        _followed(shown),
        title="Share of those at risk who have followed the rule so far",
        description=description,
        key="adherence",
    )
    head = ["rule", *(f"period {t + 1}" for t in range(max(len(each["followers"]) for each in shown)))]
    rows = [[each["rule"], *_counts(each)] for each in shown]
    rows = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    return html + element(
        "details", text("summary", "The numbers") + scrolling(table(head, rows), "Adherence")
    )


def _counts(each: Document) -> list[str]:
    pairs = zip(each["followers"], each["hidden_in"], strict=True)
    return ["hidden" if count is None else f"{count:,}{'+' if by else ''}" for count, by in pairs]


def _followed(shown: Sequence[Document]) -> Draw:
    """Draw the shares by period, one line per rule; periods that all silos hide have no point."""

    def draw(width: float) -> Canvas:
        left, right, top, bottom = 46.0, width - 12, 10.0, 210.0
        canvas = Canvas(width, bottom + 44 + 18.0 * len(shown))
        last = max(len(each["followers"]) for each in shown)
        x, y = linear(0.5, last + 0.5, left, right), linear(0.0, 1.0, bottom, top)
        step = -(-last // (12 if is_wide(width) else 6))
        x_axis(canvas, x, [float(t) for t in range(1, last + 1, step)], top, bottom)
        for value in ticks(0.0, 1.0, 5):
            canvas.line(left, y(value), right, y(value), "grid")
            canvas.text(left - 6, y(value) + 4, label(value), "tick", "end")
        for k, each in enumerate(shown):
            style = f"arm{k % CURVES}"
            points = [
                (t + 1, count / risk)
                for t, (count, risk) in enumerate(zip(each["followers"], each["at_risk"], strict=True))
                if count is not None and risk
            ]
            canvas.curve([(x(t), y(value)) for t, value in points], f"curve {style}")
            for t, value in points:
                canvas.circle(x(t), y(value), 2.5, f"dot {style}", f"{each['rule']}, period {t}: {value:.0%}")
            place = bottom + 56 + 18.0 * k
            canvas.line(left, place - 4, left + 22, place - 4, f"curve {style}")
            canvas.text(left + 30, place, shortened(each["rule"], right - left - 40), "tick")
        canvas.text((left + right) / 2, bottom + 34, "period", "axis", "middle")
        return canvas

    return draw


def weights(document: Document) -> str:
    """Return the distribution of the cumulative weights of each rule's followers, period by period."""
    shown = document.get("adherence")
    if not shown:
        return ""
    bound = document.get("weight_bound")
    limit = f"They are truncated at {bound:.3g}." if bound else "They are not truncated."
    html = text(
        "p",
        "Cumulative inverse probability weights of those who have followed the rule so far, by period: their "
        f"numbers in bins. Large weights of a few people make an estimate uncertain. {limit}",
    )
    for each in shown:
        edges = [f"{edge:g}" for edge in each["weight_edges"]]
        bins = [f"below {edges[0]}", *(f"from {edge}" for edge in edges)]
        rows = [
            [f"{t + 1}", *("hidden" if count is None else f"{count:,}" for count in counts)]
            for t, counts in enumerate(each["weight_counts"])
        ]
        caption = f"Weights under {each['rule']}"
        html += scrolling(table(["period", *bins], rows, caption=caption), caption)
    return html
