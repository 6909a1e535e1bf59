"""The round before targeting: overlap, and the scales at which targeting starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedtmle.estimation.diagnostics.base import Pool
from fedtmle.estimation.diagnostics.overlap import WeightOverlap, refuse_no_overlap
from fedtmle.estimation.effect import EffectTerms
from fedtmle.estimation.flow import Flow, ask
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


def find_overlap(problem: TermProblem, effect: EffectTerms, pool: Pool) -> Flow[Start]:
    """Ask for overlap and for the scales of targeting in one round; refuse arms that do not overlap."""
    H = tuple(product(effect.weights, each) for each in effect.H)
    intervals = graph.intervals(H, problem.dictionary)
    weights = WeightOverlap(
        pool=pool,
        weights=H,
        ceilings=tuple(size(intervals[each]) for each in H),
        truncated=effect.truncated,
    )
    predicted, seen = effect.at_arm(effect.q), product(effect.weights, effect.observed)
    scores = tuple(product(each, effect.y - predicted) for each in H)
    moments = (seen, product(seen, predicted), product(seen, predicted, predicted))
    count = len(scores)
    products = (*((r, r) for r in range(count)), *((count + k,) for k in range(len(moments))))
    rough = Moments(columns=(*scores, *moments), products=products)
    hessian = problem.score(problem.start(), np.zeros(problem.dim), Part.HESSIAN)
    *asked, totals, curvature = yield from ask(*weights.blocks, rough, hessian)
    overlap = replace(weights.read(asked), predicted=_mean_and_deviation(totals[count:].tolist()))
    refuse_no_overlap(
        overlap,
        means=[component.name for component in effect.components],
        groups=[f"arm '{arm}'" for arm in effect.arms],
        n=pool.n,
        floor=effect.floor,
    )
    # The outcome's part of the EIF alone; the covariates' part only adds to it.
    variances = [effect.width**2 * score / pool.n**2 for score in totals[:count].tolist()]
    scales = Calibration(
        errors=tuple(math.sqrt(dot([w * w for w in row], variances)) for row in problem.combination),
        curvature=tuple(map(tuple, unpack(curvature / pool.n, problem.dim).tolist())),
        rounding=0.0,
    )
    return Start(overlap, scales)


def _mean_and_deviation(moments: Sequence[float]) -> tuple[float, float]:
    """Return both from the sums of w, w q and w q^2."""
    mass, total, squares = moments
    mean = total / mass
    return mean, math.sqrt(max(squares / mass - mean * mean, 0.0))
