"""The sections of the report about an emulated trial: its protocol, the flow of people, Table 1, and TARGET.

They are made from the key `emulation` of the result's document.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Container, Sequence
from itertools import pairwise
from typing import NamedTuple

from fedtmle.layout import Document, element, scrolling, table, text
from fedtmle.report import charts
from fedtmle.report.charts import CHARACTER, Canvas
from fedtmle.text.certificate import arms, total

# Reporting checklists: where the page reports what STROBE, or TARGET for an emulated trial, asks for.
#
# Items are in our words. An item names the section of the page that reports it. Items whose section this
# page does not have, or that no software can know, are left to the authors.

AUTHORS = "for the authors"


class Item(NamedTuple):
    """An item, and the titles of sections that may report it; the page names the first that it has."""

    words: str
    sections: tuple[str, ...] = ()


class Checklist(NamedTuple):
    """A checklist: its name, how it is cited, and its items by part."""

    name: str
    note: str
    source: str  # as plain text, because the page links to nothing outside it
    parts: tuple[tuple[str, tuple[Item, ...]], ...]


def anchor(title: str) -> str:
    """Return the identifier of a section of the page."""
    return title.lower().replace(" ", "-").replace(",", "")


def render(checklist: Checklist, titles: Container[str]) -> str:
    """Return the checklist as a table; ``titles`` are the sections that the page has."""
    rows = []
    for part, items in checklist.parts:
        for k, item in enumerate(items):
            where = next((title for title in item.sections if title in titles), None)
            place = (
                text("span", AUTHORS, class_="soft")
                if where is None
                else text("a", where, href=f"#{anchor(where)}")
            )
            cells = text("td", item.words) + element("td", place)
            rows.append(element("tr", text("th", part if k == 0 else "", scope="row") + cells))
    head = "".join(text("th", title, scope="col") for title in ("part", "item", "reported in"))
    body = element("table", f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>")
    cited = text("p", f"{checklist.note} {checklist.source}.")
    return cited + scrolling(body, checklist.name, "prose")


STROBE = Checklist(
    name="STROBE checklist",
    note=(
        "Where this page reports what the STROBE statement for cohort studies (von Elm et al., 2007) asks "
        "for. The items are in our words; the statement has the checklist itself:"
    ),
    source="doi:10.1016/S0140-6736(07)61602-X",
    parts=(
        ("Title and abstract", (Item("1 design in the title, and a balanced summary"),)),
        (
            "Introduction",
            (Item("2 background and rationale"), Item("3 objectives", ("Methods",))),
        ),
        (
            "Methods",
            (
                Item("4 study design"),
                Item("5 setting, places and dates"),
                Item("6 eligibility, sources and selection of participants", ("Flow of people",)),
                Item("7 outcome, exposure, covariates", ("Methods",)),
                Item("8 data sources and measurement"),
                Item("9 efforts to address bias", ("Balance", "Overlap")),
                Item("10 how the study size was arrived at"),
                Item("11 handling of quantitative variables", ("Methods",)),
                Item("12a statistical methods, with control of confounding", ("Methods",)),
                Item("12b subgroups and interactions", ("Estimates",)),
                Item("12c missing data", ("Missing data",)),
                Item("12d loss to follow-up", ("Missing data",)),
                Item("12e sensitivity analyses", ("Sensitivity",)),
            ),
        ),
        (
            "Results",
            (
                Item("13 numbers of participants", ("Flow of people", "Participants")),
                Item("14 characteristics of participants", ("Baseline characteristics", "Balance")),
                Item("14b missing data by variable", ("Missing data",)),
                Item("15 numbers of outcomes", ("Survival curves", "Participants")),
                Item("16 estimates with their precision", ("Estimates",)),
                Item("17 other analyses", ("Sensitivity", "Silo by silo")),
            ),
        ),
        (
            "Discussion",
            (
                Item("18 key results"),
                Item("19 limitations: what is assumed", ("How exactly",)),
                Item("20 interpretation"),
                Item("21 generalisability", ("Heterogeneity",)),
            ),
        ),
        ("Other", (Item("22 funding"),)),
    ),
)


# The flow of people through a study as boxes, and their characteristics by arm (Table 1).

LINE = 16.0  # pixels from one line of a box to the next
PAD = 8.0


def diagram(boxes: Sequence[str], lost: Sequence[str], ends: Sequence[str]) -> charts.Draw:
    """Draw the steps as a column of boxes, the people who leave next to it, and the arms below."""

    def draw(width: float) -> Canvas:
        side = 0.0 if not lost else 150.0 if charts.is_wide(width) else 96.0
        main = width - (side + 24.0 if lost else 2.0)
        canvas = Canvas(width, 0.0)
        y = 4.0
        for k, words in enumerate(boxes):
            if k:
                canvas.line(main / 2, y, main / 2, y + 22.0, "flow")
                canvas.line(main / 2, y + 11.0, main + 16.0, y + 11.0, "flow")
                for place, line in enumerate(_lines(lost[k - 1], side)):
                    canvas.text(main + 24.0, y + 15.0 + place * LINE, line, "tick")
                y += 22.0
            y = _box(canvas, 0.0, y, main, words)
        beside = charts.is_wide(width)  # the arms side by side, or one below the other
        each = (main - 12.0 * (len(ends) - 1)) / len(ends) if beside else main
        places = [k * (each + 12.0) if beside else 0.0 for k in range(len(ends))]
        canvas.line(main / 2, y, main / 2, y + 10.0, "flow")
        canvas.line(places[0] + each / 2, y + 10.0, places[-1] + each / 2, y + 10.0, "flow")
        bottom = y + 10.0
        for x, words in zip(places, ends, strict=True):
            top = y + 20.0 if beside else bottom + 10.0
            canvas.line(x + each / 2, top - 10.0, x + each / 2, top, "flow")
            bottom = max(bottom, _box(canvas, x, top, each, words, "arm"))
        canvas.height = bottom + 4.0
        return canvas

    return draw


def _box(canvas: Canvas, x: float, y: float, width: float, words: str, style: str = "") -> float:
    """Draw a box of words; return the y at which it ends."""
    lines = _lines(words, width - 2 * PAD)
    height = len(lines) * LINE + 2 * PAD - 2.0
    canvas.rect(x, y, width, height, f"box {style}".strip())
    for k, line in enumerate(lines):
        canvas.text(x + PAD, y + PAD + 11.0 + k * LINE, line)
    return y + height


def _lines(words: str, pixels: float) -> list[str]:
    return textwrap.wrap(words, max(8, int(pixels / CHARACTER))) or [""]


def table1(
    arms: Sequence[str], counts: Sequence[str], lines: Sequence[Document], note: str, *, unit: str = "records"
) -> str:
    """Return a table of the characteristics by arm.

    Each of ``lines`` has a `label`, the `mean` and `sd` of every arm (without `sd`, the mean is a share;
    without `mean`, the line is hidden), the largest standardised `difference` from the first arm, which with
    two arms is the only one.
    """
    rows = [[unit, *counts, ""]]
    for line in lines:
        difference = "-" if line["difference"] is None else f"{line['difference']:+.2f}"
        rows.append([str(line["label"]), *(_cell(line, k) for k in range(len(arms))), difference])
    difference = "standardised difference" if len(arms) == 2 else "largest standardised difference"
    head = ["mean (sd) or share", *arms, difference]
    return scrolling(table(head, rows), "Table 1", "prose") + text("p", note, class_="soft")


def _cell(line: Document, arm: int) -> str:
    if not line["mean"]:
        return "-"
    mean = line["mean"][arm]
    if line["sd"] is None:
        return f"{mean:.1%}"
    return f"{_rounded(mean)} ({_rounded(line['sd'][arm])})" if line["sd"] else _rounded(mean)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def sections(document: Document) -> list[tuple[str, str]]:
    """Return the titles and the HTML of the sections; none if the study emulated no trial."""
    emulation = document.get("emulation")
    if emulation is None:
        return []
    parts = [
        ("The target trial", _protocol(emulation)),
        ("Flow of people", _flow(emulation)),
        ("Baseline characteristics", _table1(emulation)),
    ]
    return [(title, html) for title, html in parts if html]


def _protocol(emulation: Document) -> str:
    rows = [[part["name"], part["target"], part["emulation"]] for part in emulation["protocol"]]
    html = text("p", f"{emulation['trial']}.")
    return html + scrolling(table(["", "target trial", "emulation"], rows), "Protocol", "prose")


# The flow of people.


def _flow(emulation: Document) -> str:
    silos, steps = emulation["silos"], emulation["steps"]
    if not silos:
        return text("p", "No silo has shared the counts of its people at each step.")
    known = [[silo["people"][k] for silo in silos.values()] for k in range(len(steps))]
    lost = [_lost(before, after) for before, after in pairwise(known)]
    counted = list(zip(steps, known, strict=True))
    boxes = [f"{step[:1].upper()}{step[1:]}: {total(counts)}" for step, counts in counted]
    ends = [_arm(row) for row in arms(emulation)]
    description = ". ".join([*boxes, *ends]) + "."
    title = "People who remain after each step, and the arms that are compared"
    figure = charts.figure(diagram(boxes, lost, ends), title=title, description=description, key="flow")
    rows = [[step, total(counts), *(total([count]) for count in counts)] for step, counts in counted]
    numbers = scrolling(table(["step", "all", *silos], rows), "People by silo")
    head = ["arm", "people", "events", "without", "unknown outcome"]
    numbers += scrolling(table(head, list(arms(emulation))), "Arms")
    note = ""
    absent = emulation.get("not_shared", [])
    if absent:
        note += text("p", f"Without the counts of {', '.join(absent)}, which did not share them.")
    if emulation["floor"] is not None:
        note += text(
            "p",
            f"Counts and losses of fewer than {emulation['floor']} people are not shown (-). A number with "
            "a + covers only the silos that show theirs.",
            class_="soft",
        )
    return figure + note + element("details", text("summary", "The numbers by silo") + numbers)


def _lost(before: Sequence[int | None], after: Sequence[int | None]) -> str:
    if None in before or None in after:
        return "left out: not shown"
    return f"left out: {sum(b for b in before if b is not None) - sum(a for a in after if a is not None):,}"


def _arm(row: Sequence[str]) -> str:
    name, people, events, _, unknown = row
    return f"{name}: {people} people, {events} with the event, {unknown} unknown"


# Table 1.


def _table1(emulation: Document) -> str:
    described = emulation.get("table1")
    if not described:
        return ""
    labels, levels = emulation["labels"], defaultdict(list)
    for line in described["lines"]:
        levels[line["name"]].append(line["level"])
    lines = []
    for line in described["lines"]:
        name = labels.get(line["name"]) or line["name"]
        if line["level"] is not None and levels[line["name"]] != ["1"]:  # the share of 1 needs no level
            name = f"{name}: {line['level']}"
        lines.append({**line, "label": name})
    counts = [f"{count['count']:,}" for count in described["arm_counts"]]
    note = f"Rounded, so that nothing is said about fewer than {described['floor']} people."
    return table1(described["arms"], counts, lines, note, unit="people")


# The TARGET statement's items, in our words, by its six sections.

TARGET = Checklist(
    name="TARGET checklist",
    note=(
        "Where this page reports what the TARGET statement (Cashin et al., JAMA 2025) asks of a study that "
        "emulates a target trial. The items are in our words; the statement has the checklist itself:"
    ),
    source="doi:10.1001/jama.2025.13350",
    parts=(
        ("Abstract", (Item("a summary that names the target trial, the data and the main estimate"),)),
        (
            "Introduction",
            (
                Item("what is known, and why the question is open"),
                Item("the causal question", ("Methods",)),
                Item("why a target trial is emulated"),
            ),
        ),
        (
            "Methods",
            (
                Item("data sources: where, when and for what the records were made"),
                Item("data sources: silos and their records", ("Flow of people",)),
                Item("each component of the protocol, as the target trial has it", ("The target trial",)),
                Item("each component, as the records emulate it, with code lists", ("The target trial",)),
                Item("models, estimator and intervals", ("Methods",)),
                Item("exactness and rounds of the computation", ("How exactly",)),
            ),
        ),
        (
            "Results",
            (
                Item("selection of people: numbers at each step", ("Flow of people",)),
                Item("baseline characteristics by strategy", ("Baseline characteristics", "Balance")),
                Item("length of follow-up, and reasons for its end", ("The target trial",)),
                Item("missing data: unknown outcomes by strategy", ("Flow of people", "Missing data")),
                Item("events by strategy", ("Flow of people",)),
                Item("effect estimates with intervals", ("Estimates",)),
                Item("overlap of the strategies", ("Overlap",)),
                Item("sensitivity and other additional analyses", ("Sensitivity",)),
            ),
        ),
        (
            "Discussion",
            (
                Item("interpretation, and other evidence"),
                Item("limitations: assumptions that may not hold", ("How exactly",)),
            ),
        ),
        (
            "Other information",
            (
                Item("ethics, registration, funding and interests"),
                Item("involvement of patients and the public"),
                Item("access to data: what left the silos", ("What left the silos",)),
                Item("access to the protocol and code", ("To reproduce this",)),
            ),
        ),
    ),
)
