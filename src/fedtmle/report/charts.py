"""The figures of the report, each for a wide and for a narrow screen, and the canvas they are drawn on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from fedtmle.layout import element, partial, phase_name, text
from fedtmle.report.series import (
    ZERO,
    BitsByRound,
    CohortOverlap,
    Forest,
    Interval,
    Path,
    Probabilities,
    Spread,
)

# Drawing: a canvas of SVG elements, scales from data to pixels, and round numbers for axes.

Scale = Callable[[float], float]
CHARACTER = 6.6  # generous width of a letter in pixels, at the figures' font size


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Return the linear map from data in [low, high] to pixels in [start, end]."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Return the logarithmic map from data in [low, high] to pixels in [start, end]."""
    inner = linear(math.log10(low), math.log10(high), start, end)
    return lambda value: inner(math.log10(value))


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` multiples of 1, 2 or 5 times a power of ten within [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return powers of ten within [low, high], thinned to about ``count``; 1-2-5 steps on a short axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first <= 2:
        every = [m * 10.0**k for k in range(first, last + 1) for m in (1, 2, 5)]
        return [value for value in every if low * 0.999 <= value <= high * 1.001]
    step = max(1, math.ceil((last - first) / count))
    return [10.0**k for k in range(first, last + 1, step) if low * 0.999 <= 10.0**k <= high * 1.001]


def label(value: float) -> str:
    """Return the text of a tick, with a real minus sign."""
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, power = f"{value:.0e}".partition("e")
        shown = f"{mantissa}e{int(power)}"
    else:
        shown = f"{round(value, 10):g}"
    return shown.replace("-", "\N{MINUS SIGN}")


def shortened(name: str, pixels: float) -> str:
    """Return a name that fits into ``pixels``."""
    most = max(4, int(pixels / CHARACTER))
    return name if len(name) <= most else f"{name[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


@dataclass
class Canvas:
    """SVG elements in order; colours are classes of the page's style sheet."""

    width: float
    height: float
    items: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.items.append(f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def text(self, x: float, y: float, content: str, style: str = "", anchor: str = "start") -> None:
        named = f' class="{style}"' if style else ""
        self.items.append(
            f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
        )

    def circle(self, x: float, y: float, radius: float, style: str, description: str = "") -> None:
        shape = f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"'
        self.items.append(
            f"{shape}><title>{escape(description)}</title></circle>" if description else f"{shape}/>"
        )

    def rect(
        self, x: float, y: float, width: float, height: float, style: str, description: str = ""
    ) -> None:
        shape = (
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
        )
        self.items.append(
            f"{shape}><title>{escape(description)}</title></rect>" if description else f"{shape}/>"
        )

    def path(self, d: str, style: str, description: str = "") -> None:
        shape = f'<path class="{style}" d="{d}"'
        self.items.append(
            f"{shape}><title>{escape(description)}</title></path>" if description else f"{shape}/>"
        )

    def triangle(self, x: float, y: float, radius: float, style: str, description: str) -> None:
        """Draw a triangle that points down."""
        self.path(
            f"M{x - radius:.1f} {y - radius:.1f}h{2 * radius:.1f}L{x:.1f} {y + radius:.1f}z",
            style,
            description,
        )

    def curve(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Draw a polyline."""
        self.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), style)

    def render(self, title: str, description: str, style: str, key: str) -> str:
        """Return the SVG element, with its title and description for screen readers."""
        return (
            f'<svg class="{style}" viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{escape(title)}</title>'
            f'<desc id="{key}-d">{escape(description)}</desc>{"".join(self.items)}</svg>'
        )


WIDE, NARROW = 720.0, 340.0
ROW = 20.0
SHADES = 6
GROUPS = {
    "silo": "Silos whose owner allows it",
    "summary": "Summary of these silos",
    "prediction": "The effect at another such silo",
    "without": "Summary without one silo",
    "pooled": "All silos, pooled data",
}
Draw = Callable[[float], Canvas]


def figure(draw: Draw, *, title: str, description: str, key: str) -> str:
    """Return the wide and the narrow drawing, one of which the style sheet shows, and a caption."""
    drawings = "".join(
        draw(width).render(title, description, style, f"{key}-{style}")
        for width, style in ((WIDE, "wide"), (NARROW, "narrow"))
    )
    return element("figure", drawings + text("figcaption", title), id=key)


def is_wide(width: float) -> bool:
    return width > 500


def name_column(names: Sequence[str], width: float) -> float:
    """Return the width of the column of names: that of the longest name, within limits for the figure."""
    longest = max(map(len, names), default=0) * CHARACTER + 20.0
    return min(max(longest, 110.0), 300.0 if is_wide(width) else width / 2)


def x_axis(canvas: Canvas, scale: Scale, values: Sequence[float], top: float, bottom: float) -> None:
    for value in values:
        x = scale(value)
        canvas.line(x, top, x, bottom, "grid")
        canvas.text(x, bottom + 16, label(value), "tick", "middle")


def forest(data: Forest, digits: int) -> Draw:
    """Draw estimates with their intervals, one row each."""

    def draw(width: float) -> Canvas:
        wide = is_wide(width)
        kinds = [kind for kind in GROUPS if any(row.kind == kind for row in data.rows)]
        top, left = 8.0, name_column([row.label for row in data.rows], width)
        right = width - (200.0 if wide else 10.0)
        bottom = top + ROW * (len(data.rows) + len(kinds))
        canvas = Canvas(width, bottom + 42)
        ends = [end for row in data.rows for end in (row.low, row.high)]
        ends += [] if data.null is None else [data.null]
        low, high = min(ends), max(ends)
        if data.ratio and low > 0:
            scale, marks = logarithmic(low, high, left, right), log_ticks(low, high, 5 if wide else 3)
        else:
            scale, marks = linear(low, high, left, right), ticks(low, high, 6 if wide else 4)
        x_axis(canvas, scale, marks, top, bottom)
        if data.null is not None:
            canvas.line(scale(data.null), top, scale(data.null), bottom, "null")
        y, weights = top, data.weights
        for kind in kinds:
            canvas.text(0, y + 14, GROUPS[kind], "group")
            y += ROW
            for row in (row for row in data.rows if row.kind == kind):
                _interval(canvas, row, scale, y + ROW / 2, left, digits, weights.get(row.label, 0.0))
                if wide:
                    numbers = f"{row.estimate:.{digits}f} ({row.low:.{digits}f} to {row.high:.{digits}f})"
                    shown = numbers.replace("-", "\N{MINUS SIGN}")
                    canvas.text(width, y + 14, shown, "tick", "end")
                y += ROW
        canvas.text((left + right) / 2, bottom + 36, data.estimand, "axis", "middle")
        return canvas

    return draw


def _interval(
    canvas: Canvas, row: Interval, scale: Scale, y: float, left: float, digits: int, weight: float
) -> None:
    """Draw a silo as a square whose area is its weight, a summary as a diamond as wide as its interval."""
    canvas.text(10, y + 4, shortened(row.label, left - 18), "name")
    low, middle, high = scale(row.low), scale(row.estimate), scale(row.high)
    value, first, last = (f"{number:.{digits}f}" for number in (row.estimate, row.low, row.high))
    description = (
        f"{row.name}: {value} ({first} to {last}), n = {'not disclosed' if row.n is None else f'{row.n:,}'}"
    )
    if row.is_summary:
        canvas.path(
            f"M{low:.1f} {y:.1f}L{middle:.1f} {y - 6:.1f}L{high:.1f} {y:.1f}L{middle:.1f} {y + 6:.1f}Z",
            f"dot {row.kind}",
            description,
        )
        return
    canvas.line(low, y, high, y, f"whisker {row.kind}")
    if row.kind == "silo":
        half = 2.5 + 5.0 * math.sqrt(weight)
        canvas.rect(middle - half, y - half, 2 * half, 2 * half, "dot silo", description)
    elif row.kind == "without":
        canvas.circle(middle, y, 4.0, f"dot {row.kind}", description)


def trajectory(data: Path) -> Draw:
    """Draw the norm of the pooled gradient by round on a log axis, with the tolerance; the loss below.

    A norm of zero has a triangle at the foot of the axis.
    """

    def draw(width: float) -> Canvas:
        left, right, top, middle = 52.0, width - 10, 24.0, 210.0
        loss = [(r, v) for r, v in zip(data.rounds, data.loss or (), strict=False) if v is not None]
        bottom = middle + (150.0 if loss else 0.0)
        canvas = Canvas(width, bottom + 42)
        x = linear(min(data.rounds), max(data.rounds), left, right)
        values = [v for v in (*data.norm, data.tolerance) if v]
        low, high = min(values) / 1.5, max(values) * 1.5
        y = logarithmic(low, high, middle - (ROW if data.zeros else 0.0), top)
        marks = [mark for mark in ticks(min(data.rounds), max(data.rounds), 6) if mark == int(mark)]
        x_axis(canvas, x, marks, top, bottom)
        for value in log_ticks(low, high):
            canvas.line(left, y(value), right, y(value), "grid")
            canvas.text(left - 6, y(value) + 4, label(value), "tick", "end")
        if data.zeros:
            canvas.line(left, middle, right, middle, "grid")
            canvas.text(left - 6, middle + 4, "0", "tick", "end")
        canvas.text(0, 14, "norm of the pooled gradient", "axis")
        if data.tolerance:
            canvas.line(left, y(data.tolerance), right, y(data.tolerance), "tolerance")
            canvas.text(left + 4, y(data.tolerance) - 5, f"tolerance {data.tolerance:.2g}", "warn")
        shown = [(r, v, y(v) if v else middle) for r, v in data.known]
        canvas.curve([(x(r), height) for r, _, height in shown], "curve residual")
        origins = {r for r, at in zip(data.rounds, data.at_origin, strict=True) if at}
        if len(shown) <= 200:
            for r, v, height in shown:
                style = "dot residual" if r in origins else "dot step"
                if v:
                    canvas.circle(x(r), height, 3.0, style, f"round {r}: {v:.3g}")
                else:
                    canvas.triangle(x(r), height, 5.0, style, f"round {r}: {ZERO}")
        if loss:
            _loss(canvas, loss, x, left, right, middle, bottom)
        canvas.text((left + right) / 2, bottom + 36, "round of targeting", "axis", "middle")
        return canvas

    return draw


def _loss(
    canvas: Canvas,
    loss: Sequence[tuple[int, float]],
    x: Scale,
    left: float,
    right: float,
    middle: float,
    bottom: float,
) -> None:
    values = [value for _, value in loss]
    low, high = min(values), max(values)
    y = linear(low, high, bottom - 8, middle + 44)
    for value in ticks(low, high, 3):
        canvas.line(left, y(value), right, y(value), "grid")
        canvas.text(left - 6, y(value) + 4, label(value), "tick", "end")
    canvas.text(0, middle + 32, "pooled loss, less its first value", "axis")
    canvas.curve([(x(r), y(v)) for r, v in loss], "curve loss")


def bits(data: BitsByRound) -> Draw:
    """Draw silos by rounds, with darker cells for more bits; long runs are averaged into columns."""

    def draw(width: float) -> Canvas:
        left, right, top = (150.0 if is_wide(width) else 96.0), width - 4, 40.0
        rounds = len(data.phases)
        columns = min(rounds, int((right - left) / 4))
        rows = [*data.up.items(), ("broadcast", data.down)]
        height = 18.0 if len(rows) <= 24 else 15.0
        bottom = top + height * len(rows)
        canvas = Canvas(width, bottom + 66)
        edges = [round(k * rounds / columns) for k in range(columns + 1)]
        x = linear(0, rounds, left, right)
        means = [[_mean(sent[a:b]) for a, b in pairwise(edges)] for _, sent in rows]
        known = [value for row in means for value in row if value]
        low, high = (min(known), max(known)) if known else (1.0, 1.0)
        cells: dict[int, list[str]] = {}
        for i, row in enumerate(means):
            canvas.text(0, top + height * (i + 0.5) + 4, shortened(rows[i][0], left - 6), "name")
            for k, value in enumerate(row):
                if value:
                    x0, y0 = x(edges[k]), top + height * i
                    wide = max(x(edges[k + 1]) - x0 - 0.4, 0.6)
                    cells.setdefault(_shade(value, low, high), []).append(
                        f"M{x0:.1f} {y0:.1f}h{wide:.1f}v{height - 1:.0f}H{x0:.1f}z"
                    )
        for shade, paths in sorted(cells.items()):
            canvas.path("".join(paths), f"shade{shade}")
        _phases(canvas, data.phases, x, top, bottom)
        for mark in ticks(1, rounds, 6 if is_wide(width) else 3):
            if mark == int(mark):
                canvas.text(x(mark - 0.5), bottom + 16, label(mark), "tick", "middle")
        canvas.text((left + right) / 2, bottom + 34, "round", "axis", "middle")
        _legend(canvas, low, high, left, bottom + 46)
        return canvas

    return draw


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _shade(value: float, low: float, high: float) -> int:
    """Return a shade from 0 to SHADES - 1 on a log scale."""
    if not high > low:
        return SHADES - 1
    return min(SHADES - 1, int(SHADES * math.log(value / low) / math.log(high / low)))


def _phases(canvas: Canvas, phases: Sequence[str], x: Scale, top: float, bottom: float) -> None:
    """Draw a line where a phase begins, with its name; the names alternate between two lines."""
    runs = [(k, phase) for k, phase in enumerate(phases) if k == 0 or phases[k - 1] != phase]
    free = [0.0, 0.0]  # x from which each line of names is free
    for place, (start, phase) in enumerate(runs):
        name = phase_name(phase)
        above = top - (10 if place % 2 == 0 else 24)
        canvas.line(x(start), above + 3, x(start), bottom, "phase")
        size = CHARACTER * len(name)
        begin = min(x(start) + 2, canvas.width - size)
        if begin >= free[place % 2]:
            canvas.text(begin, above, name, "tick")
            free[place % 2] = begin + size


def _legend(canvas: Canvas, low: float, high: float, left: float, y: float) -> None:
    canvas.text(0, y + 11, "bits per round", "axis")
    for shade in range(SHADES):
        canvas.rect(left + 22 * shade, y, 21, 13, f"shade{shade}")
    canvas.text(left + 22 * SHADES + 6, y + 11, f"{low:,.0f} to {high:,.0f}", "tick")


def overlap(data: CohortOverlap) -> Draw:
    """Draw records by arm (with outcome, without, truncated) and effective sample sizes."""

    def draw(width: float) -> Canvas:
        wide = is_wide(width)
        left, right, top = name_column([arm.name for arm in data.arms], width), width - 96, 8.0
        bars = len(data.arms) + len(data.effective)
        bottom = top + ROW * (bars + 2)
        canvas = Canvas(width, bottom + 42)
        most = max([*(arm.records for arm in data.arms), *data.effective.values(), 1])
        x = linear(0, most, left, right)
        x_axis(canvas, x, ticks(0, most, 5 if wide else 3), top, bottom)
        y = top
        canvas.text(0, y + 14, "Records by arm", "group")
        for arm in data.arms:
            y += ROW
            canvas.text(10, y + 14, shortened(arm.name, left - 18), "name")
            seen = partial(arm.observed, arm.observed_hidden_in)
            description = f"{arm.name}: {arm.records:,} records, {seen} with an outcome"
            canvas.rect(left, y + 4, x(arm.records) - left, 12, "bar all", description)
            canvas.rect(left, y + 4, x(arm.observed) - left, 12, "bar seen", description)
            truncated = f"score of {arm.name}: truncated in {arm.truncated:,} of {data.records:,} records"
            canvas.rect(left, y + 13, x(arm.truncated) - left, 3, "bar truncated", truncated)
            canvas.text(x(arm.records) + 5, y + 14, f"{arm.truncated:,} truncated", "tick")
        y += ROW
        canvas.text(0, y + 14, "Effective sample size", "group")
        for name, size in data.effective.items():
            y += ROW
            canvas.text(10, y + 14, shortened(name, left - 18), "name")
            canvas.rect(left, y + 4, x(size) - left, 12, "bar effective", f"{name}: {size:,.1f}")
            canvas.text(x(size) + 5, y + 14, f"{size:,.0f}", "tick")
        canvas.text((left + right) / 2, bottom + 36, "records", "axis", "middle")
        return canvas

    return draw


def probabilities(data: Probabilities) -> Draw:
    """Draw one histogram below the other, by observed arm, over the same probabilities."""

    def draw(width: float) -> Canvas:
        left, right, tall = 40.0, width - 8, 92.0
        canvas = Canvas(width, tall * len(data.counts) + 42)
        x = linear(0, 1, left, right)
        most = max([1, *(count or 0 for counts in data.counts.values() for count in counts)])
        for k, (arm, counts) in enumerate(data.counts.items()):
            top, bottom = tall * k + 22, tall * (k + 1)
            y = linear(0, most, bottom, top)
            canvas.text(left, top - 6, f"records in arm {shortened(arm, width - 180)}", "group")
            canvas.line(left, bottom, right, bottom, "null")
            canvas.text(left - 6, top + 8, f"{most:,}", "tick", "end")
            for (low, high), count in zip(pairwise(data.edges), counts, strict=True):
                if count is None:
                    canvas.text((x(low) + x(high)) / 2, bottom - 4, "?", "warn", "middle")
                elif count:
                    description = f"{count:,} with a probability of {low:g} to {high:g}"
                    canvas.rect(
                        x(low) + 1, y(count), x(high) - x(low) - 2, bottom - y(count), "bar seen", description
                    )
        bottom = tall * len(data.counts)
        for mark in (0, 0.2, 0.4, 0.6, 0.8, 1):
            canvas.text(x(mark), bottom + 16, label(mark), "tick", "middle")
        canvas.text((left + right) / 2, bottom + 36, f"probability of arm {data.of}", "axis", "middle")
        return canvas

    return draw


def heterogeneity(data: Spread) -> Draw:
    """Draw each silo's distance from the weighted mean in its own standard errors."""

    def draw(width: float) -> Canvas:
        left, right, top = name_column(list(data.distance), width), width - 14, 8.0
        bottom = top + ROW * len(data.distance)
        canvas = Canvas(width, bottom + 42)
        most = max([2.2, *(abs(value) * 1.05 for value in data.distance.values())])
        x = linear(-most, most, left, right)
        canvas.rect(x(-1.96), top, x(1.96) - x(-1.96), bottom - top, "usual", "within 1.96 standard errors")
        x_axis(canvas, x, ticks(-most, most, 6 if is_wide(width) else 4), top, bottom)
        canvas.line(x(0), top, x(0), bottom, "null")
        for i, (silo, value) in enumerate(data.distance.items()):
            y = top + ROW * (i + 0.5)
            canvas.text(10, y + 4, shortened(silo, left - 18), "name")
            canvas.line(x(0), y, x(value), y, "whisker silo")
            canvas.circle(x(value), y, 4.0, "dot silo", f"{silo}: {value:+.2f} standard errors")
        description = "distance from the weighted mean, in standard errors"
        canvas.text(
            (left + right) / 2,
            bottom + 36,
            description if is_wide(width) else "standard errors",
            "axis",
            "middle",
        )
        return canvas

    return draw
