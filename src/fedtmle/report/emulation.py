"""The sections of the report about an emulated trial: its protocol, the flow of people, Table 1, and TARGET.

They are made from the key `emulation` of the result's document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from fedtmle.layout import Document
from fedtmle.report import charts, flow
from fedtmle.report.checklist import Checklist, Item
from fedtmle.runtime.markup import element, scrolling, table, text
from fedtmle.text.emulation import arms, total


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
    figure = charts.figure(flow.diagram(boxes, lost, ends), title=title, description=description, key="flow")
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
    counts = [_count(described, count["count"]) for count in described["arm_counts"]]
    note = f"No cell of fewer than {described['floor']} people leaves a silo; such cells are not in the sums."
    return flow.table1(described["arms"], counts, lines, note, unit="people")


def _count(described: Document, count: int | None) -> str:
    return f"<{described['floor']}" if count is None else f"{count:,}"


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
