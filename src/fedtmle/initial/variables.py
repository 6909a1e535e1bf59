"""The dictionary of a study: what each variable is, in which unit, declared once and the same for every silo.

It is public and part of the plan. A silo checks every value against it; grids of sums, levels of factors and
the words of tables follow from it, so that no silo is asked for labels or for the size of its values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, final

from fedtmle.defects import near
from fedtmle.errors import InputError
from fedtmle.initial.design import UNIT, Range

# Units by name, and the conversions between them that need no further knowledge.
#
# A unit has a dimension, and a scale and a shift to the base unit of the dimension: value * scale + shift.
# Between a mass concentration (mg/dL) and a molar one (mmol/L) the conversion needs the molar mass of the
# substance. Months and years are mean ones, of 365.25 / 12 and 365.25 days, at every silo.

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


Kind = Literal["binary", "number", "count", "category", "date difference", "identifier"]
KINDS: tuple[Kind, ...] = ("binary", "number", "count", "category", "date difference", "identifier")
BasicKind = Literal["binary", "number", "count", "category", "identifier"]
Missing = Literal["refuse", "indicator", "impute", "omit"]
MISSING: tuple[Missing, ...] = ("refuse", "indicator", "impute", "omit")
MOST_LEVELS = 200  # a variable with more is an identifier or a number
LONGEST_TEXT = 200  # characters of a label or a unit, which tables print


@final
@dataclass(frozen=True, kw_only=True)
class Variable:
    """One entry of a study's dictionary.

    Parameters
    ----------
    kind
        "binary" (0 and 1), "number", "count" (0, 1, 2, ...), "category", "date difference" (days, weeks,
        months or years between two dates) or "identifier" (names clusters and is never shown).
    range
        The least and the largest possible value of a number or a count: a declaration for all silos, not a
        statistic of a table.
    levels
        The codes of a category in the order of its indicator columns, or of a binary variable's 0 and 1: a
        sequence of codes, or a mapping from each code to its words.
    label
        The words for the variable in tables.
    unit
        The unit in tables.
    missing
        What happens where a value is missing: "refuse" stops the silo; "indicator" and "impute" (multiple
        imputation) are for covariates; "omit", for the treatment, leaves the record out and counts it.

    Raises
    ------
    InputError
        A value is wrong, or does not suit the kind; the message names the key.

    Examples
    --------
    >>> ft.Variable(kind="number", range=(18, 110), unit="years").bounds
    (18.0, 110.0)
    """

    kind: Kind
    range: Range | None = None
    levels: tuple[tuple[str, str], ...] = ()  # (code, words)
    label: str = ""
    unit: str = ""
    missing: Missing = "refuse"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"kind: expected one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.missing not in MISSING:
            raise InputError(f"missing: expected one of {', '.join(MISSING)}, not {self.missing!r}")
        object.__setattr__(self, "levels", _levels(self.levels))
        object.__setattr__(self, "range", _range(self.range))
        for name in ("label", "unit"):
            require_text(name, getattr(self, name))
        if self.kind == "date difference" and time_unit(self.unit) is None:
            raise InputError(
                f"unit: a date difference is in {', '.join(TIME_UNITS)}, not {self.unit!r}; as in "
                'unit = "years"'
            )
        if self.basic_kind in ("number", "count"):
            self._check_number()
        else:
            self._check_levels()

    def _check_number(self) -> None:
        if self.levels:
            raise InputError(f"levels: a {self.kind} has none; a variable with levels is a category")
        if self.range is None:
            raise InputError(
                f"range: a {self.kind} needs its least and its largest possible value, as in range = [0, 120]"
            )
        if self.kind == "count" and not (self.range[0] >= 0 and all(end.is_integer() for end in self.range)):
            raise InputError(
                f"range: a count goes from one whole number of at least 0 to another, not {self.range}"
            )

    def _check_levels(self) -> None:
        if self.kind == "identifier":
            if self.range is not None or self.levels:
                raise InputError("kind: an identifier has neither a range nor levels")
            return
        if self.range is not None:
            raise InputError(f"range: a {self.kind} variable has levels, not a range")
        if self.kind == "category" and len(self.levels) < 2:
            raise InputError('levels: a category needs at least two, as in levels = ["no", "yes"]')
        if self.kind == "binary" and len(self.levels) not in (0, 2):
            raise InputError("levels: a binary variable has two, that of 0 first, or none")

    @property
    def basic_kind(self) -> BasicKind:
        """The kind for models and tables: a date difference is a number."""
        return "number" if self.kind == "date difference" else self.kind

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the levels; those of a binary variable without levels are 0 and 1."""
        if self.kind == "binary" and not self.levels:
            return ("0", "1")
        return tuple(code for code, _ in self.levels)

    @property
    def noun(self) -> str:
        """The kind in words: "a category", "an identifier"."""
        return {"identifier": "an identifier", "binary": "a binary variable"}.get(self.kind, f"a {self.kind}")

    @property
    def bounds(self) -> Range | None:
        """The range of the variable as a number; None for a category or an identifier."""
        return UNIT if self.kind == "binary" else self.range


@final
class Variables(Mapping[str, Variable]):
    """The dictionary of a study: its variables by name.

    Parameters
    ----------
    variables
        Each variable as a `Variable`, or as a mapping of its fields, as in a study file.

    Raises
    ------
    InputError
        An entry is wrong; the message names the variable and the key.

    Examples
    --------
    >>> variables = ft.Variables({"age": {"kind": "number", "range": (18, 110), "unit": "years"}})
    >>> variables.heading("age")
    'age (years)'
    """

    def __init__(self, variables: Mapping[str, Variable | Mapping[str, object]]) -> None:
        self._variables: dict[str, Variable] = {}
        for name, entry in variables.items():
            try:
                self._variables[name] = read_variable(entry)
            except InputError as error:
                raise InputError(f"variable '{name}': {error}") from None

    def __getitem__(self, name: str) -> Variable:
        return self._variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def __repr__(self) -> str:
        return f"Variables({self._variables!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variables) and self._variables == other._variables

    def __hash__(self) -> int:
        return hash(tuple(self._variables.items()))

    @property
    def ranges(self) -> dict[str, Range]:
        """The range of every variable that formulas use as a number."""
        return {name: each.bounds for name, each in self.items() if each.bounds is not None}

    def label(self, name: str) -> str:
        """Return the words for a variable: its label, or its name where it has none."""
        return (self[name].label if name in self else "") or name

    def heading(self, name: str) -> str:
        """Return the label of a variable with its unit, if it has one: "Age (years)"."""
        unit = self[name].unit if name in self else ""
        return f"{self.label(name)} ({unit})" if unit else self.label(name)

    def words(self, name: str) -> dict[str, str]:
        """Return the words for each level of a variable: those declared, or its code."""
        return {code: words or code for code, words in self[name].levels} if name in self else {}


def read_variable(entry: object) -> Variable:
    """Return one entry of a dictionary; an `InputError` begins with the key that is wrong."""
    if isinstance(entry, Variable):
        return entry
    if not isinstance(entry, Mapping):
        raise InputError('kind: describe the variable by keys, such as {kind = "number", range = [0, 120]}')
    known = {field.name for field in fields(Variable)}
    unknown = sorted(set(map(str, entry)) - known)
    if unknown:
        hint = near(unknown[0], known) or f"; there are {', '.join(sorted(known))}"
        raise InputError(f"{unknown[0]}: there is no such key{hint}")
    if "kind" not in entry:
        raise InputError(f"kind: this is missing; it is one of {', '.join(KINDS)}")
    return Variable(**dict(entry))  # the constructor checks every value


def _range(given: object) -> Range | None:
    if given is None:
        return None
    ends = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, int | float) for end in ends):
        raise InputError("range: expected two numbers, the least and the largest possible value")
    low, high = float(ends[0]), float(ends[1])
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(
            f"range: expected two finite numbers, the first below the second, not {low:g} and {high:g}"
        )
    return low, high


def _levels(given: object) -> tuple[tuple[str, str], ...]:
    if isinstance(given, Mapping):
        pairs = [(code, words) for code, words in given.items()]
    elif isinstance(given, Sequence) and not isinstance(given, str):
        pairs = [(item, "") if isinstance(item, str | int) else item for item in given]
    else:
        raise InputError("levels: expected a list of codes, or a table of codes and their words")
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise InputError("levels: a code is text or a whole number")
    levels = []
    for code, words in pairs:
        if isinstance(code, bool) or not isinstance(code, str | int):
            raise InputError("levels: a code is text or a whole number")
        require_text("levels", str(code))
        require_text("levels", words)
        if not str(code):
            raise InputError("levels: a code must not be empty")
        levels.append((str(code), words))
    if len({code for code, _ in levels}) < len(levels):
        raise InputError("levels: two of them have the same code")
    if len(levels) > MOST_LEVELS:
        raise InputError(f"levels: at most {MOST_LEVELS}, not {len(levels)}")
    return tuple(levels)


def require_text(name: str, text: object) -> None:
    """Raise `InputError` unless the text is one printable line without blanks at its ends."""
    if not isinstance(text, str):
        raise InputError(f"{name}: expected text, not {type(text).__name__}")
    if len(text) > LONGEST_TEXT or not text.isprintable() or text != text.strip():
        raise InputError(
            f"{name}: expected one line of at most {LONGEST_TEXT} printable characters, no blanks at its ends"
        )
