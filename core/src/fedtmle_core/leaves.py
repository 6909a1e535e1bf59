"""The leaves of the language: what terms read of a person's record, piece by piece of the closed vocabulary.

A number is divided by the least power of two that covers its range, which is exact, so that it lies in
[-1, 1] and its coefficients are comparable. A leaf is 0 where its variable is missing; `Known` says where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np

from fedtmle_core import kernels
from fedtmle_core.dictionary import Dictionary, Interval
from fedtmle_core.errors import InputError
from fedtmle_core.terms import Rows, Term
from fedtmle_core.types import Array

HIGHEST_POWER = 3  # a high power is nearly zero but for the largest value: it singles somebody out
MOST_FOLDS = 100  # of cross-fitting; nobody uses more, and a fold of few people is a small group


class AbstractPiece(Term):
    """A function of one number that is 0 where it is missing."""

    __slots__ = ()

    name: str

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        x = rows.number(self.name)
        if rows.is_complete(self.name):
            return self.of(x)
        with np.errstate(invalid="ignore"):
            return np.where(np.isnan(x), 0.0, self.of(x))

    def of(self, x: Array) -> Array:
        """Return the piece of known values, in the unit of the dictionary."""
        raise TypeError("a piece is a function of a number")

    def _ends(self, dictionary: Dictionary) -> Interval:
        variable = dictionary.numeric(self.name)
        ends = self.of(np.array([variable.low, variable.high])).tolist()
        return _with_zero(*ends)


@final
@dataclass(frozen=True, eq=False)
class Number(AbstractPiece):
    """A number over 2^``exponent``, which is the variable's (`dictionary.Numeric.exponent`)."""

    name: str
    exponent: int

    def of(self, x: Array) -> Array:
        return x * 2.0**-self.exponent

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        return self._ends(dictionary)


@final
@dataclass(frozen=True, eq=False)
class Power(AbstractPiece):
    """The square or the cube of a scaled number."""

    name: str
    exponent: int
    power: int

    def of(self, x: Array) -> Array:
        scaled = x * 2.0**-self.exponent
        return scaled * scaled if self.power == 2 else scaled * scaled * scaled

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if not 2 <= self.power <= HIGHEST_POWER:
            raise InputError(f"'{self.name}': expected a power of 2 or 3, not {self.power}")
        return self._ends(dictionary)


@final
@dataclass(frozen=True, eq=False)
class Log(AbstractPiece):
    """The natural logarithm of a positive number."""

    name: str

    def of(self, x: Array) -> Array:
        return kernels.log(np.maximum(x, np.finfo(np.float64).tiny))

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if not dictionary.numeric(self.name).low > 0.0:
            raise InputError(f"log: the range of '{self.name}' reaches 0; declare a positive least value")
        return self._ends(dictionary)


@final
@dataclass(frozen=True, eq=False)
class Root(AbstractPiece):
    """The square root of a number that is not negative."""

    name: str

    def of(self, x: Array) -> Array:
        return np.sqrt(np.maximum(x, 0.0))

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if dictionary.numeric(self.name).low < 0.0:
            raise InputError(f"sqrt: the range of '{self.name}' reaches below 0")
        return self._ends(dictionary)


@final
@dataclass(frozen=True, eq=False)
class Spline(AbstractPiece):
    """Piece ``index`` of a natural cubic spline with declared knots, over (t_k - t_1)^2 and 2^``exponent``.

    (x - t_j)_+^3 - (x - t_{k-1})_+^3 (t_k - t_j)/(t_k - t_{k-1})
                  + (x - t_k)_+^3 (t_{k-1} - t_j)/(t_k - t_{k-1})
    """

    name: str
    exponent: int
    knots: tuple[float, ...]
    index: int

    def of(self, x: Array) -> Array:
        knots, j = self.knots, self.index
        inner, last = knots[-2], knots[-1]
        # Beyond t_k the cubes cancel to a line; written as that line, no digit cancels far out.
        inside = np.minimum(x, last)
        cubes = _cube(np.maximum(inside - knots[j], 0.0))
        cubes = cubes - _cube(np.maximum(inside - inner, 0.0)) * ((last - knots[j]) / (last - inner))
        line = (3.0 * (last - knots[j]) * (inner - knots[j])) * (x - inside)
        spread = (last - knots[0]) * (last - knots[0])
        return np.asarray((cubes + line) / spread * 2.0**-self.exponent)

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        rising = all(a < b for a, b in pairwise(self.knots))
        if len(self.knots) < 3 or not rising or not 0 <= self.index < len(self.knots) - 2:
            raise InputError(
                f"spline of '{self.name}': expected three rising knots or more, and a piece of it"
            )
        return self._ends(dictionary)  # it is 0 up to its knot, and rises from there


@final
@dataclass(frozen=True, eq=False)
class BSpline(AbstractPiece):
    """B-spline number ``index`` of a degree from ``low`` to ``high``, by the recursion of Cox and de Boor."""

    name: str
    knots: tuple[float, ...]
    low: float
    high: float
    degree: int
    index: int

    def of(self, x: Array) -> Array:
        degree, index = self.degree, self.index
        t = [self.low] * (degree + 1) + list(self.knots) + [self.high] * (degree + 1)
        last = len(t) - degree - 2  # the interval that ends at high has it inside
        pieces = [
            ((t[m] <= x) & ((x < t[m + 1]) | (m == last))).astype(np.float64)
            for m in range(index, index + degree + 1)
        ]
        for order in range(1, degree + 1):
            for i in range(degree + 1 - order):
                m = index + i
                rising, falling = t[m + order] - t[m], t[m + order + 1] - t[m + 1]
                rise = pieces[i] * ((x - t[m]) / rising) if rising else 0.0
                fall = pieces[i + 1] * ((t[m + order + 1] - x) / falling) if falling else 0.0
                pieces[i] = np.asarray(rise + fall)
        return pieces[0]

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        variable, edges = dictionary.numeric(self.name), (self.low, *self.knots, self.high)
        rising = all(a < b for a, b in pairwise(edges))
        if not rising or not 0 <= self.degree <= HIGHEST_POWER:
            raise InputError(f"spline of '{self.name}': expected rising knots, and a degree up to 3")
        if not 0 <= self.index <= len(self.knots) + self.degree:
            raise InputError(f"spline of '{self.name}': there is no piece of this number")
        if variable.low < self.low or variable.high > self.high:
            raise InputError(f"spline of '{self.name}': its range goes beyond low and high")
        return 0.0, 1.0


@final
@dataclass(frozen=True, eq=False)
class Level(Term):
    """1 for the people of one level of a categorical variable, else 0; ``code`` is its place in the list."""

    name: str
    code: int

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if not 0 <= self.code < len(dictionary.levels(self.name)):
            raise InputError(f"'{self.name}' has no level of this number")
        return 0.0, 1.0

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        return np.asarray((rows.codes(self.name) == self.code).astype(np.float64))


@final
@dataclass(frozen=True, eq=False)
class Known(Term):
    """1 where a variable is known, 0 where it is missing."""

    name: str
    is_level: bool = False

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if self.is_level:
            dictionary.levels(self.name)
        else:
            dictionary.numeric(self.name)
        return 0.0, 1.0

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        if rows.is_complete(self.name):
            return np.broadcast_to(np.float64(1.0), (rows.n,))
        missing = rows.codes(self.name) < 0 if self.is_level else np.isnan(rows.number(self.name))
        return (~missing).astype(np.float64)


@final
@dataclass(frozen=True, eq=False)
class Between(Term):
    """1 where a number is above ``low`` and at most ``high``, at declared cuts; 0 where it is missing."""

    name: str
    low: float | None
    high: float | None

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        dictionary.numeric(self.name)
        return 0.0, 1.0

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        x = rows.number(self.name)
        if self.low is None:
            inside = x <= (math.inf if self.high is None else self.high)
        else:
            inside = x > self.low
            if self.high is not None:
                inside &= x <= self.high
        return inside.astype(np.float64)


@final
@dataclass(frozen=True, eq=False)
class Fold(Term):
    """1 for the people of one fold of ``folds``, drawn by a public rule; a cluster's people stay together."""

    folds: int
    seed: int
    cluster: str  # an identifier, or "" if each person is drawn alone
    fold: int

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        if not 2 <= self.folds <= MOST_FOLDS or not 0 <= self.fold < self.folds:
            raise InputError(f"folds: expected from 2 to {MOST_FOLDS}, and one of them")
        if self.cluster:
            dictionary.largest_cluster(self.cluster)
        return 0.0, 1.0

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        return np.asarray((rows.fold(self.folds, self.seed, self.cluster) == self.fold).astype(np.float64))


@final
@dataclass(frozen=True, eq=False)
class Draw(Term):
    """A number in (0, 1) for each person, by a public rule: the same whenever it is asked."""

    seed: int
    stream: int

    def interval(self, parts: Sequence[Interval], dictionary: Dictionary) -> Interval:
        return 0.0, 1.0

    def values(self, parts: Sequence[Array], rows: Rows) -> Array:
        return rows.uniform(self.seed, self.stream)


def _cube(x: Array) -> Array:
    return x * x * x


def _with_zero(*ends: float) -> Interval:
    """Return the interval between the ends, with 0, the value where the variable is missing."""
    if not all(map(math.isfinite, ends)):
        raise InputError("a term has no finite bound")
    return min(0.0, *ends), max(0.0, *ends)
