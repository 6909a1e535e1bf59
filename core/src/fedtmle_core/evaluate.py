"""Answering a question: the integer sums of its blocks over a hospital's people.

People are visited in blocks that stay in the cache. Each term of a block's graph is computed once, parts
first, and let go after its last use; a `Kept` term is computed once for the table, and its column stays. Sums
are exact integers, so that blocks, threads and the order of people cannot change a bit of an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import add
from typing import TypeAlias, TypeVar, final

import numpy as np

from fedtmle_core import graph
from fedtmle_core.blocks import Block, Cells, Intervals, Lattice, Moments, Score
from fedtmle_core.exact import Sums, column_shifts
from fedtmle_core.kernels import OUTSIDE, binned_sums, bins_between, column_sums, count_bins
from fedtmle_core.parallel import done, mapped
from fedtmle_core.plan import Plan, Question
from fedtmle_core.recipe import Recipe, recipe
from fedtmle_core.scores import read_scores
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import Kept, Term
from fedtmle_core.types import Array, exponent

Result = TypeVar("Result")

BLOCK_NUMBERS = 1 << 20  # numbers of a block's terms together: 8 MiB, within a processor's cache
LEAST_BLOCK, LARGEST_BLOCK = 1 << 11, 1 << 16  # people: below, the interpreter's share grows; above, no gain
KEPT_BYTES = 1 << 29  # of kept columns, beside the table; more are computed again when they are asked for
WHAT = "part of a sum"


@final
@dataclass(frozen=True)
class Place:
    """Consecutive people: where they are in the table, and their part of the sheet."""

    rows: slice
    part: Sheet


@final
@dataclass(frozen=True)
class Asked:
    """Groups of terms that are asked of a sheet, with the columns that are at hand."""

    sheet: Sheet
    recipe: Recipe
    kept: Sequence[Array | None]

    def places(self) -> Iterator[Place]:
        """Yield consecutive people: all at once where clusters are summed."""
        size = min(max(BLOCK_NUMBERS // max(self.recipe.most, 1), LEAST_BLOCK), LARGEST_BLOCK)
        if self.sheet.clusters or self.sheet.n <= size:
            size = max(self.sheet.n, 1)
        for start in range(0, self.sheet.n, size):
            rows = slice(start, min(start + size, self.sheet.n))
            yield Place(rows, self.sheet.part(rows))

    def each(self, place: Place) -> Iterator[list[Array]]:
        """Yield the columns of each group, shape (people,) each."""
        return self.recipe.values(self.kept, place.rows, place.part)

    def values(self, place: Place) -> list[Array]:
        """Return the columns of the one group."""
        (values,) = self.each(place)
        return values


@final
@dataclass
class Workspace:
    """A sheet, and the columns that are kept of it, the last used last."""

    sheet: Sheet
    kept: OrderedDict[Term, Array] = field(default_factory=OrderedDict)

    @property
    def digest(self) -> bytes:
        """The sheet's digest."""
        return self.sheet.digest

    def answer(self, question: Question, plan: Plan) -> tuple[int, ...]:
        """Return the integers of a question, in the order of its lanes."""
        intervals = question.intervals(plan)
        self._keep(question.terms)
        answers: dict[Block, tuple[int, ...]] = {}
        for blocks in _together(question.blocks):
            match blocks[0]:
                case Score():
                    units = self._scores([each for each in blocks if isinstance(each, Score)], intervals)
                    answers.update(zip(blocks, units, strict=True))
                case Moments() as block:
                    answers[block] = self._moments(block, intervals)
                case Cells() as block:
                    answers[block] = self._cells(block, intervals)
        return tuple(unit for block in question.blocks for unit in answers[block])

    def columns(self, terms: Sequence[Term]) -> list[Array]:
        """Return the columns of all people; they stay in this process, for the judgement of own records."""
        filled = [np.empty(self.sheet.n) for _ in terms]
        asked = self._asked([terms])

        def fill(place: Place) -> None:
            for column, values in zip(filled, asked.values(place), strict=True):
                column[place.rows] = values

        done(fill, asked.places())
        return filled

    def pieces(self, terms: Sequence[Term]) -> Iterator[Array]:
        """Yield the columns of consecutive people, shape (p, people)."""
        asked = self._asked([terms])
        for place in asked.places():
            yield np.stack(asked.values(place))

    def _keep(self, roots: Sequence[Term]) -> None:
        """Compute the columns of kept terms that are not there, in one pass over the people."""
        wanted = [term for term in graph.ordered(roots) if isinstance(term, Kept)]
        for term in wanted:
            if term in self.kept:
                self.kept.move_to_end(term)
        missing = [term for term in wanted if term not in self.kept]
        if missing and len(wanted) * 8 * self.sheet.n <= KEPT_BYTES:
            self.kept.update(zip(missing, self.columns([term.of for term in missing]), strict=True))
        while len(self.kept) * 8 * self.sheet.n > max(KEPT_BYTES, len(wanted) * 8 * self.sheet.n):
            self.kept.popitem(last=False)

    def _asked(self, groups: Sequence[Sequence[Term]]) -> Asked:
        how = recipe(tuple(map(tuple, groups)), frozenset(self.kept))
        return Asked(self.sheet, how, how.at_hand(self.kept))

    def _over(self, terms: Sequence[Term], work: Callable[[list[Array]], Result]) -> Iterator[Result]:
        """Yield ``work`` of the values of consecutive people, computed in parallel."""
        asked = self._asked([terms])
        return mapped(lambda place: work(asked.values(place)), asked.places())

    # One kind of block after another.

    def _scores(self, blocks: Sequence[Score], intervals: Intervals) -> list[tuple[int, ...]]:
        """Return the units of scores of the same layers at the same point, which share a pass."""
        grids = [block.shifts(intervals) for block in blocks]
        scores = read_scores(blocks, grids, self.sheet)
        asked = self._asked(scores.asked)
        totals = [Sums((0,) * len(shifts), shifts) for shifts in grids]
        for parts in mapped(lambda place: scores.sums(asked.each(place), place.rows), asked.places()):
            totals = [total + part for total, part in zip(totals, parts, strict=True)]
        return [
            total.units if block.lattice is None else on_lattice(total, block.lattice, self.sheet.n)
            for block, total in zip(blocks, totals, strict=True)
        ]

    def _moments(self, block: Moments, intervals: Intervals) -> tuple[int, ...]:
        exponents, shifts = block.exponents(intervals), block.shifts(intervals)

        def summed(values: list[Array]) -> Sums:
            return column_sums(values, exponents, what=WHAT, terms=block.products)

        zero = Sums((0,) * len(shifts), column_shifts(exponents))
        return reduce(add, self._over(block.columns, summed), zero).rounded(shifts).units

    def _cells(self, block: Cells, intervals: Intervals) -> tuple[int, ...]:
        exponents = [exponent(max(map(abs, intervals[term]))) for term in block.sums]
        groups, fine = len(block.groups), column_shifts(exponents)
        coarse = (block.places,) * len(exponents)

        def counted(values: list[Array]) -> list[tuple[int, Sums]]:
            bins = bins_between(block.edges, np.ascontiguousarray(values[0]))
            cells: list[tuple[int, Sums]] = []
            for group in values[1 : 1 + groups]:
                inside = np.where(group != 0.0, bins, np.uint8(OUTSIDE))
                counts = count_bins(inside, block.bins)
                sums = [Sums((), ())] * block.bins
                if exponents:
                    sums = binned_sums(values[1 + groups :], inside, block.bins, exponents, what=WHAT)
                cells += zip(counts, sums, strict=True)
            return cells

        total = [(0, Sums((0,) * len(exponents), fine))] * block.cells
        for cells in self._over(block.terms, counted):
            total = [(n + m, a + b) for (n, a), (m, b) in zip(total, cells, strict=True)]
        return tuple(unit for n, sums in total for unit in (n, *sums.rounded(coarse).units))


def _together(blocks: Sequence[Block]) -> Iterable[list[Block]]:
    """Return the blocks that are answered in one pass: scores of the same layers at the same point."""
    found: dict[object, list[Block]] = {}
    for block in dict.fromkeys(blocks):
        key = (block.family, block.layers, block.at) if isinstance(block, Score) else block
        found.setdefault(key, []).append(block)
    return found.values()


def on_lattice(total: Sums, lattice: Lattice, n: int) -> tuple[int, ...]:
    """Return N_m round(C g_m 2^places), half to even, in exact integers; zeros for a hospital with nobody."""
    if n == 0:
        return (0,) * (len(total.units) if lattice.C is None else len(lattice.C))
    return tuple(n * _rounded(row, total, lattice.places, n) for row in _ratios(lattice, len(total.units)))


Ratio: TypeAlias = tuple[int, int, int]  # c of the sum at a place is top / 2^depth: place, top, depth


@lru_cache(maxsize=16)  # hospitals of one process share a question
def _ratios(lattice: Lattice, width: int) -> tuple[tuple[Ratio, ...], ...]:
    """Return the factors of the sums in each row of C, exactly, without those that are 0."""
    if lattice.C is None:
        return tuple(((j, 1, 0),) for j in range(width))
    ratios = [[factor.as_integer_ratio() for factor in row] for row in lattice.C]
    return tuple(
        tuple((j, top, bottom.bit_length() - 1) for j, (top, bottom) in enumerate(row) if top)
        for row in ratios
    )


def _rounded(row: Sequence[Ratio], total: Sums, places: int, n: int) -> int:
    """Return round(sum_k c_k S_k 2^places / n), half to even: summands are brought to one power of two."""
    depths = [depth + total.shifts[j] - places for j, _, depth in row]
    deepest = max([0, *depths])
    above = sum(
        [(top * total.units[j]) << (deepest - depth) for (j, top, _), depth in zip(row, depths, strict=True)]
    )
    below = n << deepest
    whole, rest = divmod(above, below)
    return whole + (2 * rest > below or (2 * rest == below and whole % 2 == 1))


def values_of(question: Question, totals: Sequence[int], plan: Plan) -> list[Array]:
    """Return the totals of each block as numbers: sums, or sums of N_m times rounded means over a lattice."""
    intervals, found, start = question.intervals(plan), [], 0
    for block in question.blocks:
        shifts = _shifts(block, intervals)
        units = totals[start : start + len(shifts)]
        found.append(Sums(tuple(units), tuple(shifts)).values())
        start += len(shifts)
    return found


def _shifts(block: Block, intervals: Mapping[Term, tuple[float, float]]) -> list[int]:
    match block:
        case Score(lattice=Lattice() as lattice):
            return [lattice.places] * (block.width if lattice.C is None else len(lattice.C))
        case Score() | Moments():
            return list(block.shifts(intervals))
        case Cells():
            return [0, *[block.places] * len(block.sums)] * block.cells
