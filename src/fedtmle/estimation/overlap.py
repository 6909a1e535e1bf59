"""Overlap: how much the weights leave of the people in each arm, and the scales at which targeting starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedtmle.errors import FitError
from fedtmle.estimation.effect import EffectTerms
from fedtmle.estimation.flow import Flow, ask
from fedtmle.estimation.rows import FluctuatedArms
from fedtmle.estimation.targeting import TermProblem
from fedtmle.model.linear import dot
from fedtmle.model.problem import Calibration
from fedtmle.targets.diagnostics import Overlap
from fedtmle_core import graph
from fedtmle_core.blocks import Moments, size
from fedtmle_core.terms import product
from fedtmle_core.types import Part, unpack


class Start(NamedTuple):
    """What one round before targeting says: overlap, and rough standard errors with the loss's curvature."""

    overlap: Overlap
    scales: Calibration


def find_overlap(problem: TermProblem, q: FluctuatedArms, n: int, hospitals: int) -> Flow[Start]:
    """Ask for overlap and for the scales of targeting in one round; refuse arms that do not overlap."""
    effect = q.effect
    weight, count = effect.weights, len(effect.components)
    H = [product(weight, each) for each in effect.H]
    predicted = effect.at_arm(effect.q)
    residual = effect.y - predicted
    seen = product(weight, effect.observed)
    scores = [product(each, residual) for each in H]
    moments = [product(seen, predicted), product(seen, predicted, predicted)]
    columns = (*H, *scores, *effect.truncated, seen, *moments)
    arms = len(effect.arms)
    products = (
        *((r,) for r in range(count)),
        *((r, r) for r in range(2 * count)),
        *((k,) for k in range(2 * count, 2 * count + arms + 3)),
    )
    hessian = problem.score(problem.start(), np.zeros(q.dim), Part.HESSIAN)
    totals, curvature = yield from ask(Moments(columns=columns, products=products), hessian)
    listed = totals.tolist()
    sums, squares, scored = (listed[k * count : (k + 1) * count] for k in range(3))
    truncated = tuple(map(round, listed[3 * count : 3 * count + arms]))
    _refuse_no_overlap(effect, truncated, n)
    for component, mass in zip(effect.components, squares, strict=True):
        if not mass > 0:
            raise FitError("arm", f"target: no observed outcome contributes to {component.name}")
    intervals = graph.intervals(H, problem.dictionary)
    overlap = Overlap(
        truncated=truncated,
        disclosing=(hospitals,) * arms,
        effective_sizes=tuple(a * a / b for a, b in zip(sums, squares, strict=True)),
        largest_shares=tuple(
            min(size(intervals[each]), math.sqrt(b)) / a for each, a, b in zip(H, sums, squares, strict=True)
        ),
        mean_squares=tuple(b / n for b in squares),
        predicted=_mean_and_deviation(listed[3 * count + arms :]),
    )
    # The outcome's part of the EIF alone; the covariates' part only adds to it.
    variances = [q.width**2 * score / n**2 for score in scored]
    scales = Calibration(
        errors=tuple(math.sqrt(dot([w * w for w in row], variances)) for row in q.combination),
        curvature=tuple(map(tuple, unpack(curvature / n, q.dim).tolist())),
        rounding=0.0,
    )
    return Start(overlap, scales)


def _mean_and_deviation(moments: Sequence[float]) -> tuple[float, float]:
    """Return both from the sums of w, w q and w q^2."""
    mass, total, squares = moments
    mean = total / mass
    return mean, math.sqrt(max(squares / mass - mean * mean, 0.0))


def _refuse_no_overlap(effect: EffectTerms, truncated: Sequence[int], n: int) -> None:
    for arm, people in zip(effect.arms, truncated, strict=True):
        if people and not effect.floor:
            raise FitError(
                "overlap",
                f"g_bounds: the probability of arm '{arm}' is nearly 0 for {people} of {n} rows, and nothing "
                "bounds it; give a bound, or leave g_bounds out",
            )
        if people > n / 2:
            raise FitError(
                "overlap",
                f"g_bounds: the probability of arm '{arm}' is below {effect.floor:.3g} for {people} of {n} "
                "rows; there is no overlap to learn from. Restrict the cohort, or simplify the treatment "
                "model",
            )
