"""The chart of a multinomial regression: each record's share in its sums, and how it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.initial.multinomial import MultinomialModel
from fedtmle.initial.tangent import design_tangent
from fedtmle.model import kernels
from fedtmle.model.multinomial import Multinomial
from fedtmle.model.table import Table
from fedtmle.model.types import Array, Part, matrix, upper_pairs
from fedtmle.privacy.charts import AbstractChart, Tangent, chart_of, row_tangents, row_terms


@final
@dataclass(frozen=True)
class MultinomialChart(AbstractChart[None, Table]):
    """The chart of a multinomial regression; it has no closing sums."""

    model: MultinomialModel

    def submodel(self, law: None, rows: Table) -> Multinomial:  # noqa: ARG002 - there is no law
        return self.model.design(rows)

    def submodel_tangent(self, law: None, rows: Table, name: str) -> Tangent:  # noqa: ARG002 - as above
        # The weight is affine in every column, so a difference is the derivative; the arm does not move.
        model = self.model
        _, w = model.response.of(rows)
        _, w_moved = model.response.of(rows.with_numeric(name, rows.numeric[name] + 1.0))
        X = None
        if name in model.formula.numeric_names:
            X = design_tangent(model.formula, rows, model.levels, name)
            X = X * np.exp2(-np.array(model.scales, dtype=np.float64))[:, None]
        return Tangent(X=X, w=w_moved - w)


chart_of.register(MultinomialModel, MultinomialChart)


@row_terms.register
def _(submodel: Multinomial, eps: Array, parts: Part) -> Array:
    X, p, taken, w = _columns(submodel, eps)
    terms = []
    if Part.LOSS in parts:
        eta = eps.reshape(submodel.classes - 1, -1) @ X
        mass = kernels.log(1.0 + kernels.exp(eta).sum(axis=0)) - kernels.log(float(submodel.classes))
        terms.append((w * (mass - (taken * eta).sum(axis=0)))[None, :])
    if Part.GRADIENT in parts:
        terms.append(np.concatenate([w * slope * X for slope in p - taken]))
    if Part.HESSIAN in parts:
        terms.append(_hessian(w * _bends(p), X))
    return np.concatenate(terms)


@row_tangents.register
def _(submodel: Multinomial, eps: Array, parts: Part, tangents: tuple[Tangent, ...]) -> Array:
    (tangent,) = tangents
    X, p, taken, w = _columns(submodel, eps)
    dX = np.zeros_like(X) if tangent.X is None else tangent.X
    dw = np.zeros(submodel.n_rows) if tangent.w is None else tangent.w
    d_eta = eps.reshape(submodel.classes - 1, -1) @ dX
    dp = p * (d_eta - (p * d_eta).sum(axis=0))
    moved = []
    if Part.LOSS in parts:
        change = row_terms(submodel, eps, Part.LOSS)[0] / np.where(w, w, 1.0)
        moved.append((dw * change + w * ((p - taken) * d_eta).sum(axis=0))[None, :])
    if Part.GRADIENT in parts:
        slopes = zip(p - taken, dp, strict=True)
        moved.append(np.concatenate([(dw * s + w * ds) * X + w * s * dX for s, ds in slopes]))
    if Part.HESSIAN in parts:
        bends = _bends(p)
        cross = dp[:, None] * p[None, :] + p[:, None] * dp[None, :]
        d_bends = np.eye(len(p))[:, :, None] * dp[:, None] - cross
        moved.append(_hessian(dw * bends + w * d_bends, X) + _hessian(w * bends, X, dX))
    return np.concatenate(moved)


def _columns(submodel: Multinomial, eps: Array) -> tuple[Array, Array, Array, Array]:
    """Return X (p, N), the probabilities and indicators of classes 1..J-1, (J - 1, N), and w (N,)."""
    X = matrix(submodel.X)
    eta = eps.reshape(submodel.classes - 1, -1) @ X
    p = kernels.softmax(np.concatenate([np.zeros((1, submodel.n_rows)), eta]))[1:]
    taken = (submodel.y == np.arange(1, submodel.classes)[:, None]).astype(np.float64)
    return X, p, taken, np.broadcast_to(submodel.w, (submodel.n_rows,))


def _bends(p: Array) -> Array:
    """Return p_j 1{j = k} - p_j p_k, shape (J - 1, J - 1, N)."""
    return np.asarray(np.eye(len(p))[:, :, None] * p[:, None] - p[:, None] * p[None, :])


def _hessian(bends: Array, X: Array, dX: Array | None = None) -> Array:
    """Return bends_jk x_a x_b, or with ``dX`` bends_jk d(x_a x_b), upper triangle over (j, a), (k, b)."""
    p = len(X)
    terms = []
    for first, second in upper_pairs(len(bends) * p):
        (j, a), (k, b) = divmod(first, p), divmod(second, p)
        product = X[a] * X[b] if dX is None else dX[a] * X[b] + X[a] * dX[b]
        terms.append(bends[j, k] * product)
    return np.stack(terms)
