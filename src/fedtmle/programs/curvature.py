"""Coordinates in which a regression is easy to fit: one coarse Gram matrix serves all models of a study.

The columns of a formula are moved and scaled by their declared ranges, z = A x, and one round pools the mean
of z z^T, each entry rounded to 2^-9. With its Cholesky factor L the columns C x, C = L^-1 A, are nearly
uncorrelated and of unit variance. A model whose columns are some of those of another needs no matrix of its
own, and neither do the folds of a model: C need not be accurate, since the gradients are.

Where columns are nearly collinear the rounded matrix does not show it. Then the matrix is asked again, in the
coordinates found so far and on a finer grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.initial.design import column_names
from fedtmle.initial.glm import AbstractResponse, GLMModel, Levels
from fedtmle.initial.own import ProfiledModel, within_names
from fedtmle.initial.ranges import ONE, Range, Ranges, column_exponents, column_ranges, range_exponent
from fedtmle.initial.syntax import Formula
from fedtmle.model.families import Family
from fedtmle.model.linear import (
    cholesky,
    congruence,
    dot,
    invert_lower,
    multiply,
    operator_norm_squared,
    symmetric_norm,
)
from fedtmle.model.types import Array, packed_size, upper_pairs
from fedtmle.protocol.query import Flow
from fedtmle.protocol.regression import FitCurvatureQuery, Near

GRIDS = (-9, -14, -40)  # the exponents of the grids on which a Gram matrix is asked, until it is resolved


@final
@dataclass(frozen=True, kw_only=True)
class DesignColumns:
    """The columns of a formula, and the public coordinates z = A x that their declared ranges give.

    x are the columns divided by 2^scales. A is lower triangular: with an intercept it centres columns whose
    range is away from zero. If every silo has an intercept of its ``own``, which is no column here, all
    matrices are of columns that are centred within the silos.
    """

    formula: Formula
    names: tuple[str, ...]
    scales: tuple[int, ...]
    A: Array
    largest: float  # a bound of every |z|
    ranges: tuple[Range, ...]  # ranges of the columns
    own: bool = False

    @classmethod
    def within(cls, formula: Formula, levels: Levels, ranges: Ranges) -> DesignColumns:
        """Return the columns of a formula whose intercept is each silo's own."""
        _, *of_columns = column_ranges(formula, levels, ranges)
        _, *scales = column_exponents(formula, levels, ranges)
        # A column that is centred within a silo has a mean square of at most that of half its range.
        halves = [
            math.ldexp(0.5 * (high - low), -scale) or 1.0
            for (low, high), scale in zip(of_columns, scales, strict=True)
        ]
        return cls(
            formula=formula,
            names=within_names(column_names(formula, levels)),
            scales=tuple(scales),
            A=np.diag([1.0 / half for half in halves]),
            largest=1.0,
            ranges=tuple(of_columns),
            own=True,
        )

    @classmethod
    def declared(cls, formula: Formula, levels: Levels, ranges: Ranges) -> DesignColumns:
        """Return the columns whose variables have the given ranges."""
        names, scales = column_names(formula, levels), column_exponents(formula, levels, ranges)
        of_columns = column_ranges(formula, levels, ranges)
        bounds = [
            (math.ldexp(low, -scale), math.ldexp(high, -scale))
            for (low, high), scale in zip(of_columns, scales, strict=True)
        ]
        A = np.zeros((len(names), len(names)))
        has_intercept = bool(names) and names[0] == "1"
        first = bounds[0][1] if has_intercept else 1.0  # the intercept's column, which is scaled too
        for j, (low, high) in enumerate(bounds):
            # A range that holds zero stays where it is: many columns, such as rare levels, are mostly zero.
            middle = 0.5 * (low + high) if has_intercept and j > 0 and not low <= 0.0 <= high else 0.0
            reach = max(high - middle, middle - low) or 1.0
            A[j, j] = 1.0 / reach
            A[j, 0] -= middle / (reach * first)
        ends = [abs(A[j, j] * x + (A[j, 0] * first if j else 0.0)) for j, b in enumerate(bounds) for x in b]
        most = max(ends, default=1.0)
        return cls(formula=formula, names=names, scales=scales, A=A, largest=most, ranges=of_columns)


@final
@dataclass(frozen=True, kw_only=True)
class Gram:
    """The pooled mean of z z^T, each entry to within ``precision``.

    It is the sum over ``rows``, all rows that a regression may use, over the number of people.
    """

    columns: DesignColumns
    rows: AbstractResponse
    matrix: Array
    precision: float
    grid: int  # one of `GRIDS`

    @property
    def is_fine(self) -> bool:
        """Whether there is no finer grid to ask on."""
        return self.grid == GRIDS[-1]

    def covers(self, columns: DesignColumns, rows: AbstractResponse) -> bool:
        return rows == self.rows and set(columns.names) <= set(self.columns.names)

    @property
    def mass(self) -> float:
        """The mean number of rows per person; 1 if the rows are the table's, or if it is unknown."""
        has_intercept = self.rows.periods > 0 and self.columns.names[:1] == ("1",)
        return float(self.matrix[0, 0]) if has_intercept else 1.0

    def largest(self, whitener: Array) -> float:
        """Return a bound of the largest eigenvalue of W K W', K the exact matrix and W the whitener."""
        rounding = len(self.matrix) * self.precision * operator_norm_squared(whitener)
        return symmetric_norm(congruence(whitener, self.matrix)) + rounding

    def of(self, columns: DesignColumns) -> Gram:
        """Return the matrix of columns that are some of these."""
        at = [self.columns.names.index(name) for name in columns.names]
        mix = multiply(columns.A, invert_lower(self.columns.A)[at])
        reach = max((math.fsum(map(abs, row)) for row in mix.tolist()), default=1.0)
        return Gram(
            columns=columns,
            rows=self.rows,
            matrix=congruence(mix, self.matrix),
            precision=self.precision * reach * reach,
            grid=self.grid,
        )

    def raw(self) -> Array:
        """Return the pooled mean of x x^T."""
        return congruence(invert_lower(self.columns.A), self.matrix)

    def whitener(self) -> Array:
        """Return L^-1, L the Cholesky factor of the matrix, lifted by its rounding error if necessary."""
        lift = 0.0
        while True:
            factor = cholesky(self.matrix, shift=lift, floor=self.precision)
            if factor is not None:
                return invert_lower(factor)
            lift = 4.0 * lift if lift else 2.0 * len(self.matrix) * self.precision

    @property
    def is_resolved(self) -> bool:
        """Whether rounding is small relative to the part of each column that earlier columns do not explain.

        With v the row of L^-1 of a column, v' K v = 1. Rounding moves it by some precision |v|^2.
        """
        factor = cholesky(self.matrix)
        if factor is None:
            return False
        return all(self.precision * dot(row, row) <= 0.5 for row in invert_lower(factor).tolist())


Needed = tuple[DesignColumns, AbstractResponse]  # columns, and the response whose rows are used


def covering(needed: Sequence[Needed]) -> list[Needed]:
    """Return the Gram matrices that cover all columns that are needed."""
    chosen: list[Needed] = []
    for columns, rows in sorted(needed, key=lambda each: -len(each[0].names)):
        if not any(rows == other and set(columns.names) <= set(of.names) for of, other in chosen):
            chosen.append((columns, rows))
    return chosen


def _gram_model(columns: DesignColumns, rows: AbstractResponse, levels: Levels) -> GLMModel | ProfiledModel:
    """Return the squared loss whose curvature is the Gram matrix."""
    scales, ranges = columns.scales, columns.ranges
    if columns.own:
        scales, ranges = (range_exponent(ONE), *scales), (ONE, *ranges)
    model = GLMModel(
        formula=columns.formula,
        levels=levels,
        scales=scales,
        ranges=ranges,
        family=Family.GAUSSIAN,
        response=rows,
    )
    return ProfiledModel(whole=model) if columns.own else model


def ask_gram(
    columns: DesignColumns, rows: AbstractResponse, levels: Levels, n: int, before: Gram | None = None
) -> Flow[Gram]:
    """Ask for a Gram matrix: on the first grid or, given one before, in its coordinates and on the next."""
    size = len(columns.names)
    model = _gram_model(columns, rows, levels)
    if before is None:
        grid, whitener = GRIDS[0], np.eye(size)
        near = Near(np.zeros(packed_size(size)), max(rows.periods, 1) * columns.largest**2)
    else:
        grid, whitener = GRIDS[GRIDS.index(before.grid) + 1], before.whitener()
        reach = max(math.fsum(map(abs, row)) for row in whitener.tolist())
        expected = congruence(whitener, before.matrix)
        near = Near(np.array([expected[j, k] for j, k in upper_pairs(size)]), before.precision * reach**2)
    factor = invert_lower(whitener)
    query = FitCurvatureQuery(
        model=model, eps=np.zeros(size), C=multiply(whitener, columns.A), exponent=grid, n=n, near=near
    )
    reach = max(math.fsum(map(abs, row)) for row in factor.tolist())
    return Gram(
        columns=columns,
        rows=rows,
        matrix=congruence(factor, query.matrix((yield query))),
        precision=2.0**grid * reach**2,
        grid=grid,
    )
