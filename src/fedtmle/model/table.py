"""A silo's table: typed columns, in memory or streamed, and statistics of its rows as values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, reduce
from operator import add
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, final
from weakref import ref

import numpy as np

from fedtmle_core import kernels
from fedtmle_core.exact import Sums, column_shifts, zero_sums
from fedtmle_core.kernels import column_sums
from fedtmle_core.parallel import mapped, pieces
from fedtmle_core.types import Array, Bytes, Columns, IntArray, UnitScaled

ROW = "\0row"  # the number of a row in the pooled order, where draws depend on it; no formula names it
SILO = "silo"  # the factor that holds each row's silo, for C(silo); no study reads a column of this name

LONG_BLOCK = 8_192  # long rows of a block: several columns of each are made anew at every pass
Result = TypeVar("Result")


@dataclass(frozen=True)
class Factor:
    """A categorical column: ``levels[codes[i]]`` is the level of row i, code -1 is missing."""

    codes: IntArray
    levels: tuple[str, ...]
    known_counts: tuple[int, ...] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of rows with each level."""
        if self.known_counts is not None:
            return self.known_counts
        return tuple(np.bincount(self.codes[self.codes >= 0], minlength=len(self.levels)).tolist())

    def recode(self, levels: tuple[str, ...]) -> IntArray:
        """Return codes into the study's levels, which must contain all of this silo's."""
        if levels == self.levels:
            return self.codes
        position = {level: code for code, level in enumerate(levels)}
        lookup = np.array([position[level] for level in self.levels] + [-1], dtype=np.int64)
        return np.asarray(lookup[self.codes])


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of equal length by the study's names; a name may be both numeric and a factor.

    Numeric columns are float64 with NaN for missing. ``known_reach`` is the `reach` of these columns, or of
    a table of which these rows are a part, if it was computed before.
    """

    n_rows: int
    numeric: Mapping[str, Array]
    factors: Mapping[str, Factor]
    omitted: int = 0  # rows that the study leaves out by declaration, and counts
    known_reach: Mapping[str, float] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def reach(self) -> Mapping[str, float]:
        """The largest magnitude in each numeric column; missing or infinite if one of its values is.

        It is computed once: a block has that of its table.
        """
        if self.known_reach is not None:
            return self.known_reach
        return {name: kernels.largest(column) for name, column in self.numeric.items()}

    @property
    def nbytes(self) -> int:
        """The memory of the columns."""
        codes = (factor.codes.nbytes for factor in self.factors.values())
        return sum(column.nbytes for column in self.numeric.values()) + sum(codes)

    def with_numeric(self, name: str, column: Array) -> Table:
        """Return the same table with one numeric column replaced, as for a counterfactual."""
        reach = {**self.reach, name: kernels.largest(column)}
        return replace(self, numeric={**self.numeric, name: column}, known_reach=reach)

    def with_factor(self, name: str, factor: Factor) -> Table:
        """Return the same table with one factor replaced."""
        return replace(self, factors={**self.factors, name: factor}, known_reach=self.reach)

    def levels(self, name: str) -> tuple[str, ...]:
        """Return the levels of a factor in these rows."""
        return self.factors[name].levels

    def counts(self, name: str) -> tuple[int, ...]:
        """Return how many of these rows have each level."""
        return self.factors[name].counts

    def blocks(self) -> Iterator[Table]:
        """Yield consecutive rows without copying: a design of all rows is as large as the data."""
        return map(self.part, pieces(self.n_rows))

    def part(self, rows: slice) -> Table:
        """Return consecutive rows without copying."""
        return Table(
            n_rows=rows.stop - rows.start,
            numeric={name: column[rows] for name, column in self.numeric.items()},
            factors={name: Factor(f.codes[rows], f.levels) for name, f in self.factors.items()},
            known_reach=self.reach,
        )

    def placed_blocks(self) -> Iterator[tuple[slice, Table]]:
        """Yield the blocks, each with its place."""
        return zip(pieces(self.n_rows), self.blocks(), strict=True)

    def take(self, rows: IntArray) -> Table:
        """Return the given rows, in the given order."""
        return Table(
            n_rows=len(rows),
            numeric={name: column[rows] for name, column in self.numeric.items()},
            factors={name: Factor(f.codes[rows], f.levels) for name, f in self.factors.items()},
        )


@final
@dataclass(frozen=True, kw_only=True)
class StreamedTable:
    """A table that is read again, batch by batch, at every pass: it may be larger than memory.

    Sums over rows are exact, so the size of the batches cannot change a bit of a result.
    """

    n_rows: int
    factor_counts: Mapping[str, Mapping[str, int]]  # level -> rows, over all rows
    digest: bytes  # digest of the content
    omitted: int = 0  # rows that the study leaves out by declaration, and counts
    read: Callable[[], Iterator[Table]] = field(compare=False, repr=False)  # one pass

    def levels(self, name: str) -> tuple[str, ...]:
        """Return the levels of a factor over all rows."""
        return tuple(self.factor_counts[name])

    def counts(self, name: str) -> tuple[int, ...]:
        """Return how many of all rows have each level."""
        return tuple(self.factor_counts[name].values())

    def blocks(self) -> Iterator[Table]:
        """Yield all rows in blocks, in their order, by one pass."""
        return (block for batch in self.read() for block in batch.blocks())

    def map(self, work: Callable[[Table], Result]) -> Iterator[Result]:
        """Yield ``work`` of every batch, in order, computed in parallel."""
        return mapped(work, self.read())


AnyTable = Table | StreamedTable
Rows = TypeVar("Rows", bound=AnyTable)


def without_missing(table: AnyTable, name: str) -> AnyTable:
    """Return the rows that have a level of a factor; the others are counted as ``omitted``."""
    known = sum(table.counts(name))
    if known == table.n_rows:
        return table
    omitted = table.n_rows - known
    if isinstance(table, StreamedTable):
        read = table.read
        return replace(
            table, n_rows=known, omitted=omitted, read=lambda: (_with_level(batch, name) for batch in read())
        )
    return replace(_with_level(table, name), omitted=omitted)


def _with_level(table: Table, name: str) -> Table:
    return table.take(np.flatnonzero(table.factors[name].codes >= 0))


def numbered(table: AnyTable) -> AnyTable:
    """Return the table with the column `ROW`: 0, 1, 2, ... until the rows are `placed`."""
    if isinstance(table, StreamedTable):
        read = table.read
        return replace(table, read=lambda: _numbered_batches(read()))
    return table.with_numeric(ROW, np.arange(table.n_rows, dtype=np.float64))


def _numbered_batches(batches: Iterator[Table]) -> Iterator[Table]:
    first = 0
    for batch in batches:
        yield batch.with_numeric(ROW, first + np.arange(batch.n_rows, dtype=np.float64))
        first += batch.n_rows


def placed(table: AnyTable, first_row: int) -> AnyTable:
    """Return the table with ``first_row`` added to its row numbers in `ROW`, if it has them."""
    if isinstance(table, StreamedTable):
        read = table.read
        return replace(table, read=lambda: (_placed(batch, first_row) for batch in read()))
    return _placed(table, first_row)


def _placed(table: Table, first_row: int) -> Table:
    if ROW not in table.numeric or not first_row:
        return table
    return table.with_numeric(ROW, table.numeric[ROW] + first_row)


def with_silo(table: AnyTable, silo: str, silos: tuple[str, ...]) -> AnyTable:
    """Return the rows of ``silo`` with the factor `SILO`, whose levels are the study's ``silos`` in order.

    Pooled rows have the factor already, and are returned as they are.
    """
    if isinstance(table, StreamedTable):
        read = table.read
        counts = {name: table.n_rows if name == silo else 0 for name in silos}
        return replace(
            table,
            factor_counts={**table.factor_counts, SILO: counts},
            read=lambda: (_in_silo(batch, silo, silos) for batch in read()),
        )
    return table if SILO in table.factors else _in_silo(table, silo, silos)


def _in_silo(table: Table, silo: str, silos: tuple[str, ...]) -> Table:
    codes = np.broadcast_to(np.int64(silos.index(silo)), (table.n_rows,))  # takes no memory
    return table.with_factor(SILO, Factor(codes, silos))


class TableView(Protocol):
    """A public rule from a table to one with as many rows."""

    def of(self, rows: AnyTable, /) -> AnyTable:
        """Return the rows as the view shows them."""
        ...


class PerTable(Generic[Result]):
    """Remembers what was computed of a table, for as long as the table exists.

    The silos of one process may share the problem or the view that remembers it. As a field it has
    ``init=False``, so that `dataclasses.replace` gives the changed copy a memory of its own.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[ref[AnyTable], Result]] = {}  # by the table's identity

    def of(self, table: Rows, work: Callable[[Rows], Result]) -> Result:
        """Return ``work(table)``, computed once; it must not refer to the table itself."""
        key = id(table)
        if key not in self._kept:
            this, result = ref(self), work(table)

            def let_go(_: object) -> None:
                cache = this()
                if cache is not None:
                    cache._kept.pop(key, None)

            self._kept[key] = ref(table, let_go), result
        return self._kept[key][1]

    def forget(self, table: Table) -> None:
        """Let what was computed of a table go."""
        self._kept.pop(id(table), None)


def seen_through(cache: PerTable[Table], rows: AnyTable, work: Callable[[Table], Table]) -> AnyTable:
    """Return ``work`` of the rows. Streamed rows are transformed as they are read."""
    if isinstance(rows, StreamedTable):
        read = rows.read
        return replace(rows, read=lambda: (work(batch) for batch in read()))
    return cache.of(rows, work)


def over_blocks(table: AnyTable, work: Callable[[Table], Result]) -> Iterator[Result]:
    """Yield ``work`` of consecutive rows, in order, computed in parallel."""
    return mapped(work, table.blocks())


def over_batches(table: AnyTable, work: Callable[[Table], Result]) -> Iterator[Result]:
    """Yield ``work`` of a table in memory as it is, or of each batch of one that is streamed."""
    return iter((work(table),)) if isinstance(table, Table) else table.map(work)


def people_blocks(table: AnyTable, periods: int) -> Iterator[Table]:
    """Yield consecutive people, as many as have about `LONG_BLOCK` long rows."""
    if isinstance(table, StreamedTable):
        for batch in table.read():
            yield from people_blocks(batch, periods)
        return
    for rows in people_slices(table.n_rows, periods):
        yield table.part(rows)


def people_slices(n_rows: int, periods: int) -> Iterator[slice]:
    """Yield the places of these blocks."""
    size = max(64, LONG_BLOCK // max(periods, 1))
    return (slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size))


# Statistics of a silo's rows as values: named columns to sum, and bins to count.
#
# A query carries one of these instead of a function, so that everyone who reads the query (the silo's
# guard, the audit, the preview, the documents) sees the same names and public bounds.

Piece = TypeVar("Piece")  # consecutive rows, as `over` gives them


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
    def of_leavers(self) -> bool:
        """Whether bins are the times at which people leave, and those who stay to the end are the last bin.

        How many are left is then shown, which is the sum over a bin and all later ones.
        """
        return False

    @property
    def partitions(self) -> tuple[tuple[int, ...], ...]:
        """Groups by number of which everyone is in one, has a sensitive value of 1 there, and else 0.

        The levels of a category are such groups: the sums of one follow from those of the others.
        """
        return ()

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
