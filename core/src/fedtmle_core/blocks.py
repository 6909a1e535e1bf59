"""Blocks: the three shapes of sums over people that a question can ask for, each one pass over the records.

    Score      derivatives of a loss  sum_i w_i rho(offset_i + eps . X_i, y_i):  fits and targeting
    Moments    sums of terms, and of products of two terms:                     closing sums, counts, tables
    Cells      counts and sums by bins of a term within groups:                 histograms, calibration

Every number of an answer is an integer with a public bound of its total over all hospitals. It follows from
the intervals of the terms and from the largest number of people that the plan allows, never from records.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias, final

import numpy as np

from fedtmle_core.dictionary import Interval
from fedtmle_core.errors import InputError
from fedtmle_core.exact import GRID_BITS, column_shifts, nearest, query_shifts
from fedtmle_core.terms import Term
from fedtmle_core.types import Array, Family, Part, RowBound, exponent, packed_size

Intervals: TypeAlias = Mapping[Term, Interval]

MOST_BINS = 254  # a bin's number is a byte, and one of them means "in no bin"
ROUNDING = 2.0**-30  # relative error of a sum of products of floats, in whatever order, with room to spare
POISSON_REACH = 12.0  # e^12: a mean beyond it is a runaway fit, and the bound of its rows would cost digits


class AbstractBlock(ABC):
    """A part of a question."""

    __slots__ = ()

    @property
    @abstractmethod
    def terms(self) -> tuple[Term, ...]:
        """All terms that the block reads."""

    @property
    @abstractmethod
    def numbers(self) -> int:
        """How many numbers it asks for."""

    @abstractmethod
    def reaches(self, intervals: Intervals, people: int) -> list[int]:
        """Return the public bound of each total over at most ``people``; `InputError` if there is none."""


@final
@dataclass(frozen=True, kw_only=True)
class Layer:
    """One record of each person in a loss: of a person-period, or the person once.

    Column j of the design is ``X[j] * factors[j]``. An ``offset``, ``y`` or ``w`` of None stands for zeros,
    zeros and ones.
    """

    X: tuple[Term, ...]
    factors: tuple[float, ...] = ()  # ones if there are none
    offset: Term | None = None
    y: Term | None = None
    w: Term | None = None

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*self.X, *(term for term in (self.offset, self.y, self.w) if term is not None))


@final
@dataclass(frozen=True, kw_only=True)
class Lattice:
    """Sums are sent as N_m round(C g_m 2^places), g_m the mean over the hospital's N_m people.

    ``C`` None is the identity. So the total over hospitals, over n, is the mean of the rounded means.
    """

    places: int
    C: tuple[tuple[float, ...], ...] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Score(AbstractBlock):
    """Derivatives at ``at`` of the sum over layers and people of w rho(offset + eps . X, y).

    ``part`` is the gradient, the Hessian's upper triangle, or the change of the loss from eps = 0. Without a
    ``lattice`` the sums are exact, on a grid that follows from the bounds.
    """

    family: Family
    layers: tuple[Layer, ...]
    at: tuple[float, ...]
    part: Part = Part.GRADIENT
    lattice: Lattice | None = None

    def __post_init__(self) -> None:
        dim = len(self.at)
        if not self.layers or any(len(layer.X) != dim for layer in self.layers):
            raise InputError("a score needs as many columns in each layer as it has coordinates")
        if any(layer.factors and len(layer.factors) != dim for layer in self.layers):
            raise InputError("a score needs one factor for each column")
        if self.part not in (Part.LOSS, Part.GRADIENT, Part.HESSIAN):
            raise InputError("a score asks for one part of the loss")
        if self.lattice and self.lattice.C and any(len(row) != self.width for row in self.lattice.C):
            raise InputError("the matrix of a lattice has a column for each sum")

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(term for layer in self.layers for term in layer.terms)

    @property
    def width(self) -> int:
        """How many sums there are before a lattice's matrix."""
        dim = len(self.at)
        return {Part.LOSS: 1, Part.GRADIENT: dim, Part.HESSIAN: packed_size(dim)}[self.part]

    @property
    def numbers(self) -> int:
        return self.width if self.lattice is None or self.lattice.C is None else len(self.lattice.C)

    def bound(self, intervals: Intervals) -> RowBound:
        """Return the public bound of one person's part, over all layers."""
        slopes, bends = 0.0, 0.0
        for layer in self.layers:
            factors = layer.factors or (1.0,) * len(layer.X)
            sizes = [abs(f) * size(intervals[x]) for f, x in zip(factors, layer.X, strict=True)]
            x, w = max(sizes, default=0.0), 1.0 if layer.w is None else size(intervals[layer.w])
            if layer.w is not None and intervals[layer.w][0] < 0.0:
                raise InputError("a weight may not be negative")
            eta = math.fsum(abs(e) * s for e, s in zip(self.at, sizes, strict=True))
            eta += 0.0 if layer.offset is None else size(intervals[layer.offset])
            y = (0.0, 0.0) if layer.y is None else intervals[layer.y]
            slope, bend = _slope_and_bend(self.family, eta, y)
            slopes, bends = slopes + w * slope * x, bends + w * bend * x * x
        return RowBound(gradient=exponent(slopes), curvature=exponent(bends))

    def shifts(self, intervals: Intervals) -> tuple[int, ...]:
        """Return the public grid of the exact sums: entry j counts multiples of 2^-shifts[j]."""
        return query_shifts(self.bound(intervals), _array(self.at), self.part)

    def reaches(self, intervals: Intervals, people: int) -> list[int]:
        largest = [math.ldexp(1.0, GRID_BITS - shift) for shift in self.shifts(intervals)]
        if self.lattice is None:
            return [people << GRID_BITS] * self.width
        if self.lattice.C is not None:
            largest = (np.abs(np.array(self.lattice.C)) @ np.array(largest) * (1.0 + ROUNDING)).tolist()
        return [people * (math.ceil(math.ldexp(most, self.lattice.places)) + 1) for most in largest]


def _slope_and_bend(family: Family, eta: float, y: Interval) -> tuple[float, float]:
    """Return bounds of |rho'| and rho'' where the predictor is at most ``eta`` in magnitude."""
    match family:
        case Family.LOGISTIC:
            return max(1.0, 1.0 - y[0], y[1]), 0.25
        case Family.GAUSSIAN:
            return eta + size(y), 1.0
        case Family.POISSON:
            mean = math.exp(min(eta, POISSON_REACH))
            return mean + size(y), mean
        case Family.LINEAR:
            return 1.0, 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Moments(AbstractBlock):
    """Sums of products: each of ``products`` lists the places of one, two or more of the ``columns``.

    A number is the sum over the hospital's people, rounded to a multiple of 2^-places; with ``places`` None
    it is exact to the last digit of a double.
    """

    columns: tuple[Term, ...]
    products: tuple[tuple[int, ...], ...]
    places: int | None = None

    def __post_init__(self) -> None:
        for pair in self.products:
            if not 1 <= len(pair) <= 2 or not all(0 <= j < len(self.columns) for j in pair):
                raise InputError("moments are sums of one column, or of the product of two")

    @classmethod
    def of(cls, columns: Sequence[Term], places: int | None = None) -> Moments:
        """Return the sums of the columns themselves."""
        return cls(columns=tuple(columns), products=tuple((j,) for j in range(len(columns))), places=places)

    @classmethod
    def gram(cls, columns: Sequence[Term], places: int | None = None) -> Moments:
        """Return the sums of all products of two columns, the upper triangle row by row."""
        pairs = tuple((j, k) for j in range(len(columns)) for k in range(j, len(columns)))
        return cls(columns=tuple(columns), products=pairs, places=places)

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.columns

    @property
    def numbers(self) -> int:
        return len(self.products)

    def exponents(self, intervals: Intervals) -> tuple[int, ...]:
        """Return for each product the least c with every person's part below 2^c."""
        sizes = [size(intervals[column]) for column in self.columns]
        return tuple(exponent(math.prod(sizes[j] for j in pair)) for pair in self.products)

    def shifts(self, intervals: Intervals) -> tuple[int, ...]:
        """Return the grid of the sums that are sent."""
        if self.places is None:
            return column_shifts(self.exponents(intervals))
        return (self.places,) * len(self.products)

    def reaches(self, intervals: Intervals, people: int) -> list[int]:
        exponents, shifts = self.exponents(intervals), self.shifts(intervals)
        return [nearest(people, -(c + shift)) + 1 for c, shift in zip(exponents, shifts, strict=True)]


@final
@dataclass(frozen=True, kw_only=True)
class Cells(AbstractBlock):
    """People by bins of a term, within each group: how many, and the sums of some terms over them.

    Bin b holds the people with edges[b-1] <= t < edges[b]; a group holds those whose term is not 0. The order
    is by group, then by bin, then the count before the sums. Sums are rounded to multiples of 2^-places.
    """

    of: Term
    edges: tuple[float, ...]
    groups: tuple[Term, ...]
    sums: tuple[Term, ...] = ()
    places: int = 0

    def __post_init__(self) -> None:
        if not all(a < b for a, b in pairwise(self.edges)):
            raise InputError("the edges of bins rise")
        if len(self.edges) > MOST_BINS - 1:
            raise InputError(f"there are at most {MOST_BINS} bins")

    @property
    def terms(self) -> tuple[Term, ...]:
        return (self.of, *self.groups, *self.sums)

    @property
    def numbers(self) -> int:
        return self.cells * (1 + len(self.sums))

    @property
    def bins(self) -> int:
        return len(self.edges) + 1

    @cached_property
    def cells(self) -> int:
        """How many cells there are, in all groups."""
        return self.bins * len(self.groups)

    def reaches(self, intervals: Intervals, people: int) -> list[int]:
        sums = [nearest(people, -(exponent(size(intervals[t])) + self.places)) + 1 for t in self.sums]
        return [people, *sums] * self.cells


Block: TypeAlias = Score | Moments | Cells


def size(interval: Interval) -> float:
    """Return the largest magnitude in an interval."""
    return max(abs(interval[0]), abs(interval[1]))


def _array(values: Sequence[float]) -> Array:
    return np.array(values, dtype=np.float64)
