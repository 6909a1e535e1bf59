"""Nuisance regressions as sub-flows: every party fits the same GLM on the same pooled sums."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtmle.algorithms.base import Run
from fedtmle.algorithms.optimizers import Newton, Origin
from fedtmle.algorithms.outcome import Query
from fedtmle.errors import InputError
from fedtmle.initial.crossfit import CrossFitted, Folds
from fedtmle.initial.design import column_names, design
from fedtmle.initial.glm import GLM, FittedGLM, GLMModel, Levels
from fedtmle.model.families import Family
from fedtmle.model.table import Table
from fedtmle.model.types import Array, Part, unpack
from fedtmle.protocol.query import Phase
from fedtmle.protocol.tables import ScalesQuery

GOAL = 2.0**-42  # gradient norm on unit-scaled columns
GIVE_UP = 1e-8  # a fit that stalls above this has not converged
COLLINEAR = 1e-10  # a pivot of the scaled Hessian below this share of its diagonal
SEPARATED = 1e-7  # of the curvature at zero, left at the fit

Fit = Generator[Query, Any, FittedGLM]


@dataclass(frozen=True, kw_only=True)
class Regression:
    """A GLM to fit: what it regresses, on which rows, and what to call it in a message."""

    what: str  # e.g. "treatment model"
    glm: GLM
    family: Family
    response: Callable[[Table], tuple[Array, Array]]
    weight_ceiling: float


def fit_glm(regression: Regression, levels: Levels, n: int) -> Fit:
    """One federated GLM by Newton's method: a round for column scales, then some six for the fit."""
    formula = regression.glm.parsed
    names = column_names(formula, levels)
    scales: tuple[int, ...] = yield ScalesQuery(
        columns=lambda table: design(formula, table, levels), count=len(names)
    )
    model = GLMModel(
        formula=formula,
        levels=levels,
        scales=scales,
        family=regression.family,
        response=regression.response,
        weight_ceiling=regression.weight_ceiling,
        ridge=regression.glm.ridge,
    )
    run = Run(model, n, Phase.NUISANCE)
    zero = np.zeros(len(names))
    sums = yield from run.ask(None, zero, Part.GRADIENT | Part.HESSIAN)
    gradient = run.pooled_gradient(sums[: len(names)], None, zero)
    hessian = unpack(sums[len(names) :].values(n), len(names)) + model.normaliser(None).hessian(zero)
    _refuse_collinear(hessian, names, regression.what)
    origin = Origin(law=None, update=0, gradient=gradient, hessian=hessian, goal=GOAL)
    inner = yield from Newton(max_steps=100).minimise(run, origin)
    last = next((p for p in reversed(run.points) if p.eps == tuple(map(float, inner.eps))), None)
    if inner.eps.any() and (last is None or last.gradient_norm is None or last.gradient_norm > GIVE_UP):
        raise InputError(
            f"{regression.what}: the fit did not converge; give it a small ridge, or fewer terms"
        )
    if regression.family is Family.LOGISTIC and inner.hessian is not None:
        _refuse_separation(hessian, inner.hessian, regression.what)
    beta = np.ldexp(inner.eps, -np.array(scales))
    return FittedGLM(
        formula=formula,
        levels=levels,
        family=regression.family,
        coefficients=tuple(map(float, beta)),
    )


def fit_cross(
    regression: Regression, levels: Levels, n: int, folds: Folds | None
) -> Generator[Query, Any, FittedGLM | CrossFitted]:
    """The fit, or one fit per fold left out."""
    if folds is None:
        return (yield from fit_glm(regression, levels, n))
    models = []
    for fold in range(folds.count):
        without = Regression(
            what=f"{regression.what} (fold {fold + 1})",
            glm=regression.glm,
            family=regression.family,
            response=_leave_out(regression.response, folds, fold),
            weight_ceiling=regression.weight_ceiling,
        )
        models.append((yield from fit_glm(without, levels, n)))
    return CrossFitted(models=tuple(models), folds=folds)


def _leave_out(
    response: Callable[[Table], tuple[Array, Array]], folds: Folds, fold: int
) -> Callable[[Table], tuple[Array, Array]]:
    def without(table: Table) -> tuple[Array, Array]:
        y, w = response(table)
        return y, w * (folds.of(table) != fold)

    return without


def _refuse_collinear(hessian: Array, names: tuple[str, ...], what: str) -> None:
    """Names the columns that others determine: pivots of the correlation-scaled Hessian that vanish."""
    diagonal = np.sqrt(np.maximum(np.diag(hessian), 0.0))
    empty = [name for name, d in zip(names, diagonal, strict=True) if d == 0]
    if empty:
        raise InputError(f"{what}: column(s) {', '.join(empty)} are zero in every row used; drop them")
    rest = hessian / np.outer(diagonal, diagonal)
    redundant = []
    for j, name in enumerate(names):
        pivot = rest[j, j]
        if pivot <= COLLINEAR:
            redundant.append(name)
            continue
        column = rest[:, j].copy()
        rest = rest - np.outer(column, column) / pivot
    if redundant:
        raise InputError(
            f"{what}: column(s) {', '.join(redundant)} are determined by the columns before them; "
            "drop them, or give the model a small ridge"
        )


def _refuse_separation(at_zero: Array, at_fit: Array, what: str) -> None:
    """A logistic fit whose curvature has vanished in some direction has no finite coefficients."""
    root = np.linalg.inv(np.linalg.cholesky(at_zero))
    if float(np.linalg.eigvalsh(root @ at_fit @ root.T)[0]) < SEPARATED:
        raise InputError(
            f"{what}: its response is perfectly predicted by some columns, so the fit has no finite "
            "coefficients; drop the columns, or give the model a small ridge"
        )
