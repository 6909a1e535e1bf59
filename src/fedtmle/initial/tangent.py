"""Derivatives of a formula's columns and of fitted predictions in one numeric column of the table.

They are taken row by row: the disclosure audit needs them to see how a record's covariate moves an answer.
"""

from __future__ import annotations

from functools import singledispatch

import numpy as np

from fedtmle.errors import InputError
from fedtmle.initial.crossfit import CrossFitted, SuppliedPrediction, SuppliedProbability, chosen_fold
from fedtmle.initial.design import DesignPart, Levels, design_columns, part_values, study_codes
from fedtmle.initial.glm import FittedGLM, FittedMultinomial
from fedtmle.initial.superlearner import TreeEnsemble
from fedtmle.initial.syntax import (
    Arithmetic,
    BSpline,
    Categorical,
    Chain,
    Computed,
    Formula,
    Name,
    NaturalSpline,
    Negative,
    Number,
    Power,
    Transformed,
)
from fedtmle.model.table import Table
from fedtmle_core.types import Array, Family


def design_tangent(formula: Formula, table: Table, levels: Levels, name: str) -> Array:
    """Return d(design)/d(column ``name``) row by row, shape (p, N)."""
    codes = {factor: study_codes(factor, table, levels[factor]) for factor in formula.factor_names}
    columns = design_columns(formula, levels)
    result = np.zeros((len(columns), table.n_rows))
    for index, column in enumerate(columns):
        values = [part_values(part, table, codes) for part in column]
        for j, part in enumerate(column):  # the product rule
            slope = _slope(part, table, name)
            if slope is not None:
                for k, value in enumerate(values):
                    if k != j:
                        slope = slope * value
                result[index] += slope
    return result


@singledispatch
def prediction_tangent(model: object, table: Table, name: str) -> Array:  # noqa: ARG001 - the interface's
    """Return d(prediction)/d(column ``name``) row by row, in the shape of the prediction."""
    raise InputError(f"a {type(model).__name__} has no derivative in a covariate; audit the outcome instead")


@prediction_tangent.register
def _(model: FittedGLM, table: Table, name: str) -> Array:
    if name not in model.formula.numeric_names:
        return np.zeros(table.n_rows)
    slope = np.array(model.coefficients) @ design_tangent(model.formula, table, model.levels, name)
    mean = model.predict(table)
    if model.family is Family.LOGISTIC:
        return np.asarray(mean * (1 - mean) * slope)
    return np.asarray(mean * slope if model.family is Family.POISSON else slope)


@prediction_tangent.register
def _(model: CrossFitted, table: Table, name: str) -> Array:
    slopes = np.stack([prediction_tangent(fitted, table, name) for fitted in model.models])
    return chosen_fold(slopes, model.folds.of(table))


@prediction_tangent.register
def _(model: FittedMultinomial, table: Table, name: str) -> Array:
    p = model.predict(table)
    if name not in model.formula.numeric_names:
        return np.zeros_like(p)
    slope = np.zeros_like(p)
    slope[1:] = np.array(model.coefficients) @ design_tangent(model.formula, table, model.levels, name)
    return np.asarray(p * (slope - (p * slope).sum(axis=0)))


@prediction_tangent.register
def _(model: SuppliedPrediction, table: Table, name: str) -> Array:
    return np.full(table.n_rows, 1.0 / model.width if name == model.name else 0.0)


@prediction_tangent.register
def _(model: SuppliedProbability, table: Table, name: str) -> Array:
    return np.full(table.n_rows, float(name == model.name))


@prediction_tangent.register
def _(model: TreeEnsemble, table: Table, name: str) -> Array:  # noqa: ARG001 - constant between cuts
    return np.zeros(table.n_rows)


def _slope(part: DesignPart, table: Table, name: str) -> Array | None:
    """Return the derivative of one variable's column, None if the variable does not use ``name``."""
    slope: Array | None = None
    match part.variable:
        case Categorical():
            slope = None
        case Name(column) if column == name:
            slope = np.ones(table.n_rows)
        case Computed(expression):
            slope = np.broadcast_to(_dual(expression, table, name)[1], (table.n_rows,)).copy()
        case Transformed("log", column) if column == name:
            slope = 1.0 / table.numeric[column]
        case Transformed("sqrt", column) if column == name:
            slope = 0.5 / np.sqrt(table.numeric[column])
        case NaturalSpline(column, knots) if column == name:
            slope = _natural_slope(table.numeric[column], knots, part.index)
        case BSpline() as spline if spline.name == name:
            slope = _b_slope(table.numeric[name], spline, part.index)
    return slope


def _dual(expression: Arithmetic, table: Table, name: str) -> tuple[Array, Array]:
    """Return the expression and its derivative."""
    zero = np.array(0.0)
    match expression:
        case Number(constant):
            return np.array(constant), zero
        case Name(column):
            return table.numeric[column], np.array(1.0 if column == name else 0.0)
        case Negative(operand):
            value, slope = _dual(operand, table, name)
            return -value, -slope
        case Power(base, exponent):
            (b, db), (e, de) = _dual(base, table, name), _dual(exponent, table, name)
            power = np.asarray(b**e)
            bend = power * np.log(b) * de if np.any(de) else zero  # log only where the exponent moves
            return power, np.asarray(e * b ** (e - 1) * db + bend)
        case Chain(first, rest):
            value, slope = _dual(first, table, name)
            for operator, operand in rest:
                other, moved = _dual(operand, table, name)
                if operator in "+-":
                    sign = 1.0 if operator == "+" else -1.0
                    value, slope = value + sign * other, slope + sign * moved
                elif operator == "*":
                    value, slope = value * other, slope * other + value * moved
                else:
                    value, slope = value / other, (slope - value / other * moved) / other
            return value, slope


def _natural_slope(x: Array, knots: tuple[float, ...], j: int) -> Array:
    inner, last = knots[-2], knots[-1]
    inside = np.minimum(x, last)
    rising = 3 * np.maximum(inside - knots[j], 0.0) ** 2
    falling = 3 * np.maximum(inside - inner, 0.0) ** 2 * ((last - knots[j]) / (last - inner))
    line = 3.0 * (last - knots[j]) * (inner - knots[j])
    return np.asarray(np.where(x < last, rising - falling, line) / (last - knots[0]) ** 2)


def _b_slope(x: Array, spline: BSpline, index: int) -> Array:
    """Return the derivative of a B-spline by the recursion of Cox and de Boor."""
    degree = spline.degree
    t = [spline.low] * (degree + 1) + list(spline.knots) + [spline.high] * (degree + 1)
    last = len(t) - degree - 2
    pieces = [
        ((t[m] <= x) & ((x < t[m + 1]) | (m == last))).astype(np.float64)
        for m in range(index, index + degree + 1)
    ]
    slopes = [np.zeros_like(x) for _ in pieces]
    for order in range(1, degree + 1):
        for i in range(degree + 1 - order):
            m = index + i
            value, slope = np.zeros_like(x), np.zeros_like(x)
            up, down = t[m + order] - t[m], t[m + order + 1] - t[m + 1]
            if up:
                value = value + pieces[i] * (x - t[m]) / up
                slope = slope + (slopes[i] * (x - t[m]) + pieces[i]) / up
            if down:
                value = value + pieces[i + 1] * (t[m + order + 1] - x) / down
                slope = slope + (slopes[i + 1] * (t[m + order + 1] - x) - pieces[i + 1]) / down
            pieces[i], slopes[i] = value, slope
    return slopes[0]
