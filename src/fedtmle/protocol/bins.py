"""Counts and sums by bin, merged until every bin stands for enough people.

A bin may be disclosed if nobody is in it, or if as many people are as the silo's smallest cell and no single
value of what is summed is held by fewer: for a binary outcome the sum is the count of those who have it. In a
first round each silo says which runs of neighbouring bins it could disclose as one. All parties then merge
bins as little as every silo allows, and a second round asks for these. So what is shown adds up to the whole
of every silo that discloses anything. A silo that could not disclose a group as one bin withholds the group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any, TypeVar, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.exact import FINE_BITS, GRID_BITS, Sums, column_shifts, zero_sums
from fedtmle.model.kernels import binned_sums
from fedtmle.model.statistics import AbstractBins, Group
from fedtmle.model.types import Array
from fedtmle.protocol.codes import MOST_SILOS, AbstractCode, BitReader, BitWriter, FixedSums
from fedtmle.protocol.query import AbstractQuery, Local, Phase, Query

Answer = TypeVar("Answer")
Pooled = TypeVar("Pooled")

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

    def is_enough(self, floor: int) -> bool:
        """Return whether the bin may be disclosed: it is empty, or nothing of it is held by too few."""
        return not self.count or (self.count >= floor and (self.rarest is None or self.rarest >= floor))


Bins = tuple[tuple[BinTotal | None, ...], ...]  # per group, per bin; None is suppressed
Partition = tuple[tuple[int, ...], ...]  # per group, the first bin of each merged one


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
            out.fixed((cell.silos, cell.count, *cell.total.units), (MOST_SILOS, *self.largest))

    def read(self, bits: BitReader) -> PooledBins:
        return tuple(tuple(self._bin(bits) for _ in range(size)) for size in self.sizes)

    def _bin(self, bits: BitReader) -> PooledBin:
        silos, count, *units = bits.fixed((MOST_SILOS, *self.largest))
        return PooledBin(silos=_natural(silos), count=_natural(count), total=Sums(tuple(units), self.shifts))


def _natural(count: int) -> int:
    if count < 0:
        raise DecodeError("a count is below zero")
    return count


class _AbstractBinsQuery(AbstractQuery[Answer, Pooled]):
    """Reads the bins of a silo."""

    bins: AbstractBins[Any]

    @property
    def _shifts(self) -> tuple[int, ...]:
        return column_shifts(self.bins.exponents)

    def _read(self, local: Local) -> list[list[_Bin]]:
        totals = [[_Bin(zero_sums(self._shifts)) for _ in range(size)] for size in self.bins.sizes]
        for piece in local.evaluate(lambda rows: self.bins.over(rows, self._count)):
            for bins, counted in zip(totals, piece, strict=True):
                for bin_, part in zip(bins, counted, strict=True):
                    bin_.add(part)
        return totals

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


@final
@dataclass(frozen=True, kw_only=True)
class SeparableQuery(_AbstractBinsQuery[Any, Sums]):
    """Which runs of neighbouring bins a silo could disclose as one: 0 or 1 each, pooled by addition.

    The first number of a group is that of the run of all bins; a silo that cannot disclose it says 0 to all.
    """

    bins: AbstractBins[Any]
    phase: Phase = Phase.DIAGNOSTICS
    floors: tuple[str, ...] = ("min_cell",)  # keys of the policy; the strictest holds

    @property
    def explanation(self) -> str:
        return f"which neighbouring bins of {self.bins.label} have enough people"

    @property
    def functionals(self) -> int:
        return 0  # bits, not numbers: they are counted by their length

    @property
    def shifts(self) -> tuple[int, ...]:
        return (0,) * sum(len(_runs(size)) for size in self.bins.sizes)

    @property
    def answer_code(self) -> FixedSums:
        return FixedSums(self.shifts, (1,) * len(self.shifts))

    @property
    def pooled_code(self) -> FixedSums:
        return FixedSums(self.shifts, (MOST_SILOS,) * len(self.shifts))

    def answer(self, local: Local) -> list[list[_Bin]]:
        return self._read(local)

    def suppress(self, answer: list[list[_Bin]], floor: Callable[[Query], int]) -> Sums:
        smallest, allowed = floor(self), list[int]()
        for group in answer:
            own = [int(_joined(group[i:j]).is_enough(smallest)) for i, j in _runs(len(group))]
            allowed += own if own[0] else [0] * len(own)
        return Sums(tuple(allowed), self.shifts)

    def pool(self, answers: Mapping[str, Sums], sizes: Mapping[str, int]) -> Sums:
        return reduce(add, answers.values())

    def merged(self, pooled: Sums, n: int) -> BinsQuery:
        """Return the query for the bins as the silos allow them."""
        return BinsQuery(
            bins=self.bins, n=n, partition=self.partition(pooled), phase=self.phase, floors=self.floors
        )

    def partition(self, pooled: Sums) -> Partition:
        """Return the finest merging that every silo allows which discloses a group at all.

        Groups of one family are merged alike, so that they can stand side by side in a table.
        """
        allowed: list[dict[tuple[int, int], bool]] = []
        numbers = iter(pooled.units)
        for size in self.bins.sizes:
            runs = _runs(size)
            silos = [next(numbers) for _ in runs]
            allowed.append({run: count == silos[0] for run, count in zip(runs, silos, strict=True)})
        families = self.bins.families
        return tuple(
            _finest(size, [a for a, other in zip(allowed, families, strict=True) if other == family])
            for size, family in zip(self.bins.sizes, families, strict=True)
        )


def _runs(size: int) -> list[tuple[int, int]]:
    """Return all runs (first, one past the last) of neighbouring bins, that of all bins first."""
    runs = [(i, j) for i in range(size) for j in range(i + 1, size + 1)]
    return [(0, size), *(run for run in runs if run != (0, size))]


def _finest(size: int, allowed: Sequence[Mapping[tuple[int, int], bool]]) -> tuple[int, ...]:
    """Return the first bins of the most merged ones into which all bins can be cut."""
    best: dict[int, tuple[int, ...]] = {0: ()}
    for j in range(1, size + 1):
        ways = [(*best[i], i) for i in range(j) if i in best and all(one[i, j] for one in allowed)]
        if ways:
            best[j] = max(ways, key=len)
    return best.get(size, (0,))


@final
@dataclass(frozen=True, kw_only=True)
class BinsQuery(_AbstractBinsQuery[Bins, PooledBins]):
    """Pooled bins of groups of rows, over the silos that disclose each group: all its bins, or none.

    ``partition`` merges bins; without it each stands by itself.
    """

    bins: AbstractBins[Any]
    n: int
    partition: Partition | None = None
    phase: Phase = Phase.DIAGNOSTICS
    floors: tuple[str, ...] = ("min_cell",)  # keys of the policy; the strictest holds

    @property
    def explanation(self) -> str:
        return f"{self.bins.label} by bin, unless a bin has a few people"

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many bins each group has once they are merged."""
        return self.bins.sizes if self.partition is None else tuple(map(len, self.partition))

    @property
    def answer_code(self) -> BinsCode:
        return BinsCode(sizes=self.sizes, largest=self._largest)

    @property
    def pooled_code(self) -> PooledBinsCode:
        return PooledBinsCode(sizes=self.sizes, largest=self._largest, shifts=self._shifts)

    @property
    def _largest(self) -> tuple[int, ...]:
        return (self.n, *(self.n << (GRID_BITS + FINE_BITS) for _ in self.bins.exponents))

    def answer(self, local: Local) -> Bins:
        groups = self._read(local)
        if self.partition is not None:
            groups = [_merged(group, firsts) for group, firsts in zip(groups, self.partition, strict=True)]
        return tuple(tuple(bin_.total_of() for bin_ in bins) for bins in groups)

    def suppress(self, answer: Bins, floor: Callable[[Query], int]) -> Bins:
        return tuple(_suppressed(group, floor(self)) for group in answer)

    def pool(self, answers: Mapping[str, Bins], sizes: Mapping[str, int]) -> PooledBins:
        empty = PooledBin(silos=0, count=0, total=zero_sums(self._shifts))
        pooled = [[empty] * size for size in self.sizes]
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


def _suppressed(group: Sequence[BinTotal | None], floor: int) -> tuple[BinTotal | None, ...]:
    """Return the bins of a group if each may be disclosed, else none: the rest would not be the whole."""
    bins = [bin_ for bin_ in group if bin_ is not None]
    if len(bins) < len(group):
        raise AssertionError("bins are suppressed once")
    if all(bin_.is_enough(floor) for bin_ in bins):
        return tuple(replace(bin_, rarest=None) for bin_ in bins)
    return (None,) * len(bins)


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

    def join(self, other: _Holders) -> None:
        """Add what another group of rows holds."""
        if self._counts is None or other._counts is None:
            self._counts = None
            return
        for value, count in other._counts.items():
            self._counts[value] = self._counts.get(value, 0) + count
        if len(self._counts) > MOST_VALUES:
            self._counts = None

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

    def total_of(self) -> BinTotal:
        rarest = None if self.holders is None else self.holders.rarest(self.count)
        return BinTotal(count=self.count, units=self.total.units, rarest=rarest)

    def join(self, other: _Bin) -> None:
        """Add another bin of the same group."""
        self.count += other.count
        self.total += other.total
        if other.holders is not None:
            self.holders = self.holders or _Holders()
            self.holders.join(other.holders)

    def is_enough(self, floor: int) -> bool:
        return self.total_of().is_enough(floor)


def _joined(bins: Sequence[_Bin]) -> _Bin:
    whole = _Bin(zero_sums(bins[0].total.shifts))
    for bin_ in bins:
        whole.join(bin_)
    return whole


def _merged(bins: Sequence[_Bin], firsts: Sequence[int]) -> list[_Bin]:
    return [_joined(bins[i:j]) for i, j in pairwise((*firsts, len(bins)))]
