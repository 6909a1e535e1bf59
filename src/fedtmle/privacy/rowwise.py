"""One row's share in the sums of a generalised linear submodel, and how it moves with the record.

loss      w [rho(eta, y) - rho(offset, y)],   eta = offset + eps . X
gradient  w rho'(eta, y) X
Hessian   w rho''(eta, y) X X^T, upper triangle
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.families import Family
from fedtmle.model.scaled import matrix
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.types import Array, Part


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
