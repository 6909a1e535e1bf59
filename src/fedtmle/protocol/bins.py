"""Counts and sums by bin. A silo merges bins until its policy allows each of them to be disclosed.

A bin may be disclosed if it is empty, or if it has at least ``min_cell`` people and each value of the summed
variable in it is held by at least as many: the sum of a binary outcome is the count of those who have it. If
bins are ordered on a scale, a silo merges neighbouring bins until each may be disclosed, and sends their sum
as that of the bin with most people. No part of a group is left out, which would bias the rest, and the total
is exact. Other bins, such as arms, are disclosed all together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, islice, pairwise
from operator import add
from typing import Any, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.exact import Sums, column_shifts, nearest, zero_sums
from fedtmle.model.kernels import binned_sums
from fedtmle.model.statistics import AbstractBins, Forecast, Group
from fedtmle.model.types import Array
from fedtmle.protocol.codes import MOST_SILOS, AbstractCode, BitReader, BitWriter, Integers
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import AbstractTotals, Local, Phase, Query

SAMPLED_ROWS = 1000  # rows that usually show whether there are more values than `MOST_VALUES`
MOST_VALUES = 10  # with at most this many values, a few sums nearly determine how many people hold each


@dataclass(frozen=True, kw_only=True, slots=True)
class BinTotal:
    """One bin at one silo: how many people are in it, and the sums over them in grid units.

    ``holders`` counts how many of them hold each sensitive value; it never leaves the silo.
    """

    count: int
    units: tuple[int, ...]
    holders: Holders | None = None

    def is_enough(self, floor: int) -> bool:
        """Return whether the bin may be disclosed: it is empty, or no value in it is held by too few."""
        if self.count and self.holders is not None and self.holders.rarest(self.count) < floor:
            return False
        return not self.count or self.count >= floor


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
class CellsCode:
    """The counts and sums of some bins, by column, each sent as its difference from a forecast.

    The forecast of a count is that of the same bin in the group before. Sums of few ``places`` have the
    ``forecasts`` of `AbstractBins`. Columns are in a Golomb code; exact sums (None) have a fixed width.
    """

    largest: tuple[int, ...]  # bounds of a bin's count and sums
    places: tuple[int, ...] | None  # binary places of each sum
    forecasts: tuple[Forecast, ...] = ()

    def write(self, bins: Sequence[int], cells: Sequence[Integers], out: BitWriter) -> None:
        """Append a count and its sums for each cell, given the number of its bin in its group."""
        if not cells:
            return
        columns, before = list(zip(*cells, strict=True)), _same_bin(bins)
        for c in self._coded:
            out.golomb([value - self._forecast(columns, c, i, before) for i, value in enumerate(columns[c])])
        if self.places is None:
            for cell in cells:
                out.fixed(cell[1:], self.largest[1:])

    def read(self, bins: Sequence[int], bits: BitReader) -> list[Integers]:
        """Return a count and its sums for each of the bins, given by their numbers."""
        if not bins:
            return []
        columns: list[list[int]] = []
        before = _same_bin(bins)
        for c in self._coded:
            columns.append([])
            for i, step in enumerate(bits.golomb(len(bins))):
                columns[c].append(self._forecast(columns, c, i, before) + step)
        cells = list(zip(*columns, strict=True))
        if self.places is None:
            cells = [(*cell, *bits.fixed(self.largest[1:])) for cell in cells]
        if any(cell[0] < 0 for cell in cells):
            raise DecodeError("a count is below zero")
        if any(abs(value) > most for cell in cells for value, most in zip(cell, self.largest, strict=True)):
            raise DecodeError("a count or sum of a bin is out of its range")
        return cells

    @property
    def _coded(self) -> range:
        """The columns that are sent as differences, the counts first."""
        return range(1 if self.places is None else len(self.largest))

    def _forecast(self, columns: Sequence[Sequence[int]], c: int, i: int, before: Sequence[int]) -> int:
        """Return the forecast of column c of cell i from earlier columns, or from the same bin before it."""
        factors = None if c == 0 else self.forecasts[c - 1]
        if factors is None:
            return columns[c][before[i]] if before[i] < i else 0
        (first, second), count, places = factors, columns[0][i], (0, *(self.places or ()))
        if count <= 0:
            return 0
        finer = places[c] - places[first] - places[second]
        product = columns[first][i] * columns[second][i]
        return (product << finer) // count if finer >= 0 else product // (count << -finer)


def _same_bin(bins: Sequence[int]) -> list[int]:
    """Return for each cell the place of the last earlier one of the same bin, or its own place."""
    last: dict[int, int] = {}
    before = []
    for i, number in enumerate(bins):
        before.append(last.get(number, i))
        last[number] = i
    return before


@final
@dataclass(frozen=True, kw_only=True)
class BinsCode(AbstractCode[Bins]):
    """One bit per bin says whether it is disclosed; the counts and sums of those that are follow."""

    sizes: tuple[int, ...]
    cells: CellsCode

    @property
    def numbers(self) -> int:
        return sum(self.sizes) * len(self.cells.largest)

    def write(self, value: Bins, out: BitWriter) -> None:
        for cell in chain(*value):
            out.uint(int(cell is not None), 1)
        shown = [(b, cell) for group in value for b, cell in enumerate(group) if cell is not None]
        self.cells.write([b for b, _ in shown], [(cell.count, *cell.units) for _, cell in shown], out)

    def read(self, bits: BitReader) -> Bins:
        is_shown = [[bool(bits.uint(1)) for _ in range(size)] for size in self.sizes]
        places = [b for group in is_shown for b, shown in enumerate(group) if shown]
        cells = iter(self.cells.read(places, bits))
        return tuple(tuple(_total(next(cells)) if shown else None for shown in group) for group in is_shown)


def _total(cell: Integers) -> BinTotal:
    count, *units = cell
    return BinTotal(count=count, units=tuple(units))


@final
@dataclass(frozen=True, kw_only=True)
class PooledBinsCode(AbstractCode[PooledBins]):
    """Per bin the number of silos that disclose it, as differences; then the counts and sums."""

    sizes: tuple[int, ...]
    cells: CellsCode
    shifts: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return sum(self.sizes) * (1 + len(self.cells.largest))

    def write(self, value: PooledBins, out: BitWriter) -> None:
        before = 0
        for cell in chain(*value):
            out.gamma((cell.silos - before,))
            before = cell.silos
        shown = [(b, cell) for group in value for b, cell in enumerate(group) if cell.silos]
        self.cells.write([b for b, _ in shown], [(cell.count, *cell.total.units) for _, cell in shown], out)

    def read(self, bits: BitReader) -> PooledBins:
        disclosing, silos = [], 0
        for size in self.sizes:
            group = []
            for _ in range(size):
                silos += bits.gamma(1)[0]
                if not 0 <= silos <= MOST_SILOS:
                    raise DecodeError("a count is out of its range")
                group.append(silos)
            disclosing.append(group)
        shown = [b for group in disclosing for b, silos in enumerate(group) if silos]
        cells = iter(self.cells.read(shown, bits))
        return tuple(tuple(self._bin(silos, cells) for silos in group) for group in disclosing)

    def _bin(self, silos: int, cells: Iterator[Integers]) -> PooledBin:
        if not silos:
            return PooledBin(silos=0, count=0, total=zero_sums(self.shifts))
        count, *units = next(cells)
        return PooledBin(silos=silos, count=count, total=Sums(tuple(units), self.shifts))


@final
@dataclass(frozen=True, kw_only=True)
class BinsQuery(AbstractTotals[Bins, PooledBins]):
    """Pooled bins of groups of rows, over the silos that disclose the group.

    The sums are exact, or each has the given number of binary ``places``.
    """

    bins: AbstractBins[Any]
    n: int
    phase: Phase = Phase.DIAGNOSTICS
    floors: tuple[str, ...] = ("min_cell",)  # keys of the policy; the strictest holds
    places: tuple[int, ...] | None = None

    @property
    def explanation(self) -> str:
        few = " by bin, joined until none has a few people" if self.bins.on_a_scale else ", hidden if few"
        return self.bins.label + few

    @property
    def answer_code(self) -> BinsCode:
        return BinsCode(sizes=self.bins.sizes, cells=self._cells)

    @property
    def pooled_code(self) -> PooledBinsCode:
        return PooledBinsCode(sizes=self.bins.sizes, cells=self._cells, shifts=self._shifts)

    @property
    def _cells(self) -> CellsCode:
        return CellsCode(largest=self._largest, places=self.places, forecasts=self.bins.forecasts)

    @property
    def _shifts(self) -> tuple[int, ...]:
        return column_shifts(self.bins.exponents) if self.places is None else self.places

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
        rule = _folded if self.bins.on_a_scale else _whole
        return tuple(rule([bin_ for bin_ in group if bin_ is not None], floor(self)) for group in answer)

    def _count(self, piece: object) -> list[list[_Counted]]:
        """Return the contribution of a piece of the rows to each bin of each group."""
        groups = zip(self.bins.groups(piece), self.bins.sizes, strict=True)
        alike = groupby(groups, key=lambda pair: (id(pair[0].bins), id(pair[0].values), pair[1]))
        parts = (self._counted([group for group, _ in pairs], size) for (_, _, size), pairs in alike)
        return list(chain.from_iterable(parts))

    def _counted(self, groups: Sequence[Group], size: int) -> list[list[_Counted]]:
        """Return the contributions to groups that share their rows' bins and values."""
        rows = groups[0]
        if rows.values is None and all(group.sensitive is None for group in groups):
            counts = np.bincount(rows.bins, minlength=size).tolist()
            return [[_Counted(count) for count in counts] for _ in groups]
        if not rows.is_sorted:
            return [each for group in groups for each in self._counted([group.sorted()], size)]
        ends = np.searchsorted(rows.bins, range(size), side="right").tolist()
        places = list(pairwise((0, *ends)))
        counted = []
        for group, totals in zip(groups, self._totals(groups, ends), strict=True):
            held = group.sensitive
            holders = [None if held is None else held[first:last] for first, last in places]
            counts = [last - first for first, last in places]
            counted.append([_Counted(*parts) for parts in zip(counts, totals, holders, strict=True)])
        return counted

    def _totals(self, groups: Sequence[Group], ends: Sequence[int]) -> list[list[Sums | None]]:
        """Return the sums of each group by bin, each in one pass over values that all groups share.

        A term that several groups have is summed once.
        """
        values, exponents = groups[0].values, self.bins.exponents
        if values is None:
            return [[None] * len(ends) for _ in groups]
        columns = [(j,) for j in range(len(values))]
        asked = [list(zip(group.terms or columns, exponents, strict=True)) for group in groups]
        places = {pair: place for place, pair in enumerate(dict.fromkeys(chain.from_iterable(asked)))}
        by_bin = binned_sums(
            values,
            ends,
            [power for _, power in places],
            what=self.bins.label,
            terms=[term for term, _ in places],
        )
        return [[sums.chosen([places[pair] for pair in pairs]) for sums in by_bin] for pairs in asked]

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """For each bin: the number of silos that disclose it, the count and the sums."""
        return (Lane(MOST_SILOS), *map(Lane, self._largest)) * sum(self.bins.sizes)

    def addends(self, answer: Bins, n_rows: int) -> Integers:
        nothing = (0,) * (1 + len(self._largest))
        cells = (cell for group in answer for cell in group)
        return tuple(chain(*(nothing if cell is None else (1, cell.count, *cell.units) for cell in cells)))

    def pool_totals(self, totals: Integers) -> PooledBins:
        width, rest = 1 + len(self._largest), iter(totals)
        return tuple(
            tuple(self._pooled(*islice(rest, width)) for _ in range(size)) for size in self.bins.sizes
        )

    def _pooled(self, silos: int, count: int, *units: int) -> PooledBin:
        return PooledBin(silos=silos, count=count, total=Sums(units, self._shifts))


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


def _whole(group: Sequence[BinTotal], floor: int) -> tuple[BinTotal | None, ...]:
    """Return all bins of a group if each may be disclosed, else none of them."""
    if all(bin_.is_enough(floor) for bin_ in group):
        return tuple(replace(bin_, holders=None) for bin_ in group)
    return (None,) * len(group)


def _folded(group: Sequence[BinTotal], floor: int) -> tuple[BinTotal | None, ...]:
    """Return the bins of a group, merged until each may be disclosed; none if even one merged bin may not.

    The sum of merged bins is assigned to the bin with most people; the others are empty.
    """
    if all(bin_.is_enough(floor) for bin_ in group):
        return tuple(replace(bin_, holders=None) for bin_ in group)
    runs = {
        (i, j): joined
        for i in range(len(group))
        for j, joined in enumerate(accumulate(group[i:], _joined), start=i + 1)
    }
    firsts = _finest(len(group), {run: joined.is_enough(floor) for run, joined in runs.items()})
    if firsts is None:
        return (None,) * len(group)
    empty = BinTotal(count=0, units=(0,) * len(group[0].units))
    folded = [empty] * len(group)
    for i, j in pairwise((*firsts, len(group))):
        fullest = max(range(i, j), key=lambda b: group[b].count)
        folded[fullest] = replace(runs[i, j], holders=None)
    return tuple(folded)


def _joined(first: BinTotal, second: BinTotal) -> BinTotal:
    holders = None
    if first.holders is not None or second.holders is not None:
        holders = Holders()
        for part in (first.holders, second.holders):
            if part is not None:
                holders.join(part)
    units = tuple(map(add, first.units, second.units))
    return BinTotal(count=first.count + second.count, units=units, holders=holders)


def _finest(size: int, allowed: Mapping[tuple[int, int], bool]) -> tuple[int, ...] | None:
    """Join neighbouring bins into as many allowed groups as possible; return where each group begins.

    ``allowed[i, j]`` says whether bins i to j - 1 may be one group. None if no grouping is allowed.
    """
    best: dict[int, tuple[int, ...]] = {0: ()}
    for j in range(1, size + 1):
        ways = [(*best[i], i) for i in range(j) if i in best and allowed[i, j]]
        if ways:
            best[j] = max(ways, key=len)
    return best.get(size)


def smallest_cell(values: Array) -> int:
    """Return how many people hold the rarest value if there are few values; 0 if all hold the same."""
    holders = Holders()
    holders.add(values)
    return holders.rarest(len(values))


def _with_holders(counts: dict[float, int], part: Array) -> dict[float, int] | None:
    """Return the counts by value after adding ``part``; None if there are too many different values."""
    known = {value: int(np.count_nonzero(part == value)) for value in counts}
    if sum(known.values()) < len(part):  # some value is new; sort only then
        values, times = np.unique(part, return_counts=True)
        if len(values) > MOST_VALUES:
            return None
        known = dict(zip(values.tolist(), times.tolist(), strict=True))
    joined = {value: counts.get(value, 0) + known.get(value, 0) for value in counts | known}
    return joined if len(joined) <= MOST_VALUES else None


class Holders:
    """How many people hold each value, counted as long as there are few different values."""

    def __init__(self) -> None:
        self._counts: dict[float, int] | None = {}

    def add(self, values: Array) -> None:
        for part in (values[:SAMPLED_ROWS], values[SAMPLED_ROWS:]):
            if self._counts is None:
                return
            self._counts = _with_holders(self._counts, part)

    def join(self, other: Holders) -> None:
        """Add the counts of another group of rows."""
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
    total: Sums | None = None
    held: Array | None = None  # the sensitive value of each row there


@dataclass
class _Bin:
    """One bin over the pieces so far."""

    total: Sums
    count: int = 0
    holders: Holders | None = None

    def add(self, counted: _Counted) -> None:
        self.count += counted.count
        if counted.total is not None:
            self.total += counted.total
        if counted.held is not None:
            self.holders = self.holders or Holders()
            self.holders.add(counted.held)

    def total_of(self, shifts: tuple[int, ...]) -> BinTotal:
        return BinTotal(
            count=self.count, units=self.total.rounded(shifts).units, holders=self.holders or None
        )
