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

    A ratio is combined on the log scale. Intervals have the quantile of t; simultaneous ones have theirs
    widened by the same factor.
    """
    tables = [table_rows(study, components, each.psi, each.covariance) for each in estimates]
    z = NormalDist().inv_cdf(0.5 + study.confidence / 2)
    pointwise, simultaneous, combinations = [], [], []
    for index, like in enumerate(tables[0][0]):
        pairs = [symmetric(pointwise_rows[index]) for pointwise_rows, _ in tables]
        found = combine([y for y, _ in pairs], [v for _, v in pairs], n - 1)
        quantile = float(stdtrit(found.df, 0.5 + study.confidence / 2)) if math.isfinite(found.df) else z
        wider = float(np.mean([_widening(rows[1][index], rows[0][index]) for rows in tables]))
        pointwise.append(_combined_row(like, found, quantile))
        simultaneous.append(_combined_row(like, found, quantile * wider))
        combinations.append(found)
    return pointwise, simultaneous, combinations


def symmetric(row: Row) -> tuple[float, float]:
    """Return a row's estimate and variance on the scale on which its interval is symmetric."""
    if row.scale.is_log:
        return math.log(row.estimate), (row.std_error / row.estimate) ** 2
    return row.estimate, row.std_error**2


def _widening(simultaneous: Row, pointwise: Row) -> float:
    """Return the width of a simultaneous interval relative to the pointwise one."""
    ends = [(row.conf_low, row.conf_high) for row in (simultaneous, pointwise)]
    if pointwise.scale.is_log:
        ends = [(math.log(low), math.log(high)) for low, high in ends]
    (low, high), (inner_low, inner_high) = ends
    return (high - low) / (inner_high - inner_low) if inner_high > inner_low else 1.0


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
