"""One row's share in the sums of a generalised linear submodel, and how it moves with the record.

loss      w [rho(eta, y) - rho(offset, y)],   eta = offset + eps . X
gradient  w rho'(eta, y) X
Hessian   w rho''(eta, y) X X^T, upper triangle
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import Any, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model import kernels
from fedtmle.model.density.law import AbstractFunctional, DensityLaw
from fedtmle.model.density.problem import AbstractDensityProblem
from fedtmle.model.families import Family
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.types import Array, Part, matrix
from fedtmle.targets.mean import Mean, MeanLaw
from fedtmle.targets.optimal_transport import Transport
from fedtmle.targets.two_arm import TwoArm, TwoArmLaw, TwoArmRows


@final
@dataclass(frozen=True, kw_only=True)
class Tangent:
    """How X (d, N), offset, y and w (N,) of each row move with one coordinate of its record; None: not."""

    X: Array | None = None
    offset: Array | None = None
    y: Array | None = None
    w: Array | None = None


def row_terms(submodel: GeneralisedLinear, eps: Array, parts: Part) -> Array:
    """Every row's share in the asked sums, shape (p, N), in the order of the wire."""
    offset, y, w = _columns(submodel)
    X = matrix(submodel.X)
    eta = offset + eps @ X
    found = []
    if Part.LOSS in parts:
        found.append((w * (_rho(submodel.family, eta, y) - _rho(submodel.family, offset, y)))[None, :])
    if Part.GRADIENT in parts:
        found.append(w * _slope(submodel.family, eta, y) * X)
    if Part.HESSIAN in parts:
        upper, lower = np.triu_indices(len(X))
        found.append(w * _bend(submodel.family, eta) * X[upper] * X[lower])
    return np.concatenate(found)


def row_tangents(submodel: GeneralisedLinear, eps: Array, parts: Part, tangent: Tangent) -> Array:
    """The derivative of `row_terms` in a coordinate of each row's own record, shape (p, N)."""
    offset, y, w = _columns(submodel)
    family, X = submodel.family, matrix(submodel.X)
    zero = np.zeros(submodel.n_rows)
    dX = np.zeros_like(X) if tangent.X is None else tangent.X
    d_offset = zero if tangent.offset is None else tangent.offset
    dy = zero if tangent.y is None or family is Family.LINEAR else tangent.y
    dw = zero if tangent.w is None else tangent.w
    eta = offset + eps @ X
    d_eta = d_offset + eps @ dX
    slope, bend = _slope(family, eta, y), _bend(family, eta)
    found = []
    if Part.LOSS in parts:
        # rho_y = y for the Gaussian loss less eta, -eta for the others; in differences -(eta - offset) each.
        moved = slope * d_eta - _slope(family, offset, y) * d_offset - (eta - offset) * dy
        change = _rho(family, eta, y) - _rho(family, offset, y)
        found.append((dw * change + w * moved)[None, :])
    if Part.GRADIENT in parts:
        found.append(dw * slope * X + w * (bend * d_eta - dy) * X + w * slope * dX)
    if Part.HESSIAN in parts:
        upper, lower = np.triu_indices(len(X))
        rate = dw * bend + w * _third(family, eta) * d_eta
        found.append(rate * X[upper] * X[lower] + w * bend * (dX[upper] * X[lower] + X[upper] * dX[lower]))
    return np.concatenate(found)


def _columns(submodel: GeneralisedLinear) -> tuple[Array, Array, Array]:
    n = submodel.n_rows
    return (
        np.zeros(n) if submodel.offset is None else submodel.offset,
        np.zeros(n) if submodel.y is None else submodel.y,
        np.ones(n) if submodel.w is None else submodel.w,
    )


def _rho(family: Family, eta: Array, y: Array) -> Array:
    if family is Family.LINEAR:
        return eta
    if family is Family.GAUSSIAN:
        return np.asarray(0.5 * (eta - y) ** 2)
    base = kernels.softplus(eta) if family is Family.LOGISTIC else kernels.exp(eta)
    return np.asarray(base - y * eta)


def _slope(family: Family, eta: Array, y: Array) -> Array:
    if family is Family.LINEAR:
        return np.ones_like(eta)
    if family is Family.GAUSSIAN:
        return np.asarray(eta - y)
    return np.asarray((kernels.expit(eta) if family is Family.LOGISTIC else kernels.exp(eta)) - y)


def _bend(family: Family, eta: Array) -> Array:
    if family is Family.LOGISTIC:
        mean = kernels.expit(eta)
        return np.asarray(mean * (1 - mean))
    if family is Family.POISSON:
        return kernels.exp(eta)
    return np.full_like(eta, 1.0 if family is Family.GAUSSIAN else 0.0)


def _third(family: Family, eta: Array) -> Array:
    if family is Family.LOGISTIC:
        mean = kernels.expit(eta)
        return np.asarray(mean * (1 - mean) * (1 - 2 * mean))
    return kernels.exp(eta) if family is Family.POISSON else np.zeros_like(eta)


# Which coordinates of a record are continuous, and how they move what a target sums, analytically.
#
# A chart belongs to a target. Its coordinates are in the record's own units: an outcome in outcome units, a
# probability as a probability. A discrete column (treatment, binary outcome) has no coordinate: for it
# `discrete` enumerates.


@singledispatch
def coordinates(problem: object) -> tuple[str, ...]:
    """The continuous coordinates of one record of a target."""
    raise InputError(f"the disclosure audit does not know the records of a {type(problem).__name__}")


@singledispatch
def submodel_tangent(problem: object, law: Any, rows: Any, name: str) -> Tangent:  # noqa: ARG001
    """How the submodel's columns move with coordinate ``name`` of each row's own record."""
    raise InputError(f"the disclosure audit does not know the records of a {type(problem).__name__}")


@singledispatch
def closing_columns(problem: object, law: Any, rows: Any) -> Array:  # noqa: ARG001
    """The columns m whose sums, and products' sums, close a run; shape (k, N)."""
    raise InputError(f"the disclosure audit does not know the closing sums of a {type(problem).__name__}")


@singledispatch
def closing_tangent(problem: object, law: Any, rows: Any, name: str) -> Array:  # noqa: ARG001
    """The derivative of `closing_columns` in coordinate ``name`` of each row's own record."""
    raise InputError(f"the disclosure audit does not know the closing sums of a {type(problem).__name__}")


@singledispatch
def closing_terms(problem: object, law: Any, rows: Any, base: Any) -> Array:  # noqa: ARG001 - for clusters
    """Every row's share in the closing sums, shape (p, N); ``base`` holds the rows as they are.

    Only differences to ``base`` count: with clusters a row is seen beside the others of its own.
    """
    return with_products(closing_columns(problem, law, rows))


@singledispatch
def closing_terms_tangent(problem: object, law: Any, rows: Any, name: str) -> Array:
    """The derivative of `closing_terms` in coordinate ``name`` of each row's own record."""
    columns = closing_columns(problem, law, rows)
    return products_tangent(columns, closing_tangent(problem, law, rows, name))


def with_products(columns: Array) -> Array:
    """m and its products m_j m_k, j <= k: what `model.problem.second_moments` sums."""
    upper, lower = np.triu_indices(len(columns))
    return np.concatenate([columns, columns[upper] * columns[lower]])


def products_tangent(columns: Array, moved: Array) -> Array:
    """The derivative of `with_products`."""
    upper, lower = np.triu_indices(len(columns))
    return np.concatenate([moved, moved[upper] * columns[lower] + columns[upper] * moved[lower]])


def require_coordinate(problem: object, name: str) -> None:
    """`InputError` unless the target's records have this coordinate."""
    known = coordinates(problem)
    if name not in known:
        raise InputError(f"attribute: a record has no continuous '{name}'; it has {', '.join(known)}")


# The mean: y itself.


@coordinates.register
def _(problem: Mean) -> tuple[str, ...]:  # noqa: ARG001 - one for every mean
    return ("outcome",)


@submodel_tangent.register
def _(problem: Mean, law: MeanLaw, rows: Array, name: str) -> Tangent:  # noqa: ARG001 - the same at every law
    require_coordinate(problem, name)
    return Tangent(y=np.ones(len(rows)))


@closing_columns.register
def _(problem: Mean, law: MeanLaw, rows: Array) -> Array:  # noqa: ARG001 - as above
    return (rows - 0.5 * (problem.bounds[0] + problem.bounds[1]))[None, :]


@closing_tangent.register
def _(problem: Mean, law: MeanLaw, rows: Array, name: str) -> Array:  # noqa: ARG001 - as above
    require_coordinate(problem, name)
    return np.ones((1, len(rows)))


# Two arms: the outcome, the supplied regressions and the supplied probability; the arm itself is discrete.


@coordinates.register
def _(problem: TwoArm) -> tuple[str, ...]:  # noqa: ARG001 - the same columns for all
    return ("outcome", "Q1", "Q0", "g")


@submodel_tangent.register
def _(problem: TwoArm, law: TwoArmLaw, rows: TwoArmRows, name: str) -> Tangent:
    require_coordinate(problem, name)
    taken = np.stack([rows.treated, 1.0 - rows.treated])
    if name == "outcome":
        return Tangent(y=np.full(len(rows.y), 1.0 / problem.width))
    if name == "g":
        moved = _inverse_g_tangent(rows)
        shift = -problem.width * law.total()[:, None] * moved
        return Tangent(X=-problem.width * taken * moved, offset=(taken * shift).sum(axis=0))
    arm = 0 if name == "Q1" else 1
    return Tangent(offset=taken[arm] * _logit_tangent(problem, rows, arm))


@closing_columns.register
def _(problem: TwoArm, law: TwoArmLaw, rows: TwoArmRows) -> Array:
    q = _fluctuated(problem, law, rows)
    taken = np.stack([rows.treated, 1.0 - rows.treated])
    return np.concatenate([q, taken * rows.inverse_g * (problem.width * rows.y - q) + q])


@closing_tangent.register
def _(problem: TwoArm, law: TwoArmLaw, rows: TwoArmRows, name: str) -> Array:
    require_coordinate(problem, name)
    q = _fluctuated(problem, law, rows)
    taken = np.stack([rows.treated, 1.0 - rows.treated])
    weight = taken * rows.inverse_g
    if name == "outcome":
        return np.concatenate([np.zeros_like(q), weight])
    logits, extra = np.zeros_like(q), np.zeros_like(q)
    if name == "g":
        moved = _inverse_g_tangent(rows)
        logits = -problem.width * law.total()[:, None] * moved
        extra = taken * moved * (problem.width * rows.y - q)
    else:
        arm = 0 if name == "Q1" else 1
        logits[arm] = _logit_tangent(problem, rows, arm)
    dq = q * (1.0 - q / problem.width) * logits
    return np.concatenate([dq, (1.0 - weight) * dq + extra])


def _fluctuated(problem: TwoArm, law: TwoArmLaw, rows: TwoArmRows) -> Array:
    """Q_a - low at the law, in outcome units, (2, N)."""
    logits = rows.logit_q - problem.width * law.total()[:, None] * rows.inverse_g
    return np.asarray(problem.width / (1.0 + np.exp(-logits)))


def _inverse_g_tangent(rows: TwoArmRows) -> Array:
    """d(1/g, 1/(1 - g))/dg."""
    return np.stack([-(rows.inverse_g[0] ** 2), rows.inverse_g[1] ** 2])


def _logit_tangent(problem: TwoArm, rows: TwoArmRows, arm: int) -> Array:
    """d logit(Q_a)/dQ_a with Q_a in outcome units: 1/(width q (1 - q))."""
    q = 1.0 / (1.0 + np.exp(-rows.logit_q[arm]))
    return np.asarray(1.0 / (problem.width * q * (1.0 - q)))


# Densities: the coordinates of the observation, through D.


@coordinates.register
def _(problem: AbstractDensityProblem) -> tuple[str, ...]:
    return tuple(f"x{j}" for j in range(1, problem.columns + 1))


@submodel_tangent.register
def _(problem: AbstractDensityProblem, law: DensityLaw, rows: Array, name: str) -> Tangent:
    require_coordinate(problem, name)
    moved = eif_tangent(law.functional, rows, coordinates(problem).index(name))
    return Tangent(X=problem.fluctuation.multiple * moved)


@closing_columns.register
def _(problem: AbstractDensityProblem, law: DensityLaw, rows: Array) -> Array:  # noqa: ARG001
    return law.functional.eif(rows)


@closing_tangent.register
def _(problem: AbstractDensityProblem, law: DensityLaw, rows: Array, name: str) -> Array:
    require_coordinate(problem, name)
    return eif_tangent(law.functional, rows, coordinates(problem).index(name))


@singledispatch
def eif_tangent(functional: AbstractFunctional, points: Array, j: int) -> Array:  # noqa: ARG001
    """dD/do_j at points (q, N), shape (d, N)."""
    raise InputError(f"the disclosure audit has no derivative of a {type(functional).__name__}'s EIF")


@eif_tangent.register
def _(functional: Transport, points: Array, j: int) -> Array:
    # ds_a/do_j = s_a (z_aj - sum_b s_b z_bj)/l; |o|^2/2 cancels in the softmax.
    problem = functional.problem
    z = np.array(problem.destinations)[:, j]
    s = problem.shares(points, functional.theta)
    rest = 1.0 - s.sum(axis=0)
    mean = z[:-1] @ s + z[-1] * rest
    return np.asarray(functional.gain @ (s * (z[:-1, None] - mean) / problem.regularisation))
