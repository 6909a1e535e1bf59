"""Queries that set up a study on tables: factor levels and column scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, final

import numpy as np

from fedtmle.errors import DataError, DecodeError
from fedtmle.model.statistics import AbstractColumns
from fedtmle.model.table import AnyTable
from fedtmle.model.types import Array
from fedtmle.protocol.codes import (
    AbstractCode,
    BitReader,
    BitWriter,
    FixedIntegers,
    read_bytes,
    read_count,
    write_bytes,
)
from fedtmle.protocol.query import AbstractQuery, Local

LARGEST_EXPONENT = 1000
LARGEST_LABEL = 256  # bytes of a level's label
MOST_LEVELS = 4096  # of one factor


Levels = tuple[tuple[str, ...], ...]


@final
@dataclass(frozen=True)
class LevelsCode(AbstractCode[Levels]):
    """The labels of each factor, in the order of `sort_levels`."""

    factors: int

    @property
    def numbers(self) -> int:
        return 0  # as many labels as the silo has

    def write(self, value: Levels, out: BitWriter) -> None:
        for levels in value:
            out.gamma((len(levels),))
            for level in levels:
                write_bytes(level.encode(), out)

    def read(self, bits: BitReader) -> Levels:
        factors = []
        for _ in range(self.factors):
            levels = tuple(_label(bits) for _ in range(read_count(bits, MOST_LEVELS)))
            if levels != sort_levels(set(levels)):
                raise DecodeError("levels are not sorted, or repeat")
            factors.append(levels)
        return tuple(factors)


@final
@dataclass(frozen=True, kw_only=True)
class LevelsQuery(AbstractQuery[Levels, Levels]):
    """The levels of each factor: a silo names those that it has, the union is the study's.

    Levels are labels such as sites or schooling, not records; a study that declares its levels
    asks nothing.
    """

    factors: tuple[str, ...]

    @property
    def explanation(self) -> str:
        return f"the labels that occur in {', '.join(self.factors)}"

    @property
    def answer_code(self) -> LevelsCode:
        return LevelsCode(len(self.factors))

    @property
    def pooled_code(self) -> LevelsCode:
        return self.answer_code

    @property
    def floors(self) -> tuple[str, ...]:
        return ("min_level_rows",)

    def people(self, local: Local) -> Iterable[int]:
        return local.evaluate(self._counts)

    def _counts(self, table: AnyTable) -> list[int]:
        return [count for name in self.factors for count in table.counts(name)]

    def answer(self, local: Local) -> Levels:
        levels = tuple(local.evaluate(lambda table: [table.levels(name) for name in self.factors]))
        for name, labels in zip(self.factors, levels, strict=True):
            if len(labels) > MOST_LEVELS:
                raise DataError(
                    f"column '{name}' has {len(labels)} levels, more than {MOST_LEVELS}; is it a number?"
                )
            long = sum(len(level.encode()) > LARGEST_LABEL for level in labels)
            if long:
                raise DataError(f"column '{name}' has {long} level(s) of more than {LARGEST_LABEL} bytes")
        return tuple(sort_levels(set(labels)) for labels in levels)

    def pool(self, answers: Mapping[str, Levels], sizes: Mapping[str, int]) -> Levels:
        return tuple(
            sort_levels({level for levels in answers.values() for level in levels[j]})
            for j in range(len(self.factors))
        )


@final
@dataclass(frozen=True, kw_only=True)
class ScalesQuery(AbstractQuery[tuple[int, ...], tuple[int, ...]]):
    """Powers of two that bound each column: a silo sends exponents, the largest is the study's.

    The maximum over silos does not depend on the partition, so neither does the grid of the sums;
    a silo whose column is all zero does not affect it.
    """

    columns: AbstractColumns[Any]

    @property
    def explanation(self) -> str:
        return "the power of two above the largest value of each column"

    @property
    def answer_code(self) -> FixedIntegers:
        return FixedIntegers((LARGEST_EXPONENT,) * len(self.columns.names))

    @property
    def pooled_code(self) -> FixedIntegers:
        return self.answer_code

    def answer(self, local: Local) -> tuple[int, ...]:
        largest = local.evaluate(self._largest)
        exponents = np.where(largest > 0, np.frexp(largest)[1], -LARGEST_EXPONENT)
        return tuple(int(e) for e in np.clip(exponents, -LARGEST_EXPONENT, LARGEST_EXPONENT))

    def _largest(self, rows: object) -> Array:
        """Return the largest magnitude in each column, shape (p,)."""

        def largest(piece: object) -> Array:
            return np.array([np.maximum(c.max(), -c.min()) for c in self.columns.evaluate(piece)])

        return reduce(np.maximum, self.columns.over(rows, largest), np.zeros(len(self.columns.names)))

    def pool(self, answers: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(max(column) for column in zip(*answers.values(), strict=True))


def sort_levels(levels: set[str]) -> tuple[str, ...]:
    """Return the levels in numeric order if all are numbers, else as text: the same at every party."""
    numbers = {level: _number(level) for level in levels}
    if any(math.isnan(number) for number in numbers.values()):
        return tuple(sorted(levels))
    return tuple(sorted(levels, key=lambda level: (numbers[level], level)))


def _number(level: str) -> float:
    """Return the number that a label is, or NaN, which has no place in an order."""
    try:
        return float(level)
    except ValueError:
        return math.nan


def _label(bits: BitReader) -> str:
    try:
        return read_bytes(bits, LARGEST_LABEL).decode()
    except UnicodeDecodeError:
        raise DecodeError("a label is not text") from None
