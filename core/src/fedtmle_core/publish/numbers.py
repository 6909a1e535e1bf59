"""Numbers on the grids on which they are published."""

from __future__ import annotations

import math

SE_DIGITS = 3


def step_above(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    if not (math.isfinite(least) and least > 0):
        raise ValueError("a step is a positive number")
    power = math.floor(math.log10(least))
    steps = (float(f"{lead}e{power + more}") for more in (-1, 0, 1) for lead in (1, 2, 5))
    return next(step for step in steps if step >= least)


def on_grid(value: float, step: float) -> float:
    """Return the nearest multiple of a step of `step_above`, as the decimal that people write."""
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return round(round(value / step) * step, places) + 0.0  # no negative zero


def digits(value: float, count: int, *, up: bool = False) -> float:
    """Return a number with ``count`` significant digits; ``up`` rounds a bound away from zero."""
    if value == 0 or not math.isfinite(value):
        return value
    shown = float(f"{value:.{count - 1}e}")
    if up and abs(shown) < abs(value):
        unit = 10.0 ** (math.floor(math.log10(abs(shown))) - count + 1)
        shown = float(f"{shown + math.copysign(unit, value):.{count - 1}e}")
    return shown


def estimated(value: float, error: float) -> float:
    """Return an estimate on a grid of a hundredth of its standard error or a little more."""
    if not (math.isfinite(error) and error > 0):
        return digits(value, SE_DIGITS)  # nothing varies: a risk of 0 before the first event
    return on_grid(value, step_above(digits(error, SE_DIGITS) / 100))
