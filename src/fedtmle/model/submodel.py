"""The fluctuation submodel p^k(.) as one silo's rows see it, and its public normaliser.

Nearly every submodel in use is generalised linear: the loss of row i is

    w_i rho(offset_i + eps . X_i, y_i) + A(eps),

with A a public normaliser, zero for regression losses. A silo sums the first term over its
rows; A is a function of the law alone and is added by whoever needs the whole objective.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from operator import add, mul
from typing import NamedTuple, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model import kernels
from fedtmle.model.concentration import Concentration, RowSpread
from fedtmle.model.exact import Sums, query_shifts, zero_sums
from fedtmle.model.families import Family
from fedtmle.model.table import StreamedTable, Table
from fedtmle.model.types import Array, Design, IntArray, Part, RowBound, Scaled, scaled, unpack

# The result of `concentration` is reused at nearby eps, so that a little more is read than one eps needs.
FIRST_NUMBERS = 3072  # numbers of the rows that are read in any case
MARGIN = 1.5  # how much more than requested the rows that are read must show
SMALLEST = sys.float_info.min  # the smallest number above 0 with full precision


class AbstractSubmodel(ABC):
    """Sums over the rows, one fused pass each, exact on a public grid."""

    @property
    @abstractmethod
    def n_rows(self) -> int: ...

    @abstractmethod
    def take(self, rows: IntArray) -> AbstractSubmodel:
        """The submodel of a batch, a multiset of the rows."""

    @abstractmethod
    def sums(self, eps: Array, parts: Part) -> Sums:
        """Sums of the asked parts at eps."""

    @abstractmethod
    def concentration(self, eps: Array, *, share: float = 0.0, least: int = 0) -> Concentration:
        """How far the gradient at eps rests on single rows; stays in the silo.

        It may stop looking when those seen show that no row has more than ``share`` of a coordinate
        and that at least ``least`` rows enter each.
        """

    @abstractmethod
    def fewest_joint(self) -> float:
        """The fewest rows, if any, in which two coordinates both have a covariate; stays in the silo."""

    @abstractmethod
    def curvature_ceiling(self) -> Array:
        """A matrix B, shape (d, d), with 0 <= mean Hessian of the row part <= B at every eps."""

    def gradients_by_group(self, eps: Array, most: int) -> Iterator[tuple[int, Array]]:
        """Yield the size and the mean gradient at eps of each of at most ``most`` groups; stays in the silo.

        The groups are disjoint and take every row, each one in so many.
        """
        count = min(most, self.n_rows)
        for group in range(count):
            part = self.take(np.arange(group, self.n_rows, count))
            yield part.n_rows, part.sums(eps, Part.GRADIENT).values(part.n_rows)


class AbstractRowsSubmodel(AbstractSubmodel):
    """A submodel of rows in memory; those of a streamed table's batches are added up."""

    @abstractmethod
    def joint(self) -> Array:
        """In how many rows two coordinates both have a covariate, shape (d, d); below 2^53 exact."""

    @abstractmethod
    def gram(self) -> Sums:
        """Exact sums, upper triangle, whose multiple by the family's ceiling bounds the Hessian."""


@final
@dataclass(frozen=True, kw_only=True)
class GeneralisedLinear(AbstractRowsSubmodel):
    """The submodel above; ``X`` has shape (d, N): one array, or columns where they are.

    ``offset``, ``y`` and ``w`` have shape (N,); None stands for zeros, zeros and ones and is
    never read from memory. ``y_largest`` bounds every |y|, where that is known.
    """

    family: Family
    X: Design
    bound: RowBound
    offset: Array | None = None
    y: Array | None = None
    w: Array | None = None
    y_largest: float | None = None

    @property
    def n_rows(self) -> int:
        return int(self.X.shape[1])

    def take(self, rows: IntArray) -> GeneralisedLinear:
        def take(column: Array | None) -> Array | None:
            return None if column is None else np.ascontiguousarray(column[rows])

        return GeneralisedLinear(
            family=self.family,
            X=self.X.take(rows) if isinstance(self.X, Scaled) else np.ascontiguousarray(self.X[:, rows]),
            bound=self.bound,
            offset=take(self.offset),
            y=take(self.y),
            w=take(self.w),
            y_largest=self.y_largest,
        )

    def sums(self, eps: Array, parts: Part) -> Sums:
        shifts = query_shifts(self.bound, eps, parts)
        return Sums(self.units(eps, parts, shifts), shifts)

    def units(self, eps: Array, parts: Part, shifts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sums in units of 2^-shifts[j]."""
        return kernels.glm_sums(self._rows, eps, parts, shifts)

    @cached_property
    def _rows(self) -> kernels.Rows:
        return kernels.glm_rows(self.family, self.X, self.offset, self.y, self.w)

    def concentration(self, eps: Array, *, share: float = 0.0, least: int = 0) -> Concentration:
        if not share > 0:
            spread, _, _ = kernels.glm_spread(self._rows, eps)
            return self._concentration(spread)
        n_unknown = self._n_unknown_maxima
        if not n_unknown:
            return self._by_columns(eps, share, least, None)
        rows, public = self._rows, 2.0**self.bound.gradient
        until = np.array([MARGIN * public / share] * rows.dim)
        many = n_unknown * rows.n_rows / (4 * (1 + rows.dim))  # above, column maxima are cheaper to compute
        first = _first_rows(rows.dim)
        spread, n_read, enough = kernels.glm_spread(rows, eps, until, least, few=first, many=many)
        if enough:  # no row exceeds its public bound at any eps: the exact sums would refuse it
            spread.set_maxima(public, 0.0)
            return self._concentration(spread, is_whole=False)
        if n_read < rows.n_rows:
            return self._by_columns(eps, share, least, spread)
        return self._concentration(spread)

    def _by_columns(self, eps: Array, share: float, least: int, first: RowSpread | None) -> Concentration:
        """Return the concentration by the columns' maxima; ``first`` is the first rows' spread, if known."""
        maxima = self._maxima(eps)
        if first is not None:
            first.set_maxima(*maxima)
            shown = self._concentration(first, is_whole=False)
            if shown.shows(share / MARGIN, least):
                return shown
        until = np.array([MARGIN * largest / share for largest in maxima.largest])
        few = _first_rows(len(until))
        spread, _, enough = kernels.glm_spread(self._rows, eps, until, least, few=few)
        if enough:
            spread.set_maxima(*maxima)
        return self._concentration(spread, is_whole=not enough)

    def _concentration(self, spread: RowSpread, *, is_whole: bool = True) -> Concentration:
        ceiling = self.family.curvature_ceiling
        lipschitz = math.inf if ceiling is None else ceiling
        return Concentration(spread=spread, lipschitz=lipschitz, is_whole=is_whole)

    @cached_property
    def _columns(self) -> list[float]:
        """The largest |X| by coordinate."""
        design = self._rows.X
        largest = design.largest
        if largest is None:
            largest = np.array([kernels.largest(column) for column in design.columns])
        columns: list[float] = (largest * np.abs(design.factors)).tolist()
        return columns

    @property
    def _n_unknown_maxima(self) -> int:
        """How many columns have to be read for `_maxima`."""
        if self._extents.is_known:
            return 0
        n_columns = self._rows.dim if self._rows.X.largest is None else 0
        return n_columns + sum(column is not None for column in self._extents.columns)

    @cached_property
    def _extents(self) -> _Extents:
        # A bound of rho' depends on the offset in these families only.
        offset = self.offset if self.family in (Family.GAUSSIAN, Family.POISSON) else None
        return _Extents(offset, self.y if self.y_largest is None else None, self.w)

    def _maxima(self, eps: Array) -> _Maxima:
        """Return bounds that hold for every row, from the columns' largest values alone.

        The bound of |c| is above 0 if a row enters at all: a few rows without a slope show nothing.
        """
        (offset, y, w), columns, public = self._extents.largest(), self._columns, 2.0**self.bound.gradient
        eta = (offset or 0.0) + sum(map(mul, map(abs, eps.tolist()), columns))
        slope = self.family.slope_ceiling(eta, (y or 0.0) if self.y_largest is None else self.y_largest)
        reach = [column if w is None else w * column for column in columns]
        # min and max return their first argument if the other is not a number
        largest = [r and max(SMALLEST, min(public, slope * r)) for r in reach]
        return _Maxima(largest=largest, reach_largest=reach, columns=columns)

    def fewest_joint(self) -> float:
        return _fewest(self.joint())

    def joint(self) -> Array:
        inside = np.stack([(column != 0).astype(np.float64) for column in scaled(self.X).columns])
        if self.w is not None:
            inside *= self.w != 0
        return np.asarray(inside @ inside.T)

    def curvature_ceiling(self) -> Array:
        return _largest_mean_hessian(self.family, self.gram, self.n_rows, len(self.X))

    def gram(self) -> Sums:
        """Exact sums of w X_j X_k: the squared loss has them for its Hessian, at every eps."""
        # |rho'' w X_j X_k| <= 2^curvature, so that without rho'' the bound is 1/ceiling times that.
        slack = math.frexp(1.0 / (self.family.curvature_ceiling or 1.0))[1] - 1
        bound = RowBound(gradient=self.bound.gradient, curvature=self.bound.curvature + slack)
        squared = GeneralisedLinear(family=Family.GAUSSIAN, X=self.X, w=self.w, bound=bound)
        return squared.sums(np.zeros(len(self.X)), Part.HESSIAN)


@final
@dataclass(frozen=True, kw_only=True)
class StreamedLinear(AbstractSubmodel):
    """The same submodel over a table that is read at every query: ``design`` makes a batch's part of it."""

    table: StreamedTable
    family: Family
    dim: int
    bound: RowBound
    design: Callable[[Table], AbstractRowsSubmodel]

    @property
    def n_rows(self) -> int:
        return self.table.n_rows

    def take(self, rows: IntArray) -> StreamedLinear:  # noqa: ARG002 - no batch of them
        raise InputError("optimizer: a streamed table is read from end to end; choose one that draws no rows")

    def sums(self, eps: Array, parts: Part) -> Sums:
        zero = zero_sums(query_shifts(self.bound, eps, parts))
        return reduce(add, self.table.map(lambda batch: self.design(batch).sums(eps, parts)), zero)

    def concentration(self, eps: Array, *, share: float = 0.0, least: int = 0) -> Concentration:
        public = 2.0**self.bound.gradient
        batches = self.table.map(lambda batch: self.design(batch).concentration(eps))
        for read_so_far in accumulate(batches, Concentration.join):
            if share > 0 and (of_all := read_so_far.of_all(public)).shows(share, least):
                return of_all
        return read_so_far

    def fewest_joint(self) -> float:
        return _fewest(reduce(add, self.table.map(lambda batch: self.design(batch).joint())))

    def curvature_ceiling(self) -> Array:
        return _largest_mean_hessian(self.family, self.gram, self.n_rows, self.dim)

    def gradients_by_group(self, eps: Array, most: int) -> Iterator[tuple[int, Array]]:
        """Yield as above, with at most ``most`` groups in each batch of the table."""
        for groups in self.table.map(lambda batch: list(self.design(batch).gradients_by_group(eps, most))):
            yield from groups

    def gram(self) -> Sums:
        """See `AbstractRowsSubmodel.gram`."""
        return reduce(add, self.table.map(lambda batch: self.design(batch).gram()))


def _first_rows(dim: int) -> int:
    """Return how many rows are read in any case."""
    return max(1, FIRST_NUMBERS // (1 + dim))


class _Maxima(NamedTuple):
    """Bounds of |c|, w |X| and |X| for every row, by coordinate: the arguments of `RowSpread.set_maxima`."""

    largest: list[float]
    reach_largest: list[float]
    columns: list[float]


class _Extents:
    """The largest magnitudes of offset, y and w, computed when they are first needed; None for no column."""

    def __init__(self, *columns: Array | None) -> None:
        self.columns = columns
        self._largest: tuple[float | None, ...] | None = None

    @property
    def is_known(self) -> bool:
        return self._largest is not None

    def largest(self) -> tuple[float | None, ...]:
        if self._largest is None:
            self._largest = tuple(None if c is None else kernels.largest(c) for c in self.columns)
        return self._largest


def _fewest(joint: Array) -> float:
    return float(joint[joint > 0].min(initial=math.inf))


def _largest_mean_hessian(family: Family, gram: Callable[[], Sums], n_rows: int, dim: int) -> Array:
    ceiling = family.curvature_ceiling
    if ceiling is None:
        raise InputError(
            "smoothness: this loss has no curvature bound on the whole line; "
            "give a number, or use smoothness=Estimated()"
        )
    return ceiling * unpack(gram().values(n_rows), dim) if ceiling else np.zeros((dim, dim))


class AbstractNormaliser(ABC):
    """A(eps), public: the same at every party, because it is computed from the law alone."""

    @abstractmethod
    def value(self, eps: Array) -> float: ...

    @abstractmethod
    def gradient(self, eps: Array) -> Array: ...

    @abstractmethod
    def hessian(self, eps: Array) -> Array: ...

    @abstractmethod
    def curvature_ceiling(self, C: Array) -> float:
        """A bound on ||C Hess A(eps) C^T|| at every eps, in coordinates C, (d, d)."""


@final
@dataclass(frozen=True)
class NoNormaliser(AbstractNormaliser):
    """A = 0: regression losses."""

    dim: int

    def value(self, eps: Array) -> float:  # noqa: ARG002 - the interface's argument
        return 0.0

    def gradient(self, eps: Array) -> Array:  # noqa: ARG002 - the interface's argument
        return np.zeros(self.dim)

    def hessian(self, eps: Array) -> Array:  # noqa: ARG002 - the interface's argument
        return np.zeros((self.dim, self.dim))

    def curvature_ceiling(self, C: Array) -> float:  # noqa: ARG002 - the interface's argument
        return 0.0
