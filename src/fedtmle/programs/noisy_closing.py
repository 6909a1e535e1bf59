"""After the last round of a differentially private study: estimates, their covariance, and the account.

With strata, the sums of the last round are those of each stratum. The estimate in a stratum is a ratio of two
noisy sums, m = T / N, with the variance of its noise

    (sigma^2 + sigma_N^2 m^2) / N^2,   sigma and sigma_N those of T and of N,

and the estimate for everyone is the sum of the strata's sums over n, which is public.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import final

import numpy as np

from fedtmle.model.budget import epsilon_of
from fedtmle.model.exact import Sums
from fedtmle.model.linear import congruence, eigen
from fedtmle.model.problem import Estimate
from fedtmle.model.types import Array
from fedtmle.programs.diagnostics import Overlap
from fedtmle.programs.noisy import PrivateFit
from fedtmle.programs.study import Study
from fedtmle.protocol.noisy import NoisySums
from fedtmle.targets.effects.noisy import COUNT_SCALE, TRUNCATED_SCALE, OneStepColumns
from fedtmle.targets.effects.prepare import EffectColumns

LEAST_SHARE = 0.5  # floor of the sampling variance, as a share of its prediction
LEAST_VARIANCE = 1e-12  # floor for one-step terms of an outcome in [0, 1]
LARGEST_BIAS = 0.3  # share of the standard error; with a larger bias an interval is labelled
LARGEST_REMAINDER = 0.5  # share of the variance; with a larger remainder an interval is labelled
LARGEST_INFLATION = 2.0  # factor of the width; with a larger one an interval is labelled
FEWEST_ROWS = 5.0  # a stratum with fewer rows, in deviations of their noise, is labelled


@final
@dataclass(frozen=True, kw_only=True)
class PrivacyAccount:
    """What privacy cost: the budget, the parts of the variance, and whether the interval is supported.

    The variances are of each coordinate of psi, and ``places`` names its population: "" for everyone, or
    "in" a stratum. ``expected`` is the variance of sampling that widths are compared with. ``bias`` is the
    expected bias by shrinkage of the models, in standard errors. ``truncated`` is the noisy number of rows in
    which the g of an arm was truncated, ``rows`` that of the rows in each stratum.
    """

    epsilon: float
    delta: float
    rho: float
    colluders: int
    silos: int
    g_bound: float
    places: tuple[str, ...]
    sampling: tuple[float, ...]
    expected: tuple[float, ...]
    noise: tuple[float, ...]
    remainder: tuple[float, ...]
    bias: tuple[float, ...]
    truncated: tuple[float, ...]
    n: int
    rows: tuple[float, ...] = ()
    rows_deviation: float = 0.0  # standard deviation of the noise of each row count

    @property
    def inflation(self) -> tuple[float, ...]:
        """The width of each interval over that of the same estimate without noise."""
        parts = zip(self.sampling, self.noise, self.remainder, self.expected, strict=True)
        return tuple(math.sqrt((s + e + r) / without) for s, e, r, without in parts)

    @property
    def limits(self) -> tuple[str, ...]:
        """Why an interval is not promised to cover; empty if all are."""
        return tuple(
            f"{place}: {limit}" if place else limit
            for place in dict.fromkeys(self.places)
            for limit in self._limits(place)
        )

    def _limits(self, place: str) -> Iterator[str]:
        """Yield why the intervals of one place are not promised to cover."""
        at = [k for k, each in enumerate(self.places) if each == place]
        bias = max(abs(self.bias[k]) for k in at)
        inflation = max(self.inflation[k] for k in at)
        remainder = max(
            self.remainder[k] / (self.sampling[k] + self.noise[k] + self.remainder[k]) for k in at
        )
        strata = [each for each in dict.fromkeys(self.places) if each]
        if place and self.rows[strata.index(place)] < FEWEST_ROWS * self.rows_deviation:
            yield "there are too few records compared with the noise of their number"
        if bias > LARGEST_BIAS:
            yield (
                "the budget is too small for these covariates: the models are shrunk, with an expected bias "
                f"of {bias:.1f} standard errors"
            )
        if remainder > LARGEST_REMAINDER:
            yield "most of the variance is that of noisy nuisance models"
        if inflation > LARGEST_INFLATION:
            yield (
                f"noise makes the interval {inflation:.1f} times wider: more records or a larger "
                "epsilon are needed for a useful one"
            )


@dataclass(frozen=True, kw_only=True)
class _Mean:
    """The mean of the one-step terms in one population, on the scale of the unit ball times the radius."""

    rows: float
    mean: Array  # (k,)
    sampling: Array  # (k, k), of the mean
    expected: Array  # (k,): the variance of sampling that widths are compared with
    noise: Array  # (k, k)


def _mean(
    columns: OneStepColumns, sums: tuple[float, Array, Array], predicted: Array, deviations: Array, n: int
) -> _Mean:
    """Return a population's mean from the share of its rows and its first and second moments over n.

    ``deviations`` are those of the noise of all three, likewise over n, and ``predicted`` is the covariance
    of the terms that the points predict.
    """
    share, first, second = sums
    of_share, of_first, of_second = (deviations / share).tolist()
    mean, scale = first / share, columns.radius**2
    observed = scale * (second / share - mean[:, None] * mean[None, :])
    sampling = _floored(observed, predicted)
    # Noise may add to the second moment as well as take away. The variance without it is taken to be the
    # prediction where noise could explain the difference, so that a width is not compared with noise.
    error = scale * np.sqrt(of_second**2 + 4.0 * mean * mean * of_first**2)
    least = np.maximum(np.diag(predicted), LEAST_VARIANCE)
    expected = np.minimum(np.diag(sampling), np.maximum(least, np.diag(observed) - 2.0 * error))
    rows = share * n
    return _Mean(
        rows=rows,
        mean=mean,
        sampling=sampling / rows,
        expected=expected / rows,
        noise=scale * (of_first**2 * np.eye(len(mean)) + of_share**2 * mean[:, None] * mean[None, :]),
    )


def _floored(noisy: Array, predicted: Array) -> Array:
    """Return the noisy covariance, its eigenvalues raised to at least half of the smallest predicted one."""
    values, vectors = eigen(noisy)
    least = max(LEAST_SHARE * float(eigen(predicted)[0][0]), LEAST_VARIANCE)
    return congruence(vectors, np.diag(np.maximum(values, least)))


def finish(
    study: Study, fit: PrivateFit, query: NoisySums, pooled: Sums, bound: float, spent: Fraction
) -> tuple[Estimate, PrivacyAccount]:
    """Return the estimates with their covariance, and the account of what privacy cost."""
    columns, n = query.columns, query.n
    if not isinstance(columns, OneStepColumns) or study.privacy is None:
        raise AssertionError("the last query of a private study")
    values = pooled.values(n)
    parts, sigma = columns.split(values), query.deviation / n
    strata = [fit.in_stratum(code) for code in range(len(columns.strata))]
    first = np.sum([part.first for part in parts], axis=0)
    second = np.sum([part.second for part in parts], axis=0)
    of_sums = np.array([0.0, sigma, sigma / columns.scale])
    predicted, of_total = fit.predicted_covariance(bound), math.sqrt(len(parts)) * of_sums
    means = [_mean(columns, (1.0, first, second), predicted, of_total, n)]
    of_rows = sigma / COUNT_SCALE
    for part, points in zip(parts, strata, strict=False):
        share = max(part.share, FEWEST_ROWS * of_rows)
        deviations = np.array([of_rows, sigma, sigma / columns.scale])
        predicted = points.predicted_covariance(bound)
        means.append(_mean(columns, (share, part.first, part.second), predicted, deviations, n))
    remainder, bias = fit.remainder(bound, strata)
    sampling = _joined([each.sampling for each in means], [each.sampling * each.rows / n for each in means])
    shared = (columns.radius * sigma) ** 2 * np.eye(columns.dim)  # noise of everyone's mean and a stratum's
    noise = _joined([each.noise for each in means], [shared * (n / each.rows) for each in means])
    covariance = sampling + noise + remainder
    low, high = study.outcome_bounds
    width, error = high - low, np.sqrt(np.diag(covariance))
    constant = low * columns.problem.L.sum(axis=1)
    psi = [constant + width * (columns.centre + columns.radius * each.mean) for each in means]
    rho = spent + query.spent
    places = ("", *(f"in {level}" for level in columns.strata))
    account = PrivacyAccount(
        epsilon=epsilon_of(float(rho), study.privacy.delta),
        delta=study.privacy.delta,
        rho=float(rho),
        colluders=study.privacy.colluders,
        silos=query.silos,
        g_bound=bound,
        places=tuple(place for place in places for _ in range(columns.dim)),
        sampling=tuple((width**2 * np.diag(sampling)).tolist()),
        expected=tuple((width**2 * np.concatenate([each.expected for each in means])).tolist()),
        noise=tuple((width**2 * np.diag(noise)).tolist()),
        remainder=tuple((width**2 * np.diag(remainder)).tolist()),
        bias=tuple((bias / error).tolist()),
        truncated=tuple((values[-columns.arms :] * n / TRUNCATED_SCALE).tolist()),
        n=n,
        rows=tuple(part.share * n for part in parts) if strata else (),
        rows_deviation=of_rows * n,
    )
    return Estimate(psi=np.concatenate(psi), covariance=width**2 * covariance), account


def _joined(own: Sequence[Array], shared: Sequence[Array]) -> Array:
    """Return the covariance of everyone's mean, the first, and of the strata's, which are independent.

    ``shared`` is the covariance of everyone's mean with each stratum's.
    """
    k = len(own[0])
    joined = np.zeros((k * len(own), k * len(own)))
    for position, (block, beside) in enumerate(zip(own, shared, strict=True)):
        at = slice(k * position, k * position + k)
        joined[at, at] = block
        if position:
            joined[:k, at] = beside
            joined[at, :k] = beside.T
    return joined


def noisy_overlap(fit: PrivateFit, account: PrivacyAccount) -> Overlap:
    """Return the overlap of everyone and of each stratum, as the points predict it."""
    n, bound = account.n, account.g_bound
    sizes, squares = list(fit.effective_sizes(bound)), list(fit.mean_squares(bound))
    shares = [1.0]
    for code, rows in enumerate(account.rows):
        share, points = max(rows / n, 1.0 / n), fit.in_stratum(code)
        shares.append(share)
        sizes += [share * size for size in points.effective_sizes(bound)]
        squares += [square / share for square in points.mean_squares(bound)]
    return Overlap(
        truncated=tuple(max(round(count), 0) for count in account.truncated),
        disclosing=(account.silos,) * fit.arms,
        effective_sizes=tuple(sizes),
        largest_shares=tuple(1.0 / (bound * n * share) for share in shares for _ in range(fit.arms)),
        mean_squares=tuple(squares),
        predicted=(0.0, 0.0),
    )


def noisy_counts(fit: PrivateFit, columns: EffectColumns) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows, and the rows with an outcome, of each arm, from the noisy Gram matrix."""
    population, n = fit.population, fit.n
    share = population.mean("observed")
    if columns.treatment is None:
        return (n,), (round(n * share),)
    treated = population.mean("arm")
    arms = (n - round(n * treated), round(n * treated))
    if "observed" not in population.gram.labels:
        return arms, arms
    both = float(
        population.entry("observed")[population.gram.labels.index("arm")]
    )  # E[(2A - 1)(2 Delta - 1)]
    seen = min(max((both - 1.0 + 2.0 * treated + 2.0 * share) / 4.0, 0.0), treated, share)
    return arms, (round(n * (share - seen)), round(n * seen))
