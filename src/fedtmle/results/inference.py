"""From components to the table of estimates: Wald intervals, pointwise and simultaneous.

`results.meta` combines the silos' own estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from statistics import NormalDist

import numpy as np
from scipy.special import chdtrc, stdtr, stdtrit

from fedtmle.errors import NumericalError
from fedtmle.layout import Document
from fedtmle.model.problem import Estimate
from fedtmle.model.types import Array
from fedtmle.programs.rubin import MultiplyImputed, combine
from fedtmle.programs.study import Study
from fedtmle.protocol.sites import OwnEstimate
from fedtmle.targets.effects.components import AbstractPopulation, Component, InStratum
from fedtmle.targets.effects.estimands import Scale, Summary

DRAWS = 200_000  # simulated maxima, for simultaneous intervals


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table of estimates."""

    estimand: str
    estimate: float
    std_error: float
    conf_low: float
    conf_high: float
    p_value: float | None  # None for a mean: no value of it is "no effect"
    scale: Scale

    def to_dict(self) -> dict[str, str | float | None]:
        return {**asdict(self), "scale": self.scale.value}


def summaries(study: Study, components: Sequence[Component], psi: Array) -> list[Summary]:
    """Return the numbers that the study reports, with gradients in all components."""
    return [summary for _, part in _by_population(study, components, psi) for summary in part]


def _by_population(
    study: Study, components: Sequence[Component], psi: Array, *, named: bool = True
) -> list[tuple[AbstractPopulation, list[Summary]]]:
    """Return each population's estimates; without ``named``, their names leave out the population."""
    reported, start = [], 0
    for population, group in groupby(components, key=lambda component: component.population):
        size, name = len(list(group)), population.label if named else ""
        if study.submodel == "contrast":  # the contrast was targeted by itself
            (only,) = study.target.summarise(np.array([0.0, 1.0]), name)
            part = slice(start, start + 1)
            summarised = [replace(only, value=float(psi[start]), gradient=np.ones(1))]
        else:
            part = slice(start, start + size)
            summarised = study.target.summarise(psi[part], name)
        start = part.stop
        own = []
        for summary in summarised:
            gradient = np.zeros(len(psi))
            gradient[part] = summary.gradient
            own.append(replace(summary, gradient=gradient))
        reported.append((population, own))
    return reported


def table_rows(
    study: Study, components: Sequence[Component], psi: Array, covariance: Array
) -> tuple[list[Row], list[Row]]:
    """Return the rows with pointwise intervals, and the same rows with simultaneous ones."""
    reported = summaries(study, components, psi)
    gradients = np.stack([summary.gradient for summary in reported])
    joint = gradients @ covariance @ gradients.T
    pointwise = NormalDist().inv_cdf(0.5 + study.confidence / 2)
    quantiles = (pointwise, simultaneous_quantile(joint, study.confidence, study.seed))
    rows = [[_row(s, math.sqrt(joint[i, i]), z) for i, s in enumerate(reported)] for z in quantiles]
    return rows[0], rows[1]


def interaction_tests(
    study: Study, components: Sequence[Component], psi: Array, covariance: Array
) -> list[Document]:
    """Return a Wald test, for each estimand, that it is the same in every stratum; none without strata.

    With theta the estimates by stratum (logarithms of ratios) and C their differences from the first,
    (C theta)' (C V C')^-1 C theta is chi-squared with one degree of freedom less than there are strata.
    """
    if study.target.strata is None:
        return []
    populations = _by_population(study, components, psi, named=False)
    by_stratum = [part for population, part in populations if isinstance(population, InStratum)]
    tests: list[Document] = []
    for same in zip(*by_stratum, strict=True):
        slopes = [s.gradient / s.value if s.scale.is_log else s.gradient for s in same]
        values = np.array([math.log(s.value) if s.scale.is_log else s.value for s in same])
        V = np.stack(slopes) @ covariance @ np.stack(slopes).T
        contrast, contrast_V = values[1:] - values[0], V[1:, 1:] - V[1:, :1] - V[:1, 1:] + V[0, 0]
        df = len(contrast)
        if not df or not np.isfinite(contrast_V).all() or np.linalg.matrix_rank(contrast_V) < df:
            continue
        statistic = float(contrast @ np.linalg.solve(contrast_V, contrast))
        p_value = float(chdtrc(df, statistic))
        tests.append({"estimand": same[0].name, "statistic": statistic, "df": df, "p_value": p_value})
    return tests


def simultaneous_quantile(covariance: Array, confidence: float, seed: int) -> float:
    """Return the quantile of max |Z| for Z normal with the estimates' correlation, by seeded simulation."""
    error = np.sqrt(np.diag(covariance))
    if len(error) == 1 or not (np.isfinite(error).all() and (error > 0).all()):
        return NormalDist().inv_cdf(0.5 + confidence / 2)
    values, vectors = np.linalg.eigh(covariance / np.outer(error, error))
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    draws = np.random.default_rng(seed).standard_normal((DRAWS, len(error))) @ root.T
    return float(np.quantile(np.abs(draws).max(axis=1), confidence))


def _score(distance: float, error: float) -> float:
    return distance / error if error else math.copysign(math.inf, distance) if distance else 0.0


def _row(summary: Summary, error: float, z: float) -> Row:
    score, null = None, summary.scale.null
    if summary.scale.is_log:
        center, spread = math.log(summary.value), error / summary.value
        low, high = math.exp(center - z * spread), math.exp(center + z * spread)
        if null is not None:
            score = _score(center - math.log(null), spread)
    else:
        low, high = summary.value - z * error, summary.value + z * error
        if null is not None:
            score = _score(summary.value - null, error)
    return Row(
        estimand=summary.name,
        estimate=summary.value,
        std_error=error,
        conf_low=low,
        conf_high=high,
        p_value=None if score is None else math.erfc(abs(score) / math.sqrt(2)),
        scale=summary.scale,
    )


def imputed_rows(
    study: Study, components: Sequence[Component], estimates: Sequence[Estimate], n: int
) -> tuple[list[Row], list[Row], list[MultiplyImputed]]:
    """Return the pointwise and simultaneous rows of m data sets by Rubin's rules, and what they rest on.

    A ratio is combined on the log scale; `imputed_intervals` has the quantiles.
    """
    by_set = [summaries(study, components, each.psi) for each in estimates]
    values, variances = [], []
    for reported, each in zip(by_set, estimates, strict=True):
        slopes = np.stack([s.gradient / s.value if s.scale.is_log else s.gradient for s in reported])
        values.append([math.log(s.value) if s.scale.is_log else s.value for s in reported])
        variances.append(slopes @ each.covariance @ slopes.T)
    found = imputed_intervals(np.array(values), np.stack(variances), n, study.confidence, study.seed)
    likes = [_row(summary, 0.0, 0.0) for summary in by_set[0]]
    pointwise = [
        _combined_row(like, each, q)
        for like, each, q in zip(likes, found.combined, found.pointwise, strict=True)
    ]
    simultaneous = [
        _combined_row(like, each, q)
        for like, each, q in zip(likes, found.combined, found.simultaneous, strict=True)
    ]
    return pointwise, simultaneous, list(found.combined)


@dataclass(frozen=True, kw_only=True)
class ImputedIntervals:
    """Numbers over m data sets by Rubin's rules, and the quantiles of their intervals, one for each."""

    combined: tuple[MultiplyImputed, ...]
    pointwise: tuple[float, ...]
    simultaneous: tuple[float, ...]


def imputed_intervals(
    values: Array, variances: Array, n: int, confidence: float, seed: int
) -> ImputedIntervals:
    """Return the combined numbers and their quantiles.

    ``values`` has shape (m, numbers) and ``variances`` (m, numbers, numbers), on the scale on which intervals
    are symmetric. Pointwise quantiles are those of t with each number's degrees of freedom. For simultaneous
    ones let q be the quantile of max |Z|, Z normal with the correlation of the total variance

        T = mean of the variances + (1 + 1/m) B,   B the covariance of the values over the data sets:

    each number's quantile is that of t at the level Phi(q), so that all numbers have the same coverage one by
    one, and together the stated one if the t's depend on each other as Z does.
    """
    numbers = values.shape[1]
    combined = tuple(
        combine(values[:, k].tolist(), variances[:, k, k].tolist(), n - 1) for k in range(numbers)
    )
    between = np.cov(values, rowvar=False, ddof=1).reshape(numbers, numbers)
    total = variances.mean(axis=0) + (1.0 + 1.0 / len(values)) * between
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    q = simultaneous_quantile(total, confidence, seed)
    level = NormalDist().cdf(q) if q > z else 0.5 + confidence / 2

    def quantiles(level: float, normal: float) -> tuple[float, ...]:
        degrees = (each.df for each in combined)
        return tuple(float(stdtrit(df, level)) if math.isfinite(df) else normal for df in degrees)

    return ImputedIntervals(
        combined=combined,
        pointwise=quantiles(0.5 + confidence / 2, z),
        simultaneous=quantiles(level, q),
    )


@dataclass(frozen=True, kw_only=True)
class MeanIntervals:
    """Standard errors of the components of psi, and the quantiles of their intervals; shape (d,) each."""

    std_error: Array
    pointwise: Array
    simultaneous: Array


def mean_intervals(
    study: Study, covariance: Array, imputed: Sequence[Estimate], n: int, place: slice = slice(None)
) -> MeanIntervals:
    """Return the intervals of the components in ``place``: by Rubin's rules if data sets were imputed."""
    covariance = covariance[place, place]
    if imputed:
        values = np.stack([each.psi[place] for each in imputed])
        variances = np.stack([each.covariance[place, place] for each in imputed])
        found = imputed_intervals(values, variances, n, study.confidence, study.seed)
        return MeanIntervals(
            std_error=np.sqrt([each.variance for each in found.combined]),
            pointwise=np.array(found.pointwise),
            simultaneous=np.array(found.simultaneous),
        )
    ones = np.ones(len(covariance))
    return MeanIntervals(
        std_error=np.sqrt(np.diag(covariance)),
        pointwise=NormalDist().inv_cdf(0.5 + study.confidence / 2) * ones,
        simultaneous=simultaneous_quantile(covariance, study.confidence, study.seed) * ones,
    )


def symmetric(row: Row) -> tuple[float, float]:
    """Return a row's estimate and variance on the scale on which its interval is symmetric."""
    if row.scale.is_log:
        return math.log(row.estimate), (row.std_error / row.estimate) ** 2
    return row.estimate, row.std_error**2


def _combined_row(like: Row, found: MultiplyImputed, quantile: float) -> Row:
    center, spread, null = found.estimate, math.sqrt(found.variance), like.scale.null
    low, high = center - quantile * spread, center + quantile * spread
    p_value = None
    if null is not None:
        distance = center - (math.log(null) if like.scale.is_log else null)
        p_value = float(2.0 * stdtr(found.df, -abs(_score(distance, spread))))
    if like.scale.is_log:
        center, low, high = math.exp(center), math.exp(low), math.exp(high)
        spread *= center
    return replace(like, estimate=center, std_error=spread, conf_low=low, conf_high=high, p_value=p_value)


def silo_tables(
    study: Study, components: Sequence[Component], own: Mapping[str, OwnEstimate]
) -> dict[str, list[Row]]:
    """Return the table of each silo that sent an estimate of its own."""
    tables = {}
    for silo, estimate in own.items():
        if estimate.psi is not None and estimate.covariance is not None:
            with suppress(NumericalError):  # a mean may leave the range of a ratio
                tables[silo] = table_rows(study, components, estimate.psi, estimate.covariance)[0]
    return tables
