"""A study's nuisance regressions, and the federated GLM: every party fits it on the same pooled sums.

Newton's method asks for gradients and, as long as it changes, for the curvature. The loss is convex, and the
step solves H p = -g, so that the norm of g falls along it. A step is taken when it does fall; no loss is
asked. Close to the fit the curvature hardly changes: a step with the one of the point before leaves

    |g(eps + p)| ~ 2 r |g(eps)|,   r = |g(eps)| / |g before|,

r of the last full step, which squares from one to the next. Where such a step is expected to reach the goal,
a round asks for the gradient alone: d sums instead of d + d(d+1)/2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fedtmle.algorithms.base import Run
from fedtmle.errors import FitError
from fedtmle.initial.crossfit import Folds
from fedtmle.initial.design import Ranges, column_exponents, column_names, column_ranges, design_columns
from fedtmle.initial.glm import (
    FAMILIES,
    GLM,
    AbstractResponse,
    FittedGLM,
    FittedMultinomial,
    GLMModel,
    Levels,
    MultinomialModel,
    Supplied,
)
from fedtmle.initial.own import WITHIN, OwnBlock, OwnFormula, ProfiledModel, own_formula
from fedtmle.initial.superlearner import Pilot, SuperLearner
from fedtmle.initial.syntax import Categorical, Formula
from fedtmle.model.linear import newton_direction
from fedtmle.model.refusals import refuse_collinear, refuse_constant, refuse_separation, remedy
from fedtmle.model.table import TableView
from fedtmle.programs.study import Study
from fedtmle.protocol.query import Flow, Model, Phase
from fedtmle.targets.effects.prepare import (
    ArmResponse,
    ArmsResponse,
    EffectColumns,
    ObservedResponse,
    OutcomeResponse,
    WithoutFold,
)
from fedtmle_core.types import Array, Family, Part, Response, unpack

GRADIENT_GOAL = 2.0**-42  # gradient norm on unit-scaled columns
LARGEST_GRADIENT = 1e-8  # a fit that stalls above this has not converged
CONSTANT = 1e-12  # treat a column as constant within silos if its mean square around their means is below
MAX_STEPS = 100
MAX_HALVINGS = 50
SMALLEST_DECREASE = 1e-4  # a step of length t lowers the norm by at least this share of t

ToFit = GLM | Pilot | SuperLearner


@dataclass(frozen=True, kw_only=True)
class Regression:
    """A model to fit: its response, on which rows, and its name in messages."""

    label: str  # e.g. "treatment model"
    model: ToFit
    kind: Response  # decides the family of a GLM whose family is "auto"
    response: AbstractResponse
    weight_ceiling: float
    family: Family | None = None  # the family of every GLM; None: each GLM's own
    cluster: str | None = None
    spanning: bool = False  # whether a cluster may be in several silos
    bounds: tuple[float, float] = (0.0, 1.0)  # the response's own scale, which public models predict on
    fold: int = 0  # the study's fold that is left out, counted from 1; 0: none
    classes: tuple[str, ...] = ()  # names of the classes of a multinomial response
    constant: str = ""  # the message if the response is the same in every row used
    ranges: Ranges  # ranges of the variables that formulas use as numbers
    own: bool = False  # whether terms with C(silo) have coefficients of each silo's own, which it keeps
    view: TableView | None = None  # shows the rows on which it is fitted, None if they are the study's

    def without(self, folds: Folds, fold: int) -> Regression:
        """Return the same regression on the other folds' rows."""
        response = WithoutFold(response=self.response, folds=folds, fold=fold)
        return replace(self, label=f"{self.label} (fold {fold + 1})", response=response)

    def coefficient_names(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of the coefficients: those of the columns, for each class but the first."""
        if not self.classes:
            return columns
        return tuple(f"{name} (arm {arm})" for arm in self.classes[1:] for name in columns)

    def own_formula(self, glm: GLM, levels: Levels) -> OwnFormula | None:
        """Return the formula of one silo, None if no coefficient is its own."""
        return own_formula(glm.parsed, levels) if self.own else None

    def family_of(self, glm: GLM) -> Family:
        return FAMILIES[glm.family_for(self.kind)] if self.family is None else self.family


def effect_columns(study: Study, spanning: tuple[bytes, ...] = ()) -> EffectColumns:
    """Return which columns of a table play which part in the study."""
    target = study.target
    return EffectColumns(
        outcome=target.outcome,
        outcome_bounds=study.outcome_bounds,
        treatment=None if target.is_modified else target.treatment,
        arms=("all",) if target.is_modified else target.arms,
        strata=target.strata,
        strata_levels=study.levels[target.strata] if target.strata else (),
        weights=study.weights,
        weight_ceiling=study.weight_ceiling,
        cluster=study.cluster,
        largest_cluster=study.largest_cluster,
        spanning=spanning,
    )


def regressions(
    study: Study, columns: EffectColumns, weight_mean: float
) -> dict[str, tuple[Regression, ...]]:
    """Return the regressions of each role whose model is to be fitted: one, or one per arm."""
    regression = partial(
        Regression,
        weight_ceiling=study.weight_ceiling if study.weights else 1.0,
        cluster=study.cluster,
        spanning=study.cluster_scope == "spanning",
        ranges=study.ranges,
        own=study.profiles_silo,
    )
    by_role: dict[str, tuple[Regression, ...]] = {}
    treatment, missingness, outcome = study.treatment_model, study.missingness_model, study.outcome_model
    if treatment is not None and not isinstance(treatment, Supplied):
        by_role["treatment"] = _treatment_regressions(treatment, columns, weight_mean, regression)
    if missingness is not None and not isinstance(missingness, Supplied):
        by_role["missingness"] = (
            regression(
                label="missingness model",
                model=missingness,
                kind="binary",
                response=ObservedResponse(columns=columns, weight_mean=weight_mean),
                family=Family.LOGISTIC,
                constant="every outcome of those it is fitted on is observed, or every one is missing; leave "
                "the model out, or use fewer folds",
            ),
        )
    if outcome is not None and not isinstance(outcome, Supplied):
        by_role["outcome"] = (
            regression(
                label="outcome model",
                model=outcome,
                kind=study.response,
                response=OutcomeResponse(columns=columns, weight_mean=weight_mean),
                bounds=study.outcome_bounds,
                constant="every observed outcome is the same, so there is nothing to model; check the "
                "outcome's column and how it is coded",
            ),
        )
    return by_role


def _treatment_regressions(
    model: ToFit, columns: EffectColumns, weight_mean: float, regression: Callable[..., Regression]
) -> tuple[Regression, ...]:
    """Return the fits of g: one for two arms; for more, one multinomial GLM, or one arm against the rest."""
    constant = (
        "everyone it is fitted on has the same treatment; check the treatment's column and arms, or use "
        "fewer folds"
    )
    arms, fit = columns.arms, partial(regression, model=model, kind="binary", family=Family.LOGISTIC)
    if len(arms) > 2 and isinstance(model, GLM):
        response = ArmsResponse(columns=columns, weight_mean=weight_mean)
        missing = "someone in each arm is needed to fit it; check the treatment's column, or use fewer folds"
        return (fit(label="treatment model", response=response, classes=arms, constant=missing),)
    labels = {1: "treatment model"}
    if len(arms) > 2:
        labels = {code: f"treatment model, arm '{arm}'" for code, arm in enumerate(arms)}
    return tuple(
        fit(
            label=label,
            response=ArmResponse(columns=columns, weight_mean=weight_mean, code=code),
            constant=constant,
        )
        for code, label in labels.items()
    )


def fit_model(
    regression: Regression, glm: GLM, levels: Levels
) -> GLMModel | MultinomialModel | ProfiledModel:
    """Return the loss that a fit minimises, on columns that are scaled by their declared ranges."""
    own = regression.own_formula(glm, levels)
    formula = glm.parsed if own is None else own.whole
    shared: dict[str, Any] = {
        "formula": formula,
        "levels": levels,
        "scales": column_exponents(formula, levels, regression.ranges),
        "response": regression.response,
        "weight_ceiling": regression.weight_ceiling,
        "ridge": glm.ridge,
    }
    model: GLMModel | MultinomialModel
    if regression.classes:
        model = MultinomialModel(classes=len(regression.classes), **shared)
    else:
        ranges = column_ranges(formula, levels, regression.ranges)
        model = GLMModel(family=regression.family_of(glm), ranges=ranges, **shared)
    return model if own is None else ProfiledModel(whole=model, own=own.own)


def fitted_model(
    regression: Regression,
    glm: GLM,
    levels: Levels,
    eps: Array,
    *,
    error: float = 0.0,
    bits: int | None = None,
) -> FittedGLM | FittedMultinomial:
    """Return the fit whose coefficients on scaled columns are ``eps``."""
    model = fit_model(regression, glm, levels)
    own, formula = None, glm.parsed
    if isinstance(model, ProfiledModel):
        label = f"{regression.label}, {glm.formula}"
        own = OwnBlock(label=label, model=model, eps=tuple(eps.tolist()), view=regression.view)
        formula = model.whole.formula
        beta = model.coefficients(eps)
    else:
        scales = np.array(model.scales)
        beta = tuple(tuple(map(float, row)) for row in np.ldexp(eps.reshape(-1, len(scales)), -scales))
    if regression.classes:
        return FittedMultinomial(
            formula=formula, levels=levels, coefficients=beta, error=error, bits=bits, own=own
        )
    return FittedGLM(
        formula=formula,
        levels=levels,
        family=regression.family_of(glm),
        coefficients=beta[0],
        error=error,
        bits=bits,
        own=own,
    )


def fit_exactly(
    regression: Regression, glm: GLM, levels: Levels, n: int, *, has_offset: bool = False
) -> Flow[FittedGLM | FittedMultinomial]:
    """Fit one federated GLM or multinomial model by Newton's method on exact sums: some six rounds.

    ``has_offset`` says that the response has an offset: then no sum at zero shows whether it is constant.

    The coefficients are the same bits in any partition of the rows. Every round discloses the gradient and,
    as long as it changes, the Hessian, to 50 bits.
    """
    formula, family = glm.parsed, regression.family_of(glm)
    model = fit_model(regression, glm, levels)
    is_own = isinstance(model, ProfiledModel)
    names = model.columns if isinstance(model, ProfiledModel) else column_names(formula, levels)
    size, dim = len(names), model.dim
    if not dim:  # each silo has its intercept, and nothing is common
        return fitted_model(regression, glm, levels, np.zeros(0))
    run: Run[Model] = Run(model, n, Phase.NUISANCE)
    zero = np.zeros(dim)
    sums = yield from run.ask(None, zero, Part.GRADIENT | Part.HESSIAN)
    gradient = run.pooled_gradient(sums[:dim], None, zero)
    hessian = unpack(sums[dim:].values(n), dim) + model.normaliser(None).hessian(zero)
    of_columns = hessian[:size, :size]
    if is_own:
        refuse_constant_within(np.diag(of_columns), names, regression.label)
    empty = np.zeros((size, size)) if is_own else unused_levels(of_columns, formula, levels)
    unused = np.diag(np.tile(np.diag(empty), dim // size))
    hessian = hessian + unused
    of_columns = hessian[:size, :size]
    if family is Family.LOGISTIC and names[0] == "1" and not has_offset:
        refuse_constant(
            gradient[::size], hessian[0, 0], model.scales[0], regression.label, regression.constant
        )
    refuse_collinear(of_columns, names, regression.label)
    fit = yield from minimise(
        run,
        gradient,
        hessian,
        goal=GRADIENT_GOAL,
        acceptable=LARGEST_GRADIENT,
        is_quadratic=family is Family.GAUSSIAN,
        pinned=unused,
    )
    if family is Family.LOGISTIC:  # checked first: separation also prevents convergence
        refuse_separation(hessian, fit.hessian, regression.coefficient_names(names), regression.label)
    if fit.norm > LARGEST_GRADIENT:
        raise FitError(
            "convergence",
            f"{regression.label}: the fit did not converge; {remedy(of_columns, names, family)}",
        )
    return fitted_model(regression, glm, levels, fit.eps)


def unused_levels(hessian: Array, formula: Formula, levels: Levels) -> Array:
    """Return a diagonal matrix with a one for each column of a declared level that no row used has.

    Such a column is zero in every row. With this curvature added its coefficient stays 0.
    """
    is_factor = [
        any(isinstance(part.variable, Categorical) for part in column)
        for column in design_columns(formula, levels)
    ]
    return np.diag((np.array(is_factor) & (np.diag(hessian) == 0.0)).astype(np.float64))


def refuse_constant_within(squares: Array, names: tuple[str, ...], label: str) -> None:
    """Refuse columns that do not vary within any silo, given their mean squares around the silos' means.

    The columns are scaled by their declared ranges.
    """
    constant = [name for name, s in zip(names, squares, strict=True) if s <= CONSTANT]
    if not constant:
        return
    shown = ", ".join(name.split(WITHIN)[0] for name in constant)
    why = f"column(s) {shown} are the same for everyone of a silo, at each silo, so that C(silo) determines "
    why += "them"
    if not constant[0].endswith(WITHIN):
        why = f"the terms with C(silo) determine column(s) {shown} at each silo"
    raise FitError("collinear", f"{label}: {why}; drop them, or leave C(silo) out")


@dataclass(frozen=True, kw_only=True)
class NewtonPoint:
    """A point of the fit; ``is_fresh`` says whether the Hessian was computed at this point."""

    eps: Array
    gradient: Array
    norm: float
    hessian: Array
    is_fresh: bool = True
    ratio: float | None = None  # ratio of the norm to that before a full step


def minimise(
    run: Run[Model],
    gradient: Array,
    hessian: Array,
    *,
    goal: float,
    acceptable: float,
    is_quadratic: bool,
    pinned: Array | None = None,
) -> Flow[NewtonPoint]:
    """Return the fit from eps = 0, where the gradient and the Hessian are given.

    It ends at a norm of ``goal``, or where exact sums allow no smaller one if that is at most
    ``acceptable``. A quadratic loss has the same Hessian everywhere. ``pinned`` is curvature that is added to
    every Hessian, for coordinates that stay 0.
    """
    pinned = np.zeros_like(hessian) if pinned is None else pinned
    fit = NewtonPoint(
        eps=np.zeros(run.problem.dim), gradient=gradient, norm=run.norm(gradient), hessian=hessian
    )
    for _ in range(MAX_STEPS):
        if fit.norm <= goal:
            break
        with_hessian = not is_quadratic and _needs_hessian(fit, goal)
        ahead = yield from _step(run, fit, with_hessian, acceptable, pinned)
        if ahead is None:
            break
        fit = ahead
    return fit


def _needs_hessian(fit: NewtonPoint, goal: float) -> bool:
    """Return whether the next point needs its own Hessian: a step with the last one would not suffice."""
    if fit.ratio is None:
        return True
    reached = 2.0 * fit.norm * fit.ratio**4 if fit.is_fresh else fit.norm * fit.ratio**2
    return reached > goal


def _step(
    run: Run[Model], fit: NewtonPoint, with_hessian: bool, acceptable: float, pinned: Array
) -> Flow[NewtonPoint | None]:
    """Return the first point along Newton's direction, halving, with a smaller norm, or None."""
    dim, direction, length = run.problem.dim, newton_direction(fit.hessian, fit.gradient), 1.0
    for _ in range(MAX_HALVINGS + 1):
        eps = fit.eps + length * direction
        if run.problem.admits(None, eps):
            parts = Part.GRADIENT | Part.HESSIAN if with_hessian else Part.GRADIENT
            sums = yield from run.ask(None, eps, parts)
            gradient = run.pooled_gradient(sums[:dim], None, eps)
            norm = run.norm(gradient)
            if norm <= (1.0 - SMALLEST_DECREASE * length) * fit.norm:
                hessian = fit.hessian
                if with_hessian:
                    curvature = unpack(sums[dim:].values(run.n), dim)
                    hessian = curvature + run.problem.normaliser(None).hessian(eps) + pinned
                return NewtonPoint(
                    eps=eps,
                    gradient=gradient,
                    norm=norm,
                    hessian=hessian,
                    is_fresh=with_hessian,
                    ratio=norm / fit.norm if length == 1.0 else None,
                )
            if fit.norm <= acceptable:
                return None
        length *= 0.5
    return None
