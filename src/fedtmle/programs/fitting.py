"""How a study's GLMs are fitted: coded, by rounded gradients (`programs.coded_fit`), or by exact sums.

Every coded fit begins with the same round: the Gram matrices that cover all models (`programs.coded_fit`),
and for each fit the sums of its weights and responses and the gradient at zero. From these follow the
coordinates, the fit of the intercept alone, and a first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from fedtmle.errors import FitError
from fedtmle.initial.glm import GLM, AbstractResponse, FittedGLM, FittedMultinomial, Levels, over_long
from fedtmle.model.linear import cholesky, congruence, invert_lower, multiply, solve_factored
from fedtmle.model.refusals import refuse_collinear, refuse_separated
from fedtmle.model.submodels import by_person
from fedtmle.model.table import AbstractBoundedColumns, AnyTable, Table, over_batches
from fedtmle.programs.coded_fit import (
    CURVATURE_ROUND,
    FEW_COORDINATES,
    LONGEST_STEP,
    DesignColumns,
    Gram,
    Task,
    ask_gram,
    covering,
    fit_coded,
)
from fedtmle.programs.nuisance import (
    Regression,
    fit_exactly,
    fit_model,
    fitted_model,
    refuse_constant_within,
    unused_levels,
)
from fedtmle.protocol.flows import ask, together
from fedtmle.protocol.query import Flow
from fedtmle.protocol.regression import FitCurvatureQuery, FitGradientQuery, Near
from fedtmle.protocol.sums import TallyQuery, norm
from fedtmle_core import kernels
from fedtmle_core.types import Array, Columns, Family, IntArray, exponent, product

Result = TypeVar("Result")

TOTAL_BITS = 10  # binary places of the sums of weights and responses
MINORITY_SHARE = (
    2.0**-20
)  # treat the response as constant if the minority's share of the weight is below this
FIRST_EXPONENT = -9  # exponent of the grid of the first gradient
DOUBTFUL = 2.0**-6  # ask for the first gradient again if rounding of a coordinate exceeds this
MISFIT = 2.0**-4  # share of the first gradient of a squared loss that a step may leave
UNITS = {Family.LOGISTIC: 1.0, Family.GAUSSIAN: 2.0**-4, Family.POISSON: 2.0**-4}  # see `FittedGLM.error`


@final
@dataclass(frozen=True, kw_only=True)
class First:
    """The first sums of a coded fit: the mean weight, that of weight times response, the gradient at zero.

    A multinomial response has one for the indicator of each class but the first.
    """

    weight: float
    responses: tuple[float, ...]
    basis: Array  # B, lower triangular: gradient and curvature are in the coordinates B z, z = A x
    gradient: Array
    rounding: float  # rounding error of each coordinate of the gradient
    curvature: Array | None = None  # known for a squared loss over its own rows, if asked

    def whitened(self, whitener: Array) -> tuple[Array, Array]:
        """Return the gradient in the coordinates W z, and a bound of the rounding of each of them."""
        move = multiply(whitener, invert_lower(self.basis))
        doubt = self.rounding * np.array([math.fsum(map(abs, row)) for row in move.tolist()])
        parts = self.gradient.reshape(-1, len(move))
        gradient = np.concatenate([multiply(move, part[:, None])[:, 0] for part in parts])
        return gradient, np.tile(doubt, len(parts))


@final
@dataclass(frozen=True, kw_only=True)
class Fitting:
    """How the models of a study are fitted. ``accuracy`` None asks for exact sums (`fit_exactly`).

    Else it bounds the effect of a coded fit on the estimate, in standard errors. ``grams`` and ``firsts`` are
    what `begin` found.
    """

    levels: Levels
    n: int
    accuracy: float | None = None
    grams: tuple[Gram, ...] = ()
    firsts: Mapping[tuple[str, GLM], First] = field(default_factory=dict)

    @property
    def is_coded(self) -> bool:
        return self.accuracy is not None

    def columns(self, regression: Regression, glm: GLM) -> DesignColumns:
        own = regression.own_formula(glm, self.levels)
        if own is not None:
            return DesignColumns.within(own, self.levels, regression.ranges)
        return DesignColumns.declared(glm.parsed, self.levels, regression.ranges)

    def gram(self, columns: DesignColumns, rows: AbstractResponse) -> Gram:
        return next(gram for gram in self.grams if gram.covers(columns, rows)).of(columns)


class LongPiece(NamedTuple):
    """Rows of a regression, and how many of them each person has, None if one."""

    rows: Table
    counts: IntArray | None


@final
@dataclass(frozen=True, kw_only=True)
class ResponseTotals(AbstractBoundedColumns[LongPiece]):
    """The weights of a regression, and weight times response or the indicator of each class but the first."""

    label = "weights and responses of a model"

    response: AbstractResponse
    weight_ceiling: float
    classes: int = 0  # number of classes of a multinomial response

    @property
    def names(self) -> tuple[str, ...]:
        if not self.classes:
            return ("weight", "weight times response")
        return ("weight", *(f"weight in class {j}" for j in range(1, self.classes)))

    @property
    def exponents(self) -> tuple[int, ...]:
        return (exponent(self.weight_ceiling * max(self.response.periods, 1)),) * len(self.names)

    @property
    def judged(self) -> Sequence[int]:
        # The gradient discloses as much about the response; without weights, the first column counts people.
        return (0,) if self.weight_ceiling > 1 else ()

    def over(self, rows: AnyTable, work: Callable[[LongPiece], Result]) -> Iterable[Result]:
        if self.response.periods:
            return over_long(self.response, rows, lambda long, counts: work(LongPiece(long, counts)))
        # Folds and clusters are drawn over all rows of a silo.
        return over_batches(rows, lambda table: work(LongPiece(table, None)))

    def evaluate(self, piece: LongPiece) -> Columns:
        y, w = self.response.of(piece.rows)
        parts = [w * (y == j) for j in range(1, self.classes)] if self.classes else [product(w, y)]
        columns = [np.broadcast_to(w, y.shape), *parts]
        if piece.counts is None:
            return columns
        return by_person(np.stack(columns), piece.counts)


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """A Gram matrix, and the first sums of the fits that it serves."""

    gram: Gram
    firsts: Mapping[tuple[str, GLM], First]


def begin(fits: Sequence[tuple[Regression, GLM]], fitting: Fitting) -> Flow[Fitting]:
    """Ask for the first sums of all coded fits: Gram matrices that cover all models, and sums of each fit."""
    if not fitting.is_coded:
        return fitting
    parts = [_Part(part, glm, fitting.columns(part, glm)) for part, glm in fits]
    parts = [part for part in parts if part.columns.names]  # a silo's intercept needs no sums of others
    flows, rest = [], parts
    for columns, rows in covering([(part.columns, part.rows) for part in parts]):
        flows.append(_begin_with(columns, rows, [p for p in rest if p.is_among(columns, rows)], fitting))
        rest = [p for p in rest if not p.is_among(columns, rows)]
    begun = yield from together(flows)
    return replace(
        fitting,
        grams=tuple(each.gram for each in begun),
        firsts={key: first for each in begun for key, first in each.firsts.items()},
    )


class _Part(NamedTuple):
    """A fit and its columns."""

    regression: Regression
    glm: GLM
    columns: DesignColumns

    @property
    def rows(self) -> AbstractResponse:
        return self.regression.response.every_row

    def is_among(self, columns: DesignColumns, rows: AbstractResponse) -> bool:
        return self.rows == rows and set(self.columns.names) <= set(columns.names)


def _begin_with(
    columns: DesignColumns, rows: AbstractResponse, served: Sequence[_Part], fitting: Fitting
) -> Flow[_Begun]:
    """Ask for a Gram matrix until it is resolved, and for the first sums of the fits that it serves.

    In a further round the first gradient is asked again, in the coordinates found so far, if the first step
    of a fit would be unreliable: after a wrong step, one person may dominate the residuals.
    """
    flows: list[Flow[Any]] = [ask_gram(columns, rows, fitting.levels, fitting.n)]
    flows += [_first(part, fitting) for part in served]
    results: list[Any] = yield from together(flows)
    gram: Gram = results[0]
    firsts: list[First] = results[1:]
    while not (gram.is_resolved or gram.is_fine):
        whiteners = [gram.of(part.columns).whitener() for part in served]
        doubtful = [
            k
            for k, (first, whitener) in enumerate(zip(firsts, whiteners, strict=True))
            if first.whitened(whitener)[1].max() > DOUBTFUL
        ]
        flows = [ask_gram(columns, rows, fitting.levels, fitting.n, gram)]
        flows += [_first_again(served[k], firsts[k], whiteners[k], fitting) for k in doubtful]
        gram, *again = yield from together(flows)
        for k, first in zip(doubtful, again, strict=True):
            firsts[k] = first
    keys = ((part.regression.label, part.glm) for part in served)
    return _Begun(gram=gram, firsts=dict(zip(keys, firsts, strict=True)))


def _first(part: _Part, fitting: Fitting) -> Flow[First]:
    regression = part.regression
    columns_of = ResponseTotals(
        response=regression.response,
        weight_ceiling=regression.weight_ceiling,
        classes=len(regression.classes),
    )
    totals = TallyQuery(columns=columns_of, n=fitting.n, grid=(TOTAL_BITS,) * len(columns_of.names))
    basis = np.eye(len(part.columns.names))
    flows: list[Flow[Any]] = [ask(totals), _first_gradient(part, basis, fitting)]
    sums, (gradient, rounding) = yield from together(flows)
    weight, *responses = sums.values(fitting.n).tolist()
    return First(weight=weight, responses=tuple(responses), basis=basis, gradient=gradient, rounding=rounding)


def _first_again(part: _Part, first: First, basis: Array, fitting: Fitting) -> Flow[First]:
    """Return the first sums in the coordinates B z.

    For a squared loss over some of the rows they include the curvature, which is not that of all rows.
    """
    asks = part.regression.family_of(part.glm) is Family.GAUSSIAN and not _is_of_all(part.regression, first)
    flows: list[Flow[Any]] = [_first_gradient(part, basis, fitting)]
    curvature = FitCurvatureQuery(**_at_zero(part, basis, fitting))
    if asks:
        flows.append(ask(curvature))
    (gradient, rounding), *matrix = yield from together(flows)
    return replace(
        first,
        basis=basis,
        gradient=gradient,
        rounding=rounding,
        curvature=curvature.matrix(matrix[0]) if asks else None,
    )


def _first_gradient(part: _Part, basis: Array, fitting: Fitting) -> Flow[tuple[Array, float]]:
    """Return the gradient at zero in the coordinates B z, and the rounding of each coordinate."""
    stream = f"{part.regression.label}, {part.glm.formula}, at zero"
    query = FitGradientQuery(**_at_zero(part, basis, fitting), stream=stream)
    return query.values((yield query)), query.rounding


def _at_zero(part: _Part, basis: Array, fitting: Fitting) -> dict[str, Any]:
    """Return the arguments of a query at zero in the coordinates B z."""
    model = fit_model(part.regression, part.glm, fitting.levels)
    return {
        "model": model,
        "eps": np.zeros(model.dim),
        "C": _per_class(multiply(basis, part.columns.A), part.regression),
        "exponent": FIRST_EXPONENT,
        "n": fitting.n,
    }


def _per_class(matrix: Array, regression: Regression) -> Array:
    """Return the block diagonal matrix with one block per class but the first; a GLM has one block."""
    if not regression.classes:
        return matrix
    return np.asarray(np.kron(np.eye(len(regression.classes) - 1), matrix), dtype=np.float64)


def fit_federated(regression: Regression, glm: GLM, fitting: Fitting) -> Flow[FittedGLM | FittedMultinomial]:
    """Fit one federated GLM or multinomial model, coded or by exact sums."""
    if fitting.is_coded and fitting.columns(regression, glm).names:
        return (yield from _fit_coded(regression, glm, fitting))
    return (yield from fit_exactly(regression, glm, fitting.levels, fitting.n))


def _fit_coded(regression: Regression, glm: GLM, fitting: Fitting) -> Flow[FittedGLM | FittedMultinomial]:
    columns, family = fitting.columns(regression, glm), regression.family_of(glm)
    gram = fitting.gram(columns, regression.response.every_row)
    first = fitting.firsts[regression.label, glm]
    _require_response(regression, family, first)
    if gram.is_fine and columns.own:
        refuse_constant_within(np.diag(gram.matrix), columns.names, regression.label)
        refuse_collinear(gram.raw(), columns.names, regression.label)
    elif gram.is_fine and not glm.ridge:
        empty = unused_levels(gram.raw(), columns.formula, fitting.levels)  # levels that nobody has
        refuse_collinear(gram.raw() + empty, columns.names, regression.label)
    whitener, size = gram.whitener(), len(columns.names)
    W, unit = _per_class(whitener, regression), UNITS[family]
    blocks = range(len(W) // size)

    def separated(direction: Array) -> None:
        if family is Family.LOGISTIC:
            mean = 0.0 if columns.own else gram.raw()[0]
            spread = np.sqrt(np.maximum(np.diag(gram.raw()) - mean**2, 0.0))
            names = regression.coefficient_names(columns.names)
            refuse_separated(direction, np.tile(spread, len(blocks)), names, regression.label)

    gradient, doubt = first.whitened(whitener)
    bend = _largest_bend(regression, family)
    task = Task(
        label=regression.label,
        stream=f"{regression.label}, {glm.formula}",
        model=fit_model(regression, glm, fitting.levels),
        C=multiply(W, _per_class(columns.A, regression)),
        n=fitting.n,
        goal=unit * (fitting.accuracy or 0.0) / math.sqrt(fitting.n),
        curvature_round=_curvature_round(regression, family, first, len(W)),
        separated=separated,
        smoothness=None if bend is None else regression.weight_ceiling * bend * gram.largest(whitener),
        at_zero=Near(gradient, float(doubt.max())),
    )
    gradient = np.where(np.abs(gradient) > 2.0 * doubt, gradient, 0.0)  # little is known about narrow columns
    means, start = [response / first.weight for response in first.responses], np.zeros(task.dim)
    if columns.names[0] == "1" and family is not Family.GAUSSIAN:
        reference = 1.0 - math.fsum(means) if family is Family.LOGISTIC else 1.0
        for j in blocks:  # at the fit of the intercepts alone, their gradient is zero
            start[j * size] = kernels.log(means[j] / reference) / whitener[0, 0]
            gradient[j * size] = 0.0
    null = first.weight / gram.mass * _null_curvature(family, means)
    curvature = np.kron(null, np.eye(size))
    if first.curvature is not None:
        curvature = congruence(multiply(whitener, invert_lower(first.basis)), first.curvature)
    curvature = curvature + task.public_curvature()
    factor = cholesky(curvature)
    step = np.zeros(task.dim) if factor is None else -solve_factored(factor, gradient)
    step *= min(1.0, LONGEST_STEP / (norm(step) or 1.0))
    scale = max(norm(gradient), min(norm(doubt), math.sqrt(max(np.diag(null).tolist()))))
    if family is Family.GAUSSIAN:  # the doubt remains, and so does the error of the curvature
        scale = norm(doubt) + MISFIT * norm(gradient)
    fit = yield from fit_coded(task, start + step, scale, curvature)
    return fitted_model(regression, glm, fitting.levels, fit.eps, error=fit.error / unit, bits=fit.bits)


def _is_of_all(regression: Regression, first: First) -> bool:
    """Return whether a regression uses all rows with the weight 1: its curvature is the Gram matrix."""
    return regression.weight_ceiling <= 1 and first.weight > 1.0 - 2.0**-TOTAL_BITS


def _curvature_round(regression: Regression, family: Family, first: First, dim: int) -> int | None:
    """Return from which round on a fit may ask for its curvature, None if it need not."""
    if family is not Family.GAUSSIAN:
        return CURVATURE_ROUND
    is_known = first.curvature is not None or _is_of_all(regression, first)
    return None if is_known or dim > FEW_COORDINATES else 1


def _largest_bend(regression: Regression, family: Family) -> float | None:
    """Return a bound of the second derivative of a row's loss in its linear predictors, None if none holds.

    p (1 - p) <= 1/4 and, of several classes, diag(p) - p p^T <= 1/2.
    """
    if family is Family.LOGISTIC:
        return 0.5 if regression.classes else 0.25
    return 1.0 if family is Family.GAUSSIAN else None


def _null_curvature(family: Family, means: Sequence[float]) -> Array:
    """Return the second derivative of a row's loss at the fit of the intercepts alone, (classes - 1)^2."""
    if family is Family.LOGISTIC:
        return np.asarray(np.diag(means) - np.outer(means, means), dtype=np.float64)
    return np.array([[1.0 if family is Family.GAUSSIAN else means[0]]])


def _require_response(regression: Regression, family: Family, first: First) -> None:
    """Refuse a response that has no weight or is the same in every row, and a class without records."""
    smallest = MINORITY_SHARE * first.weight
    if not first.weight > 0:
        raise FitError("arm", f"{regression.label}: no row has a positive weight")
    if min(first.responses) <= smallest and family is not Family.GAUSSIAN:
        raise FitError("arm", f"{regression.label}: {regression.constant}")
    if first.weight - math.fsum(first.responses) <= smallest and family is Family.LOGISTIC:
        raise FitError("arm", f"{regression.label}: {regression.constant}")
