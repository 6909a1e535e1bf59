"""Exact fits: Newton's method on exact sums, some six rounds; the same bits in any partition of the people.

The loss is convex, and the step solves H p = -g, so that the norm of g falls along it. A step is taken when
it does fall; no loss is asked. Close to the fit the curvature hardly changes: a step with the one of the
point before leaves |g(eps + p)| ~ 2 r |g(eps)|, r = |g(eps)| / |g before|, which squares from one step to the
next. Where such a step is expected to reach the goal, a round asks for the gradient alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import FitError
from fedtmle.estimation.algebra import multiply, newton_direction, norm, on_grid
from fedtmle.estimation.flow import Flow, ask
from fedtmle.estimation.loss import Loss
from fedtmle.estimation.regression import Fit, Regression
from fedtmle.model.refusals import (
    FLAT,
    refuse_collinear,
    refuse_constant,
    refuse_runaway,
    refuse_separated,
    refuse_separation,
    remedy,
    spread_of,
)
from fedtmle_core.types import Array, Family

GOAL = 2.0**-42  # norm of the mean gradient on unit columns: exact sums hold some 2^-50
LARGEST_GRADIENT = 1e-8  # a fit that stalls above this has not converged
MAX_STEPS = 100
MAX_HALVINGS = 50
SMALLEST_DECREASE = 1e-4  # a step of length t lowers the norm by at least this share of t


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
        names = regression.coefficient_names
        if not loss.admits(found.eps + newton_direction(found.hessian, found.gradient)):
            if family is Family.LOGISTIC and found.norm < FLAT * start.norm:
                refuse_separated(found.eps, spread_of(hessian, design.has_intercept), names, label)
            refuse_runaway(found.eps, names, label)
        raise FitError(
            "convergence",
            f"{label}: the fit did not converge; {remedy(of_columns, design.names, family)}",
        )
    return Fit(regression=regression, coefficients=regression.raw(found.eps))


def _first(loss: Loss, zero: Array) -> Flow[Point]:
    """Return the point 0; what all gradients share is asked in the same round."""
    gradients, hessians = loss.gradient_blocks(zero), loss.hessian_blocks(zero)
    shared = loss.shared_blocks()
    totals = yield from ask(*shared, *gradients, *hessians)
    loss.read_shared(totals[: len(shared)])
    rest = totals[len(shared) :]
    gradient = loss.gradient(rest[: len(gradients)])  # the penalty is 0 there
    hessian = loss.hessian(rest[len(gradients) :]) + loss.regression.penalty
    return Point(eps=zero, gradient=gradient, norm=norm(gradient), hessian=hessian)


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
        if loss.admits(eps):
            gradients = loss.gradient_blocks(eps)
            hessians = loss.hessian_blocks(eps) if with_hessian else ()
            totals = yield from ask(*gradients, *hessians)
            penalty = loss.regression.penalty
            gradient = loss.gradient(totals[: len(gradients)]) + multiply(penalty, eps)
            size = norm(gradient)
            if size <= (1.0 - SMALLEST_DECREASE * length) * found.norm:
                hessian = found.hessian
                if with_hessian:
                    hessian = loss.hessian(totals[len(gradients) :]) + penalty + pinned
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
