"""Text for people: plain text of 80 columns, and small pieces of HTML.

Plain text has aligned tables, wrapped paragraphs and numbers as people read them.
"""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import Any

Document = dict[str, Any]  # plain data of a saved result; docs/result.md has its keys
WIDTH = 80
POOR_OVERLAP = "Poor overlap: the estimates rest on few records or on the bound of the propensity score."
GAP = "  "


def visible(text: str) -> str:
    """Return ``text`` on one line, with an escape for each character that is not shown as itself.

    Control and formatting characters can move a terminal's cursor, hide text or reverse its order: a study
    that holds them could look like another one.
    """
    return "".join(repr(char)[1:-1] if unicodedata.category(char) in _UNSEEN else char for char in text)


_UNSEEN = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")  # controls, formats, unassigned, private, separators
_BLANKS = str.maketrans("\t\n\r", "   ")


def aligned(rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Return rows as lines: the first column to the left, shortened if need be, the others to the right."""
    if not rows:
        return []
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(len(row[j]) for row in rows) for j in range(len(rows[0]))]
    rest = sum(widths[1:]) + len(GAP) * (len(widths) - 1) + len(indent)
    first = min(widths[0], max(8, WIDTH - rest))
    return [
        (
            indent
            + GAP.join(
                [shortened(row[0], first).ljust(first)]
                + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            )
        ).rstrip()
        for row in rows
    ]


def shortened(text: str, width: int) -> str:
    """Return at most ``width`` characters; two dots mark a shortened text."""
    return text if len(text) <= width else f"{text[: width - 2]}.."


def wrapped(text: str, *, indent: str = "", first: str | None = None) -> list[str]:
    """Return a paragraph as lines; the first one starts with ``first``, the others with ``indent``."""
    return textwrap.wrap(
        visible(text.translate(_BLANKS)),
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
    )


def decimals(error: float | None) -> int:
    """Return the number of decimals that show a standard error with three digits."""
    if error is None or not math.isfinite(error) or error <= 0:
        return 4
    return min(8, max(0, 2 - math.floor(math.log10(error))))


def number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def probability(p: float | None) -> str:
    """Return a p-value as text, "<0.001" if it is smaller."""
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def partial(count: int | None, hidden_in: int) -> str:
    """Return a count over the silos that disclose it, with a + if some do not."""
    if count is None or (count == 0 and hidden_in):
        return "few"
    return f"{count:,}{'+' if hidden_in else ''}"


def partial_share(count: int, whole: int, hidden_in: int) -> str:
    """Return a count over the silos that disclose it, and its share of the whole if all do."""
    return partial(count, hidden_in) + ("" if hidden_in else f" ({share(count, whole)})")


def decreasing(counts: Sequence[int | None], hidden_in: Sequence[int]) -> list[str]:
    """Return counts that never rise from one period to the next, such as people at risk, as text.

    A count that some silos hide is at least the sum over the others, and at least every later count: the
    larger of these is shown with a +. It is "hidden" if nothing is known of it.
    """
    shown: list[str] = []
    least = 0
    for count, hidden in zip(reversed(counts), reversed(hidden_in), strict=True):
        least = max(count or 0, least)
        shown.append(f"{least:,}+" if hidden and least else "hidden" if hidden else f"{least:,}")
    return shown[::-1]


def silo_count(document: Document) -> str:
    """Return how many silos took part, of how many the study names."""
    joined, absent = len(document["sizes"]), len(document.get("absent", ()))
    noun = "silo" if joined + absent == 1 else "silos"
    return f"{joined} of {joined + absent} {noun}" if absent else f"{joined} {noun}"


def covariate_name(line: Document) -> str:
    """Return the words of a line of the key `balance`: the covariate's label, and its level if any."""
    level = line.get("level_label") or line["level"]
    return str(line["label"]) if level is None else f"{line['label']}: {level}"


def is_poor(document: Document) -> bool:
    """Return whether a result's overlap passes a threshold for a warning."""
    return bool(document.get("overlap", {}).get("is_poor"))


JOINED = (
    "Silos add a bin with few records to a neighbouring bin. A bin that reads joined may thus have "
    "records, and the bins next to it have too many."
)


def histogram_table(histograms: Sequence[Document]) -> list[str]:
    """Return histograms of propensity scores: a line for each bin with records, a column for each arm."""
    lines: list[str] = []
    for of in dict.fromkeys(histogram["probability_of"] for histogram in histograms):
        by_arm = [histogram for histogram in histograms if histogram["probability_of"] == of]
        rows = [[f"P({of})", *(f"in {histogram['arm']}" for histogram in by_arm)]]
        for b, (low, high) in enumerate(pairwise(by_arm[0]["edges"])):
            cells = [partial(histogram["counts"][b], histogram["hidden_in"][b]) for histogram in by_arm]
            if any(cell != "0" for cell in cells):
                shown = ["joined" if cell == "0" else cell for cell in cells]
                rows.append([f"{low:.2f} to {high:.2f}", *shown])
        lines += ([""] if lines else []) + aligned(rows)
    return lines + (wrapped(JOINED) if any("joined" in line for line in lines) else [])


def learner_tables(document: Document) -> Iterator[list[list[str]]]:
    """Yield a table for each super learner, a row per learner; if cross-fitted, with means over folds."""
    rows = document.get("learners", ())  # the document of a core result has none
    for of in dict.fromkeys((row["model"], row["arm"]) for row in rows):
        fits = [row for row in rows if (row["model"], row["arm"]) == of]
        folds = len({row["fold"] for row in fits})
        title = f"{of[0]} learners" + (f", arm {of[1]}" if of[1] is not None else "")
        table = [[title + (f", means of {folds} folds" if folds > 1 else ""), "weight", "CV risk"]]
        for learner in dict.fromkeys((row["learner"], row["text"]) for row in fits):
            same = [row for row in fits if (row["learner"], row["text"]) == learner]
            weight = sum(row["weight"] for row in same) / folds  # a learner that was not fitted has no weight
            risk = math.fsum(row["risk"] for row in same) / len(same)
            table.append([f"{learner[0]}. {learner[1]}", f"{weight:.3f}", f"{risk:.4g}"])
        yield table


def phase_name(phase: str) -> str:
    """Return the name of a phase for people; files and messages call the fits of models ``nuisance``."""
    return "models" if phase == "nuisance" else phase


def sent_bits(account: Document, way: str, phase: str) -> int:
    """Return the bits of a phase over all silos; ``way`` is "bits_up" or "bits_down"."""
    return sum(by_phase.get(phase, 0) for by_phase in account[way].values())


def phase_rounds(account: Document, phases: Sequence[str]) -> dict[str, str]:
    """Return the rounds of each phase that sent anything; "shared" if it only rode along with others."""
    return {
        phase: str(account["rounds"].get(phase) or "shared")
        for phase in phases
        if account["rounds"].get(phase) or sent_bits(account, "bits_up", phase)
    }


def bits(count: int) -> str:
    """Return a number of bits with a unit."""
    for unit, size in (("Gbit", 10**9), ("Mbit", 10**6), ("kbit", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bit"


# Small pieces of HTML; text from a user or a file is escaped here and nowhere else.

Cells = Sequence[str]
FEW_COLUMNS = 3  # columns that fit on the narrowest screen


def element(tag: str, content: str, **attributes: str) -> str:
    """Return an element; ``content`` is HTML, attributes are escaped, `_` in their names becomes `-`."""
    named = "".join(f' {name.strip("_").replace("_", "-")}="{escape(v)}"' for name, v in attributes.items())
    return f"<{tag}{named}>{content}</{tag}>"


def text(tag: str, content: str, **attributes: str) -> str:
    """Return an element that holds plain text."""
    return element(tag, escape(content), **attributes)


def scrolling(content: str, name: str, style: str = "") -> str:
    """Return a wide table in a region of its own, which the keyboard can scroll."""
    classes = f"scroll {style}".strip()
    return element("div", content, class_=classes, role="region", aria_label=name, tabindex="0")


def table(head: Cells, rows: Iterable[Cells], *, caption: str = "") -> str:
    """Return a table of plain text; the first cell of a row is its header.

    A table of many columns becomes a list of records on a narrow screen (`.many` in the style sheet), where
    each cell shows the title of its column.
    """
    is_wide = len(head) > FEW_COLUMNS
    titles = "".join(text("th", title, scope="col") for title in head)
    body = "".join(
        element("tr", text("th", first, scope="row") + "".join(_cells(rest, head[1:], named=is_wide)))
        for first, *rest in rows
    )
    title = text("caption", caption) if caption else ""
    content = f"{title}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    return element("table", content, class_="many") if is_wide else element("table", content)


def _cells(cells: Cells, titles: Cells, *, named: bool) -> Iterator[str]:
    for cell, title in zip(cells, titles, strict=True):
        yield text("td", cell, data_title=title) if named else text("td", cell)
