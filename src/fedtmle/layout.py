"""Plain text at 80 columns: aligned tables, wrapped paragraphs, numbers as people read them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

WIDTH = 80
GAP = "  "


def aligned(rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Rows as lines: the first column to the left, cut where the table is too wide, the rest to the right."""
    if not rows:
        return []
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
    """At most ``width`` characters, the end cut off visibly."""
    return text if len(text) <= width else f"{text[: width - 2]}.."


def wrapped(text: str, *, indent: str = "", first: str | None = None) -> list[str]:
    """A paragraph as lines."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent
    )


def decimals(error: float | None) -> int:
    """Decimals that show a standard error with three digits."""
    if error is None or not math.isfinite(error) or error <= 0:
        return 4
    return min(8, max(0, 2 - math.floor(math.log10(error))))


def number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def probability(p: float | None) -> str:
    """A p-value; below a thousandth only that."""
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def partial(count: int | None, hidden_in: int) -> str:
    """A count over the silos that show it; a + where some do not."""
    if count is None or (count == 0 and hidden_in):
        return "few"
    return f"{count:,}{'+' if hidden_in else ''}"


def histogram_table(histograms: Sequence[Mapping[str, Any]]) -> list[str]:
    """The probabilities of an arm, one line for each band in which anybody is, one column per arm."""
    lines: list[str] = []
    for of in dict.fromkeys(histogram["probability_of"] for histogram in histograms):
        own = [histogram for histogram in histograms if histogram["probability_of"] == of]
        rows = [[f"P({of})", *(f"in {histogram['arm']}" for histogram in own)]]
        edges = own[0]["edges"]
        for b, (low, high) in enumerate(pairwise(edges)):
            cells = [partial(histogram["counts"][b], histogram["hidden_in"][b]) for histogram in own]
            if any(cell != "0" for cell in cells):
                rows.append([f"{low:.2f} to {high:.2f}", *cells])
        lines += ([""] if lines else []) + aligned(rows)
    return lines


def learner_tables(document: Mapping[str, Any]) -> Iterator[list[list[str]]]:
    """A table for each super learner, one row per learner; over the folds of the study, means."""
    rows = document.get("learners", ())  # which older documents have not
    for of in dict.fromkeys((row["model"], row["arm"]) for row in rows):
        own = [row for row in rows if (row["model"], row["arm"]) == of]
        folds = len({row["fold"] for row in own})
        title = f"{of[0]} learners" + (f", arm {of[1]}" if of[1] is not None else "")
        table = [[title + (f", means of {folds} folds" if folds > 1 else ""), "weight", "CV risk"]]
        for learner in dict.fromkeys((row["learner"], row["text"]) for row in own):
            same = [row for row in own if (row["learner"], row["text"]) == learner]
            weight = sum(row["weight"] for row in same) / folds  # one that was not fitted weighs nothing
            risk = fmean(row["risk"] for row in same)
            table.append([f"{learner[0]}. {learner[1]}", f"{weight:.3f}", f"{risk:.4g}"])
        yield table


def phase_name(phase: str) -> str:
    """A phase as people read it; files and messages call the fits of the models ``nuisance``."""
    return "models" if phase == "nuisance" else phase


def bits(count: int) -> str:
    """A number of bits in a unit that keeps it short."""
    for unit, size in (("Gbit", 10**9), ("Mbit", 10**6), ("kbit", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bit"
