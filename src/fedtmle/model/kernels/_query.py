"""What a fused pass over the rows is asked, in the plain arrays that both backends take."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
        return 1 if Part.LOSS in self.parts else 0

    @property
    def hessian_at(self) -> int:
        """The column of the first Hessian sum."""
        return self.gradient_at + (self.dim if Part.GRADIENT in self.parts else 0)

    @property
    def width(self) -> int:
        """The number of sums."""
        return self.hessian_at + (packed_size(self.dim) if Part.HESSIAN in self.parts else 0)


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
    low = [max(min(shift, LARGEST_POWER), -LARGEST_POWER) for shift in shifts]
    checked = Query(
        family=family,
        X=X,
        **{name: None if column is None else _contiguous(column) for name, column in columns.items()},
        eps=eps,
        parts=parts,
        first=np.array([math.ldexp(1.0, power) for power in low]),
        second=np.array([math.ldexp(1.0, s - power) for s, power in zip(shifts, low, strict=True)]),
    )
    if checked.width != len(shifts):
        raise InputError(f"shifts: expected {checked.width} for the asked parts, not {len(shifts)}")
    edges = (0, checked.gradient_at, checked.hessian_at, len(shifts))
    if len(set(shifts)) > 1 and any(len(set(shifts[begin:end])) > 1 for begin, end in pairwise(edges)):
        raise InputError("shifts: the sums of one part share one grid")
    return checked


def _contiguous(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.float64)
