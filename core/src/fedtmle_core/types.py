"""Array aliases, designs by column, parts of a query, bounds of a row's contribution, families of losses."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Codes = NDArray[np.int16]  # the code of the arm in each row
Bools = NDArray[np.bool_]
Columns = Sequence[Array] | Array  # columns of shape (N,) each: a list of them, or one array of shape (p, N)


class Part(enum.Flag):
    """What a query asks to be summed over the rows, in this order on the wire."""

    LOSS = enum.auto()  # sum of L(p(eps)) - L(p(0)): -log p^k cancels row by row
    GRADIENT = enum.auto()  # d sums
    HESSIAN = enum.auto()  # d(d+1)/2 sums, upper triangle row by row


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBound:
    """Public powers of two that bound one row: |grad_j| <= 2^gradient, |hess_jk| <= 2^curvature.

    The mean value theorem bounds the loss too: |L(eps) - L(0)| <= sum_j |eps_j| 2^gradient.
    """

    gradient: int
    curvature: int


def packed_size(dim: int) -> int:
    """Entries of the upper triangle of a symmetric d x d matrix."""
    return dim * (dim + 1) // 2


def upper_pairs(dim: int) -> list[tuple[int, int]]:
    """The places of those entries, row by row."""
    return [(j, k) for j in range(dim) for k in range(j, dim)]


def unpack(entries: Array, dim: int) -> Array:
    """The symmetric matrix whose upper triangle, row by row, is ``entries``; shape (d, d)."""
    return np.asarray(entries, dtype=np.float64)[_places(dim)]


@lru_cache(maxsize=256)
def _places(dim: int) -> IntArray:
    """Where each entry of a symmetric matrix is in its upper triangle, shape (d, d)."""
    places = np.zeros((dim, dim), dtype=np.int64)
    for place, (j, k) in enumerate(upper_pairs(dim)):
        places[j, k] = places[k, j] = place
    return places


def exponent(bound: float) -> int:
    """The least c with |bound| < 2^c: a declared bound as a power of two."""
    return math.frexp(bound)[1]


def first(column: Array) -> Array:
    """Return the column; if it is a constant that takes no memory, its first row only."""
    return column[:1] if column.strides == (0,) else column


def is_one(column: Array) -> bool:
    """Whether a column is one everywhere. A constant column is judged by its first row."""
    return bool((first(column) == 1.0).all())


def product(column: Array, factor: Array) -> Array:
    """Return the product row by row; if one of the two is one everywhere, the other: do not write to it."""
    if column.strides == (0,) and is_one(column):
        return factor
    return column if factor.strides == (0,) and is_one(factor) else column * factor


def combine(parts: Sequence[tuple[Array | float, Array]], total: Array) -> None:
    """Fill ``total``, shape (N,), with the sum of factors times columns, added in order."""
    if not parts:
        total[:] = 0.0
    for place, (factor, column) in enumerate(parts):
        if place:
            total += factor * column
        else:
            np.multiply(factor, column, out=total)


@final
@dataclass(frozen=True)
class UnitScaled:
    """A column on the unit scale of its range, (column - low) / width, computed where it is read."""

    column: Array
    low: float
    width: float

    def part(self, rows: slice) -> Array:
        """Return some rows."""
        scaled = self.column[rows] - self.low
        scaled /= self.width
        return np.asarray(scaled)

    def __len__(self) -> int:
        return len(self.column)


@final
@dataclass(frozen=True)
class Scaled:
    """A design that stays where its columns are: column j is ``columns[j] * factors[j]``, row by row.

    Each column has shape (N,) and is contiguous, or a constant of stride 0 that takes no memory. Columns must
    not be written to. ``largest`` holds the largest magnitude of each column, if known.
    """

    columns: tuple[Array, ...]
    factors: Array
    largest: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.columns), len(self.columns[0]) if self.columns else 0

    @property
    def reach(self) -> float:
        """A bound of every |x| of the design; infinite if none is known."""
        if self.largest is None:
            return math.inf
        return float((self.largest * np.abs(self.factors)).max(initial=0.0))

    def __len__(self) -> int:
        return len(self.columns)

    def part(self, rows: slice | IntArray) -> Array:
        """Return some rows of the design, shape (d, rows)."""
        return np.stack(
            [column[rows] * factor for column, factor in zip(self.columns, self.factors, strict=True)]
        )

    def chosen(self, columns: Sequence[int]) -> Scaled:
        """Return the design of some columns, in the given order."""
        places = list(columns)
        largest = None if self.largest is None else self.largest[places]
        return Scaled(tuple(self.columns[j] for j in places), self.factors[places], largest)

    def take(self, rows: IntArray) -> Scaled:
        """Return the design of the given rows, in the given order."""
        return Scaled(tuple(column[rows] for column in self.columns), self.factors)


Design = Array | Scaled


def scaled(design: Design) -> Scaled:
    """Return any design as columns that are float64, and contiguous or constant."""
    if isinstance(design, Scaled):
        factors = np.ascontiguousarray(design.factors, dtype=np.float64)
        return Scaled(_flat(design.columns), factors, design.largest)
    return Scaled(_flat(tuple(design)), np.ones(len(design)))


def matrix(design: Design) -> Array:
    """Return any design as one array, shape (d, N)."""
    return design.part(slice(None)) if isinstance(design, Scaled) else design


def _flat(columns: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(
        column
        if column.strides == (0,) and column.dtype == np.float64
        else np.ascontiguousarray(column, dtype=np.float64)
        for column in columns
    )


# The loss of one row as a function of its linear predictor: rho(eta, y).

Response = Literal["binary", "continuous", "count"]  # the kinds of a response


class Family(enum.IntEnum):
    """rho, with rho' and rho'' its derivatives in eta. The integer is the kernels' code."""

    LINEAR = 0  # rho = eta: the exponential tilt, whose curvature is all in the normaliser
    GAUSSIAN = 1  # rho = (eta - y)^2 / 2
    LOGISTIC = 2  # rho = log(1 + e^eta) - y eta: binomial outcomes and the density fluctuation
    POISSON = 3  # rho = e^eta - y eta

    @property
    def curvature_ceiling(self) -> float | None:
        """The supremum of rho'' over the real line, or None if it is infinite."""
        return _CURVATURE_CEILINGS[self]


_CURVATURE_CEILINGS = (0.0, 1.0, 0.25, None)  # in the order of the codes
