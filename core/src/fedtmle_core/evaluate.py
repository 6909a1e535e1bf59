"""Answering a question: the integer sums of its blocks over a hospital's people.

People are visited in blocks that stay in the cache. Each term of a block's graph is computed once, parts
first, and let go after its last use; a `Kept` term is computed once for the table, and its column stays. Sums
are exact integers, so that blocks, threads and the order of people cannot change a bit of an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import add
from typing import TypeAlias, TypeVar, final

import numpy as np

from fedtmle_core import graph, kernels
from fedtmle_core.blocks import Block, Cells, Intervals, Lattice, Moments, Score
from fedtmle_core.exact import Sums, column_shifts
from fedtmle_core.kernels import OUTSIDE, binned_sums, bins_between, column_sums, count_bins
from fedtmle_core.leaves import Number
from fedtmle_core.parallel import done, mapped
from fedtmle_core.plan import Plan, Question
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, Constant, Kept, Term
from fedtmle_core.types import Array, Scaled, exponent

Result = TypeVar("Result")

BLOCK_NUMBERS = 1 << 20  # numbers of a block's terms together: 8 MiB, within a processor's cache
LEAST_BLOCK, LARGEST_BLOCK = 1 << 11, 1 << 16  # people: below, the interpreter's share grows; above, no gain
KEPT_BYTES = 1 << 29  # of kept columns, beside the table; more are computed again when they are asked for
WHAT = "part of a sum"


@final
@dataclass(frozen=True)
class Recipe:
    """The order in which terms are computed; ``parts`` are places of earlier ones."""

    terms: tuple[Term, ...]
    parts: tuple[tuple[int, ...], ...]
    roots: tuple[int, ...]
    last: tuple[tuple[int, ...], ...]  # by place: the earlier ones that nobody needs after it


@lru_cache(maxsize=64)
def recipe(roots: tuple[Term, ...], kept: frozenset[Term]) -> Recipe:
    """Return the recipe of some terms, where the columns of those ``kept`` are at hand."""
    place: dict[Term, int] = {}
    terms: list[Term] = []
    waiting: list[tuple[Term, bool]] = [(root, False) for root in reversed(roots)]
    while waiting:
        term, is_ready = waiting.pop()
        if term in place:
            continue
        if is_ready or term in kept or not term.parts:
            place[term] = len(terms)
            terms.append(term)
        else:
            waiting.append((term, True))
            waiting += [(part, False) for part in reversed(term.parts)]
    parts = tuple(() if term in kept else tuple(place[p] for p in term.parts) for term in terms)
    asked = {place[root] for root in roots}
    user = {j: k for k, needed in enumerate(parts) for j in needed if j not in asked}
    last: list[list[int]] = [[] for _ in terms]
    for j, k in user.items():
        last[k].append(j)
    return Recipe(tuple(terms), parts, tuple(place[root] for root in roots), tuple(map(tuple, last)))


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
        return tuple(unit for block in question.blocks for unit in self._block(block, intervals))

    def columns(self, terms: Sequence[Term]) -> list[Array]:
        """Return the columns of all people; they stay in this process, for the judgement of own records."""
        filled = [np.empty(self.sheet.n) for _ in terms]

        def fill(place: tuple[slice, Sheet]) -> None:
            rows, part = place
            for column, values in zip(filled, self._values(tuple(terms), rows, part), strict=True):
                column[rows] = values

        done(fill, self._pieces(terms))
        return filled

    def pieces(self, terms: Sequence[Term]) -> Iterator[Array]:
        """Yield the columns of consecutive people, shape (p, people)."""
        for rows, part in self._pieces(terms):
            yield np.stack(self._values(tuple(terms), rows, part))

    def _keep(self, roots: Sequence[Term]) -> None:
        """Compute the columns of kept terms that are not there, parts first."""
        wanted = [term for term in graph.ordered(roots) if isinstance(term, Kept)]
        for term in wanted:
            if term in self.kept:
                self.kept.move_to_end(term)
        for term in wanted:
            if term not in self.kept and len(wanted) * 8 * self.sheet.n <= KEPT_BYTES:
                (column,) = self.columns([term.of])
                self.kept[term] = column
        while len(self.kept) * 8 * self.sheet.n > max(KEPT_BYTES, len(wanted) * 8 * self.sheet.n):
            self.kept.popitem(last=False)

    def _pieces(self, terms: Sequence[Term]) -> Iterator[tuple[slice, Sheet]]:
        """Yield consecutive people: all at once where clusters are summed."""
        count = len(self._recipe(tuple(terms)).terms)
        size = min(max(BLOCK_NUMBERS // max(count, 1), LEAST_BLOCK), LARGEST_BLOCK)
        if self.sheet.clusters or self.sheet.n <= size:
            size = max(self.sheet.n, 1)
        for start in range(0, self.sheet.n, size):
            rows = slice(start, min(start + size, self.sheet.n))
            yield rows, self.sheet.part(rows)

    def _recipe(self, terms: tuple[Term, ...]) -> Recipe:
        return recipe(terms, frozenset(self.kept))

    def _values(self, terms: tuple[Term, ...], rows: slice, part: Sheet) -> list[Array]:
        """Return the values of terms for consecutive people, shape (people,) each."""
        how = self._recipe(terms)
        values: list[Array | None] = [None] * len(how.terms)
        for k, (term, parts) in enumerate(zip(how.terms, how.parts, strict=True)):
            column = self.kept.get(term)
            if column is not None:
                values[k] = column[rows]
            else:
                values[k] = term.values([_present(values[j]) for j in parts], part)
            for j in how.last[k]:
                values[j] = None
        return [_present(values[root]) for root in how.roots]

    def _over(self, terms: Sequence[Term], work: Callable[[list[Array]], Result]) -> Iterator[Result]:
        """Yield ``work`` of the values of consecutive people, computed in parallel."""
        asked = tuple(terms)
        return mapped(lambda place: work(self._values(asked, *place)), self._pieces(asked))

    # One block after another.

    def _block(self, block: Block, intervals: Intervals) -> tuple[int, ...]:
        match block:
            case Score():
                return self._score(block, intervals)
            case Moments():
                return self._moments(block, intervals)
            case Cells():
                return self._cells(block, intervals)

    def _score(self, block: Score, intervals: Intervals) -> tuple[int, ...]:
        shifts, at = block.shifts(intervals), np.array(block.at)
        in_place = {term: _in_place(term, self.sheet) for term in block.terms}
        asked = tuple(dict.fromkeys(term for term in block.terms if in_place[term] is None))
        place = {term: k for k, term in enumerate(asked)}

        def summed(rows: slice, part: Sheet) -> Sums:
            values = self._values(asked, rows, part)

            def column(term: Term) -> tuple[Array, float]:
                found = in_place[term]
                return (values[place[term]], 1.0) if found is None else (found[0][rows], found[1])

            def whole(term: Term | None) -> Array | None:
                if term is None:
                    return None
                values, factor = column(term)
                return values if factor == 1.0 else values * factor

            units = Sums((0,) * len(shifts), shifts)
            for layer in block.layers:
                columns = [column(term) for term in layer.X]
                factors = np.array([factor for _, factor in columns]) * np.array(layer.factors or 1.0)
                X = Scaled(tuple(values for values, _ in columns), factors)
                records = kernels.glm_rows(
                    block.family, X, whole(layer.offset), whole(layer.y), whole(layer.w)
                )
                units = units + Sums(kernels.glm_sums(records, at, block.part, shifts), shifts)
            return units

        parts = mapped(lambda rows: summed(*rows), self._pieces(asked or (ONE,)))
        total = reduce(add, parts, Sums((0,) * len(shifts), shifts))
        return total.units if block.lattice is None else on_lattice(total, block.lattice, self.sheet.n)

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


def _in_place(term: Term, sheet: Sheet) -> tuple[Array, float] | None:
    """Return a column that needs no computation, and its factor; None if there is none."""
    if isinstance(term, Number) and sheet.is_complete(term.name):
        return sheet.number(term.name), 2.0**-term.exponent
    if isinstance(term, Constant):
        return np.broadcast_to(np.float64(term.value), (sheet.n,)), 1.0
    return None


def _present(values: Array | None) -> Array:
    if values is None:
        raise AssertionError("a term is computed before those that are made of it")
    return values


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
