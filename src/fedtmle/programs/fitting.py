"""How a study's GLMs are fitted: coded, by rounded gradients (`programs.coded_fit`), or by exact sums.

Every coded fit begins with the same round: the Gram matrices that cover all models (`programs.curvature`),
and for each fit the sums of its weights and responses and the gradient at zero. From these follow the
coordinates, the fit of the intercept alone, and a first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, final

import numpy as np

from fedtmle.errors import FitError
from fedtmle.initial.glm import GLM, AbstractResponse, FittedGLM, GLMModel, Levels
from fedtmle.model import kernels
from fedtmle.model.families import Family
from fedtmle.model.linear import cholesky, multiply, solve_factored
from fedtmle.model.statistics import AbstractBoundedColumns
from fedtmle.model.table import AnyTable, Table, over_batches
from fedtmle.model.types import Array, exponent
from fedtmle.programs.coded_fit import LONGEST_STEP, Task, fit_coded
from fedtmle.programs.curvature import DesignColumns, Gram, ask_grams
from fedtmle.programs.nuisance import (
    Regression,
    fit_exactly,
    refuse_collinear,
    refuse_separated,
    unused_levels,
)
from fedtmle.protocol.query import Flow, JointQuery
from fedtmle.protocol.regression import FitGradientQuery
from fedtmle.protocol.sums import TallyQuery, norm

Result = TypeVar("Result")

TOTAL_BITS = 10  # binary places of the sums of weights and responses
MINORITY_SHARE = (
    2.0**-20
)  # treat the response as constant if the minority's share of the weight is below this
FIRST_EXPONENT = -9  # of the grid of the first gradient
UNITS = {Family.LOGISTIC: 1.0, Family.GAUSSIAN: 2.0**-4, Family.POISSON: 2.0**-4}  # see `FittedGLM.error`


@final
@dataclass(frozen=True, kw_only=True)
class First:
    """The first sums of a coded fit: the mean weight, that of weight times response, the gradient at zero."""

    weight: float
    response: float
    gradient: Array  # in the coordinates z = A x
    rounding: float  # of each coordinate of the gradient


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

    def is_coded(self, regression: Regression) -> bool:
        return self.accuracy is not None and not regression.classes

    def columns(self, regression: Regression, glm: GLM) -> DesignColumns:
        return DesignColumns.declared(glm.parsed, self.levels, regression.ranges)

    def gram(self, columns: DesignColumns) -> Gram:
        return next(gram for gram in self.grams if gram.covers(columns)).of(columns)


@final
@dataclass(frozen=True, kw_only=True)
class ResponseTotals(AbstractBoundedColumns[Table]):
    """The weights of a regression, and weight times response."""

    response: AbstractResponse
    weight_ceiling: float

    @property
    def label(self) -> str:
        return "weights and responses of a model"

    @property
    def names(self) -> tuple[str, ...]:
        return ("weight", "weight times response")

    @property
    def exponents(self) -> tuple[int, ...]:
        return (exponent(self.weight_ceiling),) * 2

    @property
    def judged(self) -> Sequence[int]:
        # The gradient tells as much of the response, and without weights the first column counts people.
        return (0,) if self.weight_ceiling > 1 else ()

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_batches(rows, work)  # folds and clusters are drawn over all rows of a silo

    def evaluate(self, piece: Table) -> Array:
        y, w = self.response.of(piece)
        return np.stack([np.broadcast_to(w, y.shape), w * y])


def begin(fits: Sequence[tuple[Regression, GLM]], fitting: Fitting) -> list[Flow[tuple[object, object]]]:
    """Return the flows of a study's first round: each result belongs into `Fitting` (`begun`).

    They do not depend on each other: Gram matrices that cover all models, and the first sums of each fit.
    """
    coded = [(part, glm) for part, glm in fits if fitting.is_coded(part)]
    if not coded:
        return []
    columns = [fitting.columns(part, glm) for part, glm in coded]
    grams = ask_grams(columns, fitting.levels, fitting.n)
    firsts = [_first(part, glm, each, fitting) for (part, glm), each in zip(coded, columns, strict=True)]
    return [*(_keyed(None, gram) for gram in grams), *firsts]


def begun(fitting: Fitting, results: Iterable[tuple[object, object]]) -> Fitting:
    """Return the fitting with the results of the flows of `begin`."""
    found = list(results)
    return replace(
        fitting,
        grams=tuple(value for _, value in found if isinstance(value, Gram)),
        firsts={key: value for key, value in found if isinstance(value, First)},  # type: ignore[misc]
    )


def _keyed(key: object, flow: Flow[Gram]) -> Flow[tuple[object, object]]:
    return key, (yield from flow)


def _first(
    regression: Regression, glm: GLM, columns: DesignColumns, fitting: Fitting
) -> Flow[tuple[object, object]]:
    totals = TallyQuery(
        columns=ResponseTotals(response=regression.response, weight_ceiling=regression.weight_ceiling),
        n=fitting.n,
        grid=(TOTAL_BITS,) * 2,
    )
    gradient = FitGradientQuery(
        model=_model(regression, glm, columns, fitting.levels),
        eps=np.zeros(len(columns.names)),
        C=columns.A,
        exponent=FIRST_EXPONENT,
        n=fitting.n,
        stream=f"{regression.label}, {glm.formula}, at zero",
    )
    sums, pooled = yield JointQuery((totals, gradient))
    weight, response = sums.values(fitting.n).tolist()
    return (regression.label, glm), First(
        weight=weight,
        response=response,
        gradient=gradient.values(pooled),
        rounding=gradient.rounding,
    )


def _model(regression: Regression, glm: GLM, columns: DesignColumns, levels: Levels) -> GLMModel:
    return GLMModel(
        formula=glm.parsed,
        levels=levels,
        scales=columns.scales,
        family=regression.family_of(glm),
        response=regression.response,
        weight_ceiling=regression.weight_ceiling,
        ridge=glm.ridge,
    )


def fit_glm(regression: Regression, glm: GLM, fitting: Fitting) -> Flow[FittedGLM]:
    """Fit one federated GLM, coded or by exact sums."""
    if fitting.is_coded(regression):
        return (yield from _fit_coded(regression, glm, fitting))
    return (yield from fit_exactly(regression, glm, fitting.levels, fitting.n))


def _fit_coded(regression: Regression, glm: GLM, fitting: Fitting) -> Flow[FittedGLM]:
    columns, family = fitting.columns(regression, glm), regression.family_of(glm)
    gram, first = fitting.gram(columns), fitting.firsts[regression.label, glm]
    model = _model(regression, glm, columns, fitting.levels)
    _require_response(regression, family, first)
    if gram.is_fine and not glm.ridge:
        empty = unused_levels(gram.raw(), columns.formula, fitting.levels)  # of levels that nobody has
        refuse_collinear(gram.raw() + empty, columns.names, regression.label)
    whitener = gram.whitener()
    unit = UNITS[family]

    def separated(direction: Array) -> None:
        if family is Family.LOGISTIC:
            spread = np.sqrt(np.maximum(np.diag(gram.raw()) - gram.raw()[0] ** 2, 0.0))
            refuse_separated(direction, spread, columns.names, regression.label)

    task = Task(
        label=regression.label,
        stream=f"{regression.label}, {glm.formula}",
        model=model,
        C=multiply(whitener, columns.A),
        n=fitting.n,
        goal=unit * (fitting.accuracy or 0.0) / math.sqrt(fitting.n),
        is_quadratic=family is Family.GAUSSIAN,
        separated=separated,
    )
    gradient = multiply(whitener, first.gradient[:, None])[:, 0]
    doubt = first.rounding * np.array([math.fsum(map(abs, row)) for row in whitener.tolist()])
    gradient = np.where(np.abs(gradient) > 2.0 * doubt, gradient, 0.0)  # of narrow columns little is known
    mean = first.response / first.weight
    bend, start = first.weight * _curvature(family, mean), np.zeros(task.dim)
    if columns.names[0] == "1" and family is not Family.GAUSSIAN:
        start[0] = kernels.log(mean / (1.0 - mean) if family is Family.LOGISTIC else mean)
        gradient[0] = 0.0  # at the fit of the intercept alone
    curvature = bend * np.eye(task.dim) + task.public_curvature()
    factor = cholesky(curvature)
    step = np.zeros(task.dim) if factor is None else -solve_factored(factor, gradient)
    step *= min(1.0, LONGEST_STEP / (norm(step) or 1.0))
    scale = max(norm(gradient), min(norm(doubt), math.sqrt(bend)))
    fit = yield from fit_coded(task, start + step, scale, curvature)
    return FittedGLM(
        formula=glm.parsed,
        levels=fitting.levels,
        family=family,
        coefficients=tuple(map(float, np.ldexp(fit.eps, -np.array(columns.scales)))),
        error=fit.error / unit,
        bits=fit.bits,
    )


def _curvature(family: Family, mean: float) -> float:
    """Return the second derivative of a row's loss at the fit of the intercept alone."""
    return {Family.LOGISTIC: mean * (1.0 - mean), Family.GAUSSIAN: 1.0}.get(family, mean)


def _require_response(regression: Regression, family: Family, first: First) -> None:
    """Refuse a response without weight, or one that is the same in every row."""
    smallest = MINORITY_SHARE * first.weight
    if not first.weight > 0:
        raise FitError("arm", f"{regression.label}: no row has a positive weight")
    if first.response <= smallest and family is not Family.GAUSSIAN:
        raise FitError("arm", f"{regression.label}: {regression.constant}")
    if first.weight - first.response <= smallest and family is Family.LOGISTIC:
        raise FitError("arm", f"{regression.label}: {regression.constant}")
