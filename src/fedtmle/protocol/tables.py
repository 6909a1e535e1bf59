"""Queries that set up a study on tables: factor levels, column scales, and counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, final

import numpy as np

from fedtmle.errors import DataError, DecodeError
from fedtmle.model.columns import column_sums
from fedtmle.model.exact import FINE_BITS, GRID_BITS, Sums, column_shifts, zero_sums
from fedtmle.model.table import AnyTable, Table, over_blocks
from fedtmle.model.types import Array
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.query import AbstractQuery, Cell, Link, Local, Over, Phase, Spread, whole
from fedtmle.protocol.sums import AbstractSums

LARGEST_EXPONENT = 1000
LARGEST_LABEL = 256  # bytes of a level's label
LARGEST_COUNT = 4096  # levels of one factor


Levels = tuple[tuple[str, ...], ...]


@final
@dataclass(frozen=True, kw_only=True)
class LevelsQuery(AbstractQuery[Levels, Levels]):
    """The levels of each factor: a silo says which it has, the union is the study's.

    Levels are labels such as sites or schooling, not records; a study that declares its levels
    asks nothing.
    """

    factors: tuple[str, ...]

    @property
    def phase(self) -> Phase:
        return Phase.NUISANCE

    @property
    def tells(self) -> str:
        return f"the labels that occur in {', '.join(self.factors)}"

    @property
    def functionals(self) -> int:
        return 0  # as many labels as the silo has

    def holders(self, local: Local) -> Iterable[int]:
        return tuple(local.evaluate(self._counts))

    def _counts(self, table: AnyTable) -> list[int]:
        return [count for name in self.factors for count in table.counts(name)]

    def answer(self, local: Local) -> Levels:
        levels = tuple(local.evaluate(lambda table: [table.levels(name) for name in self.factors]))
        for name, own in zip(self.factors, levels, strict=True):
            if len(own) > LARGEST_COUNT:
                raise DataError(
                    f"column '{name}' has {len(own)} levels, more than {LARGEST_COUNT}; is it a number?"
                )
            long = sum(len(level.encode()) > LARGEST_LABEL for level in own)
            if long:
                raise DataError(f"column '{name}' has {long} level(s) of more than {LARGEST_LABEL} bytes")
        return tuple(sort_levels(set(own)) for own in levels)

    def pool(self, answers: Mapping[str, Levels], sizes: Mapping[str, int]) -> Levels:  # noqa: ARG002
        return tuple(
            sort_levels({level for levels in answers.values() for level in levels[j]})
            for j in range(len(self.factors))
        )

    def write_answer(self, answer: Levels, out: BitWriter, link: Link) -> None:  # noqa: ARG002
        self.write_pooled(answer, out)

    def read_answer(self, bits: BitReader, link: Link) -> Levels:  # noqa: ARG002
        return self.read_pooled(bits)

    def write_pooled(self, pooled: Levels, out: BitWriter) -> None:
        for levels in pooled:
            out.gamma((len(levels),))
            for level in levels:
                data = level.encode()
                out.gamma((len(data),))
                out.uint(int.from_bytes(data, "big"), 8 * len(data))

    def read_pooled(self, bits: BitReader) -> Levels:
        pooled = []
        for _ in self.factors:
            count = _bounded(bits, LARGEST_COUNT)
            levels = tuple(_label(bits) for _ in range(count))
            if levels != sort_levels(set(levels)):
                raise DecodeError("levels are not sorted, or repeat")
            pooled.append(levels)
        return tuple(pooled)

    def retires(self, answer: Levels) -> bool:  # noqa: ARG002
        return False


@final
@dataclass(frozen=True, kw_only=True)
class ScalesQuery(AbstractQuery[tuple[int, ...], tuple[int, ...]]):
    """Powers of two that bound each column: a silo sends exponents, the largest is the study's.

    The maximum over silos does not depend on the partition, so neither does the grid of the sums;
    a silo whose column is all zero has no say in it.
    """

    columns: Callable[[Any], Iterable[Array]]  # of a piece of the table, each of shape (N,)
    count: int
    over: Over = over_blocks

    @property
    def phase(self) -> Phase:
        return Phase.NUISANCE

    @property
    def tells(self) -> str:
        return "the power of two above the largest value of each column"

    @property
    def functionals(self) -> int:
        return self.count

    def answer(self, local: Local) -> tuple[int, ...]:
        largest = local.evaluate(self._largest)
        exponents = np.where(largest > 0, np.frexp(largest)[1], -LARGEST_EXPONENT)
        return tuple(int(e) for e in np.clip(exponents, -LARGEST_EXPONENT, LARGEST_EXPONENT))

    def _largest(self, table: AnyTable) -> Array:
        """The largest magnitude in each column, shape (p,)."""

        def reach(piece: Table) -> Array:
            return np.array([np.maximum(column.max(), -column.min()) for column in self.columns(piece)])

        return reduce(np.maximum, self.over(table, reach), np.zeros(self.count))

    def pool(self, answers: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> tuple[int, ...]:  # noqa: ARG002
        return tuple(max(column) for column in zip(*answers.values(), strict=True))

    def write_answer(self, answer: tuple[int, ...], out: BitWriter, link: Link) -> None:  # noqa: ARG002
        self.write_pooled(answer, out)

    def read_answer(self, bits: BitReader, link: Link) -> tuple[int, ...]:  # noqa: ARG002
        return self.read_pooled(bits)

    def write_pooled(self, pooled: tuple[int, ...], out: BitWriter) -> None:
        out.fixed(pooled, (LARGEST_EXPONENT,) * self.count)

    def read_pooled(self, bits: BitReader) -> tuple[int, ...]:
        return bits.fixed((LARGEST_EXPONENT,) * self.count)

    def retires(self, answer: tuple[int, ...]) -> bool:  # noqa: ARG002
        return False


@final
@dataclass(frozen=True, kw_only=True)
class TallyQuery(AbstractSums):
    """Pooled sums of columns of the table: counts per arm, of observed outcomes, of weights."""

    columns: Callable[[Any], Array]  # of a piece of the table, shape (p, N)
    exponents: tuple[int, ...]
    n: int
    what: str = "count"
    phase: Phase = Phase.NUISANCE
    counts: tuple[Cell, ...] = ()
    spread: tuple[Spread, ...] = ()
    over: Over = whole

    @property
    def shifts(self) -> tuple[int, ...]:
        return column_shifts(self.exponents)

    @property
    def row_units(self) -> int:
        return 1 << (GRID_BITS + FINE_BITS)

    @property
    def tells(self) -> str:
        return f"exact sums over the rows: {self.what}"

    def cells(self) -> Iterable[Cell]:
        return self.counts

    def spreads(self) -> Iterable[Spread]:
        return self.spread

    def answer(self, local: Local) -> Sums:
        def summed(piece: Any) -> Sums:
            return column_sums(self.columns(piece), self.exponents, what=self.what)

        sums = local.evaluate(lambda table: self.over(table, summed))
        return reduce(add, sums, zero_sums(self.shifts))


def sort_levels(levels: set[str]) -> tuple[str, ...]:
    """Numbers in their order, else text order: the same at every party."""
    numbers = {level: _number(level) for level in levels}
    if any(math.isnan(number) for number in numbers.values()):
        return tuple(sorted(levels))
    return tuple(sorted(levels, key=lambda level: (numbers[level], level)))


def _number(level: str) -> float:
    """The number that a label is, else NaN, which has no place in an order."""
    try:
        return float(level)
    except ValueError:
        return math.nan


def _bounded(bits: BitReader, largest: int) -> int:
    (count,) = bits.gamma(1)
    if not 0 <= count <= largest:
        raise DecodeError("a count is out of its range")
    return count


def _label(bits: BitReader) -> str:
    length = _bounded(bits, LARGEST_LABEL)
    try:
        return bits.uint(8 * length).to_bytes(length, "big").decode()
    except UnicodeDecodeError:
        raise DecodeError("a label is not text") from None
