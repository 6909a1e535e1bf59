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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from operator import add, mul
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model import kernels
from fedtmle.model.concentration import Concentration
from fedtmle.model.exact import Sums, query_shifts, zero_sums
from fedtmle.model.families import Family
from fedtmle.model.scaled import Design, Scaled, scaled
from fedtmle.model.table import StreamedTable, Table
from fedtmle.model.types import Array, IntArray, Part, RowBound, unpack

# What is seen of the rows must last for other eps: at least so many of their numbers are looked at, and until
# they show this much more than is asked.
LOOKED_AT = 3072
LASTING = 1.5
LEAST = sys.float_info.min  # above 0


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


@final
@dataclass(frozen=True, kw_only=True)
class GeneralisedLinear(AbstractSubmodel):
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
        return Sums(kernels.glm_sums(self._rows, eps, parts, shifts), shifts)

    @cached_property
    def _rows(self) -> kernels.Rows:
        return kernels.glm_rows(self.family, self.X, self.offset, self.y, self.w)

    def concentration(self, eps: Array, *, share: float = 0.0, least: int = 0) -> Concentration:
        if not share > 0:
            found, _, _ = kernels.glm_spread(self._rows, eps)
            return self._concentration(found)
        sought = 0 if "_extents" in self.__dict__ else self._unsought
        if not sought:
            return self._by_columns(eps, share, least, None)
        rows, public = self._rows, 2.0**self.bound.gradient
        until = np.array([LASTING * public / share] * rows.dim)
        many = sought * rows.n_rows / (4 * (1 + rows.dim))  # beyond, to seek largest values takes less time
        found, seen, enough = kernels.glm_spread(rows, eps, until, least, few=_few(rows.dim), many=many)
        if enough:  # no row goes beyond its public bound, at any eps: the exact sums see to that
            found[2], found[4] = public, 0.0
        elif seen < rows.n_rows:
            return self._by_columns(eps, share, least, found)
        return self._concentration(found, is_whole=not enough)

    def _by_columns(self, eps: Array, share: float, least: int, found: Array | None) -> Concentration:
        """From the first rows, of which some may be found already, and the largest values of the columns."""
        ceilings = self._ceilings(eps)
        if found is not None:
            found[2], found[4], found[5] = ceilings
            first = self._concentration(found, is_whole=False)
            if first.shows(share / LASTING, least):
                return first
        until = np.array([LASTING * largest / share for largest in ceilings[0]])
        found, _, enough = kernels.glm_spread(self._rows, eps, until, least, few=_few(len(until)))
        if enough:
            found[2], found[4], found[5] = ceilings
        return self._concentration(found, is_whole=not enough)

    def _concentration(self, found: Array, *, is_whole: bool = True) -> Concentration:
        ceiling = self.family.curvature_ceiling
        return Concentration(
            found=found, lipschitz=math.inf if ceiling is None else ceiling, is_whole=is_whole
        )

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
    def _unsought(self) -> int:
        """How many columns have a largest value that is not known."""
        others = self._shift, self.y if self.y_largest is None else None, self.w
        return (self._rows.dim if self._rows.X.largest is None else 0) + sum(c is not None for c in others)

    @property
    def _shift(self) -> Array | None:
        """An offset on which a bound of rho' rests."""
        return self.offset if self.family in (Family.GAUSSIAN, Family.POISSON) else None

    @cached_property
    def _extents(self) -> tuple[float, float, float]:
        """The largest |offset|, |y| and |w|; 0 for an offset on which no bound of rho' rests."""
        offset, w = (None if c is None else kernels.largest(c) for c in (self._shift, self.w))
        y = self.y_largest
        if y is None:
            y = 0.0 if self.y is None else kernels.largest(self.y)
        return offset or 0.0, y, 1.0 if w is None else w

    def _ceilings(self, eps: Array) -> tuple[list[float], list[float], list[float]]:
        """Bounds of |c|, of w |X| and of |X| for every row, from the columns' largest values alone.

        That of |c| is above 0 where a row enters at all, so that no few rows without a slope show anything.
        """
        (offset, y, w), columns, public = self._extents, self._columns, 2.0**self.bound.gradient
        eta = offset + sum(map(mul, map(abs, eps.tolist()), columns))
        slope, reach = self.family.slope_ceiling(eta, y), [w * column for column in columns]
        # min and max take their first argument where the other is not a number
        return [r and max(LEAST, min(public, slope * r)) for r in reach], reach, columns

    def fewest_joint(self) -> float:
        return _fewest(self.joint())

    def joint(self) -> Array:
        """In how many rows two coordinates both have a covariate, shape (d, d); below 2^53 exact."""
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
    design: Callable[[Table], GeneralisedLinear]

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
        for seen in accumulate(batches, Concentration.join):
            if share > 0 and (of_all := seen.of_all(public)).shows(share, least):
                return of_all
        return seen

    def fewest_joint(self) -> float:
        return _fewest(reduce(add, self.table.map(lambda batch: self.design(batch).joint())))

    def curvature_ceiling(self) -> Array:
        return _largest_mean_hessian(self.family, self.gram, self.n_rows, self.dim)

    def gram(self) -> Sums:
        """See `GeneralisedLinear.gram`."""
        return reduce(add, self.table.map(lambda batch: self.design(batch).gram()))


def _few(dim: int) -> int:
    """How many rows are looked at in any case."""
    return max(1, LOOKED_AT // (1 + dim))


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
