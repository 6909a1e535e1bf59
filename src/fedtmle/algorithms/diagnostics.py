"""Diagnostics of a study, pooled from what each silo may tell: overlap, and the outcome model's fit.

Both outcome regressions, before and after targeting, are held against the outcome in the same bins, those
of the initial prediction: bins of each would differ in a few rows, and so tell them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from fedtmle.algorithms.outcome import Query
from fedtmle.algorithms.overlap import Overlap
from fedtmle.algorithms.study import Study
from fedtmle.model.types import Array, Bytes, Codes, exponent
from fedtmle.protocol.bins import BinsQuery, Group, PooledBin
from fedtmle.protocol.learners import JointQuery
from fedtmle.protocol.query import Phase
from fedtmle.protocol.tables import TallyQuery
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle.targets.effects.rows import PROBABILITY_EDGES, EffectRows, bins_between, shown_arms

DECILES = tuple(NormalDist().inv_cdf(k / 10) for k in range(1, 10))
LARGEST_LOSS = 64.0  # of one row, where a prediction is all but certain and wrong
SMALLEST_CHANCE = math.exp(-LARGEST_LOSS)


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """P(arm ``of`` | W) among those in ``arm``, between consecutive `PROBABILITY_EDGES`."""

    of: str
    arm: str
    bins: tuple[PooledBin, ...]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well Q(A, W) predicts the outcomes that were observed, on the unit scale.

    ``r_squared`` and ``deviance`` (the share explained, of a binary outcome) are before and after
    targeting. A calibration bin has the sums of w, w y, w Q before and w Q after.
    """

    r_squared: tuple[float, float]
    deviance: tuple[float, float] | None
    edges: tuple[float, ...]  # of Q before, the inner ones
    calibration: tuple[PooledBin, ...]


@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """What can be said of a study's models without a record."""

    overlap: tuple[Histogram, ...]
    fit: Fit


Binned = Callable[[Any], tuple[Bytes, Codes]]


def histograms(binned: Binned, arms: int, n: int) -> tuple[BinsQuery, list[tuple[int, int]]]:
    """The query, and of which arm's probability in which arm each of its groups is.

    ``binned`` gives the bin of each shown arm's probability and the arm taken, of a piece of the rows.
    """
    of = shown_arms(arms)
    pairs = [(a, b) for a in of for b in range(arms)]

    def groups(piece: Any) -> list[Group]:
        bins, arm = binned(piece)
        rows = [arm == b for b in range(arms)]
        return [Group(bins=bins[of.index(a)][rows[b]]) for a, b in pairs]

    sizes = (len(PROBABILITY_EDGES) - 1,) * len(pairs)
    return BinsQuery(groups=groups, sizes=sizes, exponents=(), n=n, what="probabilities of treatment"), pairs


def named_histograms(
    pairs: Sequence[tuple[int, int]], bins: Sequence[tuple[PooledBin, ...]], arms: Sequence[str]
) -> tuple[Histogram, ...]:
    return tuple(
        Histogram(of=arms[a], arm=arms[b], bins=found) for (a, b), found in zip(pairs, bins, strict=True)
    )


def diagnose(
    study: Study,
    effect: EffectProblem,
    law: EffectLaw,
    overlap: Overlap,
    n: int,
) -> Generator[Query, Any, Diagnostics]:
    """One round, after the closing one."""
    mean, spread = overlap.predicted
    edges = tuple(mean + spread * z for z in DECILES) if spread > 0 else ()

    def fitted(rows: EffectRows) -> Array:
        w, y = rows.weight * rows.observed, rows.y
        before, after = predicted(rows)
        errors = [np.minimum((y - q) ** 2, LARGEST_LOSS) for q in (before, after)]
        losses = [_log_loss(y, q) for q in (before, after)] if study.target.is_binary else []
        return np.stack([np.ones_like(y), y, y * y, *errors, *losses]) * w

    def calibrated(rows: EffectRows) -> list[Group]:
        seen = slice(None) if rows.observed.all() else rows.observed > 0
        before, after = (q[seen] for q in predicted(rows))
        values = np.stack([np.ones_like(before), rows.y[seen], before, np.clip(after, -1.0, 2.0)])
        values *= rows.weight[seen]
        bins = bins_between(edges, before)
        return [Group(bins=bins, values=values, sensitive=rows.y[seen])]

    def predicted(rows: EffectRows) -> tuple[Array, Array]:
        return effect.factual(effect.start(), rows), effect.factual(law, rows)

    def binned(rows: EffectRows) -> tuple[Bytes, Codes]:
        return rows.g_bins, rows.arm

    weight = effect.population_ceiling
    per_row = 7 if study.target.is_binary else 5
    propensity, pairs = histograms(binned, len(study.target.arms), n)
    propensity = replace(propensity, over=effect.over)
    sums, overlapping, (bins,) = yield JointQuery(
        (
            TallyQuery(
                columns=fitted,
                over=effect.over,
                exponents=(exponent(weight),) * 3 + (exponent(LARGEST_LOSS * weight),) * (per_row - 3),
                n=n,
                what="error of a prediction",
                phase=Phase.DIAGNOSTICS,
            ),
            propensity,
            BinsQuery(
                groups=calibrated,
                over=effect.over,
                sizes=(len(edges) + 1,),
                exponents=(exponent(2.0 * weight),) * 4,
                n=n,
                what="outcomes and predictions",
            ),
        )
    )
    mass, y, squares, *errors = map(float, sums.values())
    scatter = squares - y * y / mass
    deviance = None
    if study.target.is_binary:
        null = mass * _entropy(y / mass)
        deviance = _explained(errors[2], null), _explained(errors[3], null)
    found = named_histograms(pairs, overlapping, study.target.arms)
    fit = Fit(
        r_squared=(_explained(errors[0], scatter), _explained(errors[1], scatter)),
        deviance=deviance,
        edges=edges,
        calibration=bins,
    )
    return Diagnostics(overlap=found, fit=fit)


def _log_loss(y: Array, q: Array) -> Array:
    return np.asarray(-np.log(np.clip(np.where(y > 0, q, 1.0 - q), SMALLEST_CHANCE, 1.0)))


def _entropy(p: float) -> float:
    return -sum(share * math.log(share) for share in (p, 1 - p) if share > 0)


def _explained(left: float, whole: float) -> float:
    return 1.0 - left / whole if whole > 0 else math.nan
