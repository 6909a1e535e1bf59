"""Sections of the report about treatment over time: periods, who followed the rules, and their weights."""

from __future__ import annotations

from dataclasses import replace

from fedtmle.layout import Document, decreasing, share
from fedtmle.report import charts, clinical, series, wording
from fedtmle.runtime.markup import element, scrolling, table, text
from fedtmle.text.result import interval_title


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
    """Return the risk under each rule by period, with the numbers at risk, and comparisons by horizon."""
    drawn = [each for each in document.get("rules") or () if len(each["horizons"]) > 1]
    if not drawn:
        return ""
    same = [
        {**each, "times": each["horizons"], "name": wording.rule(document, each["rule"])} for each in drawn
    ]
    ends = "; ".join(f"{each['name']} {each['estimate'][-1]:.3f}" for each in same)
    last = max(drawn[0]["horizons"])
    at_risk = [(each["period"] - 1.0, f"{each['at_risk']:,}") for each in document["periods"][:last]]
    html = charts.figure(
        clinical.curves(same, "period", at_risk=[at_risk]),
        title=f"Risk of {wording.outcome(document)} by period and rule; bands hold for all at once",
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
        html += charts.figure(
            clinical.horizons(data), title=title, description=description, key=f"horizon-{k}"
        )
    return html


def adherence(document: Document) -> str:
    """Return how many of those at risk have followed each rule so far."""
    shown = document.get("adherence")
    if not shown:
        return ""
    numbers = {
        wording.rule(document, each["rule"]): decreasing(each["followers"], each["hidden_in"])
        for each in shown
    }
    html = text(
        "p",
        "People at risk in a period who have been treated as the rule says in each period so far and are not "
        "censored. The estimate of a rule rests on them.",
    )
    drawn = [replace(each, rule=wording.rule(document, each.rule)) for each in series.adherence(document)]
    html += charts.figure(
        clinical.followed(drawn),
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


def weights(document: Document) -> str:
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
        name = wording.rule(document, each.rule)
        title = f"Weights under the rule: {name}"
        last = each.counts[-1]
        told = "" if last is None else f" {', '.join(map(str, last))} of these people in the last period."
        html += charts.figure(
            clinical.weights(each),
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
