"""A hospital's column as it was found, before the study's reading of it, and who reads it."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedtmle.data.schema import Column, Findings, Kind
from fedtmle.data.silofile import ColumnMap
from fedtmle.model import kernels
from fedtmle.model.table import Factor
from fedtmle.model.types import Array, IntArray
from fedtmle.protocol.clusters import keyed


@dataclass(frozen=True)
class Numbers:
    """Numbers and booleans (0 and 1); NaN is missing."""

    values: Array

    @cached_property
    def reach(self) -> float:
        """The largest magnitude; not finite where a value is missing or infinite."""
        return kernels.largest(self.values)


@dataclass(frozen=True)
class Unusable:
    """Cells that are neither numbers nor text, and what they are instead."""

    what: str


Cells = Numbers | Factor | Unusable  # text is a factor of all its distinct labels

DATES = Unusable("dates or times")
OTHER = Unusable("values that are neither numbers nor text")


class AbstractReader(ABC):
    """An opened source: the hospital's column names, then the cells of those that are needed."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """All column names as the source has them, repeated ones too."""

    @property
    def quotable(self) -> tuple[str, ...]:
        """The names that are certainly names and no record's values, so that a message may hold them."""
        return self.names

    @abstractmethod
    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        """The number of rows, and the cells of the named columns in the same row order."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How named columns are read batch by batch: settled once, from the whole columns."""

    numbers: Mapping[str, str]  # the SQL expression of each
    texts: Mapping[str, str]
    labels: Mapping[str, tuple[str, ...]]  # all the labels of each text
    others: Mapping[str, Unusable]


class AbstractStreamReader(AbstractReader):
    """A source that can also be read batch by batch, again and again."""

    @abstractmethod
    def settle(self, names: Sequence[str]) -> Reading:
        """How to read the named columns."""

    @abstractmethod
    def batches(self, reading: Reading) -> Iterator[tuple[int, Mapping[str, Cells]]]:
        """One pass in the order of the rows: the number of rows and the cells of each batch."""


class UnreadableError(Exception):
    """A source cannot be read: what is wrong and what to do, free of values.

    Raise it outside the handler of a library's exception: that one may quote a record, and would
    stay reachable as ``__context__`` even after ``from None``.
    """

    def __init__(self, what: str, fix: str, *, line: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.line = line


NUMERAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def number(label: str) -> float | None:
    """The number a label writes, None if it writes none: True and false are 1 and 0."""
    written = label.strip().lower()
    if written in ("true", "false"):
        return float(written == "true")
    return float(written) if NUMERAL.fullmatch(written) else None


def canonical(value: float) -> str:
    """The one label of a number, so that 1, 1.0 and 01 are the same level at every silo."""
    return str(int(value)) if value.is_integer() else repr(float(value))


def relabel(codes: IntArray, labels: Sequence[str | None]) -> Factor:
    """The factor of ``labels[codes]`` (None: missing); equal labels merge, absent ones go.

    Levels are in numeric order when all are numbers, else in text order.
    """
    missing = len(codes) > 0 and codes.min() < 0
    counts = np.bincount(codes[codes >= 0] if missing else codes, minlength=len(labels))
    used = counts > 0
    levels = in_order(label for label, seen in zip(labels, used, strict=True) if seen and label is not None)
    if tuple(labels) == levels:
        return Factor(codes, levels, tuple(counts.tolist()))
    lookup = _lookup(labels, levels)
    merged = np.zeros(len(levels) + 1, dtype=np.int64)
    np.add.at(merged, lookup[:-1], counts)  # what is no level goes to the last
    return Factor(np.asarray(lookup[codes]), levels, tuple(merged[:-1].tolist()))


def in_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Labels as levels, each once."""
    present = set(labels)
    if all(NUMERAL.fullmatch(label) for label in present):
        return tuple(sorted(present, key=lambda label: (float(label), label)))
    return tuple(sorted(present))


def recode(codes: IntArray, labels: Sequence[str | None], levels: tuple[str, ...]) -> IntArray:
    """Codes into ``levels`` of the labels ``labels[codes]``; -1 for a label that is none of them."""
    return codes if tuple(labels) == levels else np.asarray(_lookup(labels, levels)[codes])


def _lookup(labels: Sequence[str | None], levels: tuple[str, ...]) -> IntArray:
    """The place of each label among the levels, -1 if it is none of them; a last -1 is for code -1."""
    position: dict[str | None, int] = {level: code for code, level in enumerate(levels)}
    return np.array([position.get(label, -1) for label in labels] + [-1], dtype=np.int64)


# From a hospital's cells to the study's column, noting whatever does not fit the schema.


Bools = NDArray[np.bool_]

_EXACT = 2.0**53  # from here on, different integers may be the same float64
_FEW = 256.0  # counts below it are labelled without looking for what is different


@dataclass(frozen=True, kw_only=True)
class Converter:
    """Reads one study name: the hospital's units and codes first, then each kind that is asked."""

    name: str
    mapped: ColumnMap
    findings: Findings

    def translate(self, cells: Cells) -> Numbers | Factor | None:
        """The cells in the study's units and level names; None if they cannot be."""
        if isinstance(cells, Unusable):
            self._add(f"the hospital's column holds {cells.what}", "convert it to numbers or text")
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

    def numeric(self, cells: Numbers | Factor, column: Column) -> Array | None:
        """A column of numbers, counts or 0 and 1, NaN where missing; None if it cannot be read as one."""
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
            self._count("is neither 0 nor 1", neither, "code it 0 and 1, or map it with levels")
        if column.kind is Kind.COUNT:
            broken = ~np.isnan(values) & ((values < 0.0) | (values != np.floor(values)))
            self._count("is no count (0, 1, 2, ...)", broken, "correct it, or declare another outcome_type")
        if column.bounds is not None and not -column.bounds[0] >= reach <= column.bounds[1]:
            low, high = column.bounds
            outside = (values < low) | (values > high)
            what, fix = column.outside
            self._count(what, outside, fix)
        return values

    def factor(self, cells: Numbers | Factor, column: Column) -> Factor | None:
        """A factor in the study's levels if declared, else in the sorted levels of these rows."""
        labels = self._labels(cells)
        if labels is None:
            return None
        if labels.codes.min(initial=0) < 0:
            self._check_missing(labels.codes < 0, column)
        if self.mapped.secret is not None:
            return self._keyed(labels, column, self.mapped.secret)
        if column.levels is None:
            found = relabel(labels.codes, labels.levels)
            if column.most is not None and len(found.levels) > column.most:
                fix = "group its values into a few, or name another column"
                self._add(f"has {len(found.levels)} levels, where strata may have {column.most}", fix)
            return found
        undeclared = _rows_of(labels, [label not in column.levels for label in labels.levels])
        fix = "map it with levels in the silo file, or declare it in the study"
        self._count("has a level that the study does not declare", undeclared, fix)
        return Factor(recode(labels.codes, labels.levels, column.levels), column.levels)

    def _without_missing(self, cells: Numbers | Factor) -> Numbers | Factor:
        """The cells with the hospital's codes of no value taken out; "9" and 9.0 are one code."""
        codes = {_plain(code) for code in self.mapped.missing}
        if isinstance(cells, Numbers):
            numbers = [float(code) for code in codes if NUMERAL.fullmatch(code)]
            return Numbers(np.where(np.isin(cells.values, numbers), np.nan, cells.values))
        gone = [_plain(label) in codes for label in cells.levels]
        kept = [None if out else label for label, out in zip(cells.levels, gone, strict=True)]
        values = [math.nan if label is None else number(label) for label in kept]
        if any(gone) and None not in values:  # only a code made a column of numbers text
            return Numbers(np.array([*values, np.nan], dtype=np.float64)[cells.codes])
        return relabel(cells.codes, kept)

    def _convert(self, cells: Numbers) -> Numbers | None:
        """Numbers in the study's unit."""
        if self.mapped.converts:
            with np.errstate(over="ignore"):  # counted below
                cells = Numbers(cells.values * self.mapped.scale + self.mapped.shift)
        if math.isfinite(cells.reach):
            return cells
        return None if self._count("is infinite", np.isinf(cells.values), "correct it") else cells

    def _recode(self, cells: Numbers | Factor, codes: Mapping[str, str]) -> Factor | None:
        """The hospital's level codes replaced by the study's level names."""
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
        """Identifiers as keyed digests, so that nothing after this sees them."""
        if column.levels is not None:
            self._add("has a secret, yet the study reads its levels", "a secret is for cluster identifiers")
            return None
        return relabel(labels.codes, [keyed(label, secret) for label in labels.levels])

    def _number_codes(self, codes: Mapping[str, str]) -> dict[str, str]:
        """Level codes of a column of numbers: "01" and "1.0" in the silo file mean the number 1."""
        by_number: dict[str, str] = {}
        for code, name in codes.items():
            value = number(code)
            if value is not None and by_number.setdefault(canonical(value), name) != name:
                self._add("levels give one number two meanings", "list each number once in the silo file")
        return by_number

    def _labels(self, cells: Numbers | Factor) -> Factor | None:
        """Cells as labels, those of numbers canonical."""
        if isinstance(cells, Factor):
            return cells
        if not cells.reach < _EXACT:
            huge = np.abs(cells.values) >= _EXACT
            if self._count("is a number too large to label exactly", huge, "give the column as text"):
                return None
        if cells.reach < _FEW:
            codes = cells.values.astype(np.int64)
            if codes.min(initial=0) >= 0 and (codes == cells.values).all():  # the numbers are codes already
                return relabel(codes, [str(code) for code in range(int(codes.max(initial=0)) + 1)])
        import pandas

        codes, values = pandas.factorize(cells.values)
        return relabel(codes, [canonical(float(value)) for value in values])

    def _positions(self, labels: Factor, levels: tuple[str, ...]) -> Array | None:
        """Text as 0 and 1 by its place in the two levels."""
        unknown = _rows_of(labels, [label not in levels for label in labels.levels])
        if self._count("is neither 0 nor 1", unknown, "code it 0 and 1, or map it with levels"):
            return None
        codes = recode(labels.codes, labels.levels, levels)
        return np.where(codes < 0, np.nan, codes.astype(np.float64))

    def _numerals(self, labels: Factor) -> Array | None:
        """Level names that the silo file gave as numbers; other text is no number."""
        values = [number(label) for label in labels.levels]
        if self.mapped.levels is None or None in values:
            self._text_for_number(labels)
            return None
        return np.array([*values, np.nan], dtype=np.float64)[labels.codes]

    def _text_for_number(self, labels: Factor) -> None:
        strays = _rows_of(labels, [number(label) is None for label in labels.levels])
        fix = "write numbers with a decimal point, or map text with levels in the silo file"
        if not self._count("is text where a number is expected", strays, fix):
            fix = "convert the column to numbers"
            self._count("is a number stored as text", labels.codes >= 0, fix)

    def _check_missing(self, missing: Bools, column: Column) -> None:
        if not column.may_be_missing:
            self._count(
                "is missing, which the study does not allow,",
                missing,
                "complete it or leave the rows out; an outcome may be missing if it has a missingness model",
            )

    def _count(self, what: str, rows: Bools, fix: str) -> bool:
        """Note how many rows are wrong, if any; whether there were."""
        count = int(np.count_nonzero(rows))
        if count:
            self._add(what, fix, rows=count)
        return count > 0

    def _add(self, what: str, fix: str, rows: int | None = None) -> None:
        self.findings.add(what, fix, column=self.name, rows=rows)


def _plain(label: str) -> str:
    """A label with its blanks off; one of a number in its one form."""
    value = float(label) if NUMERAL.fullmatch(label.strip()) else None
    return label.strip() if value is None else canonical(value)


def _rows_of(labels: Factor, chosen: list[bool]) -> Bools:
    """Which rows have one of the chosen levels."""
    if not any(chosen):
        return np.zeros(0, dtype=bool)
    return np.asarray(np.array([*chosen, False], dtype=bool)[labels.codes])
