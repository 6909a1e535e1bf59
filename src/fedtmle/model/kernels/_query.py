"""What a fused pass over the rows is asked, in the plain arrays that both backends take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.exact import CHUNK
from fedtmle.model.families import Family
from fedtmle.model.scaled import Design, Scaled, scaled
from fedtmle.model.types import Array, Bools, IntArray, Part, packed_size

_NO_MATRIX = np.empty((0, 0))
_ABSENT = np.empty(0)  # a column that is None; the kernels test its length and never read it
LARGEST_POWER = 1000  # a shift beyond it needs two factors: 2^shift itself would overflow


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of a generalised linear loss, checked: the kernels index without checking.

    ``matrix`` is the design where it is one array, else empty; ``addresses`` is where each of its columns
    is, ``constant`` whether it is one number. ``plain`` is all of it as compiled loops take it.
    """

    family: Family
    X: Scaled
    matrix: Array
    offset: Array | None
    y: Array | None
    w: Array | None
    dim: int = field(init=False)
    n_rows: int = field(init=False)
    addresses: IntArray = field(init=False)
    constant: Bools = field(init=False)
    plain: tuple[int, Array, IntArray, Bools, Array, int, Array, Array, Array] = field(init=False)

    def __post_init__(self) -> None:
        columns = (self.matrix,) if len(self.matrix) else self.X.columns
        places = np.array([column.__array_interface__["data"][0] for column in columns], dtype=np.int64)
        if len(self.matrix):  # its rows stand one after the other
            places = places + self.matrix.strides[0] * np.arange(len(self.matrix))
        constant = np.array([c.strides == (0,) for c in self.X.columns])
        dim, n_rows = self.X.shape
        others = (_ABSENT if column is None else column for column in (self.offset, self.y, self.w))
        found = {
            "dim": dim,
            "n_rows": n_rows,
            "addresses": places,
            "constant": constant,
            "plain": (int(self.family), self.matrix, places, constant, self.X.factors, n_rows, *others),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)


def rows_of(family: Family, X: Design, offset: Array | None, y: Array | None, w: Array | None) -> Rows:
    """`Rows` whose shapes fit."""
    if len(X.shape) != 2 or not len(X):
        raise InputError(f"X: expected shape (d, N), d >= 1, not {X.shape}")
    if isinstance(X, Scaled):
        matrix, design = _NO_MATRIX, scaled(X)
    else:
        matrix = _contiguous(X)
        design = Scaled(tuple(matrix), np.ones(len(matrix)))
    n_rows = (design.shape[1],)
    if any(column.shape != n_rows for column in design.columns) or design.factors.shape != (len(X),):
        raise InputError(f"X: expected {len(X)} columns of shape {n_rows}, and as many factors")
    columns = {"offset": offset, "y": y, "w": w}
    for name, column in columns.items():
        if column is not None and np.shape(column) != n_rows:
            raise InputError(f"{name}: expected shape {n_rows}, not {np.shape(column)}")
    plain = {name: None if column is None else _contiguous(column) for name, column in columns.items()}
    return Rows(family=family, X=design, matrix=matrix, **plain)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """What is summed where, checked; 2^shifts[s] = first[s] * second[s], both exact floats."""

    rows: Rows
    eps: Array
    parts: Part
    first: Array
    second: Array

    @property
    def n_chunks(self) -> int:
        return -(-self.rows.n_rows // CHUNK)

    @property
    def gradient_at(self) -> int:
        """The column of the first gradient sum."""
        return _edges(self.rows.dim, self.parts)[1]

    @property
    def hessian_at(self) -> int:
        """The column of the first Hessian sum."""
        return _edges(self.rows.dim, self.parts)[2]

    @property
    def width(self) -> int:
        """The number of sums."""
        return len(self.first)


def query(rows: Rows, eps: Array, parts: Part, shifts: tuple[int, ...]) -> Query:
    """A `Query` whose shapes fit."""
    first, second = _factors(rows.dim, parts, shifts)
    return Query(rows=rows, eps=checked_eps(rows, eps), parts=parts, first=first, second=second)


def checked_eps(rows: Rows, eps: Array) -> Array:
    eps = _contiguous(eps)
    if eps.shape != (rows.dim,):
        raise InputError(f"eps: expected shape ({rows.dim},), not {eps.shape}")
    return eps


@lru_cache(maxsize=256)
def _factors(dim: int, parts: Part, shifts: tuple[int, ...]) -> tuple[Array, Array]:
    """2^shifts as two factors; not to write to, since the same grid is asked many times in a row."""
    edges = _edges(dim, parts)
    if edges[-1] != len(shifts):
        raise InputError(f"shifts: expected {edges[-1]} for the asked parts, not {len(shifts)}")
    if any(len(set(shifts[begin:end])) > 1 for begin, end in pairwise(edges)):
        raise InputError("shifts: the sums of one part share one grid")
    low = [max(min(shift, LARGEST_POWER), -LARGEST_POWER) for shift in shifts]
    first = np.array([math.ldexp(1.0, power) for power in low])
    second = np.array([math.ldexp(1.0, s - power) for s, power in zip(shifts, low, strict=True)])
    return first, second


def _edges(dim: int, parts: Part) -> tuple[int, int, int, int]:
    """Where the sums of the loss, the gradient and the Hessian begin, and where they end."""
    gradient_at = 1 if Part.LOSS in parts else 0
    hessian_at = gradient_at + (dim if Part.GRADIENT in parts else 0)
    return 0, gradient_at, hessian_at, hessian_at + (packed_size(dim) if Part.HESSIAN in parts else 0)


def _contiguous(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.float64)
