"""Nuisance regressions as sub-flows: every party fits the same GLM on the same pooled sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedtmle.algorithms.base import Run
from fedtmle.algorithms.outcome import Query
from fedtmle.algorithms.regression_newton import minimise
from fedtmle.errors import InputError
from fedtmle.initial.crossfit import Folds
from fedtmle.initial.design import column_names, extremes_of, in_place
from fedtmle.initial.glm import FAMILIES, GLM, FittedGLM, GLMModel, Levels
from fedtmle.initial.pilot import Pilot
from fedtmle.initial.superlearner import SuperLearner
from fedtmle.model.families import Family, Response
from fedtmle.model.table import Table, over_batches, over_blocks
from fedtmle.model.types import Array, Part, unpack
from fedtmle.protocol.query import Phase
from fedtmle.protocol.tables import ScalesQuery

GOAL = 2.0**-42  # gradient norm on unit-scaled columns
GIVE_UP = 1e-8  # a fit that stalls above this has not converged
COLLINEAR = 1e-10  # a pivot of the scaled Hessian below this share of its diagonal
SAME = 1e-9  # a share of the weight below this has another response
SEPARATED = 1e-7  # of the curvature at zero, left at the fit

Fit = Generator[Query, Any, FittedGLM]
ToFit = GLM | Pilot | SuperLearner


@dataclass(frozen=True, kw_only=True)
class Regression:
    """A model to fit: what it regresses, on which rows, and what to call it in a message."""

    what: str  # e.g. "treatment model"
    model: ToFit
    kind: Response  # what a GLM's family "auto" goes by
    response: Callable[[Table], tuple[Array, Array]]
    weight_ceiling: float
    family: Family | None = None  # of every GLM, whatever it says; None: its own
    cluster: str | None = None
    spanning: bool = False  # whether a cluster may be in several silos
    bounds: tuple[float, float] = (0.0, 1.0)  # the response's own scale, which public models predict on
    fold: int = 0  # counted from 1, of the study's folds that is left out; 0: none
    constant: str = ""  # what to say where the response is the same in every row used

    def without(self, folds: Folds, fold: int) -> Regression:
        """The same regression on the other folds' rows."""

        def response(table: Table) -> tuple[Array, Array]:
            y, w = self.response(table)
            return y, w * (folds.of(table) != fold)

        return replace(self, what=f"{self.what} (fold {fold + 1})", response=response)

    def family_of(self, glm: GLM) -> Family:
        return FAMILIES[glm.family_for(self.kind)] if self.family is None else self.family


def fit_glm(regression: Regression, glm: GLM, levels: Levels, n: int) -> Fit:
    """One federated GLM by Newton's method: a round for column scales, then some six for the fit."""
    formula, family = glm.parsed, regression.family_of(glm)
    names = column_names(formula, levels)
    scales: tuple[int, ...] = yield ScalesQuery(
        columns=lambda piece: extremes_of(formula, piece, levels),
        count=len(names),
        over=over_batches if in_place(formula, levels) else over_blocks,
    )
    model = GLMModel(
        formula=formula,
        levels=levels,
        scales=scales,
        family=family,
        response=regression.response,
        weight_ceiling=regression.weight_ceiling,
        ridge=glm.ridge,
    )
    run = Run(model, n, Phase.NUISANCE)
    zero = np.zeros(len(names))
    sums = yield from run.ask(None, zero, Part.GRADIENT | Part.HESSIAN)
    gradient = run.pooled_gradient(sums[: len(names)], None, zero)
    hessian = unpack(sums[len(names) :].values(n), len(names)) + model.normaliser(None).hessian(zero)
    if family is Family.LOGISTIC:
        _refuse_constant(gradient, hessian, names, scales, regression)
    _refuse_collinear(hessian, names, regression.what)
    fit = yield from minimise(
        run, gradient, hessian, goal=GOAL, floor=GIVE_UP, is_quadratic=family is Family.GAUSSIAN
    )
    if fit.norm > GIVE_UP:
        raise InputError(
            f"{regression.what}: the fit did not converge; give it a small ridge, or fewer terms"
        )
    if family is Family.LOGISTIC:
        _refuse_separation(hessian, fit.hessian, names, regression.what)
    beta = np.ldexp(fit.eps, -np.array(scales))
    return FittedGLM(
        formula=formula,
        levels=levels,
        family=family,
        coefficients=tuple(map(float, beta)),
    )


def _refuse_constant(
    gradient: Array, hessian: Array, names: tuple[str, ...], scales: tuple[int, ...], regression: Regression
) -> None:
    """At zero the intercept's gradient is sum w (1/2 - y) and its curvature sum w / 4, so that the one is
    twice the other just where y is 0, or 1, in every row."""
    if names[0] != "1":
        return
    slope, bend = math.ldexp(abs(gradient[0]), scales[0]), math.ldexp(hessian[0, 0], 2 * scales[0])
    if bend > 0 and abs(slope - 2.0 * bend) <= 2.0 * bend * SAME:
        raise InputError(f"{regression.what}: {regression.constant}")


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


def _refuse_separation(at_zero: Array, at_fit: Array, names: tuple[str, ...], what: str) -> None:
    """A logistic fit whose curvature has vanished in some direction has no finite coefficients.

    Named are the columns that move most along that direction, each in units of its standard deviation.
    """
    root = np.linalg.inv(np.linalg.cholesky(at_zero))
    values, vectors = np.linalg.eigh(root @ at_fit @ root.T)
    if values[0] >= SEPARATED:
        return
    spread = np.diag(at_zero) - (at_zero[:, 0] ** 2 / at_zero[0, 0] if names[0] == "1" else 0.0)
    moved = np.abs(root.T @ vectors[:, 0]) * np.sqrt(np.maximum(spread, 0.0))
    most = [name for name, size in zip(names, moved, strict=True) if size > 0.3 * moved.max()]
    raise InputError(
        f"{what}: its response is perfectly predicted, mostly by {', '.join(most)}, so the fit has no finite "
        "coefficients; drop columns, or give the model a small ridge"
    )
