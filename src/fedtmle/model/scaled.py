"""A design that stays where its columns are: nothing of the size of the data is made for a regression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model.types import Array, IntArray


@final
@dataclass(frozen=True)
class Scaled:
    """Column j of the design is ``columns[j] * factors[j]``, row by row; each column is of shape (N,).

    A column is contiguous, or a constant of stride 0 that takes no memory. Columns are not to be written to.
    ``largest`` has the largest magnitude of each, where that is known.
    """

    columns: tuple[Array, ...]
    factors: Array
    largest: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.columns), len(self.columns[0]) if self.columns else 0

    @property
    def reach(self) -> float:
        """A bound of every |x| of the design; infinite where none is known."""
        if self.largest is None:
            return math.inf
        return float((self.largest * np.abs(self.factors)).max(initial=0.0))

    def __len__(self) -> int:
        return len(self.columns)

    def part(self, rows: slice | IntArray) -> Array:
        """Some rows of the design, shape (d, rows)."""
        return np.stack(
            [column[rows] * factor for column, factor in zip(self.columns, self.factors, strict=True)]
        )

    def take(self, rows: IntArray) -> Scaled:
        """The design of the given rows, in the given order."""
        return Scaled(tuple(column[rows] for column in self.columns), self.factors)


Design = Array | Scaled


def scaled(design: Design) -> Scaled:
    """Any design as columns: float64, contiguous or constant."""
    if isinstance(design, Scaled):
        factors = np.ascontiguousarray(design.factors, dtype=np.float64)
        return Scaled(_flat(design.columns), factors, design.largest)
    return Scaled(_flat(tuple(design)), np.ones(len(design)))


def matrix(design: Design) -> Array:
    """Any design as one array, shape (d, N)."""
    return design.part(slice(None)) if isinstance(design, Scaled) else design


def _flat(columns: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(
        column
        if column.strides == (0,) and column.dtype == np.float64
        else np.ascontiguousarray(column, dtype=np.float64)
        for column in columns
    )
