"""The softmax loss of rows in one of J classes: the submodel of a multinomial regression.

With class 0 as the reference, eta_0 = 0 and eta_j = eps_j . x for j = 1..J-1,

    loss of a row = w (log sum_j exp(eta_j) - eta_y),   p_j = exp(eta_j) / sum_k exp(eta_k),
    gradient in eps_j = w (p_j - 1{y = j}) x,   Hessian in (eps_j, eps_k) = w (p_j 1{j = k} - p_j p_k) x x^T.

Coordinates are class by class: class j and column a have (j - 1) p + a. Every row is evaluated by itself,
in a fixed order and without BLAS, so that its contribution does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import NamedTuple, final

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.exact import Sums, query_shifts, zero_sums
from fedtmle.model.families import Family
from fedtmle.model.leverage import Look, PersonRows, RowSpace, largest_leverage
from fedtmle.model.parallel import mapped, pieces
from fedtmle.model.submodel import AbstractRowsSubmodel, GeneralisedLinear
from fedtmle.model.types import (
    Array,
    Design,
    IntArray,
    Part,
    RowBound,
    Scaled,
    matrix,
    packed_size,
    upper_pairs,
)

HESSIAN_CEILING = 0.5  # diag(p) - p p^T is at most this times the identity
LOOK_ROWS = 1024  # rows of a piece whose leverages are computed at once


class _Piece(NamedTuple):
    """Some rows: the columns (p, N), the predictors (J, N), and the probabilities (J, N)."""

    X: Array
    eta: Array
    p: Array
    y: IntArray
    w: Array


@final
@dataclass(frozen=True, kw_only=True)
class Multinomial(AbstractRowsSubmodel):
    """The submodel above; ``X`` has shape (p, N); ``y``, classes 0..J-1, and ``w`` have shape (N,)."""

    X: Design
    y: IntArray
    w: Array
    classes: int
    bound: RowBound

    @property
    def n_rows(self) -> int:
        return int(self.X.shape[1])

    @property
    def columns(self) -> int:
        return len(self.X)

    @property
    def dim(self) -> int:
        return (self.classes - 1) * self.columns

    def take(self, rows: IntArray) -> Multinomial:
        X = self.X.take(rows) if isinstance(self.X, Scaled) else np.ascontiguousarray(self.X[:, rows])
        return Multinomial(
            X=X, y=self.y[rows], w=np.asarray(self.w)[rows], classes=self.classes, bound=self.bound
        )

    def sums(self, eps: Array, parts: Part) -> Sums:
        shifts = query_shifts(self.bound, eps, parts)
        columns = mapped(lambda rows: self._piece_sums(eps, parts, shifts, rows), pieces(self.n_rows))
        return reduce(add, columns, zero_sums(shifts))

    def _piece_sums(self, eps: Array, parts: Part, shifts: tuple[int, ...], rows: slice) -> Sums:
        piece, units = self._piece(eps, rows), list[int]()
        if Part.LOSS in parts:
            units += _summed(self._losses(piece)[None, :], [(0,)], shifts[:1])
        if Part.GRADIENT in parts:
            slopes = self._slopes(piece)
            at = [(j, len(slopes) + a) for j in range(len(slopes)) for a in range(self.columns)]
            units += _summed(np.concatenate([slopes, piece.X]), at, shifts[len(units) :][: self.dim])
        if Part.HESSIAN in parts:
            units += self._hessian(piece, shifts[len(units) :])
        return Sums(tuple(units), shifts)

    def _piece(self, eps: Array, rows: slice) -> _Piece:
        X = self.X.part(rows) if isinstance(self.X, Scaled) else self.X[:, rows]
        eta = np.zeros((self.classes, X.shape[1]))
        for j, beta in enumerate(eps.reshape(self.classes - 1, self.columns), start=1):
            for column, coefficient in zip(X, beta, strict=True):
                eta[j] += coefficient * column
        w = np.broadcast_to(self.w, (self.n_rows,))[rows]
        return _Piece(X, eta, kernels.softmax(eta), self.y[rows], w)

    def _losses(self, piece: _Piece) -> Array:
        """Return the change of the loss from eps = 0, shape (N,)."""
        top = piece.eta.max(axis=0)
        mass = np.zeros_like(top)
        for eta in piece.eta:
            mass += kernels.exp(eta - top)
        taken = kernels.chosen(piece.eta, piece.y.astype(np.int16))
        return np.asarray(piece.w * (top + kernels.log(mass) - taken - kernels.log(float(self.classes))))

    def _slopes(self, piece: _Piece) -> Array:
        """Return w (p_j - 1{y = j}) for j = 1..J-1, shape (J - 1, N)."""
        taken = piece.y == np.arange(1, self.classes)[:, None]
        return np.asarray(piece.w * (piece.p[1:] - taken))

    def _hessian(self, piece: _Piece, shifts: tuple[int, ...]) -> list[int]:
        p, columns = self.columns, upper_pairs(self.columns)
        order = {pair: k for k, pair in enumerate(upper_pairs(self.dim))}
        units = [0] * packed_size(self.dim)
        terms = [(a, p + b) for a, b in columns]
        for j, k in upper_pairs(self.classes - 1):
            bend = piece.w * (piece.p[j + 1] * (float(j == k) - piece.p[k + 1]))
            own = _summed(np.concatenate([bend * piece.X, piece.X]), terms, shifts[: len(terms)])
            for (a, b), unit in zip(columns, own, strict=True):
                units[order[j * p + a, k * p + b]] = unit
                if j < k:
                    units[order[j * p + b, k * p + a]] = unit
        return units

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        largest = largest_leverage(lambda: self.disclosed_rows(eps, part), space=space, enough=enough)
        return Look(largest=largest, columns=self.column_sizes, family=None)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        """Yield J rows sqrt(p_k) w (e_k - p) x of each person, and w (e_y - p) x, the residual.

        The products of the former add up to the variance w^2 (diag p - p p^T) x x^T.
        """
        J, p = self.classes, self.columns
        for start in range(0, self.n_rows, LOOK_ROWS):
            piece = self._piece(eps, slice(start, min(start + LOOK_ROWS, self.n_rows)))
            apart = np.eye(J)[:, 1:, None] - piece.p[None, 1:]  # (J, J - 1, N)
            spread = np.sqrt(piece.p)[:, None] * apart
            if part is Part.GRADIENT:
                spread = np.concatenate([piece.w * spread, self._slopes(piece)[None]])
            else:
                spread *= np.sqrt(piece.w)
            rows = np.einsum("kjn,an->jank", spread, piece.X).reshape((J - 1) * p, -1)
            yield PersonRows(rows, np.full(piece.X.shape[1], len(spread)))

    @property
    def column_sizes(self) -> Array:
        sizes = np.array([float(np.abs(column).max(initial=0.0)) for column in matrix(self.X)])
        return np.tile(sizes, self.classes - 1)

    @cached_property
    def _squared(self) -> GeneralisedLinear:
        """The same columns with the squared loss, whose Hessian is the sum of w x x^T."""
        # A row's Hessian has p_j (1 - p_j) or p_j p_k, at most 1/4, before x x^T.
        bound = RowBound(gradient=self.bound.gradient, curvature=self.bound.curvature + 2)
        return GeneralisedLinear(family=Family.GAUSSIAN, X=self.X, w=np.asarray(self.w), bound=bound)

    def column_people(self, enough: int | None = None) -> IntArray:
        return np.tile(self._squared.column_people(enough), self.classes - 1)

    def curvature_ceiling(self) -> Array:
        ceiling = np.kron(np.eye(self.classes - 1), self._squared.curvature_ceiling())
        return np.asarray(HESSIAN_CEILING * ceiling, dtype=np.float64)

    def gram(self) -> Sums:
        # diag(p) - p p^T <= 1/2 = 1/4 * 2, and 1/4 is the ceiling of the logistic family.
        own, p = self._squared.gram(), self.columns
        order = {pair: k for k, pair in enumerate(upper_pairs(self.dim))}
        units = [0] * packed_size(self.dim)
        for j in range(self.classes - 1):
            for (a, b), unit in zip(upper_pairs(p), own.units, strict=True):
                units[order[j * p + a, j * p + b]] = 2 * unit
        return Sums(tuple(units), own.shifts[:1] * len(units))


def _summed(columns: Array, terms: Sequence[tuple[int, ...]], shifts: tuple[int, ...]) -> tuple[int, ...]:
    return kernels.term_sums(columns, terms, shifts, what="contribution to a multinomial model")
