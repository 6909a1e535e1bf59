"""A silo's table: typed columns, in memory or streamed; what formulas and effect targets see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, final

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.types import Array, IntArray

BLOCK = 65_536  # rows of a block: the interpreter's share is small, and temporaries stay in the cache

Result = TypeVar("Result")


def pieces(n_rows: int) -> Iterator[slice]:
    """Consecutive rows, as many as stay in the cache."""
    return (slice(start, min(start + BLOCK, n_rows)) for start in range(0, n_rows, BLOCK))


@dataclass(frozen=True)
class Factor:
    """A categorical column: ``levels[codes[i]]`` is the level of row i, code -1 is missing."""

    codes: IntArray
    levels: tuple[str, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many rows have each level."""
        return tuple(np.bincount(self.codes[self.codes >= 0], minlength=len(self.levels)).tolist())

    def counted(self, counts: Sequence[int]) -> Factor:
        """The same factor, whose counts are known already."""
        self.__dict__["counts"] = tuple(counts)
        return self

    def recode(self, levels: tuple[str, ...]) -> IntArray:
        """Codes into the study's levels, which must hold all of this silo's."""
        if levels == self.levels:
            return self.codes
        position = {level: code for code, level in enumerate(levels)}
        lookup = np.array([position[level] for level in self.levels] + [-1], dtype=np.int64)
        return np.asarray(lookup[self.codes])


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of equal length by the study's names; a name may be both numeric and a factor.

    Numeric columns are float64 with NaN for missing.
    """

    n_rows: int
    numeric: Mapping[str, Array]
    factors: Mapping[str, Factor]

    @cached_property
    def reach(self) -> Mapping[str, float]:
        """The largest magnitude in each numeric column; where a value is missing or infinite, so is this.

        It is found once: a block has its table's.
        """
        return {name: kernels.largest(column) for name, column in self.numeric.items()}

    def reaching(self, reach: Mapping[str, float]) -> Table:
        """The same table, whose reach is known already, where it is that of every column."""
        if reach.keys() == self.numeric.keys():
            self.__dict__["reach"] = reach
        return self

    def with_numeric(self, name: str, column: Array) -> Table:
        """The same table with one numeric column replaced, as for a counterfactual."""
        moved = replace(self, numeric={**self.numeric, name: column})
        moved.__dict__["reach"] = {**self.reach, name: kernels.largest(column)}
        return moved

    def with_factor(self, name: str, factor: Factor) -> Table:
        """The same table with one factor replaced."""
        moved = replace(self, factors={**self.factors, name: factor})
        moved.__dict__["reach"] = self.reach
        return moved

    def levels(self, name: str) -> tuple[str, ...]:
        """The levels of a factor in these rows."""
        return self.factors[name].levels

    def counts(self, name: str) -> tuple[int, ...]:
        """How many of these rows have each level."""
        return self.factors[name].counts

    def blocks(self) -> Iterator[Table]:
        """Consecutive rows without copying: a design of all rows is as large as the data."""
        for rows in pieces(self.n_rows):
            block = Table(
                n_rows=rows.stop - rows.start,
                numeric={name: column[rows] for name, column in self.numeric.items()},
                factors={name: Factor(f.codes[rows], f.levels) for name, f in self.factors.items()},
            )
            block.__dict__["reach"] = self.reach
            yield block

    def placed_blocks(self) -> Iterator[tuple[slice, Table]]:
        """The same, each with its place."""
        return zip(pieces(self.n_rows), self.blocks(), strict=True)

    def take(self, rows: IntArray) -> Table:
        """The given rows, in the given order."""
        return Table(
            n_rows=len(rows),
            numeric={name: column[rows] for name, column in self.numeric.items()},
            factors={name: Factor(f.codes[rows], f.levels) for name, f in self.factors.items()},
        )


@final
@dataclass(frozen=True, kw_only=True)
class StreamedTable:
    """A table that is read again, batch by batch, at every pass: it may be larger than memory.

    Sums over rows are exact, so that batches cannot change a bit of what is made of them.
    """

    n_rows: int
    factor_counts: Mapping[str, Mapping[str, int]]  # level -> rows, over all rows
    digest: bytes  # of the content
    read: Callable[[], Iterator[Table]] = field(compare=False, repr=False)  # one pass

    def levels(self, name: str) -> tuple[str, ...]:
        """The levels of a factor over all rows."""
        return tuple(self.factor_counts[name])

    def counts(self, name: str) -> tuple[int, ...]:
        """How many of all rows have each level."""
        return tuple(self.factor_counts[name].values())

    def blocks(self) -> Iterator[Table]:
        """One pass over the rows, in their order."""
        return (block for batch in self.read() for block in batch.blocks())

    def map(self, work: Callable[[Table], Result]) -> Iterator[Result]:
        """``work`` of every batch, in order; batches are worked on side by side."""
        return kernels.mapped(work, self.read())


AnyTable = Table | StreamedTable


def over_blocks(table: AnyTable, work: Callable[[Table], Result]) -> Iterator[Result]:
    """``work`` of consecutive rows, in order, side by side."""
    return kernels.mapped(work, table.blocks())


def over_batches(table: AnyTable, work: Callable[[Table], Result]) -> Iterator[Result]:
    """``work`` of a table in memory as it is, or of each batch of one that is streamed."""
    return iter((work(table),)) if isinstance(table, Table) else table.map(work)
