"""Units by name, and the conversions between them that need no further knowledge.

A unit has a dimension, and a scale and a shift to the base unit of the dimension: value * scale + shift.
Between a mass concentration (mg/dL) and a molar one (mmol/L) the conversion needs the molar mass of the
substance. Months and years are mean ones, of 365.25 / 12 and 365.25 days, at every silo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from fedtmle.errors import InputError

Dimension = Literal[
    "length",
    "mass",
    "time",
    "temperature",
    "pressure",
    "volume",
    "mass per volume",
    "amount per volume",
    "share",
]
DAYS_PER_YEAR = 365.25


@final
@dataclass(frozen=True)
class Unit:
    """value * scale + shift is the value in the base unit of the dimension."""

    dimension: Dimension
    scale: float
    shift: float = 0.0


# Base units: m, kg, day, degree Celsius, Pa, L, g/L, mol/L, 1.
UNITS: dict[str, Unit] = {
    **{name: Unit("length", scale) for name, scale in {"m": 1.0, "cm": 0.01, "mm": 0.001}.items()},
    **{name: Unit("length", scale) for name, scale in {"in": 0.0254, "ft": 0.3048}.items()},
    **{name: Unit("mass", scale) for name, scale in {"kg": 1.0, "g": 1e-3, "mg": 1e-6, "ug": 1e-9}.items()},
    **{name: Unit("mass", scale) for name, scale in {"lb": 0.45359237, "oz": 0.45359237 / 16}.items()},
    **{name: Unit("time", scale) for name, scale in {"days": 1.0, "weeks": 7.0}.items()},
    **{name: Unit("time", scale) for name, scale in {"hours": 1 / 24, "minutes": 1 / 1440}.items()},
    "months": Unit("time", DAYS_PER_YEAR / 12),
    "years": Unit("time", DAYS_PER_YEAR),
    "c": Unit("temperature", 1.0),
    "f": Unit("temperature", 5 / 9, -160 / 9),
    "k": Unit("temperature", 1.0, -273.15),
    **{
        name: Unit("pressure", scale)
        for name, scale in {"mmhg": 133.322387415, "kpa": 1e3, "pa": 1.0}.items()
    },
    **{name: Unit("volume", scale) for name, scale in {"l": 1.0, "dl": 0.1, "ml": 1e-3}.items()},
    **{
        f"{mass}/{volume}": Unit("mass per volume", of_mass / of_volume)
        for mass, of_mass in {"g": 1.0, "mg": 1e-3, "ug": 1e-6, "ng": 1e-9, "pg": 1e-12}.items()
        for volume, of_volume in {"l": 1.0, "dl": 0.1, "ml": 1e-3}.items()
    },
    **{
        f"{amount}/{volume}": Unit("amount per volume", of_amount / of_volume)
        for amount, of_amount in {
            "mol": 1.0,
            "mmol": 1e-3,
            "umol": 1e-6,
            "nmol": 1e-9,
            "pmol": 1e-12,
        }.items()
        for volume, of_volume in {"l": 1.0, "dl": 0.1, "ml": 1e-3}.items()
    },
    "1": Unit("share", 1.0),
    "%": Unit("share", 0.01),
}
ALIASES = {
    "meter": "m",
    "metre": "m",
    "inch": "in",
    "inches": "in",
    "foot": "ft",
    "feet": "ft",
    "lbs": "lb",
    "pound": "lb",
    "pounds": "lb",
    "ounce": "oz",
    "ounces": "oz",
    "mcg": "ug",
    "d": "days",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "y": "years",
    "yr": "years",
    "year": "years",
    "h": "hours",
    "hour": "hours",
    "min": "minutes",
    "minute": "minutes",
    "celsius": "c",
    "degc": "c",
    "°c": "c",
    "fahrenheit": "f",
    "degf": "f",
    "°f": "f",
    "kelvin": "k",
    "mm hg": "mmhg",
    "percent": "%",
    "share": "1",
}
TIME_UNITS = ("days", "weeks", "months", "years")  # units of a difference of dates
WRITE_IT = "write the conversion as scale (and shift) instead"


def find_unit(name: str) -> Unit | None:
    """Return the unit of this name, whatever its case, or None."""
    return UNITS.get(_plain(name))


def time_unit(name: str) -> str | None:
    """Return "days", "weeks", "months" or "years" if the name means one of them."""
    plain = _plain(name)
    return plain if plain in TIME_UNITS else None


def _plain(name: str) -> str:
    # The Greek letter and the micro sign are two characters.
    plain = name.strip().replace("\u03bc", "u").replace("\u00b5", "u").casefold()
    return ALIASES.get(plain, plain)


def conversion(theirs: str, ours: str, molar_mass: float | None = None) -> tuple[float, float]:
    """Return (scale, shift): a value in the unit ``theirs`` times scale plus shift is one in ``ours``.

    ``molar_mass``, in g/mol, is for conversions between concentrations by mass and by amount. An `InputError`
    says why two units cannot be converted.
    """
    if _plain(theirs) == _plain(ours) and theirs:
        return 1.0, 0.0
    if not ours:
        raise InputError(f"the unit is {theirs!r}, and the study's dictionary has none; {WRITE_IT}")
    for name in (theirs, ours):
        if find_unit(name) is None:
            raise InputError(f"there is no known conversion of {name!r}; {WRITE_IT}")
    one, other = UNITS[_plain(theirs)], UNITS[_plain(ours)]
    scale = one.scale / other.scale
    if one.dimension != other.dimension:
        concentrations = ("mass per volume", "amount per volume")
        if {one.dimension, other.dimension} != set(concentrations):
            raise InputError(
                f"{theirs!r} is a unit of {one.dimension}, and the study's {ours!r} one of "
                f"{other.dimension}; correct the unit"
            )
        if molar_mass is None:
            raise InputError(
                f"from {theirs!r} to {ours!r} the substance matters: give its molar_mass in g/mol, or "
                f"{WRITE_IT}"
            )
        scale = scale / molar_mass if one.dimension == concentrations[0] else scale * molar_mass
    return scale, (one.shift - other.shift) / other.scale
