"""Diagnostics of a study, pooled from the bins that each silo may disclose: overlap and outcome fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from fedtmle.algorithms.overlap import Overlap
from fedtmle.algorithms.study import Study
from fedtmle.protocol.bins import BinsQuery, PooledBin
from fedtmle.protocol.query import Flow, JointQuery, Phase
from fedtmle.protocol.sums import TallyQuery
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle.targets.effects.statistics import (
    CalibrationBins,
    PredictionErrors,
    PropensityBins,
    histogram_pairs,
)

DECILES = tuple(NormalDist().inv_cdf(k / 10) for k in range(1, 10))


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """P(arm ``of`` | W) among those in ``arm``, between consecutive `PROBABILITY_EDGES`."""

    of: str
    arm: str
    bins: tuple[PooledBin, ...]


@dataclass(frozen=True, kw_only=True)
class OutcomeFit:
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
    """Overlap, and how well the outcome model predicts."""

    overlap: tuple[Histogram, ...]
    fit: OutcomeFit


def named_histograms(bins: Sequence[tuple[PooledBin, ...]], arms: Sequence[str]) -> tuple[Histogram, ...]:
    """Return the histograms of propensity scores with the names of their arms."""
    pairs = histogram_pairs(len(arms))
    return tuple(
        Histogram(of=arms[a], arm=arms[b], bins=pooled) for (a, b), pooled in zip(pairs, bins, strict=True)
    )


def diagnose(
    study: Study, effect: EffectProblem, law: EffectLaw, overlap: Overlap, n: int
) -> Flow[Diagnostics]:
    """Ask for the diagnostics in one round, after the closing one."""
    mean, spread = overlap.predicted
    edges = tuple(mean + spread * z for z in DECILES) if spread > 0 else ()
    is_binary, arms = study.target.is_binary, study.target.arms
    errors_of = PredictionErrors(effect=effect, law=law, is_binary=is_binary)
    sums, propensities, (bins,) = yield JointQuery(
        (
            TallyQuery(columns=errors_of, n=n, phase=Phase.DIAGNOSTICS),
            BinsQuery(bins=PropensityBins(effect, len(arms)), n=n),
            BinsQuery(bins=CalibrationBins(effect=effect, law=law, edges=edges), n=n),
        )
    )
    mass, y, squares, *errors = map(float, sums.values())
    scatter = squares - y * y / mass
    deviance = None
    if is_binary:
        null = mass * _entropy(y / mass)
        deviance = _explained(errors[2], null), _explained(errors[3], null)
    fit = OutcomeFit(
        r_squared=(_explained(errors[0], scatter), _explained(errors[1], scatter)),
        deviance=deviance,
        edges=edges,
        calibration=bins,
    )
    return Diagnostics(overlap=named_histograms(propensities, arms), fit=fit)


def _entropy(p: float) -> float:
    return -sum(share * math.log(share) for share in (p, 1 - p) if share > 0)


def _explained(left: float, whole: float) -> float:
    return 1.0 - left / whole if whole > 0 else math.nan
