"""Exact fits: Newton's method on exact sums, some six rounds; the same bits in any partition of the people.

The loss is convex, and the step solves H p = -g, so that the norm of g falls along it. A step is taken when
it does fall; no loss is asked. Close to the fit the curvature hardly changes: a step with the one of the
point before leaves |g(eps + p)| ~ 2 r |g(eps)|, r = |g(eps)| / |g before|, which squares from one step to the
next. Where such a step is expected to reach the goal, a round asks for the gradient alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fedtmle.errors import FitError
from fedtmle.estimation.algebra import multiply, newton_direction, norm, on_grid
from fedtmle.estimation.flow import Flow, ask
from fedtmle.estimation.regression import Fit, Regression, softmax_of
from fedtmle.model.refusals import refuse_collinear, refuse_constant, refuse_separation, remedy
from fedtmle_core.blocks import Block, Layer, Score
from fedtmle_core.terms import Term, product
from fedtmle_core.types import Array, Family, Part, unpack

GOAL = 2.0**-42  # norm of the mean gradient on unit columns: exact sums hold some 2^-50
LARGEST_GRADIENT = 1e-8  # a fit that stalls above this has not converged
LARGEST_COEFFICIENT = 2.0**14  # on unit columns
MAX_STEPS = 100
MAX_HALVINGS = 50
SMALLEST_DECREASE = 1e-4  # a step of length t lowers the norm by at least this share of t


@final
@dataclass
class Loss:
    """The mean loss of a regression over ``n`` people, on unit columns: what to ask, and how to read it."""

    regression: Regression
    n: int
    layers: tuple[Layer, ...] = field(init=False)
    responses: Array = field(init=False)  # mean of y w x, which the gradients of a multinomial loss share

    def __post_init__(self) -> None:
        self.layers = self.regression.layers()
        self.responses = np.zeros(0)

    @property
    def shared_blocks(self) -> tuple[Block, ...]:
        """What is asked once, because the gradients at all points share it."""
        return tuple(
            self._linear([record.ys[j] for record in self.regression.records])
            for j in range(1, len(self.regression.classes))
        )

    def read_shared(self, totals: list[Array]) -> None:
        """Take what `shared_blocks` asked for."""
        if totals:
            self.responses = np.concatenate(totals) / self.n

    def gradient_blocks(self, eps: Array) -> tuple[Block, ...]:
        """Return what is asked for the gradient at a point."""
        if not self.regression.classes:
            return (self._score(eps, Part.GRADIENT),)
        by_record = self._probabilities(eps)
        classes = range(1, len(self.regression.classes))
        return tuple(self._linear([p[j] for p in by_record]) for j in classes)

    def hessian_blocks(self, eps: Array) -> tuple[Block, ...]:
        """Return what is asked for the curvature at a point: p_j (1 - p_j) and p_j p_k of classes."""
        if not self.regression.classes:
            return (self._score(eps, Part.HESSIAN),)
        by_record = self._probabilities(eps)
        return tuple(
            self._gram([product(p[j], 1.0 - p[j]) if j == k else product(p[j], p[k]) for p in by_record])
            for j, k in self._pairs()
        )

    def gradient(self, eps: Array, totals: list[Array]) -> Array:
        mean = np.concatenate(totals) / self.n
        if self.regression.classes:
            mean = mean - self.responses
        return mean + multiply(self.regression.penalty, eps)

    def hessian(self, totals: list[Array]) -> Array:
        size, blocks = len(self.regression.design.columns), self.regression.blocks
        matrix = np.zeros((blocks * size, blocks * size))
        pairs = self._pairs() if self.regression.classes else [(1, 1)]
        for (j, k), sums in zip(pairs, totals, strict=True):
            part = unpack(sums / self.n, size) * (1.0 if j == k else -1.0)
            rows, columns = slice((j - 1) * size, j * size), slice((k - 1) * size, k * size)
            matrix[rows, columns] = matrix[columns, rows] = part
        return matrix + self.regression.penalty

    def _score(self, eps: Array, part: Part) -> Score:
        family, at = self.regression.family, tuple(eps.tolist())
        return Score(family=family, layers=self.layers, at=at, part=part)

    def _weighted(self, weights: Sequence[Term]) -> tuple[Layer, ...]:
        """Return the layers, each with its weight times another."""
        return tuple(
            Layer(X=layer.X, factors=layer.factors, w=w if layer.w is None else product(layer.w, w))
            for layer, w in zip(self.layers, weights, strict=True)
        )

    def _linear(self, weights: Sequence[Term]) -> Score:
        """Return sums of w x: the gradient of a loss that is the linear predictor."""
        at = (0.0,) * len(self.regression.design.columns)
        return Score(family=Family.LINEAR, layers=self._weighted(weights), at=at)

    def _gram(self, weights: Sequence[Term]) -> Score:
        """Return sums of w x x': the curvature of a squared loss."""
        at = (0.0,) * len(self.regression.design.columns)
        return Score(family=Family.GAUSSIAN, layers=self._weighted(weights), at=at, part=Part.HESSIAN)

    def _probabilities(self, eps: Array) -> list[tuple[Term, ...]]:
        raw, design = self.regression.raw(eps), self.regression.design
        return [softmax_of(design, raw, record.world) for record in self.regression.records]

    def _pairs(self) -> list[tuple[int, int]]:
        classes = range(1, len(self.regression.classes))
        return [(j, k) for j in classes for k in classes if j <= k]


@final
@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of the fit; ``is_fresh`` says whether the Hessian was computed at this point."""

    eps: Array
    gradient: Array
    norm: float
    hessian: Array
    is_fresh: bool = True
    ratio: float | None = None  # of the norm to that before a full step


def fit_exactly(regression: Regression, n: int) -> Flow[Fit]:
    """Return the fit of a regression to ``n`` people, by Newton's method on exact sums."""
    design, family, label = regression.design, regression.family, regression.label
    loss, zero, size = Loss(regression, n), np.zeros(regression.dim), len(design.columns)
    point = yield from _first(loss, zero)
    of_columns = point.hessian[:size, :size]
    # Nobody has the level of such a column: with this curvature its coefficient stays 0.
    unused = np.array(design.of_levels) & (np.diag(of_columns) == 0.0)
    pinned = np.diag(np.tile(unused.astype(np.float64), regression.blocks))
    hessian = point.hessian + pinned
    of_columns = hessian[:size, :size]
    has_offset = any(record.offset is not None for record in regression.records)
    if family is Family.LOGISTIC and design.has_intercept and not has_offset:
        refuse_constant(
            point.gradient[::size], hessian[0, 0], design.exponents[0], label, regression.constant
        )
    refuse_collinear(of_columns, design.names, label)
    start = Point(eps=zero, gradient=point.gradient, norm=point.norm, hessian=hessian)
    found = yield from _minimise(loss, start, pinned)
    if family is Family.LOGISTIC:  # checked first: separation also prevents convergence
        refuse_separation(hessian, found.hessian, regression.coefficient_names, label)
    if found.norm > LARGEST_GRADIENT:
        raise FitError(
            "convergence",
            f"{label}: the fit did not converge; {remedy(of_columns, design.names, family)}",
        )
    return Fit(regression=regression, coefficients=regression.raw(found.eps))


def _first(loss: Loss, zero: Array) -> Flow[Point]:
    """Return the point 0; what all gradients share is asked in the same round."""
    gradients, hessians = loss.gradient_blocks(zero), loss.hessian_blocks(zero)
    shared = list(loss.shared_blocks)
    totals = yield from ask(*shared, *gradients, *hessians)
    loss.read_shared(totals[: len(shared)])
    rest = totals[len(shared) :]
    gradient = loss.gradient(zero, rest[: len(gradients)])
    return Point(
        eps=zero, gradient=gradient, norm=norm(gradient), hessian=loss.hessian(rest[len(gradients) :])
    )


def _minimise(loss: Loss, start: Point, pinned: Array) -> Flow[Point]:
    """Return the point with a gradient of norm `GOAL`, or the last one where exact sums allow no smaller."""
    found = start
    for _ in range(MAX_STEPS):
        goal = max(GOAL, norm(found.eps) * 2.0**-46)  # coefficients lie on a grid, see `on_grid`
        if found.norm <= goal:
            break
        with_hessian = loss.regression.family is not Family.GAUSSIAN and _needs_hessian(found, goal)
        ahead = yield from _step(loss, found, with_hessian, pinned)
        if ahead is None:
            break
        found = ahead
    return found


def _needs_hessian(found: Point, goal: float) -> bool:
    """Return whether the next point needs its own Hessian: a step with the last one would not suffice."""
    if found.ratio is None:
        return True
    reached = 2.0 * found.norm * found.ratio**4 if found.is_fresh else found.norm * found.ratio**2
    return reached > goal


def _step(loss: Loss, found: Point, with_hessian: bool, pinned: Array) -> Flow[Point | None]:
    """Return the first point along Newton's direction, halving, with a smaller norm, or None."""
    direction, length = newton_direction(found.hessian, found.gradient), 1.0
    for _ in range(MAX_HALVINGS + 1):
        eps = on_grid(found.eps + length * direction)
        if (np.abs(eps) <= LARGEST_COEFFICIENT).all():
            gradients = loss.gradient_blocks(eps)
            hessians = loss.hessian_blocks(eps) if with_hessian else ()
            totals = yield from ask(*gradients, *hessians)
            gradient = loss.gradient(eps, totals[: len(gradients)])
            size = norm(gradient)
            if size <= (1.0 - SMALLEST_DECREASE * length) * found.norm:
                hessian = found.hessian
                if with_hessian:
                    hessian = loss.hessian(totals[len(gradients) :]) + pinned
                return Point(
                    eps=eps,
                    gradient=gradient,
                    norm=size,
                    hessian=hessian,
                    is_fresh=with_hessian,
                    ratio=size / found.norm if length == 1.0 else None,
                )
            if found.norm <= LARGEST_GRADIENT:
                return None
        length *= 0.5
    return None
