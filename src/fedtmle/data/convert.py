"""From a hospital's cells to the study's columns, and hints where they do not fit.

A reader gives the cells of a column as `Numbers`, as a `Factor` of text labels, or as `Unusable`. A
`Converter` turns them into the study's units and levels, and collects whatever does not fit the schema.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedtmle.data.silofile import Column, ColumnMap, Kind
from fedtmle.defects import Defects
from fedtmle.model.table import Factor
from fedtmle.protocol.clusters import keyed
from fedtmle_core import kernels
from fedtmle_core.types import Array, IntArray

# Columns of dates as days, for the difference of two of them.
#
# Dates come typed (Parquet, databases, data frames), or as text in a stated format. Times of the day are left
# out: the difference of two dates is a number of whole days.

EPOCH = date(1970, 1, 1).toordinal()
ISO = "YYYY-MM-DD"
_DATE = re.compile(r"(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})([ T].*)?")


def days_of(label: str, written: str) -> float | None:
    """Return the days from 1970 to the date of a label, or None if it is not a date.

    ``written`` is a format of `datetime.strptime`, or empty for ISO dates, with a time or without.
    """
    try:
        read = datetime.strptime(label, written) if written else datetime.fromisoformat(label)
    except ValueError:
        return None
    return float(read.date().toordinal() - EPOCH)


def days_of_labels(labels: Factor, written: str, missing: Sequence[str]) -> tuple[Array, NDArray[np.bool_]]:
    """Return the days of each cell (NaN if missing), and a mask of the cells that are not dates."""
    known = [None if label.strip() in missing else days_of(label.strip(), written) for label in labels.levels]
    bad = [
        day is None and label.strip() not in missing for day, label in zip(known, labels.levels, strict=True)
    ]
    days = np.array([np.nan if day is None else day for day in known] + [np.nan])
    return days[labels.codes], np.array([*bad, False])[labels.codes]


def without_missing(days: Array, missing: Sequence[str]) -> Array:
    """Return days with the dates of the codes for a missing value, such as 9999-12-31, removed."""
    codes = [day for day in (days_of(code, "") for code in missing) if day is not None]
    return np.where(np.isin(days, codes), np.nan, days)


# Hints for the owner of a table whose values do not fit the dictionary: near levels, and likely units.
#
# A hint names declared levels, which are public, and conversion factors; never a record's value.

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


@dataclass(frozen=True)
class Numbers:
    """Numbers and booleans (as 0 and 1); NaN is a missing value."""

    values: Array

    @cached_property
    def reach(self) -> float:
        """The largest magnitude; not finite if a value is missing or infinite."""
        return kernels.largest(self.values)


@dataclass(frozen=True)
class Unusable:
    """Cells that are neither numbers nor text; ``contents`` says what they are instead.

    If the cells are dates, ``days`` counts the days from 1970 to each, so that two columns can be subtracted.
    """

    contents: str
    days: Array | None = field(default=None, compare=False, repr=False)


Cells = Numbers | Factor | Unusable  # a text column is a factor of its distinct labels

DATES = Unusable("dates or times")


def dates(days: Array) -> Unusable:
    """Return cells of dates, in days from 1970; NaN is a missing value."""
    return Unusable(DATES.contents, np.ascontiguousarray(days, dtype=np.float64))


OTHER = Unusable("values that are neither numbers nor text")


class AbstractReader(ABC):
    """An open source: its column names, and the cells of the columns that are asked for."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """All column names as the source has them, including repeated ones."""

    @property
    def quotable(self) -> tuple[str, ...]:
        """The names that a message may quote, because they are certainly not a record's values."""
        return self.names

    @abstractmethod
    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        """Return the number of rows, and the cells of the named columns in one row order."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How named columns are read in batches; decided once, from the whole columns."""

    numbers: Mapping[str, str]  # SQL expressions by name
    texts: Mapping[str, str]
    labels: Mapping[str, tuple[str, ...]]  # all labels of each text column
    others: Mapping[str, Unusable]
    dates: frozenset[str] = frozenset()  # names among ``numbers`` that are days from 1970


class AbstractStreamReader(AbstractReader):
    """A source that can also be read in batches, any number of times."""

    @abstractmethod
    def settle(self, names: Sequence[str]) -> Reading:
        """Return how to read the named columns."""

    @abstractmethod
    def batches(self, reading: Reading) -> Iterator[tuple[int, Mapping[str, Cells]]]:
        """Read the source once; yield the number of rows and the cells of each batch."""


class UnreadableError(Exception):
    """A source cannot be read. The error says what is wrong and what to do, and quotes no value.

    Raise it outside the handler of a library's exception. That exception may quote a record, and would stay
    reachable as ``__context__`` even after ``from None``.
    """

    def __init__(self, message: str, fix: str, *, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.line = line


NUMERAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def number(label: str) -> float | None:
    """Return the number that a label spells, or None; "true" and "false" are 1 and 0."""
    written = label.strip().lower()
    if written in ("true", "false"):
        return float(written == "true")
    return float(written) if NUMERAL.fullmatch(written) else None


def canonical(value: float) -> str:
    """Return the canonical label of a number, so that 1, 1.0 and 01 are one level at every silo."""
    return str(int(value)) if value.is_integer() else repr(float(value))


def relabel(codes: IntArray, labels: Sequence[str | None]) -> Factor:
    """Return the factor of ``labels[codes]``, where the label None is a missing value.

    Equal labels are merged and unused ones dropped. Levels are in numeric order if all are numbers, else in
    text order.
    """
    missing = len(codes) > 0 and codes.min() < 0
    counts = np.bincount(codes[codes >= 0] if missing else codes, minlength=len(labels))
    levels = in_order(
        label for label, count in zip(labels, counts, strict=True) if count and label is not None
    )
    if tuple(labels) == levels:
        return Factor(codes, levels, tuple(counts.tolist()))
    lookup = _lookup(labels, levels)
    merged = np.zeros(len(levels) + 1, dtype=np.int64)
    np.add.at(merged, lookup[:-1], counts)  # labels that are not levels are counted in the last cell
    return Factor(np.asarray(lookup[codes]), levels, tuple(merged[:-1].tolist()))


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct labels in the order of levels: numeric if all are numbers, else as text."""
    present = set(labels)
    if all(NUMERAL.fullmatch(label) for label in present):
        return tuple(sorted(present, key=lambda label: (float(label), label)))
    return tuple(sorted(present))


def recode(codes: IntArray, labels: Sequence[str | None], levels: tuple[str, ...]) -> IntArray:
    """Return the codes of ``labels[codes]`` in ``levels``; -1 for a label that is not among them."""
    return codes if tuple(labels) == levels else np.asarray(_lookup(labels, levels)[codes])


def _lookup(labels: Sequence[str | None], levels: tuple[str, ...]) -> IntArray:
    """Return the position of each label in ``levels``, or -1, followed by -1 for the code -1."""
    position: dict[str | None, int] = {level: code for code, level in enumerate(levels)}
    return np.array([position.get(label, -1) for label in labels] + [-1], dtype=np.int64)


Bools = NDArray[np.bool_]

_FIRST_INEXACT = 2.0**53  # from here on, different integers may be the same float64
_SMALL_CODES = 256.0  # whole numbers below this serve as their own codes


@dataclass(frozen=True, kw_only=True)
class Converter:
    """Converts the hospital's column behind one name of the study, and adds its defects to ``defects``.

    ``weights``, if given, is the number of rows that each cell stands for.
    """

    name: str
    mapped: ColumnMap
    defects: Defects
    weights: IntArray | None = None

    def translate(self, cells: Cells) -> Numbers | Factor | None:
        """Return the cells in the study's units and level names, or None if that is impossible."""
        if isinstance(cells, Unusable):
            fix = "convert it to numbers or text"
            if cells.days is not None:
                fix = "map the difference of two dates with from and to in the silo file, or " + fix
            self._add(f"the hospital's column holds {cells.contents}", fix)
            return None
        if self.mapped.missing:
            cells = self._without_missing(cells)
        if self.mapped.levels is not None:
            return self._recode(cells, self.mapped.levels)
        if isinstance(cells, Numbers):
            return self._convert(cells)
        if self.mapped.converts:
            self._text_for_number(cells)
            return None
        return cells

    def difference(self, start: Cells, end: Cells) -> Numbers | None:
        """Return the time between two columns of dates, in the study's unit."""
        first, last = self._days(start, self.mapped.start), self._days(end, self.mapped.end)
        return None if first is None or last is None else Numbers((last - first) * self.mapped.scale)

    def _days(self, cells: Cells, theirs: str) -> Array | None:
        """Return a column of dates in days from 1970, with NaN for missing values."""
        mapped = self.mapped
        if isinstance(cells, Unusable) and cells.days is not None:
            return without_missing(cells.days, mapped.missing)
        if isinstance(cells, Factor):
            days, bad = days_of_labels(cells, mapped.format, mapped.missing)
            written = f"in the format {mapped.format}" if mapped.format else f"such as {ISO}"
            fix = 'correct it, state its format, as in format = "%d.%m.%Y", or list it in missing'
            return None if self._count(f"'{theirs}' is not a date {written},", bad, fix) else days
        if isinstance(cells, Numbers) and np.isnan(cells.values).all():
            return cells.values
        self._add(f"the hospital's column '{theirs}' does not hold dates", "give dates, or map a number")
        return None

    def numeric(self, cells: Numbers | Factor, column: Column) -> Array | None:
        """Return a column of numbers, with NaN for missing values, or None if it cannot be read."""
        if isinstance(cells, Numbers):
            values: Array | None = cells.values
        elif column.kind is Kind.BINARY:
            values = self._positions(cells, column.levels or ("0", "1"))
        else:
            values = self._numerals(cells)
        if values is None:
            return None
        reach = cells.reach if isinstance(cells, Numbers) else math.nan
        if not math.isfinite(reach):
            self._check_missing(np.isnan(values), column)
        if column.kind is Kind.BINARY:
            neither = (values != 0.0) & (values != 1.0)
            neither &= True if math.isfinite(reach) else ~np.isnan(values)
            self._refuse_not_binary(neither)
        if column.kind is Kind.COUNT:
            broken = ~np.isnan(values) & ((values < 0.0) | (values != np.floor(values)))
            self._count(
                "is not a count (0, 1, 2, ...)", broken, "correct it, or declare the variable as a number"
            )
        if column.bounds is not None and not -column.bounds[0] >= reach <= column.bounds[1]:
            low, high = column.bounds
            outside = (values < low) | (values > high)
            message, fix = column.outside
            self._count(message.format(low=low, high=high), outside, fix)
            self._hint_unit(values, low, high)
        return values

    def factor(self, cells: Numbers | Factor, column: Column) -> Factor | None:
        """Return a factor in the study's levels, if declared, else in the sorted levels of these rows."""
        labels = self._labels(cells)
        if labels is None:
            return None
        if labels.codes.min(initial=0) < 0:
            self._check_missing(labels.codes < 0, column)
        if self.mapped.secret is not None:
            return self._keyed(labels, column, self.mapped.secret)
        if column.levels is None:
            return relabel(labels.codes, labels.levels)
        self._refuse_undeclared(labels, column.levels)
        return Factor(recode(labels.codes, labels.levels, column.levels), column.levels)

    def _refuse_undeclared(self, labels: Factor, levels: tuple[str, ...]) -> None:
        """Report the rows whose level is not declared, with one defect for each near miss."""
        unknown = [label for label in labels.levels if label not in levels]
        meant = {label: near_level(label, levels) for label in unknown}
        for level, difference in dict.fromkeys(near for near in meant.values() if near is not None):
            chosen = [meant.get(label) == (level, difference) for label in labels.levels]
            message = f"has labels that differ from the declared level '{level}' {difference} only,"
            self._count(message, _rows_of(labels, chosen), "map them with levels in the silo file")
        others = _rows_of(labels, [label in meant and meant[label] is None for label in labels.levels])
        if levels == ("0", "1"):
            self._refuse_not_binary(others)
        else:
            fix = "map it with levels in the silo file, or declare it in the study"
            self._count("has a level that the study does not declare", others, fix)

    def _refuse_not_binary(self, rows: Bools) -> bool:
        """Report rows of a variable of 0 and 1, in the same words whether arms or numbers are read."""
        example = f"{self.name} = {{levels = {{no = 0, yes = 1}}}}"
        fix = f"code it 0 and 1, or map it in [columns] of the silo file, as in {example}"
        return self._count("is neither 0 nor 1", rows, fix)

    def _hint_unit(self, values: Array, low: float, high: float) -> None:
        """Add a hint about the likely unit, if most values are outside the range."""
        units = fitting_units(values, low, high) if is_outside(values, low, high) else ()
        if units:
            message = "most values are outside the declared range, as if they were in another unit"
            self._add(message, f"check the unit in the silo file: {'; '.join(units)}")

    def _without_missing(self, cells: Numbers | Factor) -> Numbers | Factor:
        """Return the cells with the hospital's codes for "missing" removed; "9" and 9.0 are one code."""
        codes = {_normalised(code) for code in self.mapped.missing}
        if isinstance(cells, Numbers):
            numbers = [float(code) for code in codes if NUMERAL.fullmatch(code)]
            return Numbers(np.where(np.isin(cells.values, numbers), np.nan, cells.values))
        labels = [None if _normalised(label) in codes else label for label in cells.levels]
        values = [math.nan if label is None else number(label) for label in labels]
        if None in labels and None not in values:  # without its codes for "missing" the text is numbers
            return Numbers(np.array([*values, np.nan], dtype=np.float64)[cells.codes])
        return relabel(cells.codes, labels)

    def _convert(self, cells: Numbers) -> Numbers | None:
        """Return the numbers in the study's unit."""
        if self.mapped.converts:
            with np.errstate(over="ignore"):  # infinite values are counted below
                cells = Numbers(cells.values * self.mapped.scale + self.mapped.shift)
        if math.isfinite(cells.reach):
            return cells
        return None if self._count("is infinite", np.isinf(cells.values), "correct it") else cells

    def _recode(self, cells: Numbers | Factor, codes: Mapping[str, str]) -> Factor | None:
        """Replace the hospital's level codes by the study's level names."""
        if isinstance(cells, Numbers):
            codes = self._number_codes(codes)
        labels = self._labels(cells)
        if labels is None:
            return None
        names = [codes.get(label) for label in labels.levels]
        unlisted = _rows_of(labels, [name is None for name in names])
        if self._count("has a level code that the silo file does not list", unlisted, "add it to levels"):
            return None
        return relabel(labels.codes, names)

    def _keyed(self, labels: Factor, column: Column, secret: str) -> Factor | None:
        """Replace identifiers by keyed digests, so that no later step sees them."""
        if column.levels is not None:
            self._add("has a secret, yet the study reads its levels", "a secret is for cluster identifiers")
            return None
        return relabel(labels.codes, [keyed(label, secret) for label in labels.levels])

    def _number_codes(self, codes: Mapping[str, str]) -> dict[str, str]:
        """Return the level codes by canonical number: "01" and "1.0" in the silo file mean the number 1."""
        by_number: dict[str, str] = {}
        for code, name in codes.items():
            value = number(code)
            if value is not None and by_number.setdefault(canonical(value), name) != name:
                self._add("levels give one number two meanings", "list each number once in the silo file")
        return by_number

    def _labels(self, cells: Numbers | Factor) -> Factor | None:
        """Return the cells as labels; numbers get canonical ones."""
        if isinstance(cells, Factor):
            return cells
        if not cells.reach < _FIRST_INEXACT:
            huge = np.abs(cells.values) >= _FIRST_INEXACT
            if self._count("is a number too large to label exactly", huge, "give the column as text"):
                return None
        if cells.reach < _SMALL_CODES:
            codes = cells.values.astype(np.int64)
            if codes.min(initial=0) >= 0 and (codes == cells.values).all():  # the numbers are codes already
                return relabel(codes, [str(code) for code in range(int(codes.max(initial=0)) + 1)])
        import pandas

        codes, values = pandas.factorize(cells.values)
        return relabel(codes, [canonical(float(value)) for value in values])

    def _positions(self, labels: Factor, levels: tuple[str, ...]) -> Array | None:
        """Return text as 0 and 1, its position among the two levels."""
        unknown = _rows_of(labels, [label not in levels for label in labels.levels])
        if self._refuse_not_binary(unknown):
            return None
        codes = recode(labels.codes, labels.levels, levels)
        return np.where(codes < 0, np.nan, codes.astype(np.float64))

    def _numerals(self, labels: Factor) -> Array | None:
        """Return the numbers that the silo file gave as level names; other text is a defect."""
        values = [number(label) for label in labels.levels]
        if self.mapped.levels is None or None in values:
            self._text_for_number(labels)
            return None
        return np.array([*values, np.nan], dtype=np.float64)[labels.codes]

    def _text_for_number(self, labels: Factor) -> None:
        strange = [label.strip() for label in labels.levels if number(label) is None]
        strays = _rows_of(labels, [number(label) is None for label in labels.levels])
        fix = "write a decimal point or state decimal in the silo file, or map text with levels there"
        if strange and all(map(_DATE.fullmatch, strange)):
            fix = (
                "these look like dates: map the time between two dates, with from and to in the silo file, "
                'and declare the variable as a "date difference" in [variables] of the study'
            )
        if not self._count("is text where a number is expected", strays, fix):
            fix = "convert the column to numbers"
            self._count("is a number stored as text", labels.codes >= 0, fix)

    def _check_missing(self, missing: Bools, column: Column) -> None:
        if not column.may_be_missing:
            self._count(
                "is missing, and the study does not say what to do,",
                missing,
                column.if_missing,
            )

    def _count(self, message: str, rows: Bools, fix: str) -> bool:
        """Add a defect with the number of marked rows, if any; return whether any row is marked."""
        count = int(np.count_nonzero(rows))
        if count and self.weights is not None:
            count = int(self.weights[rows].sum())
        if count:
            self._add(message, fix, rows=count)
        return count > 0

    def _add(self, message: str, fix: str, rows: int | None = None) -> None:
        self.defects.add(message, fix, column=self.name, rows=rows)


def _normalised(label: str) -> str:
    """Strip the label; write a number in its canonical form."""
    stripped = label.strip()
    return canonical(float(stripped)) if NUMERAL.fullmatch(stripped) else stripped


def _rows_of(labels: Factor, chosen: list[bool]) -> Bools:
    """Mark the rows that have one of the chosen levels."""
    if not any(chosen):
        return np.zeros(0, dtype=bool)
    return np.asarray(np.array([*chosen, False], dtype=bool)[labels.codes])
