"""The federated multinomial regression: Newton's method on pooled exact sums, as for a GLM."""

from __future__ import annotations

import math

import numpy as np

from fedtmle.algorithms.base import Run
from fedtmle.errors import FitError
from fedtmle.initial.design import column_names
from fedtmle.initial.glm import GLM, Levels
from fedtmle.initial.multinomial import FittedMultinomial, MultinomialModel
from fedtmle.initial.ranges import column_exponents
from fedtmle.model.families import Family
from fedtmle.model.types import Array, Part, unpack
from fedtmle.programs.nuisance import (
    GRADIENT_GOAL,
    LARGEST_GRADIENT,
    MINORITY_WEIGHT,
    Regression,
    minimise,
    refuse_collinear,
    refuse_separation,
    remedy,
    unused_levels,
)
from fedtmle.protocol.query import Flow, Phase


def fit_multinomial(regression: Regression, glm: GLM, levels: Levels, n: int) -> Flow[FittedMultinomial]:
    """Fit one softmax model of all classes to the pooled rows: some six rounds."""
    formula, classes = glm.parsed, len(regression.classes)
    names = column_names(formula, levels)
    scales = column_exponents(formula, levels, regression.ranges)
    model = MultinomialModel(
        formula=formula,
        levels=levels,
        scales=scales,
        classes=classes,
        response=regression.response,
        weight_ceiling=regression.weight_ceiling,
        ridge=glm.ridge,
    )
    run = Run(model, n, Phase.NUISANCE)
    zero, dim = np.zeros(model.dim), model.dim
    sums = yield from run.ask(None, zero, Part.GRADIENT | Part.HESSIAN)
    gradient = run.pooled_gradient(sums[:dim], None, zero)
    hessian = unpack(sums[dim:].values(n), dim) + model.normaliser(None).hessian(zero)
    of_class = np.diag(unused_levels(hessian[: len(names), : len(names)], formula, levels))
    unused = np.diag(np.tile(of_class, classes - 1))
    hessian = hessian + unused
    if names[0] == "1":
        _refuse_absent_class(gradient, hessian, scales[0], classes, regression)
    refuse_collinear(hessian[: len(names), : len(names)], names, regression.label)
    fit = yield from minimise(
        run,
        gradient,
        hessian,
        goal=GRADIENT_GOAL,
        acceptable=LARGEST_GRADIENT,
        is_quadratic=False,
        pinned=unused,
    )
    per_class = tuple(f"{name} (arm {arm})" for arm in regression.classes[1:] for name in names)
    refuse_separation(hessian, fit.hessian, per_class, regression.label)
    if fit.norm > LARGEST_GRADIENT:
        told = remedy(hessian[: len(names), : len(names)], names, Family.LOGISTIC)
        raise FitError("convergence", f"{regression.label}: the fit did not converge; {told}")
    beta = np.ldexp(fit.eps.reshape(classes - 1, -1), -np.array(scales))
    return FittedMultinomial(
        formula=formula, levels=levels, coefficients=tuple(tuple(map(float, row)) for row in beta)
    )


def _refuse_absent_class(
    gradient: Array, hessian: Array, scale: int, classes: int, regression: Regression
) -> None:
    """Refuse a fit without records of some class.

    At zero the intercept's gradient of class j is W (1/J - share_j), and its curvature W (1/J)(1 - 1/J),
    with W the total weight.
    """
    p = len(gradient) // (classes - 1)
    total = math.ldexp(hessian[0, 0], 2 * scale) / ((1 - 1 / classes) / classes)
    if not total > 0:
        return
    shares = [1 / classes - math.ldexp(gradient[j * p], scale) / total for j in range(classes - 1)]
    if min(*shares, 1.0 - math.fsum(shares)) <= MINORITY_WEIGHT:
        raise FitError("arm", f"{regression.label}: {regression.constant}")
