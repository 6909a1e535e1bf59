"""The look of the figures: one Okabe-Ito colour per method, names beside their curves, small files."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from fedtmle_paper.reproduce.scenario import Method

COLOURS = 96


@dataclass(frozen=True, kw_only=True)
class Ink:
    """A series: its colour (Okabe-Ito), dashes, marker and printed name."""

    colour: str
    dashes: str
    marker: str
    label: str


INKS: Mapping[Method, Ink] = {
    Method.GRADIENT: Ink(colour="#000000", dashes="-", marker="o", label="G"),
    Method.LOCAL_SIZE: Ink(colour="#0072B2", dashes="-", marker="s", label="L, size"),
    Method.LOCAL_UNIFORM: Ink(colour="#D55E00", dashes="-", marker="^", label="L, uniform"),
    Method.CODED_RAW: Ink(colour="#CC79A7", dashes="--", marker="v", label="coded, raw"),
    Method.CODED_WHITENED: Ink(colour="#009E73", dashes="--", marker="D", label="coded, whitened"),
}


def save(figure: Figure, out: Path, name: str) -> None:
    """PNG (of few colours, so small) and SVG, without a date in them."""
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png")
    few = Image.open(pixels).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(out / f"{name}.png", optimize=True)
    figure.savefig(out / f"{name}.svg", metadata={"Date": None})


def name_curves(axes: Axes, ends: Mapping[str, tuple[float, float, str]], *, gap: float = 0.085) -> None:
    """Names beside the right edge at the height of each curve's end (x, y, colour), moved apart by ``gap``.

    A hair line leads from the end of the curve to its name.
    """
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    points = {label: to_axes.transform((x, y)) for label, (x, y, _) in ends.items()}
    order = sorted(points, key=lambda label: float(points[label][1]))
    placed = _apart([float(points[label][1]) for label in order], gap)
    for label, at in zip(order, placed, strict=True):
        (x, y), colour = points[label], ends[label][2]
        axes.plot([x, 1.035], [y, at], color=colour, lw=0.5, transform=axes.transAxes, clip_on=False)
        axes.text(1.045, at, label, color=colour, transform=axes.transAxes, va="center", fontsize=7)


def _apart(heights: list[float], gap: float) -> list[float]:
    """Ascending heights, moved as little as needed to lie ``gap`` apart (pooled neighbours move together)."""
    blocks: list[list[float]] = []  # each: the heights of names that touch
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and _low(blocks[-1], gap) - _high(blocks[-2], gap) < gap:
            last = blocks.pop()
            blocks[-1] += last
    placed = [_low(block, gap) + gap * i for block in blocks for i in range(len(block))]
    for i, height in enumerate(placed):  # none below the axis ...
        placed[i] = max(height, gap * i)
    for i in reversed(range(len(placed))):  # ... and none above its top
        placed[i] = min(placed[i], 1.0 - gap * (len(placed) - 1 - i))
    return placed


def _low(block: list[float], gap: float) -> float:
    return sum(block) / len(block) - gap * (len(block) - 1) / 2


def _high(block: list[float], gap: float) -> float:
    return _low(block, gap) + gap * (len(block) - 1)
