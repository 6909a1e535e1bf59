"""Queries for integer sums over the rows: derivatives of the loss, column totals, and sums with noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, final

import numpy as np

from fedtmle.errors import NumericalError
from fedtmle.model.budget import share_variance, sharing_loss
from fedtmle.model.linear import dot
from fedtmle.model.problem import AbstractProblem
from fedtmle.model.table import AbstractPrivateColumns
from fedtmle.protocol.codes import MOST_SILOS, Golomb, Integers
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import (
    EVERYBODY,
    AbstractTotals,
    BoundedColumns,
    ColumnTerms,
    CountCell,
    Derivatives,
    DisclosedColumns,
    Evaluation,
    IntegerSums,
    KnownLaw,
    Law,
    Local,
    Model,
    Phase,
    Query,
    RowMeans,
    law_at,
)
from fedtmle_core.exact import FINE_BITS, GRID_BITS, Sums, column_shifts, nearest, query_shifts, zero_sums
from fedtmle_core.types import Array, IntArray, Part

_PARTS = {Part.LOSS: "loss", Part.GRADIENT: "gradient", Part.HESSIAN: "curvature"}


def norm(vector: Array) -> float:
    """Return the Euclidean norm by correctly rounded sums: the same at every party."""
    values = np.asarray(vector, dtype=np.float64).tolist()
    return math.sqrt(dot(values, values))


def mean_gradient(model: Model, law: Law, eps: Array, sums: Sums, n: int) -> Array:
    """Return the pooled mean gradient at eps, shape (d,); the public part is added once."""
    gradient = sums.values(n) + model.normaliser(law).gradient(eps)
    if not np.isfinite(gradient).all():
        raise NumericalError("the pooled gradient is not finite; the law may have left the model")
    return gradient


@final
@dataclass(frozen=True, kw_only=True)
class SumsQuery(IntegerSums):
    """Sums of the asked parts of the row loss at (law, eps), over all rows or a pooled batch."""

    row_units = 1 << GRID_BITS

    problem: Model
    law: Law
    eps: Array
    parts: Part
    n: int
    batch: IntArray | None = None
    phase: Phase = Phase.TARGETING
    tolerance: float | None = None

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        return query_shifts(self.problem.row_bound(self.law), self.eps, self.parts)

    @property
    def explanation(self) -> str:
        parts = [name for part, name in _PARTS.items() if part in self.parts]
        step = "a nuisance model" if self.phase is Phase.NUISANCE else "the targeting step"
        rows = "the rows" if self.batch is None else "a batch of the rows"
        return f"exact sums over {rows}: {', '.join(parts)} of {step}"

    @property
    def lanes(self) -> tuple[Lane, ...] | None:
        """A batch needs the numbers of the rows in the pooled order, which nobody knows under masks."""
        return tuple(map(Lane, self.largest)) if self.batch is None else None

    def evaluations(self) -> tuple[Evaluation, ...]:
        curvature = Part.HESSIAN in self.parts
        return (Evaluation(self.problem, self.law, self.eps, self.batch, curvature),)

    def answer(self, local: Local) -> Sums:
        return local.submodel(self.problem, self.law, self.batch).sums(self.eps, self.parts)

    def row_means(self, answer: Sums | None, local: Local) -> RowMeans:
        names = "+".join(part.name.lower() for part in self.parts if part.name)
        return RowMeans(
            label=names if self.batch is None else f"{names} of a batch",
            terms=(Derivatives(self.problem, self.law, self.eps, self.parts, self.batch),),
            box=self.grid_box,
            sent=None if answer is None else answer.values(local.n_rows),
        )

    def _gradient(self, pooled: Sums) -> Array | None:
        """Return the mean gradient of the targeting's loss over all rows, if it was asked."""
        if self.phase is not Phase.TARGETING or Part.GRADIENT not in self.parts or self.batch is not None:
            return None
        first = 1 if Part.LOSS in self.parts else 0
        sums = pooled[first : first + self.problem.dim]
        return mean_gradient(self.problem, self.law, self.eps, sums, self.n)

    def residual(self, pooled: Sums) -> float | None:
        gradient = self._gradient(pooled)
        return None if gradient is None else norm(gradient)

    def known_law(self, pooled: Sums) -> KnownLaw | None:
        gradient, problem = self._gradient(pooled), self.problem
        if gradient is None or not isinstance(problem, AbstractProblem):
            return None
        law = law_at(problem, self.law, self.eps)
        if law is None:
            return None
        return KnownLaw(problem=problem, law=law, residuals=tuple(map(abs, gradient.tolist())))


@final
@dataclass(frozen=True, kw_only=True)
class TallyQuery(IntegerSums):
    """Sums of named columns: counts per arm, of observed outcomes, of weights.

    ``grid`` None sends them exactly; else sum j is rounded to a multiple of 2^-grid[j]. If they are
    ``optional``, a silo that may not disclose them sends zeros; a column of ones shows which silos did.
    """

    row_units = 1 << (GRID_BITS + FINE_BITS)

    columns: BoundedColumns
    n: int
    phase: Phase = Phase.NUISANCE
    counts: tuple[CountCell, ...] = ()
    grid: tuple[int, ...] | None = None
    optional: bool = False
    is_hidden: bool = False  # whether every silo sends zeros

    @property
    def shifts(self) -> tuple[int, ...]:
        return column_shifts(self.columns.exponents) if self.grid is None else self.grid

    @property
    def largest(self) -> tuple[int, ...]:
        bounds = zip(self.shifts, self.columns.exponents, strict=True)
        return tuple(nearest(self.n, -shift - exponent) for shift, exponent in bounds)

    @property
    def like(self) -> Sequence[int] | None:
        return None if self.grid is None else self.columns.like

    @property
    def explanation(self) -> str:
        return f"{'exact' if self.grid is None else 'rounded'} sums over the rows: {self.columns.label}"

    def cells(self) -> Iterable[CountCell]:
        return self.counts

    @property
    def is_optional(self) -> bool:
        return self.optional

    def suppress(self, answer: Sums, floor: Callable[[Query], int]) -> Sums:
        is_refused = self.optional and floor(self) == EVERYBODY
        return zero_sums(self.shifts) if is_refused or self.is_hidden else answer

    @property
    def hideable(self) -> int:
        return int(self.optional)

    def shown(self, answer: Sums) -> tuple[bool, ...]:
        return (any(answer.units),) if self.optional else ()

    def hiding(self, parts: Collection[int]) -> TallyQuery:
        return replace(self, is_hidden=True) if parts else self

    def disclosed_columns(self, local: Local) -> DisclosedColumns | None:
        columns = self.columns
        if not columns.judged:
            return None
        return DisclosedColumns(lambda: local.evaluate(lambda rows: columns.over(rows, columns.roots)))

    def answer(self, local: Local) -> Sums:
        return local.evaluate(self.columns.total).rounded(self.shifts)

    def row_means(self, answer: Sums, local: Local) -> RowMeans:
        return RowMeans(
            label="tally",
            terms=(ColumnTerms(self.columns),),
            box=self.grid_box,
            sent=answer.values(local.n_rows),
        )


@final
@dataclass(frozen=True, kw_only=True)
class PresenceQuery(AbstractTotals[Integers, Integers]):
    """How many silos have anyone of whom a column is not zero, for each column; nobody is counted."""

    columns: BoundedColumns
    phase: Phase = Phase.NUISANCE

    @property
    def explanation(self) -> str:
        return f"whether the silo has anyone: {self.columns.label}"

    @property
    def answer_code(self) -> Golomb:
        return Golomb(blocks=(len(self.columns.names),))

    @property
    def pooled_code(self) -> Golomb:
        return self.answer_code

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (Lane(MOST_SILOS),) * len(self.columns.names)

    def answer(self, local: Local) -> Integers:
        return tuple(int(units != 0) for units in local.evaluate(self.columns.total).units)

    def addends(self, answer: Integers, n_rows: int) -> Integers:
        return answer

    def pool_totals(self, totals: Integers) -> Integers:
        return totals


# The query of a differentially private study: integer sums, to which every silo adds its share of noise.
#
# A silo sends its sum on a public grid plus discrete Gaussian noise. With M silos, of which a collude, one
# share has the variance sigma^2 / (M - a), so that the noise of the others is enough for the stated budget:
#
#     rho = Delta^2 / (2 sigma^2) + the loss by sharing (`model.budget.sharing_loss`),
#
# Delta the sensitivity: the largest Euclidean norm of the change if one record is replaced, in grid units.

PLACES = 24  # binary places of the sums: rounding is far below the noise, and a share's loss negligible
TAIL = 64  # standard deviations of noise that the range of a sum allows for


@final
@dataclass(frozen=True, kw_only=True)
class NoisySums(IntegerSums):
    """Sums to which every silo adds a share of the noise that a budget of ``rho`` (zCDP) needs.

    The shares are large enough if up to ``colluders`` of the ``silos`` reveal theirs.
    """

    row_units = 2 << PLACES

    columns: AbstractPrivateColumns[Any]
    n: int
    rho: Fraction
    silos: int
    colluders: int
    phase: Phase = Phase.NUISANCE
    needs_masks: bool = True

    @property
    def shifts(self) -> tuple[int, ...]:
        return (PLACES,) * len(self.columns.names)

    @cached_property
    def sensitivity(self) -> int:
        """Delta in grid units, rounded up.

        A silo rounds its sum, which adds at most one unit to the change in each term.
        """
        exact = self.columns.squared_sensitivity * (1 << 2 * PLACES)
        root = math.isqrt(-(-exact.numerator // exact.denominator)) + 1
        return root + math.isqrt(len(self.columns.names)) + 1

    @cached_property
    def variance(self) -> Fraction:
        """The variance of the noise that the silos that do not collude add together, in squared units."""
        return Fraction(-(-(self.sensitivity**2) // (2 * self.rho)))

    @property
    def noise(self) -> Fraction:
        return share_variance(self.variance, self.silos, self.colluders)

    @property
    def spent(self) -> Fraction:
        """The zCDP budget that the answer spends: rho, and the loss by sharing the noise."""
        honest = self.silos - self.colluders
        return self.rho + sharing_loss(self.noise, honest, len(self.columns.names))

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise in a pooled sum, on the scale of the columns."""
        return math.sqrt(float(self.noise * self.silos)) / (1 << PLACES)

    @property
    def largest(self) -> tuple[int, ...]:
        room = TAIL * (math.isqrt(int(self.noise * self.silos)) + 1)
        return (self.n * self.row_units + room,) * len(self.columns.names)

    @property
    def explanation(self) -> str:
        return f"sums over the rows with noise (differential privacy): {self.columns.label}"

    def answer(self, local: Local) -> Sums:
        return local.evaluate(self.columns.total).rounded(self.shifts)
