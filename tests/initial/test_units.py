"""Units by name: published factors, round trips, and what cannot be converted."""

from __future__ import annotations

import itertools

import pytest

from fedtmle.errors import InputError
from fedtmle.initial.variables import ALIASES, TIME_UNITS, UNITS, conversion, find_unit, time_unit

# What one value is in another unit, from tables of conversion factors.
KNOWN = [
    ("lb", "kg", 150.0, 68.0388555, None),
    ("inches", "cm", 70.0, 177.8, None),
    ("ft", "m", 6.0, 1.8288, None),
    ("oz", "g", 1.0, 28.349523125, None),
    ("\u00b0F", "\u00b0C", 98.6, 37.0, None),
    ("C", "F", 100.0, 212.0, None),
    ("K", "C", 310.15, 37.0, None),
    ("F", "K", 32.0, 273.15, None),
    ("kPa", "mmHg", 16.0, 120.0098, None),
    ("years", "months", 2.0, 24.0, None),
    ("weeks", "days", 6.0, 42.0, None),
    ("days", "years", 365.25, 1.0, None),
    ("g/dL", "g/L", 13.5, 135.0, None),
    ("ng/mL", "\u00b5g/L", 40.0, 40.0, None),
    ("%", "share", 45.0, 0.45, None),
    ("mg/dL", "\u03bcmol/L", 1.0, 88.40, 113.12),  # creatinine
    ("mg/dL", "mmol/L", 180.16, 10.0, 180.16),  # glucose
    ("mmol/L", "mg/dL", 5.0, 193.35, 386.7),  # cholesterol
]


@pytest.mark.parametrize(("theirs", "ours", "value", "expected", "molar_mass"), KNOWN)
def test_published_factors(
    theirs: str, ours: str, value: float, expected: float, molar_mass: float | None
) -> None:
    scale, shift = conversion(theirs, ours, molar_mass)
    assert value * scale + shift == pytest.approx(expected, rel=2e-5)


def test_there_and_back_is_the_same() -> None:
    pairs = 0
    for one, other in itertools.product(UNITS, UNITS):
        if UNITS[one].dimension == UNITS[other].dimension:
            (scale, shift), (back, away) = conversion(one, other), conversion(other, one)
            assert (7.0 * scale + shift) * back + away == pytest.approx(7.0, rel=1e-12)
            pairs += 1
    assert pairs > 400
    assert conversion("points", "Points") == (1.0, 0.0)  # the same, known or not


def test_every_alias_is_of_a_unit() -> None:
    assert set(ALIASES.values()) <= set(UNITS)
    assert not set(ALIASES) & set(UNITS)
    assert {time_unit(name) for name in ("day", "Weeks", "month", "yr")} == set(TIME_UNITS)
    assert time_unit("kg") is None
    assert find_unit("furlong") is None


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ("stone", "kg", "no known conversion of 'stone'; write the conversion as scale"),
        ("lb", "bushel", "no known conversion of 'bushel'"),
        ("lb", "", "the study's dictionary has none"),
        ("lb", "cm", "is a unit of mass, and the study's 'cm' one of length"),
        ("mg/dL", "mmol/L", "the substance matters: give its molar_mass in g/mol"),
        ("mg/dL", "mmHg", "one of pressure"),
    ],
)
def test_what_is_not_safe_is_refused(theirs: str, ours: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        conversion(theirs, ours)
