"""Exact sums over rows: the same bits for any order of rows, number of threads, and partition into silos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedtmle_core.types import Array, IntArray, Part, RowBound, packed_size

# Exact sums: each row is rounded to a public grid, then integers are added.
#
# Integer addition is associative, so threads, chunks, the order of rows, their partition into
# silos and the backend cannot change a bit. A row bounded by 2^c is rounded to the grid
# 2^-(50-c), half to even; at most 4,096 such integers fit an int64, and totals are Python
# integers. The mean's error is at most 2^c 2^-51. The grid is fixed by the plan, never by the
# data: a shift chosen from the data would leak and would break the invariance.

GRID_BITS = 50
CHUNK = 4096
FINE_BITS = 40


@dataclass(frozen=True, slots=True)
class Sums:
    """Exact sums over rows: entry j is ``units[j] * 2^-shifts[j]``."""

    units: tuple[int, ...]
    shifts: tuple[int, ...]

    def __add__(self, other: Sums) -> Sums:
        if self.shifts != other.shifts:
            raise ValueError("sums on different grids cannot be added")
        return Sums(tuple(a + b for a, b in zip(self.units, other.units, strict=True)), self.shifts)

    def joined(self, other: Sums) -> Sums:
        """These sums followed by ``other``'s."""
        return Sums(self.units + other.units, self.shifts + other.shifts)

    def rounded(self, shifts: Sequence[int]) -> Sums:
        """The sums on a coarser grid, or the same: each rounded half to even."""
        if tuple(shifts) == self.shifts:
            return self
        drops = [fine - coarse for fine, coarse in zip(self.shifts, shifts, strict=True)]
        units = [nearest(unit, drop) for unit, drop in zip(self.units, drops, strict=True)]
        return Sums(tuple(units), tuple(shifts))

    def __getitem__(self, part: slice) -> Sums:
        return Sums(self.units[part], self.shifts[part])

    def chosen(self, places: Sequence[int]) -> Sums:
        """Some of the sums, in the given order."""
        return Sums(tuple(self.units[j] for j in places), tuple(self.shifts[j] for j in places))

    def fractions(self, divisor: int = 1) -> list[Fraction]:
        """The sums, or means when ``divisor`` is the number of rows, as exact rationals."""
        return [
            Fraction(unit, divisor) / Fraction(2) ** shift
            for unit, shift in zip(self.units, self.shifts, strict=True)
        ]

    def values(self, divisor: int = 1) -> Array:
        """The sums or means of `fractions`, each correctly rounded to a float."""
        # Division of integers is correctly rounded, and much faster than making fractions.
        return np.array(
            [
                unit / (divisor << shift) if shift >= 0 else (unit << -shift) / divisor
                for unit, shift in zip(self.units, self.shifts, strict=True)
            ]
        )


def nearest(value: int, shift: int) -> int:
    """Return value / 2^shift, rounded half to even; a negative shift multiplies."""
    if shift <= 0:
        return value << -shift
    quotient, remainder, half = value >> shift, value & (1 << shift) - 1, 1 << shift - 1
    return quotient + (remainder > half or (remainder == half and quotient % 2 == 1))


def zero_sums(shifts: Sequence[int]) -> Sums:
    """The sum over no rows."""
    return Sums((0,) * len(shifts), tuple(shifts))


class Layout(NamedTuple):
    """Where the sums of each part of a query stand: the loss, the gradient, then the Hessian."""

    loss: slice
    gradient: slice
    hessian: slice

    @property
    def width(self) -> int:
        """The number of sums."""
        return int(self.hessian.stop)


@lru_cache(maxsize=256)
def layout(dim: int, parts: Part) -> Layout:
    """Return the layout of the requested parts for eps of shape (dim,); the place of any other is empty."""
    gradient = 1 if Part.LOSS in parts else 0
    hessian = gradient + (dim if Part.GRADIENT in parts else 0)
    stop = hessian + (packed_size(dim) if Part.HESSIAN in parts else 0)
    return Layout(slice(0, gradient), slice(gradient, hessian), slice(hessian, stop))


def query_shifts(bound: RowBound, eps: Array, parts: Part) -> tuple[int, ...]:
    """The public grid of a query's sums: a function of the plan, the law and eps alone."""
    dim = len(eps)
    shifts: tuple[int, ...] = ()
    if Part.LOSS in parts:
        reach = math.fsum(abs(float(e)) for e in eps)
        shifts += (GRID_BITS - bound.gradient - (math.frexp(reach)[1] if reach else 0),)
    if Part.GRADIENT in parts:
        shifts += (GRID_BITS - bound.gradient,) * dim
    if Part.HESSIAN in parts:
        shifts += (GRID_BITS - bound.curvature,) * packed_size(dim)
    return shifts


def total(chunks: IntArray) -> tuple[int, ...]:
    """Column totals of per-chunk int64 sums, shape (chunks, p), as unbounded integers."""
    if len(chunks) == 1:
        return tuple(chunks[0].tolist())
    high = (chunks >> 32).sum(axis=0)
    low = (chunks & 0xFFFFFFFF).sum(axis=0)
    return tuple((int(h) << 32) + int(v) for h, v in zip(high, low, strict=True))


def column_shifts(exponents: Sequence[int]) -> tuple[int, ...]:
    """The grid of `kernels.column_sums`."""
    return tuple(GRID_BITS + FINE_BITS - c for c in exponents)


def beyond_bound(rows: int, what: str) -> str:
    """The message of a `ContributionError`: a count, never a value."""
    return (
        f"{rows} row(s) exceed the declared bound on one row's {what}; "
        "check the data against the study's declared ranges, or declare wider ones"
    )
