"""What a fused pass over the rows is asked, in the plain arrays that both backends take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.exact import CHUNK
from fedtmle.model.families import Family
from fedtmle.model.types import Array, Part, packed_size

LARGEST_POWER = 1000  # a shift beyond it needs two factors: 2^shift itself would overflow


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Arguments of `glm_sums`, checked; 2^shifts[s] = first[s] * second[s], both exact floats."""

    family: Family
    X: Array
    offset: Array | None
    y: Array | None
    w: Array | None
    eps: Array
    parts: Part
    first: Array
    second: Array

    @property
    def dim(self) -> int:
        return int(self.X.shape[0])

    @property
    def n_rows(self) -> int:
        return int(self.X.shape[1])

    @property
    def n_chunks(self) -> int:
        return -(-self.n_rows // CHUNK)

    @property
    def gradient_at(self) -> int:
        """The column of the first gradient sum."""
        return _edges(self.dim, self.parts)[1]

    @property
    def hessian_at(self) -> int:
        """The column of the first Hessian sum."""
        return _edges(self.dim, self.parts)[2]

    @property
    def width(self) -> int:
        """The number of sums."""
        return len(self.first)


def query(
    family: Family,
    X: Array,
    offset: Array | None,
    y: Array | None,
    w: Array | None,
    eps: Array,
    parts: Part,
    shifts: tuple[int, ...],
) -> Query:
    """A `Query` whose shapes fit: the kernels index without checking."""
    X = _contiguous(X)
    eps = _contiguous(eps)
    if X.ndim != 2 or not len(X) or eps.shape != (len(X),):
        raise InputError(f"X, eps: expected shapes (d, N) and (d,), d >= 1, not {X.shape} and {eps.shape}")
    columns = {"offset": offset, "y": y, "w": w}
    for name, column in columns.items():
        if column is not None and np.shape(column) != X.shape[1:]:
            raise InputError(f"{name}: expected shape {X.shape[1:]}, not {np.shape(column)}")
    first, second = _factors(len(X), parts, shifts)
    return Query(
        family=family,
        X=X,
        **{name: None if column is None else _contiguous(column) for name, column in columns.items()},
        eps=eps,
        parts=parts,
        first=first,
        second=second,
    )


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
