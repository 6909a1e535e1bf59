"""From a hospital's cells to the study's column, noting whatever does not fit the schema."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtmle.data.cells import Cells, Numbers, Unusable, canonical, number, relabel
from fedtmle.data.problems import Findings
from fedtmle.data.schema import Column, Kind
from fedtmle.data.silofile import ColumnMap
from fedtmle.model.table import Factor
from fedtmle.model.types import Array, IntArray

_EXACT = 2.0**53  # from here on, different integers may be the same float64


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
        if isinstance(cells, Numbers) and self._count("is infinite", np.isinf(cells.values), "correct them"):
            return None
        if self.mapped.levels is not None:
            return self._recode(cells)
        if self.mapped.converts:
            if isinstance(cells, Factor):
                self._text_for_number(cells)
                return None
            return Numbers(cells.values * self.mapped.scale + self.mapped.shift)
        return cells

    def numeric(self, cells: Numbers | Factor, column: Column) -> Array | None:
        """A numeric or binary column, NaN where missing; None if it cannot be read as one."""
        if isinstance(cells, Numbers):
            values: Array | None = cells.values
        elif column.kind is Kind.BINARY:
            values = self._positions(cells, column.levels or ("0", "1"))
        else:
            values = self._numerals(cells)
        if values is None:
            return None
        self._check_missing(np.isnan(values), column)
        if column.kind is Kind.BINARY:
            neither = ~np.isnan(values) & (values != 0.0) & (values != 1.0)
            self._count("is neither 0 nor 1", neither, "code it 0 and 1, or map it with levels")
        if column.bounds is not None:
            low, high = column.bounds
            outside = (values < low) | (values > high)
            fix = "check the unit (scale and shift in the silo file), the records or the study's bounds"
            self._count("is outside the declared bounds", outside, fix)
        return values

    def factor(self, cells: Numbers | Factor, column: Column) -> Factor | None:
        """A factor in the study's levels if declared, else in the sorted levels of these rows."""
        labels = self._labels(cells) if isinstance(cells, Numbers) else cells
        if labels is None:
            return None
        self._check_missing(labels.codes < 0, column)
        if column.levels is None:
            return relabel(labels, labels.levels)
        return Factor(self._declared(labels, column.levels), column.levels)

    def _recode(self, cells: Numbers | Factor) -> Factor | None:
        """The hospital's level codes replaced by the study's level names."""
        codes = self.mapped.levels or {}
        if isinstance(cells, Numbers):
            labels = self._labels(cells)
            # "01" and "1.0" in the silo file mean the number 1.
            numbers = {code: number(code) for code in codes}
            codes = {canonical(value): codes[code] for code, value in numbers.items() if value is not None}
        else:
            labels = cells
        if labels is None:
            return None
        names = [codes.get(label) for label in labels.levels]
        unlisted = _rows_of(labels, [name is None for name in names])
        self._count("has a level code that the silo file does not list", unlisted, "add it to levels")
        return relabel(labels, names)

    def _labels(self, cells: Numbers) -> Factor | None:
        """Numbers as canonical labels."""
        fix = "give the column as text, for instance by a cast in the silo's query"
        if self._count("is an integer too large to tell from its neighbours", np.abs(cells.values) >= _EXACT, fix):
            return None
        import pandas

        codes, values = pandas.factorize(cells.values)
        return relabel(Factor(codes, ("",) * len(values)), [canonical(float(value)) for value in values])

    def _declared(self, labels: Factor, levels: tuple[str, ...]) -> IntArray:
        """Codes into the declared levels."""
        position = {level: code for code, level in enumerate(levels)}
        undeclared = _rows_of(labels, [label not in position for label in labels.levels])
        fix = "map it with levels in the silo file, or declare it in the study"
        self._count("has a level that the study does not declare", undeclared, fix)
        lookup = np.array([position.get(label, -1) for label in labels.levels] + [-1], dtype=np.int64)
        return np.asarray(lookup[labels.codes])

    def _positions(self, labels: Factor, levels: tuple[str, ...]) -> Array | None:
        """Text as 0 and 1 by its place in the two levels."""
        if not set(labels.levels) <= set(levels):
            unknown = _rows_of(labels, [label not in levels for label in labels.levels])
            self._count("is neither 0 nor 1", unknown, "code it 0 and 1, or map it with levels")
            return None
        codes = self._declared(labels, levels)
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

    def _check_missing(self, missing: np.ndarray[tuple[int], np.dtype[np.bool_]], column: Column) -> None:
        if not column.may_be_missing:
            self._count("is missing, though the study declares no missing values", missing, "complete it or declare it")

    def _count(self, what: str, rows: np.ndarray[tuple[int], np.dtype[np.bool_]], fix: str) -> bool:
        """Note how many rows are wrong, if any; whether there were."""
        count = int(np.count_nonzero(rows))
        if count:
            self._add(what, fix, rows=count)
        return count > 0

    def _add(self, what: str, fix: str, rows: int | None = None) -> None:
        self.findings.add(what, fix, column=self.name, rows=rows)


def _rows_of(labels: Factor, chosen: list[bool]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows have one of the chosen levels."""
    return np.asarray(np.array([*chosen, False], dtype=bool)[labels.codes])
