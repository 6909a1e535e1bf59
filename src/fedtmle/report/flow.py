"""The flow of people through a study as boxes, and their characteristics by arm (Table 1)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fedtmle.layout import Document
from fedtmle.report import charts
from fedtmle.report.svg import CHARACTER, Canvas
from fedtmle.runtime.markup import scrolling, table, text

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
    without `mean`, the line is hidden), the largest standardised `difference` from the first arm, and whether
    it is `constant`.
    """
    rows = [[unit, *counts, ""]]
    for line in lines:
        difference = "-" if line["difference"] is None else f"{line['difference']:+.2f}"
        rows.append([str(line["label"]), *(_cell(line, k) for k in range(len(arms))), difference])
    head = ["mean (sd) or share", *arms, "largest standardised difference"]
    return scrolling(table(head, rows), "Table 1", "prose") + text("p", note, class_="soft")


def _cell(line: Document, arm: int) -> str:
    if line.get("constant"):
        return "one value"
    if not line["mean"]:
        return "-"
    mean = line["mean"][arm]
    return f"{mean:.1%}" if line["sd"] is None else f"{_rounded(mean)} ({_rounded(line['sd'][arm])})"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
