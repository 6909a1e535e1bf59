"""Statistics of a silo's rows as values: named columns to sum, and bins to count.

A query carries one of these instead of a function, so that everyone who reads the query (the silo's
guard, the audit, the preview, the documents) sees the same names and public bounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from operator import add
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from fedtmle.model.exact import Sums, column_shifts, zero_sums
from fedtmle.model.kernels import column_sums
from fedtmle.model.types import Array, Bytes, Columns, UnitScaled

Piece = TypeVar("Piece")  # consecutive rows, as `over` gives them
Result = TypeVar("Result")


class AbstractStatistic(ABC, Generic[Piece]):
    """A public rule of the installed package that reads a silo's rows, piece by piece."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A description of what is computed, for the silo's owner."""

    def over(self, rows: Any, work: Callable[[Piece], Result]) -> Iterable[Result]:
        """Return ``work`` of consecutive pieces of the rows; by default of all rows as one piece."""
        return (work(rows),)


class AbstractBoundedColumns(AbstractStatistic[Piece]):
    """Named columns, or products of two, to be summed exactly; term j is at most 2^exponents[j]."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def exponents(self) -> tuple[int, ...]: ...

    @property
    def judged(self) -> Sequence[int]:
        """The places of the columns that the guard judges by leverage.

        Counts of people are held against floors of their own, and squares are judged by their roots.
        """
        return range(len(self.names))

    @property
    def like(self) -> Sequence[int]:
        """For each column the place of an earlier one whose sum is likely near its own, or its own place."""
        return range(len(self.names))

    @property
    def terms(self) -> Sequence[tuple[int, ...]]:
        """What is summed: a column's number, or two for their product; one for each name."""
        return [(j,) for j in range(len(self.names))]

    @abstractmethod
    def evaluate(self, piece: Piece) -> Columns:
        """Return the columns of which the terms are made, shape (p, N); they are not written to."""

    def disclosed(self, piece: Piece, names: Sequence[int] | None = None) -> Array:
        """Return the terms row by row, those of some names if given, shape (k, N)."""
        columns, terms = self.evaluate(piece), self.terms
        asked = [terms[j] for j in (range(len(terms)) if names is None else names)]
        values = np.empty((len(asked), len(columns[0])))
        for row, (j, *second) in zip(values, asked, strict=True):
            row[:] = columns[j] * columns[second[0]] if second else columns[j]
        return values

    def roots(self, piece: Piece) -> Array:
        """Return the columns that the guard judges, shape (q, N): the `judged` ones.

        A statistic that sums products of columns, and not the columns themselves, returns these columns.
        """
        return self.disclosed(piece, self.judged)

    def total(self, rows: Any) -> Sums:
        """Return the exact sums of the terms over all rows."""
        return reduce(add, self.over(rows, self.summed), zero_sums(column_shifts(self.exponents)))

    def summed(self, piece: Piece) -> Sums:
        """Return the exact sums of the terms over a piece; products are made as they are summed."""
        return column_sums(self.evaluate(piece), self.exponents, what=self.label, terms=self.terms)


class AbstractPrivateColumns(AbstractBoundedColumns[Piece]):
    """Columns, or products of two of them, whose sums change by a bounded norm if one record is replaced."""

    @property
    @abstractmethod
    def squared_sensitivity(self) -> Fraction:
        """A bound of the squared norm of the change in all terms if one record is replaced."""

    @property
    def exponents(self) -> tuple[int, ...]:
        return (1,) * len(self.names)  # every term is at most 3/2 in magnitude


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows in bins.

    ``bins`` is each row's bin, shape (N,), or `kernels.OUTSIDE` if it is in none. ``values``, shape (p, N),
    or ``terms`` of them are summed per bin: a column's number, or two for their product. No sum may single
    out a few rows by their value of ``sensitive``, shape (N,).
    """

    bins: Bytes
    values: Sequence[Array | UnitScaled] | Array | None = None
    sensitive: Array | UnitScaled | None = None
    terms: Sequence[tuple[int, ...]] | None = None


# A bin's sum is likely a b / count: a and b are columns before it, numbered from 1, or the count itself, 0.
# None: it is likely that of the same bin in the group before.
Forecast: TypeAlias = tuple[int, int] | None


class AbstractBins(AbstractStatistic[Piece]):
    """Groups of rows in bins, with exact sums of some values per bin."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """How many bins each group has."""

    @property
    def on_a_scale(self) -> bool:
        """Whether bins are ordered by value, so that a bin of few people may be merged with a neighbour."""
        return False

    @property
    def exponents(self) -> tuple[int, ...]:
        """Powers of two that bound the summed values; none where only rows are counted."""
        return ()

    @property
    def forecasts(self) -> tuple[Forecast, ...]:
        """The forecasts from which rounded sums are coded: by default the column before, or the count."""
        return tuple((k, 0) for k in range(len(self.exponents)))

    @abstractmethod
    def groups(self, piece: Piece) -> Sequence[Group]:
        """Return the groups, in the order of ``sizes``."""
