"""Reporting checklists: where the page reports what STROBE, or TARGET for an emulated trial, asks for.

Items are in our words. An item names the section of the page that reports it. Items whose section this
page does not have, or that no software can know, are left to the authors.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from fedtmle.runtime.markup import element, scrolling, text

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
