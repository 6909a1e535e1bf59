"""Counts and sums by bin, of which a silo discloses only those that its policy allows.

A bin is disclosed if nobody is in it or at least as many people as the silo's smallest cell, and if the
hidden bins of its group add up to that as well: the group's total is known. A sum over a bin is disclosed
if no single value of what is summed is held by fewer: for a binary outcome the sum is the count of those
who have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.exact import Sums, column_shifts, nearest, zero_sums
from fedtmle.model.kernels import binned_sums
from fedtmle.model.statistics import AbstractBins, Group
from fedtmle.model.types import Array
from fedtmle.protocol.codes import MOST_SILOS, AbstractCode, BitReader, BitWriter, read_count
from fedtmle.protocol.query import AbstractQuery, Local, Phase, Query

SAMPLED_ROWS = 1000  # rows that usually show whether there are more values than `MOST_VALUES`
MOST_VALUES = 10  # up to so many different values, a few sums nearly determine how many hold each


@dataclass(frozen=True, kw_only=True, slots=True)
class BinTotal:
    """One bin at one silo: how many people are in it, and the sums over them in grid units.

    ``rarest`` is how many of them hold the rarest sensitive value; it stays in the silo.
    """

    count: int
    units: tuple[int, ...]
    rarest: int | None = None


Bins = tuple[tuple[BinTotal | None, ...], ...]  # per group, per bin; None is suppressed


@dataclass(frozen=True, kw_only=True)
class PooledBin:
    """One bin over the silos that disclose it."""

    silos: int
    count: int
    total: Sums

    @property
    def sums(self) -> tuple[float, ...]:
        return tuple(map(float, self.total.values()))


PooledBins = tuple[tuple[PooledBin, ...], ...]


@final
@dataclass(frozen=True, kw_only=True)
class BinsCode(AbstractCode[Bins]):
    """One bit per bin says whether it is disclosed; its count and sums follow."""

    sizes: tuple[int, ...]
    largest: tuple[int, ...]  # of a bin's count and sums

    @property
    def numbers(self) -> int:
        return sum(self.sizes) * len(self.largest)

    def write(self, value: Bins, out: BitWriter) -> None:
        for cell in (cell for group in value for cell in group):
            out.uint(int(cell is not None), 1)
            if cell is not None:
                out.fixed((cell.count, *cell.units), self.largest)

    def read(self, bits: BitReader) -> Bins:
        return tuple(
            tuple(self._bin(bits) if bits.uint(1) else None for _ in range(size)) for size in self.sizes
        )

    def _bin(self, bits: BitReader) -> BinTotal:
        count, *units = bits.fixed(self.largest)
        return BinTotal(count=_natural(count), units=tuple(units))


@final
@dataclass(frozen=True, kw_only=True)
class PooledBinsCode(AbstractCode[PooledBins]):
    """Per bin the number of silos that disclose it, the count and the sums."""

    sizes: tuple[int, ...]
    largest: tuple[int, ...]
    shifts: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return sum(self.sizes) * (1 + len(self.largest))

    def write(self, value: PooledBins, out: BitWriter) -> None:
        for cell in (cell for group in value for cell in group):
            out.gamma((cell.silos,))
            if cell.silos:
                out.fixed((cell.count, *cell.total.units), self.largest)

    def read(self, bits: BitReader) -> PooledBins:
        return tuple(tuple(self._bin(bits) for _ in range(size)) for size in self.sizes)

    def _bin(self, bits: BitReader) -> PooledBin:
        silos = read_count(bits, MOST_SILOS)
        if not silos:
            return PooledBin(silos=0, count=0, total=zero_sums(self.shifts))
        count, *units = bits.fixed(self.largest)
        return PooledBin(silos=silos, count=_natural(count), total=Sums(tuple(units), self.shifts))


def _natural(count: int) -> int:
    if count < 0:
        raise DecodeError("a count is below zero")
    return count


@final
@dataclass(frozen=True, kw_only=True)
class BinsQuery(AbstractQuery[Bins, PooledBins]):
    """Pooled bins of groups of rows, over the silos that disclose each bin.

    The sums are exact, or have the given number of binary ``places``.
    """

    bins: AbstractBins[Any]
    n: int
    phase: Phase = Phase.DIAGNOSTICS
    floors: tuple[str, ...] = ("min_cell",)  # keys of the policy; the strictest holds
    places: int | None = None

    @property
    def explanation(self) -> str:
        return f"{self.bins.label} by bin, without the bins of a few people"

    @property
    def answer_code(self) -> BinsCode:
        return BinsCode(sizes=self.bins.sizes, largest=self._largest)

    @property
    def pooled_code(self) -> PooledBinsCode:
        return PooledBinsCode(sizes=self.bins.sizes, largest=self._largest, shifts=self._shifts)

    @property
    def _shifts(self) -> tuple[int, ...]:
        if self.places is None:
            return column_shifts(self.bins.exponents)
        return (self.places,) * len(self.bins.exponents)

    @property
    def _largest(self) -> tuple[int, ...]:
        bounds = zip(self._shifts, self.bins.exponents, strict=True)
        return (self.n, *(nearest(self.n, -shift - exponent) for shift, exponent in bounds))

    def answer(self, local: Local) -> Bins:
        exact = zero_sums(column_shifts(self.bins.exponents))
        totals = [[_Bin(exact) for _ in range(size)] for size in self.bins.sizes]
        for piece in local.evaluate(lambda rows: self.bins.over(rows, self._count)):
            for bins, counted in zip(totals, piece, strict=True):
                for bin_, part in zip(bins, counted, strict=True):
                    bin_.add(part)
        return tuple(tuple(bin_.total_of(self._shifts) for bin_ in bins) for bins in totals)

    def suppress(self, answer: Bins, floor: Callable[[Query], int]) -> Bins:
        return tuple(_suppressed(group, floor(self)) for group in answer)

    def _count(self, piece: object) -> list[list[_Counted]]:
        groups = zip(self.bins.groups(piece), self.bins.sizes, strict=True)
        return [self._counted(group, size) for group, size in groups]

    def _counted(self, group: Group, size: int) -> list[_Counted]:
        """Return what a piece of the rows adds to each bin of a group."""
        counts = [int(np.count_nonzero(group.bins == b)) for b in range(size)]
        totals: Sequence[Sums | None] = [None] * size
        held: Sequence[Array | None] = [None] * size
        if group.values is not None:
            totals = binned_sums(group.values, group.bins, size, self.bins.exponents, what=self.bins.label)
        if group.sensitive is not None:
            order = np.argsort(group.bins, kind="stable")
            held = np.split(group.sensitive[order], np.cumsum(counts)[:-1])
        return [_Counted(*parts) for parts in zip(counts, totals, held, strict=True)]

    def pool(self, answers: Mapping[str, Bins], sizes: Mapping[str, int]) -> PooledBins:
        empty = PooledBin(silos=0, count=0, total=zero_sums(self._shifts))
        pooled = [[empty] * size for size in self.bins.sizes]
        for answer in answers.values():
            for total, group in zip(pooled, answer, strict=True):
                for b, cell in enumerate(group):
                    if cell is not None:
                        total[b] = self._added(total[b], cell)
        return tuple(tuple(group) for group in pooled)

    def _added(self, total: PooledBin, cell: BinTotal) -> PooledBin:
        return PooledBin(
            silos=total.silos + 1,
            count=total.count + cell.count,
            total=total.total + Sums(cell.units, self._shifts),
        )


def visible(counts: Sequence[int], total: int, floor: int) -> tuple[int | None, ...]:
    """Return the cells of one total that may be shown, None for the others.

    The hidden cells add up to at least the floor: a single hidden cell would be the total less the rest.
    """
    shown: list[int | None] = [count if count >= floor else None for count in counts]
    while True:
        disclosed = [count for count in shown if count is not None]
        hidden = total - sum(disclosed)
        if not disclosed or hidden >= floor or (hidden == 0 and None not in shown):
            return tuple(shown)
        shown[shown.index(min(disclosed))] = None


def shown(counts: Sequence[int], may_be_shown: Sequence[bool], floor: int) -> tuple[int | None, ...]:
    """Return the counts that may be disclosed; an empty bin always may, and hides nobody."""
    taken = [b for b, count in enumerate(counts) if count]
    # A bin that may not be disclosed, however many are in it, counts as one of too few.
    cells = visible([counts[b] if may_be_shown[b] else 0 for b in taken], sum(counts), floor)
    by_bin = dict(zip(taken, cells, strict=True))
    return tuple(by_bin.get(b, 0) for b in range(len(counts)))


def _suppressed(group: Sequence[BinTotal | None], floor: int) -> tuple[BinTotal | None, ...]:
    bins = [bin_ for bin_ in group if bin_ is not None]
    if len(bins) < len(group):
        raise AssertionError("bins are suppressed once")
    may_be_shown = [bin_.rarest is None or bin_.rarest >= floor for bin_ in bins]
    cells = shown([bin_.count for bin_ in bins], may_be_shown, floor)
    return tuple(
        None if count is None else replace(bin_, rarest=None) for count, bin_ in zip(cells, bins, strict=True)
    )


def smallest_cell(values: Array) -> int:
    """Return how many hold the rarest value where there are few values; 0 if all hold the same."""
    holders = _Holders()
    holders.add(values)
    return holders.rarest(len(values))


class _Holders:
    """How many hold each value, as long as there are few values."""

    def __init__(self) -> None:
        self._counts: dict[float, int] | None = {}

    def add(self, values: Array) -> None:
        for part in (values[:SAMPLED_ROWS], values[SAMPLED_ROWS:]):
            if self._counts is None:
                return
            self._add(self._counts, part)
            if len(self._counts) > MOST_VALUES:
                self._counts = None

    def _add(self, counts: dict[float, int], part: Array) -> None:
        known = {value: int(np.count_nonzero(part == value)) for value in counts}
        if sum(known.values()) < len(part):  # some value is new: only then are they sorted
            values, times = np.unique(part, return_counts=True)
            known = dict(zip(values.tolist(), times.tolist(), strict=True))
        for value, count in known.items():
            counts[value] = counts.get(value, 0) + count

    def rarest(self, everyone: int) -> int:
        if self._counts is None:
            return everyone
        return min(self._counts.values()) if len(self._counts) > 1 else 0


@dataclass(frozen=True, slots=True)
class _Counted:
    """One bin in one piece of the rows."""

    count: int
    total: Sums | None
    held: Array | None  # the sensitive value of each row there


@dataclass
class _Bin:
    """One bin over the pieces so far."""

    total: Sums
    count: int = 0
    holders: _Holders | None = None

    def add(self, counted: _Counted) -> None:
        self.count += counted.count
        if counted.total is not None:
            self.total += counted.total
        if counted.held is not None:
            self.holders = self.holders or _Holders()
            self.holders.add(counted.held)

    def total_of(self, shifts: tuple[int, ...]) -> BinTotal:
        rarest = None if self.holders is None else self.holders.rarest(self.count)
        return BinTotal(count=self.count, units=self.total.rounded(shifts).units, rarest=rarest)
