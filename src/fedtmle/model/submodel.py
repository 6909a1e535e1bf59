"""The fluctuation submodel p^k(.) as one silo's rows see it, and its public normaliser.

Nearly every submodel in use is generalised linear: the loss of row i is

    w_i rho(offset_i + eps . X_i, y_i) + A(eps),

with A a public normaliser, zero for regression losses. A silo sums the first term over its
rows; A is a function of the law alone and is added by whoever needs the whole objective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import NamedTuple, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.leverage import (
    FIRST_LOOK,
    LEAST_RESIDUAL,
    Look,
    PersonRows,
    RowSpace,
    deviations,
    largest_leverage,
)
from fedtmle.model.table import StreamedTable, Table
from fedtmle_core import kernels
from fedtmle_core.exact import Sums, query_shifts, zero_sums
from fedtmle_core.types import Array, Design, Family, IntArray, Part, RowBound, Scaled, matrix, scaled, unpack

LOOK_ROWS = 1 << 12  # rows of a piece whose leverages are computed at once


class AbstractSubmodel(ABC):
    """Base of fluctuations as a silo's rows see them: exact sums on a public grid, one pass each.

    Examples
    --------
    >>> issubclass(ft.GeneralisedLinear, ft.AbstractSubmodel)
    True
    """

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
    def column_people(self, enough: int | None = None) -> IntArray:
        """How many people each coordinate is a sum over, at any eps, shape (d,); stays in the silo.

        Counts that are at least ``enough`` need not be whole.
        """

    @abstractmethod
    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        """Yield the rows of consecutive people: w s X, or sqrt(w rho'') X, the root of a row's Hessian."""

    def counted_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        """Yield rows that are zero where a person does not have a column; by default `disclosed_rows`."""
        return self.disclosed_rows(eps, part)

    @abstractmethod
    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        """Return the largest leverage of a person in the gradient or the Hessian at eps; stays in the silo.

        A bound of it that is at most ``enough`` will do. ``space`` is a pooled one, by default the rows' own.
        """

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
    def gram(self) -> Sums:
        """Exact sums, upper triangle, whose multiple by the family's ceiling bounds the Hessian."""

    @property
    @abstractmethod
    def column_sizes(self) -> Array:
        """The largest |X| by coordinate, shape (d,)."""


@final
@dataclass(frozen=True, kw_only=True)
class GeneralisedLinear(AbstractRowsSubmodel):
    """A fluctuation by a generalised linear model: row i has the loss w_i rho(offset_i + eps . X_i, y_i).

    Parameters
    ----------
    family
        The family, which is rho.
    X
        The covariates, shape (d, N): one array, or columns where they are.
    bound
        Public bounds of one row's contribution.
    offset
        The offsets, shape (N,). None stands for zeros.
    y
        The responses, shape (N,). None stands for zeros.
    w
        The weights, shape (N,). None stands for ones.
    y_largest
        A bound of every response, if one is known.

    Examples
    --------
    >>> from fedtmle_core.types import Family
    >>> from fedtmle_core.types import RowBound
    >>> bound = RowBound(gradient=1, curvature=0)
    >>> ft.GeneralisedLinear(family=Family.LOGISTIC, X=np.ones((1, 3)), bound=bound).X.shape
    (1, 3)
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
        shifts = self.shifts(eps, parts)
        return Sums(self.units(eps, parts, shifts), shifts)

    def shifts(self, eps: Array, parts: Part) -> tuple[int, ...]:
        """Return the public grid of the sums."""
        return query_shifts(self.bound, eps, parts)

    def units(self, eps: Array, parts: Part, shifts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sums in units of 2^-shifts[j]."""
        return kernels.glm_sums(self._rows, eps, parts, shifts)

    def query(self, eps: Array, parts: Part, shifts: tuple[int, ...]) -> kernels.Query:
        """Return what a pass over the rows sums."""
        return kernels.glm_query(self._rows, eps, parts, shifts)

    @cached_property
    def _rows(self) -> kernels.Rows:
        return kernels.glm_rows(self.family, self.X, self.offset, self.y, self.w)

    @cached_property
    def _columns(self) -> list[float]:
        """The largest |X| by coordinate."""
        design = self._rows.X
        largest = design.largest
        if largest is None:
            largest = np.array([kernels.largest(column) for column in design.columns])
        columns: list[float] = (largest * np.abs(design.factors)).tolist()
        return columns

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        columns = self.column_sizes
        bounds = None
        if self.n_rows >= FIRST_LOOK and space is None and enough > 0:
            bounds = self.row_bounds(eps, part)
        largest = largest_leverage(
            lambda: self.disclosed_rows(eps, part), space=space, bounds=bounds, enough=enough
        )
        return Look(largest=largest, columns=columns, family=self.family)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        for start in range(0, self.n_rows, LOOK_ROWS):
            rows = slice(start, start + LOOK_ROWS)
            X = self.X.part(rows) if isinstance(self.X, Scaled) else self.X[:, rows]
            y, w = (None if column is None else column[rows] for column in (self.y, self.w))
            eta = eps @ X if self.offset is None else self.offset[rows] + eps @ X
            scale = deviations(self.family, eta, y, part, w)
            if w is not None:
                scale = scale * (w if part is Part.GRADIENT else np.sqrt(w))
            yield PersonRows(X * scale)

    def slopes(self, eps: Array) -> Array:
        """Return what each row adds to the gradient, w (mu - y) X, shape (d, N); of the logistic family."""
        if self.family is not Family.LOGISTIC:
            raise TypeError("only the slopes of the logistic family are needed")
        X = matrix(self.X)
        eta = eps @ X if self.offset is None else self.offset + eps @ X
        slope = kernels.expit(eta) if self.y is None else kernels.expit(eta) - self.y
        return X * (slope if self.w is None else slope * self.w)

    @property
    def column_sizes(self) -> Array:
        return np.array(self._columns)

    def row_bounds(self, eps: Array, part: Part = Part.GRADIENT) -> Array | None:
        """Return bounds of the entries of `disclosed_rows` by coordinate; None if the family knows none."""
        weight = self._largest_weight
        if part is Part.HESSIAN:
            bend = 1.0 if self.family is Family.LINEAR else self.family.curvature_ceiling
            return None if bend is None else self.column_sizes * math.sqrt(bend * weight)
        most = self._largest_slope(eps)
        return None if most is None else self.column_sizes * (most * weight)

    @cached_property
    def _largest_weight(self) -> float:
        return 1.0 if self.w is None else kernels.largest(self.w)

    def _largest_slope(self, eps: Array) -> float | None:
        """Return a bound of `deviations` over the rows at eps, None if the family knows none."""
        match self.family:
            case Family.LINEAR:
                return 1.0
            case Family.LOGISTIC:  # |mu - y| for a response on the unit scale
                return 1.0 if self.y is None or self.y_largest == 1.0 else 1.0 + kernels.largest(self.y)
            case Family.GAUSSIAN:
                residual = np.zeros(self.n_rows) if self.offset is None else self.offset.copy()
                design = scaled(self.X)
                for slope, column in zip((eps * design.factors).tolist(), design.columns, strict=True):
                    residual += slope * column
                if self.y is not None:
                    residual -= self.y
                return max(kernels.largest(residual) * (1.0 + 1e-9), LEAST_RESIDUAL)
            case _:
                return None

    def column_people(self, enough: int | None = None) -> IntArray:
        if enough is not None and self.n_rows > LOOK_ROWS:
            people = self._column_people(slice(LOOK_ROWS))
            if (people >= enough).all():
                return people
        return self._column_people(slice(None))

    def _column_people(self, rows: slice) -> IntArray:
        entered = None if self.w is None else self.w[rows] != 0
        inside = (column[rows] != 0 for column in scaled(self.X).columns)
        return np.array([np.count_nonzero(each if entered is None else each & entered) for each in inside])

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

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        sizes = self.table.map(lambda batch: self.design(batch).column_sizes)
        columns = reduce(np.maximum, sizes, np.zeros(self.dim))
        largest = largest_leverage(lambda: self.disclosed_rows(eps, part), space=space, enough=enough)
        return Look(largest=largest, columns=columns, family=self.family)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        for batch in self.table.map(lambda batch: list(self.design(batch).disclosed_rows(eps, part))):
            yield from batch

    def column_people(self, enough: int | None = None) -> IntArray:  # noqa: ARG002 - batches are read at once
        return np.asarray(sum(self.table.map(lambda batch: self.design(batch).column_people())))

    def curvature_ceiling(self) -> Array:
        return _largest_mean_hessian(self.family, self.gram, self.n_rows, self.dim)

    def gradients_by_group(self, eps: Array, most: int) -> Iterator[tuple[int, Array]]:
        """Yield as `AbstractSubmodel` says, with at most ``most`` groups in each batch of the table."""
        for groups in self.table.map(lambda batch: list(self.design(batch).gradients_by_group(eps, most))):
            yield from groups

    def gram(self) -> Sums:
        """See `AbstractRowsSubmodel.gram`."""
        return reduce(add, self.table.map(lambda batch: self.design(batch).gram()))


class SumsAt(NamedTuple):
    """Parts of a submodel's loss at eps, to be summed."""

    submodel: AbstractSubmodel
    eps: Array
    parts: Part


def sums_of_two(one: SumsAt, two: SumsAt) -> tuple[Sums, Sums]:
    """Return `AbstractSubmodel.sums` of two submodels of the same rows.

    Models of a study share most of their columns, and to fetch these from memory takes about as long as to
    compute with them. Generalised linear models are therefore summed in one pass.
    """
    first, second = one.submodel, two.submodel
    if (
        not isinstance(first, GeneralisedLinear)
        or not isinstance(second, GeneralisedLinear)
        or first.n_rows != second.n_rows
    ):
        return first.sums(one.eps, one.parts), second.sums(two.eps, two.parts)
    shifts, others = first.shifts(one.eps, one.parts), second.shifts(two.eps, two.parts)
    units, more = kernels.glm_sums_of_two(
        first.query(one.eps, one.parts, shifts), second.query(two.eps, two.parts, others)
    )
    return Sums(units, shifts), Sums(more, others)


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
        """A bound on ||C Hess A(eps) C^T|| at every eps, in coordinates C, (p, d)."""

    def segment_curvature(self, start: Array, step: Array) -> float:  # noqa: ARG002 - it holds everywhere
        """A bound on the second derivative of A(start + s step) in s, for every s from 0 to 1.

        Every party computes the same number. By default it is the bound that holds everywhere.
        """
        return self.curvature_ceiling(step[None, :])


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
