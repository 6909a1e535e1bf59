"""The coded fit of a regression: rounded gradients, coded as differences, and a public quasi-Newton method.

Coefficients are eps = C^T u, with the C of the coordinates below, so that |u - u*| is the root mean square of
the difference between two linear predictors. Every round asks for the gradient at one point, on the grid

    h = THETA |g before| / sqrt(d),

so that rounding is a small share of the remaining gradient; the parties then take a step of the BFGS method.
If the curvature of the loss changes, the fit asks for it once, coarsely, when it is close to the minimum. A
squared loss with its own rows or weights and few columns asks for it in the first round. The fit ends when
the estimated remaining distance after a step,

    rho |p| + e |p| / |g|,   rho the ratio of the last two steps' lengths, e a bound of the rounding of g,

is at most the goal. The first part is how far the next step would go, an estimate; the second bounds
rounding.

A silo may decline to answer at a point where its gradient rests on too few people. The fit then asks halfway
to the last point at which all silos answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np

from fedtmle.errors import FitError
from fedtmle.initial.design import (
    Range,
    Ranges,
    column_exponents,
    column_names,
    column_ranges,
)
from fedtmle.initial.glm import AbstractResponse, GLMModel, Levels
from fedtmle.initial.own import OwnFormula, ProfiledModel, within_names
from fedtmle.initial.syntax import Formula
from fedtmle.model.linear import (
    cholesky,
    congruence,
    dot,
    invert_lower,
    multiply,
    operator_norm_squared,
    solve_factored,
    symmetric_norm,
)
from fedtmle.protocol.codes import gamma_length
from fedtmle.protocol.query import Flow, JointQuery, Model, Query
from fedtmle.protocol.regression import FitCurvatureQuery, FitGradientQuery, Near
from fedtmle.protocol.sums import norm
from fedtmle_core.types import Array, Family, packed_size, upper_pairs

# Coordinates in which a regression is easy to fit: one coarse Gram matrix serves all models of a study.
#
# The columns of a formula are moved and scaled by their declared ranges, z = A x, and one round pools the
# mean of z z^T, each entry rounded to 2^-9. With its Cholesky factor L the columns C x, C = L^-1 A, are
# nearly uncorrelated and of unit variance. A model whose columns are some of those of another needs no matrix
# of its own, and neither do the folds of a model: C need not be accurate, since the gradients are.
#
# Where columns are nearly collinear the rounded matrix does not show it. Then the matrix is asked again, in
# the coordinates found so far and on a finer grid.

GRIDS = (-9, -14, -40)  # the exponents of the grids on which a Gram matrix is asked, until it is resolved


class WholeColumns(NamedTuple):
    """The block of each silo's own coefficients, and the scales and ranges of all columns of one silo."""

    block: Formula
    scales: tuple[int, ...]
    ranges: tuple[Range, ...]


@final
@dataclass(frozen=True, kw_only=True)
class DesignColumns:
    """The columns of a formula, and the public coordinates z = A x that their declared ranges give.

    x are the columns divided by 2^scales. A is lower triangular: with an intercept it centres columns whose
    range is away from zero. If every silo has coefficients of its ``own``, whose columns are not among these,
    all matrices are of what is left of the columns after regression on these within the silos.
    """

    formula: Formula
    names: tuple[str, ...]
    scales: tuple[int, ...]
    A: Array
    largest: float  # a bound of every |z|
    ranges: tuple[Range, ...]  # ranges of the columns
    own: WholeColumns | None = None

    @classmethod
    def within(cls, own: OwnFormula, levels: Levels, ranges: Ranges) -> DesignColumns:
        """Return the common columns of a formula some of whose coefficients are each silo's own."""
        formula, of_block = own.whole, column_names(own.own, levels)
        names = column_names(formula, levels)
        whole = WholeColumns(
            own.own, column_exponents(formula, levels, ranges), column_ranges(formula, levels, ranges)
        )
        common = [j for j, name in enumerate(names) if name not in of_block]
        of_columns, scales = [whole.ranges[j] for j in common], [whole.scales[j] for j in common]
        # A column that is centred within a silo has a mean square of at most that of half its range.
        halves = [
            math.ldexp(0.5 * (high - low) if own.own.intercept else max(-low, high), -scale) or 1.0
            for (low, high), scale in zip(of_columns, scales, strict=True)
        ]
        return cls(
            formula=formula,
            names=within_names(formula, own.own, levels),
            scales=tuple(scales),
            A=np.diag([1.0 / half for half in halves]),
            largest=1.0,
            ranges=tuple(of_columns),
            own=whole,
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
    own = columns.own
    model = GLMModel(
        formula=columns.formula,
        levels=levels,
        scales=columns.scales if own is None else own.scales,
        ranges=columns.ranges if own is None else own.ranges,
        family=Family.GAUSSIAN,
        response=rows,
    )
    return model if own is None else ProfiledModel(whole=model, own=own.block)


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


THETA = 2.0**-6  # rounding of the gradient as a share of its norm; see `FINER_THETA`
FINER_THETA = 2.0**-9  # for at most `FEW_COORDINATES` coordinates, whose curvature is soon known
FEW_COORDINATES = 8
FINEST = -46  # the exponent of the finest grid: sums of rows bounded by 1 have 50 bits
LONGEST_STEP = 4.0  # longest step in u, the root mean square change of the linear predictor
MAX_ROUNDS = 80
CURVATURE_BITS = 6  # bits of the curvature relative to its mean; see `FINER_CURVATURE_BITS`
FINER_CURVATURE_BITS = 12  # for at most `FEW_COORDINATES` coordinates
WORTH_CURVATURE = 2.0**-6  # ask for the curvature only if a step is longer than this
FIRST_RATE = 2.0**-4  # share of the gradient that a step with a known curvature is expected to leave
CURVATURE_ROUND = 3  # first round that may ask for a curvature that changes
SEPARATED_CURVATURE = 1e-5  # treat as separated if this share of the first curvature is left along a step


@final
@dataclass(frozen=True, kw_only=True)
class Task:
    """A model to fit, its coordinates, and the accuracy that is wanted.

    ``separated`` raises the error of a loss without a minimum, given the direction in eps along which it
    falls for ever. ``goal`` bounds |u - u*|.
    """

    label: str
    stream: str
    model: Model
    C: Array
    n: int
    goal: float
    curvature_round: int | None  # the first round in which the curvature may be asked; None: it is known
    separated: Callable[[Array], None]
    smoothness: float | None = None  # L: a public bound of the curvature in u of the rows' mean loss, if any
    at_zero: Near | None = None  # the gradient of the rows' mean loss at u = 0, as far as it is known

    @property
    def dim(self) -> int:
        return len(self.C)

    def eps(self, u: Array) -> Array:
        return multiply(self.C.T, u[:, None])[:, 0]

    def near(self, u: Array, base: _FitPoint | None) -> Near | None:
        """Return what is known about the rows' mean gradient at u: |g(u) - g(v)| <= L |u - v|."""
        known, v = (self.at_zero, np.zeros(self.dim)) if base is None else (base.near, base.u)
        if known is None or self.smoothness is None:
            return None
        return Near(known.values, known.distance + self.smoothness * norm(u - v))

    def left_after(self, share: float, expected: float) -> float:
        """Return the expected gradient norm after a share of the first step; ``expected`` is for all."""
        known = 0.0 if self.at_zero is None else norm(self.at_zero.values)
        return max(expected, (1.0 - share) * known)

    def public_gradient(self, eps: Array) -> Array:
        gradient = self.model.normaliser(None).gradient(eps)
        return multiply(self.C, gradient[:, None])[:, 0]

    def public_curvature(self) -> Array:
        return congruence(self.C, self.model.normaliser(None).hessian(np.zeros(self.dim)))


@final
@dataclass(frozen=True, kw_only=True)
class CodedFit:
    """Coefficients on a lattice: u = 2^exponent times integers, and eps = C^T u.

    ``error`` is an estimate of |u - u*|, the lattice's rounding included.
    """

    eps: Array
    steps: tuple[int, ...]
    exponent: int
    error: float
    rounds: int

    @property
    def bits(self) -> int:
        """The length of the integers' code."""
        return sum(map(gamma_length, self.steps))


@dataclass(frozen=True, kw_only=True)
class _FitPoint:
    u: Array
    gradient: Array
    norm: float
    rounding: float  # a bound of the gradient's error
    near: Near  # the rows' part of the gradient

    @property
    def size(self) -> float:
        """How large the gradient may be."""
        return self.norm + self.rounding


class _Step(NamedTuple):
    """A step s of u, the change y of the gradient along it, and s . y."""

    s: list[float]
    y: list[float]
    along: float


@dataclass(frozen=True, kw_only=True)
class _Metric:
    """A quasi-Newton model of the curvature: a factored matrix, and the steps since it was made."""

    factor: Array
    steps: tuple[_Step, ...] = ()

    def solve(self, gradient: Array) -> Array:
        """Return the step that brings the gradient to zero if the model is right (two-loop recursion)."""
        q, shares = gradient.tolist(), []
        for step in reversed(self.steps):
            share = dot(step.s, q) / step.along
            shares.append(share)
            q = [a - share * b for a, b in zip(q, step.y, strict=True)]
        r = solve_factored(self.factor, np.array(q)).tolist()
        for step, share in zip(self.steps, reversed(shares), strict=True):
            factor = share - dot(step.y, r) / step.along
            r = [a + factor * b for a, b in zip(r, step.s, strict=True)]
        return -np.array(r)


def fit_coded(task: Task, u: Array, expected: float, curvature: Array) -> Flow[CodedFit]:
    """Return the fit from u, given the norm of the gradient and a model of the Hessian there."""
    first = _mean_curvature(curvature)
    metric = _Metric(factor=_factored(curvature))
    base: _FitPoint | None = None
    rate = 1.0  # expected ratio of the norms of the next and the last gradient
    previous_step, curvature_round = math.inf, task.curvature_round
    for number in range(1, MAX_ROUNDS + 1):
        may_ask = curvature_round is not None and number >= curvature_round
        asks = may_ask and previous_step > WORTH_CURVATURE
        if base is not None:
            expected = base.rounding + rate * base.norm if task.dim <= FEW_COORDINATES else base.size
        near = task.near(u, base)
        point, matrix = yield from _evaluate(task, u, expected, first, asks, near)
        if point is None:
            u = 0.5 * (u if base is None else u + base.u)  # the first gradient was at zero
            rate, expected = 1.0, task.left_after(0.5, expected)
            continue
        if base is not None:
            metric = _learned(task, metric, base, point, first)
        if matrix is not None:
            curvature_round, metric = None, _Metric(factor=_factored(matrix + task.public_curvature()))
        if base is None or point.size < base.size or matrix is not None:
            # Expect a step to shrink the gradient about as much as the last one did, or as the matrix allows.
            last = base.norm if base is not None else 0.0
            rate = (
                min(2.0 * point.norm / last, 1.0) if last else FIRST_RATE if curvature_round is None else 1.0
            )
            base = point
        else:
            rate = 1.0
        step = metric.solve(base.gradient)
        length = norm(step)
        if base is point:
            share = length / point.norm if point.norm else 1.0 / first
            rounding = point.rounding * share
            left = (min(0.5, length / previous_step) if previous_step else 0.5) * length + rounding
            if left <= task.goal:
                return _on_lattice(task, base.u + step, left, number)
            previous_step = length
        u = base.u + step * (LONGEST_STEP / max(length, LONGEST_STEP))
        while not task.model.admits(None, task.eps(u)):
            u = 0.5 * (u + base.u)
    raise FitError(
        "convergence", f"{task.label}: the fit did not converge; give it a small ridge, or fewer terms"
    )


def _evaluate(
    task: Task, u: Array, scale: float, first: float, asks_curvature: bool, near: Near | None
) -> Flow[tuple[_FitPoint | None, Array | None]]:
    """Ask for the gradient at u, on a grid for a gradient of norm ``scale``, and perhaps the curvature.

    Each is None if it was not asked, or if a silo declined.
    """
    theta = FINER_THETA if task.dim <= FEW_COORDINATES else THETA
    exponent = max(math.frexp(theta * scale / math.sqrt(task.dim))[1] - 1, FINEST) if scale else FINEST
    eps = task.eps(u)
    gradient = FitGradientQuery(
        model=task.model,
        eps=eps,
        C=task.C,
        exponent=exponent,
        n=task.n,
        stream=task.stream,
        near=near,
        declinable=True,
    )
    matrix = None
    if asks_curvature:
        entries = packed_size(task.dim)
        curvature = FitCurvatureQuery(
            model=task.model,
            eps=eps,
            C=task.C,
            exponent=math.frexp(first)[1]
            - (FINER_CURVATURE_BITS if task.dim <= FEW_COORDINATES else CURVATURE_BITS),
            n=task.n,
            near=None if task.smoothness is None else Near(np.zeros(entries), task.smoothness),
            declinable=True,
        )
        queries: tuple[Query, ...] = (gradient, curvature)
        pooled, curved = yield JointQuery(queries)
        matrix = None if curved is None else curvature.matrix(curved)
    else:
        pooled = yield gradient
    if pooled is None:
        return None, None
    of_rows = gradient.values(pooled)
    g = of_rows + task.public_gradient(eps)
    point = _FitPoint(
        u=u,
        gradient=g,
        norm=norm(g),
        rounding=math.sqrt(task.dim) * gradient.rounding,
        near=Near(of_rows, gradient.rounding),
    )
    return point, matrix


def _learned(task: Task, metric: _Metric, base: _FitPoint, point: _FitPoint, first: float) -> _Metric:
    """Return the model that also knows the change of the gradient between two points."""
    moved, change = point.u - base.u, point.gradient - base.gradient
    s, y = moved.tolist(), change.tolist()
    along, square = dot(s, y), dot(s, s)
    noise = base.rounding + point.rounding
    if square and along < SEPARATED_CURVATURE * first * square and norm(change) > noise:
        task.separated(task.eps(moved))
    if along <= 2.0 * noise * math.sqrt(square):  # rounding alone may explain the change
        return metric
    return replace(metric, steps=(*metric.steps, _Step(s, y, along)))


def _mean_curvature(matrix: Array) -> float:
    return math.fsum(np.diag(matrix).tolist()) / len(matrix)


def _factored(matrix: Array) -> Array:
    """Return the Cholesky factor of the matrix, lifted just enough to make it positive definite."""
    scale = _mean_curvature(matrix)
    lift = 0.0
    while True:
        factor = cholesky(matrix, shift=lift, floor=2.0**-10 * scale)
        if factor is not None:
            return factor
        lift = 4.0 * lift if lift else 2.0**-8 * scale


def _on_lattice(task: Task, u: Array, error: float, rounds: int) -> CodedFit:
    exponent = math.frexp(task.goal / math.sqrt(task.dim))[1] - 2
    steps = tuple(round(math.ldexp(value, -exponent)) for value in u.tolist())
    rounded = np.ldexp(np.array(steps, dtype=np.float64), exponent)
    return CodedFit(
        eps=task.eps(rounded),
        steps=steps,
        exponent=exponent,
        error=error + math.sqrt(task.dim) * 2.0 ** (exponent - 1),
        rounds=rounds,
    )
