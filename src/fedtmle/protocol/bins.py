"""Counts and sums by bin, of which a silo tells only those that its policy allows.

A bin is told if nobody is in it or at least the silo's smallest cell, and if what stays hidden of its
group adds up to that as well: the group's total is known. A sum over a bin is told if no single value of
what is summed is held by fewer: of a binary outcome it is the count of those who have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.columns import binned_sums
from fedtmle.model.exact import FINE_BITS, GRID_BITS, Sums, column_shifts, zero_sums
from fedtmle.model.types import Array, Bytes
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.floors import visible
from fedtmle.protocol.query import AbstractQuery, Link, Local, Over, Phase, whole

MOST_SILOS = 4096
MANY = 1000  # rows that as a rule show that there are more values than few
FEW = 10  # so many different values are told apart by a few sums, or nearly


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows in bins: the bin of each, what to sum, shape (k, N), and what a sum must not tell of a few."""

    bins: Bytes
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
    over: Over = whole

    @property
    def tells(self) -> str:
        return f"{self.what} by bin, without the bins of a few people"

    @property
    def functionals(self) -> int:
        return sum(self.sizes) * (1 + len(self.exponents))

    def answer(self, local: Local) -> Answer:
        floor = max(getattr(local.policy, key) for key in self.floors)
        found = [[_Bin(zero_sums(column_shifts(self.exponents))) for _ in range(size)] for size in self.sizes]
        for piece in local.evaluate(lambda table: self.over(table, self._look)):
            for bins, seen in zip(found, piece, strict=True):
                for own, part in zip(bins, seen, strict=True):
                    own.add(part)
        return tuple(_told(bins, floor) for bins in found)

    def _look(self, piece: Any) -> list[list[_Seen]]:
        return [self._seen(group, size) for group, size in zip(self.groups(piece), self.sizes, strict=True)]

    def _seen(self, group: Group, size: int) -> list[_Seen]:
        """What a piece of the rows puts into each bin of a group."""
        counts = [int(np.count_nonzero(group.bins == b)) for b in range(size)]
        totals: Sequence[Sums | None] = [None] * size
        held: Sequence[Array | None] = [None] * size
        if group.values is not None:
            totals = binned_sums(group.values, group.bins, size, self.exponents, what=self.what)
        if group.sensitive is not None:
            order = np.argsort(group.bins, kind="stable")
            held = np.split(group.sensitive[order], np.cumsum(counts)[:-1])
        return [_Seen(*parts) for parts in zip(counts, totals, held, strict=True)]

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
            self._add(self._counts, part)
            if len(self._counts) > FEW:
                self._counts = None

    def _add(self, counts: dict[float, int], part: Array) -> None:
        known = {value: int(np.count_nonzero(part == value)) for value in counts}
        if sum(known.values()) < len(part):  # some value is new: only then are they sorted
            values, found = np.unique(part, return_counts=True)
            known = dict(zip(values.tolist(), found.tolist(), strict=True))
        for value, count in known.items():
            counts[value] = counts.get(value, 0) + count

    def rarest(self, everyone: int) -> int:
        if self._counts is None:
            return everyone
        return min(self._counts.values()) if len(self._counts) > 1 else 0


@dataclass(frozen=True, slots=True)
class _Seen:
    """One bin in one piece of the rows."""

    count: int
    total: Sums | None
    held: Array | None  # what each row there holds


@dataclass
class _Bin:
    """What one bin holds so far."""

    total: Sums
    count: int = 0
    holders: _Holders | None = None

    def add(self, seen: _Seen) -> None:
        self.count += seen.count
        if seen.total is not None:
            self.total += seen.total
        if seen.held is not None:
            self.holders = self.holders or _Holders()
            self.holders.add(seen.held)


def _told(bins: Sequence[_Bin], floor: int) -> tuple[Cell | None, ...]:
    tellable = [own.holders is None or own.holders.rarest(own.count) >= floor for own in bins]
    cells = shown([own.count for own in bins], tellable, floor)
    return tuple(
        None if count is None else (count, *own.total.units) for count, own in zip(cells, bins, strict=True)
    )
