"""Counts and sums by bin, of which a silo tells only those that its policy allows.

A bin is told if nobody is in it or at least the silo's smallest cell, and if what stays hidden of its
group adds up to that as well: the group's total is known. A sum over a bin is told if no single value of
what is summed is held by fewer: of a binary outcome it is the count of those who have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from fedtmle.errors import DecodeError
from fedtmle.model.exact import FINE_BITS, GRID_BITS, Sums, column_shifts, column_sums, zero_sums
from fedtmle.model.types import Array
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.floors import visible
from fedtmle.protocol.query import AbstractQuery, Link, Local, Phase

MOST_SILOS = 4096
MANY = 1000  # rows that as a rule show that there are more values than few
FEW = 10  # so many different values are told apart by a few sums, or nearly


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows in bins: the bin of each, what to sum, shape (k, N), and what a sum must not tell of a few."""

    bins: NDArray[np.uint8]
    values: Array | None = None
    sensitive: Array | None = None


Cell = tuple[int, ...]  # the count, then k sums in grid units
Answer = tuple[tuple[Cell | None, ...], ...]  # per group, per bin; None is hidden


@dataclass(frozen=True, kw_only=True)
class PooledBin:
    """One bin over the silos that tell it."""

    silos: int
    count: int
    total: Sums

    @property
    def sums(self) -> tuple[float, ...]:
        return tuple(map(float, self.total.values()))


@final
@dataclass(frozen=True, kw_only=True)
class BinsQuery(AbstractQuery[Answer, tuple[tuple[PooledBin, ...], ...]]):
    """Pooled bins of some groups of rows, made of what each silo tells."""

    groups: Callable[[Any], Sequence[Group]]  # of a piece of the table
    sizes: tuple[int, ...]  # how many bins each group has
    exponents: tuple[int, ...]  # powers of two that bound what is summed
    n: int
    what: str
    phase: Phase = Phase.DIAGNOSTICS
    floors: tuple[str, ...] = ("min_cell",)  # keys of the policy; the strictest holds
    pieces: Callable[[Any], Iterable[Any]] = lambda table: (table,)  # consecutive rows of a table

    @property
    def tells(self) -> str:
        return f"{self.what} by bin, without the bins of a few people"

    @property
    def functionals(self) -> int:
        return sum(self.sizes) * (1 + len(self.exponents))

    def answer(self, local: Local) -> Answer:
        floor = max(getattr(local.policy, key) for key in self.floors)
        found = [[_Bin(zero_sums(column_shifts(self.exponents))) for _ in range(size)] for size in self.sizes]

        def look(table: Any) -> None:
            for piece in self.pieces(table):
                for group, bins in zip(self.groups(piece), found, strict=True):
                    self._add(group, bins)

        local.evaluate(look)
        return tuple(_told(bins, floor) for bins in found)

    def _add(self, group: Group, bins: Sequence[_Bin]) -> None:
        counts = np.bincount(group.bins, minlength=len(bins)).tolist()
        for own, count in zip(bins, counts, strict=True):
            own.count += count
        if group.values is None:
            return
        order = np.argsort(group.bins, kind="stable")
        values = np.split(group.values[:, order], np.cumsum(counts)[:-1], axis=1)
        for own, part in zip(bins, values, strict=True):
            own.total += column_sums(part, self.exponents, what=self.what)
        if group.sensitive is not None:
            held = np.split(group.sensitive[order], np.cumsum(counts)[:-1])
            for own, part in zip(bins, held, strict=True):
                own.holders = own.holders or _Holders()
                own.holders.add(part)

    def pool(self, answers: Mapping[str, Answer], sizes: Mapping[str, int]) -> Any:  # noqa: ARG002
        zero = (0,) * (2 + len(self.exponents))
        pooled = [[zero] * size for size in self.sizes]
        for answer in answers.values():
            for g, group in enumerate(answer):
                for b, cell in enumerate(group):
                    if cell is not None:
                        pooled[g][b] = tuple(x + y for x, y in zip(pooled[g][b], (1, *cell), strict=True))
        return tuple(tuple(self._bin(cell) for cell in group) for group in pooled)

    def _bin(self, cell: Cell) -> PooledBin:
        return PooledBin(silos=cell[0], count=cell[1], total=Sums(cell[2:], column_shifts(self.exponents)))

    def write_answer(self, answer: Answer, out: BitWriter, link: Link) -> None:  # noqa: ARG002
        for cell in (cell for group in answer for cell in group):
            out.uint(int(cell is not None), 1)
            if cell is not None:
                out.fixed(cell, self._largest)

    def read_answer(self, bits: BitReader, link: Link) -> Answer:  # noqa: ARG002
        return tuple(
            tuple(self._counted(bits.fixed(self._largest)) if bits.uint(1) else None for _ in range(size))
            for size in self.sizes
        )

    def write_pooled(self, pooled: tuple[tuple[PooledBin, ...], ...], out: BitWriter) -> None:
        for cell in (cell for group in pooled for cell in group):
            out.fixed((cell.silos, cell.count, *cell.total.units), (MOST_SILOS, *self._largest))

    def read_pooled(self, bits: BitReader) -> tuple[tuple[PooledBin, ...], ...]:
        return tuple(
            tuple(self._bin(self._counted(bits.fixed((MOST_SILOS, *self._largest)))) for _ in range(size))
            for size in self.sizes
        )

    def _counted(self, cell: Cell) -> Cell:
        if cell[0] < 0:
            raise DecodeError("a count is below zero")
        return cell

    def retires(self, answer: Answer) -> bool:  # noqa: ARG002
        return False

    @property
    def _largest(self) -> tuple[int, ...]:
        return (self.n, *(self.n << (GRID_BITS + FINE_BITS) for _ in self.exponents))


def shown(counts: Sequence[int], tellable: Sequence[bool], floor: int) -> tuple[int | None, ...]:
    """The counts that may be told; bins in which nobody is are, and hide nobody."""
    taken = [b for b, count in enumerate(counts) if count]
    # A bin that may not be told, however many are in it, counts as one of too few.
    cells = visible([counts[b] if tellable[b] else 0 for b in taken], sum(counts), floor)
    by_bin = dict(zip(taken, cells, strict=True))
    return tuple(by_bin.get(b, 0) for b in range(len(counts)))


def smallest_cell(values: Array) -> int:
    """How many hold the rarest value where there are few; none if all hold the same."""
    holders = _Holders()
    holders.add(values)
    return holders.rarest(len(values))


class _Holders:
    """How many hold each value, as long as there are few values."""

    def __init__(self) -> None:
        self._counts: dict[float, int] | None = {}

    def add(self, values: Array) -> None:
        for part in (values[:MANY], values[MANY:]):
            if self._counts is None:
                return
            for value, count in zip(*np.unique(part, return_counts=True), strict=True):
                self._counts[float(value)] = self._counts.get(float(value), 0) + int(count)
            if len(self._counts) > FEW:
                self._counts = None

    def rarest(self, everyone: int) -> int:
        if self._counts is None:
            return everyone
        return min(self._counts.values()) if len(self._counts) > 1 else 0


@dataclass
class _Bin:
    """What one bin holds so far."""

    total: Sums
    count: int = 0
    holders: _Holders | None = None


def _told(bins: Sequence[_Bin], floor: int) -> tuple[Cell | None, ...]:
    tellable = [own.holders is None or own.holders.rarest(own.count) >= floor for own in bins]
    cells = shown([own.count for own in bins], tellable, floor)
    return tuple(
        None if count is None else (count, *own.total.units) for count, own in zip(cells, bins, strict=True)
    )
