"""From components to the table of estimates: intervals, meta-analysis, and distance from convergence.

Wald intervals are pointwise and simultaneous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from statistics import NormalDist
from typing import Literal

import numpy as np
from scipy.special import chdtrc, stdtr, stdtrit

from fedtmle.errors import FedTMLEError, NumericalError, Reached
from fedtmle.initial.glm import Supplied
from fedtmle.initial.superlearner import SuperLearner
from fedtmle.layout import Document
from fedtmle.model.problem import Estimate
from fedtmle.programs.imputation import MultiplyImputed, combine
from fedtmle.programs.nuisance import effect_columns
from fedtmle.programs.study import Study
from fedtmle.protocol.sites import OwnEstimate
from fedtmle.runtime.result import Result
from fedtmle.targets.effects.components import AbstractPopulation, Component, InStratum
from fedtmle.targets.effects.estimands import AbstractEffect, Scale, Summary
from fedtmle_core.types import Array

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


# Meta-analysis of the silos' own estimates: heterogeneity, a random-effects summary, and each silo left out.
#
# With y_m the estimates (their logarithms for a ratio), v_m their squared standard errors, w_m = 1/v_m:
#
#     Q    = sum w_m (y_m - y_w)^2,  y_w the mean with weights w_m
#     tau2 = the variance between silos: DerSimonian-Laird's moment estimator, or REML
#     mu   = the mean with weights 1/(v_m + tau2)
#     I2   = tau2 / (tau2 + s2),  s2 = (k - 1) sum w / ((sum w)^2 - sum w^2)
#
# The interval of mu is that of Hartung and Knapp: its variance is sum w*_m (y_m - mu)^2 / ((k - 1) sum w*_m),
# w*_m = 1/(v_m + tau2), and its quantile that of t with k - 1 degrees of freedom. The prediction interval,
# for the effect at another silo of the same kind, has tau2 added to that variance. All are as R's metafor has
# them with test = "knha".

Method = Literal["REML", "DL"]
METHODS: tuple[Method, ...] = ("REML", "DL")
MAX_STEPS = 1_000
STEP_GOAL = 1e-12  # relative to the variances


@dataclass(frozen=True, kw_only=True)
class RandomEffects:
    """The random-effects summary of k estimates, on the scale on which they were given."""

    method: Method
    estimate: float
    std_error: float  # Hartung-Knapp
    conf_low: float
    conf_high: float
    p_value: float
    prediction_low: float
    prediction_high: float
    tau2: float
    I2: float
    Q: float
    df: int
    Q_p_value: float
    weights: tuple[float, ...]  # shares


def random_effects(
    estimates: Sequence[float] | Array,
    variances: Sequence[float] | Array,
    *,
    method: Method = "REML",
    confidence: float = 0.95,
) -> RandomEffects:
    """Return the random-effects summary of at least two estimates with their variances."""
    y, v = np.asarray(estimates, dtype=np.float64), np.asarray(variances, dtype=np.float64)
    k, w = len(y), 1.0 / v
    df = k - 1
    q = float(w @ (y - w @ y / w.sum()) ** 2)
    tau2 = _moments(q, w) if method == "DL" else _reml(y, v)
    star = 1.0 / (v + tau2)
    mu = float(star @ y / star.sum())
    error = math.sqrt(float(star @ (y - mu) ** 2) / (df * float(star.sum())))
    quantile = float(stdtrit(df, 0.5 + confidence / 2))
    typical = df * float(w.sum()) / float(w.sum() ** 2 - (w**2).sum())
    reach = quantile * math.sqrt(error**2 + tau2)
    return RandomEffects(
        method=method,
        estimate=mu,
        std_error=error,
        conf_low=mu - quantile * error,
        conf_high=mu + quantile * error,
        p_value=float(2 * stdtr(df, -abs(mu) / error)) if error > 0 else float(mu == 0),
        prediction_low=mu - reach,
        prediction_high=mu + reach,
        tau2=tau2,
        I2=tau2 / (tau2 + typical),
        Q=q,
        df=df,
        Q_p_value=float(chdtrc(df, q)),
        weights=tuple((star / star.sum()).tolist()),
    )


def _moments(q: float, w: Array) -> float:
    """Return DerSimonian and Laird's tau2 = (Q - (k - 1)) / (sum w - sum w^2 / sum w), at least 0."""
    scale = float(w.sum() - (w**2).sum() / w.sum())
    return max(0.0, (q - (len(w) - 1)) / scale)


def _reml(y: Array, v: Array) -> float:
    """Return the REML tau2, by Fisher scoring: tau2 + (y' P P y - tr P) / tr P P, at least 0."""
    tau2 = max(0.0, float(np.var(y, ddof=1) - v.mean()))
    for _ in range(MAX_STEPS):
        w = 1.0 / (v + tau2)
        P = np.diag(w) - np.outer(w, w) / w.sum()
        Py = P @ y
        step = float((Py @ Py - np.trace(P)) / np.trace(P @ P))
        after = max(0.0, tau2 + step)
        if abs(after - tau2) <= STEP_GOAL * (float(v.mean()) + after):
            return after
        tau2 = after
    return tau2


def _usable(rows: Mapping[str, Sequence[Row]], index: int) -> dict[str, Row]:
    """Return each silo's row of one estimand; silos whose standard error is zero are left out."""
    return {silo: table[index] for silo, table in rows.items() if table[index].std_error > 0}


def _summary(rows: Mapping[str, Row], method: Method, confidence: float) -> RandomEffects:
    pairs = [symmetric(row) for row in rows.values()]
    return random_effects([y for y, _ in pairs], [v for _, v in pairs], method=method, confidence=confidence)


def heterogeneity(rows: Mapping[str, Sequence[Row]], confidence: float = 0.95) -> list[Document]:
    """Return the heterogeneity of the silos' own estimates and their random-effects summary, by estimand.

    ``rows`` has the table of each silo that released its own estimate. Numbers of a ratio are on its own
    scale, except tau2 and the distances, which are on the log scale.
    """
    found: list[Document] = []
    for index, first in enumerate(next(iter(rows.values()), ())):
        usable = _usable(rows, index)
        if len(usable) < 2:
            continue
        by_method = {method: _summary(usable, method, confidence) for method in METHODS}
        chosen = by_method["REML"]
        y, v = zip(*(symmetric(row) for row in usable.values()), strict=True)
        w = [1.0 / each for each in v]
        centre = sum(a * b for a, b in zip(w, y, strict=True)) / sum(w)
        found.append(
            {
                "estimand": first.estimand,
                "silos": len(usable),
                "Q": chosen.Q,
                "df": chosen.df,
                "p_value": chosen.Q_p_value,
                "I2": chosen.I2,
                "tau2": chosen.tau2,
                "distance": {s: (a - centre) / math.sqrt(b) for s, a, b in zip(usable, y, v, strict=True)},
                "weights": dict(zip(usable, chosen.weights, strict=True)),
                "summaries": [_shown(each, first) for each in by_method.values()],
            }
        )
    return found


def _shown(summary: RandomEffects, like: Row) -> Document:
    """Return a summary on the estimand's own scale."""
    shown = asdict(summary)
    for key in ("Q", "df", "Q_p_value", "weights"):
        del shown[key]
    if like.scale.is_log:
        for key in ("estimate", "conf_low", "conf_high", "prediction_low", "prediction_high"):
            shown[key] = math.exp(shown[key])
        shown["std_error"] *= shown["estimate"]
    return shown


def leave_one_out(rows: Mapping[str, Sequence[Row]], confidence: float = 0.95) -> dict[str, list[Row]]:
    """Return the random-effects summary (REML) of the other silos' own estimates, for each silo left out.

    This needs at least three silos, because one remaining silo has no summary.
    """
    found: dict[str, list[Row]] = {}
    for left_out in rows if len(rows) >= 3 else ():
        others = {silo: table for silo, table in rows.items() if silo != left_out}
        table = []
        for index, like in enumerate(rows[left_out]):
            usable = _usable(others, index)
            if len(usable) < 2:
                break
            shown = _shown(_summary(usable, "REML", confidence), like)
            table.append(
                Row(
                    estimand=like.estimand,
                    estimate=shown["estimate"],
                    std_error=shown["std_error"],
                    conf_low=shown["conf_low"],
                    conf_high=shown["conf_high"],
                    p_value=None if like.scale.null is None else shown["p_value"],
                    scale=like.scale,
                )
            )
        if len(table) == len(rows[left_out]):
            found[left_out] = table
    return found


# How far the estimates are from convergence, and what thm:statistical does not cover, for the document.

SEVERAL = "the study combines the estimates of several imputed data sets"


def convergence_document(study: Study, components: Sequence[Component], result: Result) -> Document | None:
    """Return a bound on how far each estimate is from its value at convergence, or why there is none.

    None where nothing was targeted, or where the study combines several data sets.
    """
    stated = None if result.certificate is None else result.certificate.distance
    if stated is None or result.psi is None or study.imputes:
        return None
    if stated.bounds is None:
        return {"reason": stated.reason, "estimands": []}
    moved = _largest_moves(study, components, result.psi, np.array(stated.bounds))
    return {"reason": None, "estimands": moved}


def _largest_moves(
    study: Study, components: Sequence[Component], psi: Array, bounds: Array
) -> list[Document]:
    """Return the largest change of each reported number over the box psi +- bounds.

    Every number is monotone in each of its components, so the largest change is at a corner.
    """
    now = summaries(study, components, psi)
    moves: list[float | None] = [0.0] * len(now)
    for index, summary in enumerate(now):
        used = np.flatnonzero(summary.gradient)
        for signs in product((-1.0, 1.0), repeat=len(used)):
            corner = psi.copy()
            corner[used] += np.array(signs) * bounds[used]
            there = None
            with suppress(NumericalError):  # a mean may leave the range of a ratio
                there = abs(summaries(study, components, corner)[index].value - summary.value)
            largest = moves[index]
            moves[index] = None if there is None or largest is None else max(largest, there)
    return [{"estimand": summary.name, "bound": bound} for summary, bound in zip(now, moves, strict=True)]


def reported(study: Study, reached: Reached) -> Reached:
    """Return a run's progress in the numbers that the study reports, instead of those that it targets."""
    if study.imputes and reached.names:
        return replace(reached, names=(), estimate=None, covariance=(), bounds=None, reason=SEVERAL)
    if reached.estimate is None or not isinstance(study.target, AbstractEffect):
        return reached
    components = study.target.components(effect_columns(study, ()).strata_levels)
    psi, covariance = np.array(reached.estimate), np.array(reached.covariance)
    numbers = summaries(study, components, psi)
    slopes = np.stack([number.gradient for number in numbers])
    bounds = reached.bounds
    if bounds is not None:
        moves = _largest_moves(study, components, psi, np.array(bounds))
        bounds = tuple(move["bound"] for move in moves)
    return replace(
        reached,
        names=tuple(number.name for number in numbers),
        estimate=tuple(number.value for number in numbers),
        covariance=tuple(map(tuple, (slopes @ covariance @ slopes.T).tolist())),
        bounds=bounds,
    )


@contextmanager
def reporting_progress(study: Study) -> Iterator[None]:
    """Convert the progress that an error reports to the numbers that the study reports."""
    try:
        yield
    except FedTMLEError as error:
        if error.reached is not None:
            error.reached = reported(study, error.reached)
        raise


def uncovered(study: Study) -> list[str]:
    """Return the reasons why thm:statistical does not cover a study; empty if it does."""
    models = [
        part
        for model in study.models.values()
        for part in (model.learners if isinstance(model, SuperLearner) else (model,))
    ]
    reasons = []
    if any(isinstance(model, Supplied) for model in models):
        reasons.append("predictions supplied by the silos have no code: they must come from other records")
    if study.cluster:
        reasons.append("records of one cluster are not independent")
    if study.imputes:
        reasons.append("the covariates are imputed")
    if study.keeps_coefficients:
        reasons.append("the silos' own coefficients, C(silo), have no code: each silo keeps its own")
    return reasons
