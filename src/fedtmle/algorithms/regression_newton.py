"""Newton's method for a nuisance regression: gradients and, as long as it changes, the curvature.

The loss is convex, and the step solves H p = -g, so that the norm of g falls along it. A step is taken when
it does fall; no loss is asked. Close to the fit the curvature hardly changes: a step with the one of the
point before leaves

    |g(eps + p)| ~ 2 r |g(eps)|,   r = |g(eps)| / |g before|,

r of the last full step, which squares from one to the next. Where such a step is expected to reach the goal,
a round asks for the gradient alone: d sums instead of d + d(d+1)/2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtmle.algorithms.base import Run
from fedtmle.algorithms.publiclinear import newton_direction
from fedtmle.model.types import Array, Part, unpack
from fedtmle.protocol.query import Flow

MAX_STEPS = 100
MAX_HALVINGS = 50
SMALLEST_DECREASE = 1e-4  # a step of length t lowers the norm by at least this share of t


@dataclass(frozen=True, kw_only=True)
class NewtonPoint:
    """A point of the fit and what is known there; ``is_fresh`` unless the Hessian is of a point before."""

    eps: Array
    gradient: Array
    norm: float
    hessian: Array
    is_fresh: bool = True
    ratio: float | None = None  # of the norm to that before a full step


def minimise(
    run: Run[Any], gradient: Array, hessian: Array, *, goal: float, acceptable: float, is_quadratic: bool
) -> Flow[NewtonPoint]:
    """Return the fit from eps = 0, where the gradient and the Hessian are given.

    It ends at a norm of ``goal``, or where exact sums allow no smaller one if that is at most
    ``acceptable``. A quadratic loss has the same Hessian everywhere.
    """
    fit = NewtonPoint(
        eps=np.zeros(run.problem.dim), gradient=gradient, norm=run.norm(gradient), hessian=hessian
    )
    for _ in range(MAX_STEPS):
        if fit.norm <= goal:
            break
        ahead = yield from _step(run, fit, not is_quadratic and _needs_hessian(fit, goal), acceptable)
        if ahead is None:
            break
        fit = ahead
    return fit


def _needs_hessian(fit: NewtonPoint, goal: float) -> bool:
    """Whether the next point needs its own: a step from there with the Hessian at hand would not do."""
    if fit.ratio is None:
        return True
    reached = 2.0 * fit.norm * fit.ratio**4 if fit.is_fresh else fit.norm * fit.ratio**2
    return reached > goal


def _step(run: Run[Any], fit: NewtonPoint, with_hessian: bool, acceptable: float) -> Flow[NewtonPoint | None]:
    """The first point along Newton's direction, halving, where the norm is smaller; None if there is none."""
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
                    hessian = unpack(sums[dim:].values(run.n), dim) + run.problem.normaliser(None).hessian(
                        eps
                    )
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
