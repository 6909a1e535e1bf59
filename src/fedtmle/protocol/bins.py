"""Counts and sums by bin. A silo merges bins until its policy allows each of them to be disclosed.

A bin may be disclosed if it is empty, or if it has at least ``min_cell`` people and each value of the summed
variable in it is held by at least as many: the sum of a binary outcome is the count of those who have it. If
bins are ordered on a scale, a silo merges neighbouring bins until each may be disclosed, and sends their sum
as that of the bin with most people. No part of a group is left out, which would bias the rest, and the total
is exact. Times at which people leave are merged in their own way (`_left`). Other bins, such as arms, are
disclosed all together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, pairwise
from operator import add
from typing import Any, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.table import AbstractBins, Forecast, Group, PerTable
from fedtmle.protocol.codes import MOST_SILOS, AbstractCode, BitReader, BitWriter, Integers
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import AbstractTotals, Local, Phase, Query
from fedtmle_core.exact import Sums, column_shifts, nearest, zero_sums
from fedtmle_core.kernels import binned_sums, count_bins, count_values
from fedtmle_core.types import Array, Bytes, UnitScaled

SAMPLED_ROWS = 256  # rows that usually show whether there are more values than `MOST_VALUES`
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

    def having(self, value: float) -> int:
        """Return how many people hold a sensitive value, 0 if that is not counted."""
        counts = None if self.holders is None else self.holders.counts
        return 0 if counts is None else counts.get(value, 0)


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
    hidden: frozenset[int] = frozenset()  # bins that every silo leaves out, counted over all groups
    # A query that hides more bins has the same totals, so that it shares what was computed of a table.
    _found: PerTable[tuple[tuple[BinTotal, ...], ...]] = field(
        default_factory=PerTable, compare=False, repr=False
    )

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
        return local.evaluate(lambda rows: self._found.of(rows, self._total))

    def _total(self, rows: Any) -> tuple[tuple[BinTotal, ...], ...]:
        exact = zero_sums(column_shifts(self.bins.exponents))
        totals = [_GroupTotal([exact] * size) for size in self.bins.sizes]
        for piece in self.bins.over(rows, self._count):
            for total, counted in zip(totals, piece, strict=True):
                total.add(counted)
        return tuple(total.bins(self._shifts) for total in totals)

    def suppress(self, answer: Bins, floor: Callable[[Query], int]) -> Bins:
        rule = _left if self.bins.of_leavers else _folded if self.bins.on_a_scale else _whole
        least, whole = floor(self), [[bin_ for bin_ in group if bin_ is not None] for group in answer]
        shown = [rule(group, least) for group in whole]
        for groups in self.bins.partitions:
            for k in _complements(shown, whole, groups, least):
                shown[k] = (None,) * len(shown[k])
        return tuple(map(self._kept, shown, accumulate(self.bins.sizes, initial=0)))

    def _kept(self, group: tuple[BinTotal | None, ...], first: int) -> tuple[BinTotal | None, ...]:
        """Return a group without the bins that every silo leaves out; ``first`` numbers its first bin.

        People who leave in such a bin are counted with those before.
        """
        kept: list[BinTotal | None] = []
        last: int | None = None
        for b, bin_ in enumerate(group):
            is_hidden = bin_ is not None and first + b in self.hidden
            kept.append(None if is_hidden else bin_)
            if bin_ is None:
                continue
            before = None if last is None else kept[last]
            if not is_hidden:
                last = b
            elif last is None or before is None or not self.bins.of_leavers:
                return (None,) * len(group)
            else:
                kept[last] = _joined(before, bin_)
        return tuple(kept)

    @property
    def hideable(self) -> int:
        return sum(self.bins.sizes)

    def shown(self, answer: Bins) -> tuple[bool, ...]:
        return tuple(bin_ is not None for group in answer for bin_ in group)

    def hiding(self, parts: Collection[int]) -> BinsQuery:
        return replace(self, hidden=self.hidden | frozenset(parts))

    def _count(self, piece: object) -> list[_Counted]:
        """Return the contribution of a piece of the rows to each group."""
        groups = self.bins.groups(piece)
        alike: dict[tuple[int, int, int], list[int]] = {}
        for place, (group, size) in enumerate(zip(groups, self.bins.sizes, strict=True)):
            alike.setdefault((id(group.bins), id(group.values), size), []).append(place)
        counted: dict[int, _Counted] = {}
        for (_, _, size), places in alike.items():
            parts = self._counted([groups[place] for place in places], size)
            counted.update(zip(places, parts, strict=True))
        return [counted[place] for place in range(len(groups))]

    def _counted(self, groups: Sequence[Group], size: int) -> list[_Counted]:
        """Return the contributions to groups that share their rows' bins and values."""
        counts = count_bins(groups[0].bins, size)
        return [
            _Counted(counts, sums, group.bins, group.sensitive)
            for group, sums in zip(groups, self._totals(groups, size), strict=True)
        ]

    def _totals(self, groups: Sequence[Group], size: int) -> Sequence[list[Sums] | None]:
        """Return the sums of each group by bin, each in one pass over values that all groups share.

        A term that several groups have is summed once.
        """
        values, exponents = groups[0].values, self.bins.exponents
        if values is None:
            return [None] * len(groups)
        columns = [(j,) for j in range(len(values))]
        asked = [list(zip(group.terms or columns, exponents, strict=True)) for group in groups]
        places = {pair: place for place, pair in enumerate(dict.fromkeys(chain.from_iterable(asked)))}
        by_bin = binned_sums(
            values,
            groups[0].bins,
            size,
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


def _complements(
    shown: Sequence[Sequence[BinTotal | None]],
    whole: Sequence[Sequence[BinTotal]],
    groups: Sequence[int],
    floor: int,
) -> Iterator[int]:
    """Yield the groups to hide with those that are hidden, of some to one of which everyone in a bin belongs.

    The people of the hidden groups follow from the others: in each bin they must be enough.
    """
    left = {k for k in groups if any(bin_ is None for bin_ in shown[k])}
    members = {k: [bin_.having(1.0) for bin_ in whole[k]] for k in groups} if left else {}
    while left and len(left) < len(groups):
        hidden = [sum(members[k][b] for k in left) for b in range(len(whole[groups[0]]))]
        if min(hidden) >= floor:
            return
        fewest = min((k for k in groups if k not in left), key=lambda k: sum(members[k]))
        left.add(fewest)
        yield fewest


def _folded(group: Sequence[BinTotal], floor: int) -> tuple[BinTotal | None, ...]:
    """Return the bins of a group, merged until each may be disclosed; none if even one merged bin may not.

    The sum of merged bins is assigned to the bin with most people; the others are empty.
    """
    if all(bin_.is_enough(floor) for bin_ in group):
        return tuple(replace(bin_, holders=None) for bin_ in group)
    runs = _runs(group)
    firsts = _finest(len(group), {run: joined.is_enough(floor) for run, joined in runs.items()})
    if firsts is None:
        return (None,) * len(group)
    empty = BinTotal(count=0, units=(0,) * len(group[0].units))
    folded = [empty] * len(group)
    for i, j in pairwise((*firsts, len(group))):
        fullest = max(range(i, j), key=lambda b: group[b].count)
        folded[fullest] = replace(runs[i, j], holders=None)
    return tuple(folded)


def _left(group: Sequence[BinTotal], floor: int) -> tuple[BinTotal | None, ...]:
    """Return how many leave in each bin, merged until no number of leavers, or of those left, is too small.

    The sum of merged bins is assigned to the first of them, and the others are hidden: the sum from a bin on
    is right where the bin is shown. Those who stay (the last bin) are counted with the last who leave, but do
    not hide these: if the number of all who ever leave is known, so is that of the last who do.
    """
    *leave, stay = group
    runs, end = _runs(leave), len(leave)
    left = {run: _joined(joined, stay) if run[1] == end else joined for run, joined in runs.items()}
    firsts = _finest(end, {run: runs[run].is_enough(floor) and left[run].is_enough(floor) for run in runs})
    if firsts is None and not left[0, end].is_enough(floor):
        return (None,) * len(group)
    shown: list[BinTotal | None] = [None] * len(group)
    for i, j in pairwise((*(firsts or (0,)), end)):
        shown[i] = left[i, j]
    return tuple(shown)


def _runs(group: Sequence[BinTotal]) -> dict[tuple[int, int], BinTotal]:
    """Return the sum of bins i to j - 1, for all i < j."""
    return {
        (i, j): joined
        for i in range(len(group))
        for j, joined in enumerate(accumulate(group[i:], _joined), start=i + 1)
    }


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


class Holders:
    """How many people hold each value, counted as long as there are few different values."""

    def __init__(self) -> None:
        self.counts: dict[float, int] | None = {}

    def add(self, counts: Mapping[float, int]) -> None:
        """Add counts by value."""
        if self.counts is None:
            return
        for value, count in counts.items():
            if count:
                self.counts[value] = self.counts.get(value, 0) + count
        if len(self.counts) > MOST_VALUES:
            self.counts = None

    def join(self, other: Holders) -> None:
        """Add the counts of another group of rows."""
        if other.counts is None:
            self.counts = None
        else:
            self.add(other.counts)

    def rarest(self, everyone: int) -> int:
        if self.counts is None:
            return everyone
        return min(self.counts.values()) if len(self.counts) > 1 else 0


def add_holders(holders: Sequence[Holders], column: Array | UnitScaled, bins: Bytes) -> None:
    """Add the values of rows to the holders of their bins.

    The first rows usually show which bins have more values than are counted, and all values of the others.
    """
    for part in (slice(0, SAMPLED_ROWS), slice(SAMPLED_ROWS, None)):
        counting = [b for b, held in enumerate(holders) if held.counts is not None]
        if not counting or not len(bins[part]):
            return
        values = column.part(part) if isinstance(column, UnitScaled) else column[part]
        known = sorted({value for b in counting for value in holders[b].counts or ()})
        by_bin = count_values(values, np.array(known), bins[part], len(holders)).tolist()
        for b in counting:
            *counts, others = by_bin[b]
            holders[b].add(dict(zip(known, counts, strict=True)))
            if others:
                unknown, times = np.unique(_unknown(values, bins[part], b, known), return_counts=True)
                holders[b].add(dict(zip(unknown.tolist(), times.tolist(), strict=True)))


def _unknown(values: Array, bins: Bytes, b: int, known: Sequence[float]) -> Array:
    """Return the values of one bin's rows that are not known yet."""
    in_bin = values[bins == b]
    return np.asarray(in_bin[~np.isin(in_bin, known)] if known else in_bin)


@dataclass(frozen=True, slots=True)
class _Counted:
    """A group in one piece of the rows: counts and sums by bin, and rows with a sensitive value."""

    counts: list[int]
    sums: list[Sums] | None
    bins: Bytes
    sensitive: Array | UnitScaled | None


class _GroupTotal:
    """A group over the pieces so far: sums, counts and holders of sensitive values, by bin."""

    def __init__(self, sums: list[Sums]) -> None:
        self._sums = sums
        self._counts = [0] * len(sums)
        self._holders: list[Holders] | None = None

    def add(self, counted: _Counted) -> None:
        self._counts = list(map(add, self._counts, counted.counts))
        if counted.sums is not None:
            self._sums = list(map(add, self._sums, counted.sums))
        if counted.sensitive is not None:
            self._holders = self._holders or [Holders() for _ in self._sums]
            add_holders(self._holders, counted.sensitive, counted.bins)

    def bins(self, shifts: tuple[int, ...]) -> tuple[BinTotal, ...]:
        holders: Sequence[Holders | None] = self._holders or [None] * len(self._sums)
        return tuple(
            BinTotal(count=count, units=sums.rounded(shifts).units, holders=held)
            for count, sums, held in zip(self._counts, self._sums, holders, strict=True)
        )
