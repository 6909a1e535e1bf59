"""Drawing: a canvas of SVG elements, scales from data to pixels, and round numbers for axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

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
