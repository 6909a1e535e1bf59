"""Hints for the owner of a table whose values do not fit the dictionary: near levels, and likely units.

A hint names declared levels, which are public, and conversion factors; never a record's value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtmle.model.types import Array

# Factors between units that hospitals use, to the unit that a study may have declared: (scale, shift, words).
CONVERSIONS: tuple[tuple[float, float, str], ...] = (
    (88.42, 0.0, "creatinine in mg/dL instead of umol/L"),
    (1 / 88.42, 0.0, "creatinine in umol/L instead of mg/dL"),
    (1 / 18.016, 0.0, "glucose in mg/dL instead of mmol/L"),
    (18.016, 0.0, "glucose in mmol/L instead of mg/dL"),
    (1 / 38.67, 0.0, "cholesterol in mg/dL instead of mmol/L"),
    (38.67, 0.0, "cholesterol in mmol/L instead of mg/dL"),
    (7.50062, 0.0, "kPa instead of mmHg"),
    (1 / 7.50062, 0.0, "mmHg instead of kPa"),
    (0.45359237, 0.0, "pounds instead of kg"),
    (2.54, 0.0, "inches instead of cm"),
    (1 / 12, 0.0, "months instead of years"),
    (1 / 365.25, 0.0, "days instead of years"),
    (5 / 9, -160 / 9, "degrees Fahrenheit instead of Celsius"),
    (1.8, 32.0, "degrees Celsius instead of Fahrenheit"),
    (10.0, 0.0, "a tenth of the unit, such as g/dL instead of g/L"),
    (0.1, 0.0, "ten times the unit, such as g/L instead of g/dL"),
    (100.0, 0.0, "a hundredth of the unit, such as m instead of cm, or shares instead of percent"),
    (0.01, 0.0, "a hundred times the unit, such as cm instead of m, or percent instead of shares"),
    (1000.0, 0.0, "a thousandth of the unit, such as kg instead of g"),
    (0.001, 0.0, "a thousand times the unit, such as g instead of kg"),
)
NEARLY_ALL = 0.95
EDGE = 0.02  # share of the range; a unit error may leave nearly all values this close to an end
FEWEST = 20  # fewest values that say something about the unit
MOST_FITTING = 3


def near_level(label: str, levels: Sequence[str]) -> tuple[str, str] | None:
    """Return the declared level that a label may mean, and how they differ; None if there is none."""
    for level in levels:
        if label.strip(" \t\r\n\u00a0") == level:
            return level, "in blanks around it"
    for level in levels:
        if label.strip().casefold() == level.casefold():
            return level, "in upper and lower case"
    for level in levels:
        if _number(label) is not None and _number(label) == _number(level):
            return level, "in how the number is written, such as 01 for 1"
    return None


def _number(label: str) -> float | None:
    try:
        return float(label)
    except ValueError:
        return None


def fitting_units(values: Array, low: float, high: float) -> tuple[str, ...]:
    """Return the conversions that would bring nearly all values well into the range, at most three."""
    known = values[~np.isnan(values)]
    if len(known) < FEWEST:
        return ()
    margin = EDGE * (high - low)
    hints = []
    for scale, shift, words in CONVERSIONS:
        converted = known * scale + shift
        inside = np.mean((converted >= low) & (converted <= high))
        central = np.mean((converted > low + margin) & (converted < high - margin))
        if inside >= NEARLY_ALL and central >= NEARLY_ALL:
            written = f"scale = {scale:.6g}" + (f", shift = {shift:.6g}" if shift else "")
            hints.append(f"{written} would fit ({words})")
    return tuple(hints[:MOST_FITTING])


def is_outside(values: Array, low: float, high: float) -> bool:
    """Return whether most values are outside the range."""
    known = values[~np.isnan(values)]
    return len(known) >= FEWEST and bool(np.mean((known < low) | (known > high)) > 0.5)


def is_at_edge(values: Array, low: float, high: float) -> bool:
    """Return whether nearly all values are close to one end of the range, leaving out those at an end."""
    known = values[~np.isnan(values) & (values != low) & (values != high)]
    if len(known) < FEWEST:
        return False
    share = (known - low) / (high - low)
    return bool(np.mean(share < EDGE) >= NEARLY_ALL or np.mean(share > 1 - EDGE) >= NEARLY_ALL)
