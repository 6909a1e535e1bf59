"""The parts of a differentially private study: four rounds of noisy sums, an interval that counts the noise.

    Gram matrix -> first fits -> gradients -> second fits -> gradients -> last fits -> bound on g -> one step

The estimate is the one-step (AIPW) estimate, a mean of clipped terms of the influence function. Its variance

    V = sigma_D^2 / n + the noise of the last round + V2,   V2 = tr(B Sigma_Q B' Sigma_g),

has the sampling variance from the noisy second moment, floored at half of its prediction; the variance of the
noise, which is known exactly; and that of the second-order remainder of the noisy models, with B the
cross-moments of the two models' columns in the remainder, weighted by their derivatives.
`programs.noisy` has what follows the last round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.initial.glm import GLM, FittedGLM, Levels, Supplied
from fedtmle.model.budget import epsilon_of
from fedtmle.model.linear import congruence, eigen, multiply
from fedtmle.model.problem import Estimate
from fedtmle.programs.noisy_fit import Coefficients, Population
from fedtmle.programs.nuisance import effect_columns
from fedtmle.programs.study import Study
from fedtmle.protocol.query import Flow, Phase
from fedtmle.protocol.sums import NoisySums
from fedtmle.targets.diagnostics import Overlap
from fedtmle.targets.effects.noisy import (
    COUNT_SCALE,
    TRUNCATED_SCALE,
    GradientColumns,
    GramColumns,
    OneStepColumns,
    PrivateDesign,
    private_design,
)
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array

Columns = GramColumns | GradientColumns | OneStepColumns
ASSUMPTIONS = (
    "the nuisance models are fitted to noisy sums: their error enters the variance, not a residual",
)
ROLES = ("treatment", "missingness", "outcome")
GRADIENT_ROUNDS = 2
INFLATION = 1.1  # the bound on g is chosen so that noise inflates the standard error by this
MOST_TRUNCATED = 0.03  # share of the points whose g is below the bound
BOUNDS = tuple(0.01 * 1.08**k for k in range(50))  # candidates: 0.01 to 0.43


@final
@dataclass(frozen=True, kw_only=True)
class PrivateFit:
    """Fitted models, the bound on g, and what the last round's sums are read with."""

    population: Population
    fits: Mapping[str, Coefficients]
    combination: tuple[tuple[float, ...], ...]
    n: int
    is_binary: bool
    of_everyone: PrivateFit | None = None  # the fit of everyone, if this one is for a stratum

    def in_stratum(self, code: int) -> PrivateFit:
        """Return the same models with the points of one stratum."""
        population = replace(self.population, stratum=code)
        return replace(self, population=population, of_everyone=self)

    @property
    def design(self) -> PrivateDesign:
        return self.population.design

    @cached_property
    def models(self) -> dict[str, FittedGLM]:
        """The fitted models on the columns of their formulas."""
        return {role: self.design.models[role].fitted(fit.beta) for role, fit in self.fits.items()}

    @cached_property
    def _shares(self) -> tuple[Array, ...]:
        """g pi of each arm at the points."""
        population = self.population
        pairs = zip(population.arm_shares(self.fits), population.observed_shares(self.fits), strict=True)
        return tuple(g * pi for g, pi in pairs)

    @cached_property
    def _means(self) -> tuple[Array, ...]:
        """Q of each arm at the points."""
        return tuple(self.population.predicted("outcome", self.fits, arm) for arm in range(len(self._shares)))

    @cached_property
    def _dispersion(self) -> float:
        """The variance of the outcome given covariates, over Q (1 - Q): 1 for a binary outcome."""
        if self.is_binary:
            return 1.0
        if self.of_everyone is not None:
            return self.of_everyone._dispersion
        population = self.population
        outcome, seen = population.entry("outcome"), population.mean("observed")
        square = (float(outcome[-1]) + 2.0 * float(outcome[0]) + seen) / 4.0  # mean square of outcomes
        parts = list(zip(self._shares, self._means, strict=True))
        explained = math.fsum(float(self.population.mean_of(share * q * q)[0]) for share, q in parts)
        binary = math.fsum(float(self.population.mean_of(share * q * (1.0 - q))[0]) for share, q in parts)
        return min(max((square - explained) / binary, 0.02), 1.0)

    @property
    def arms(self) -> int:
        return len(self._shares)

    @property
    def L(self) -> Array:
        return np.array(self.combination)

    def predicted_covariance(self, bound: float) -> Array:
        """Return the covariance of the one-step terms that the points predict; shape (k, k)."""
        q = np.stack(self._means)
        centred = q - self.population.mean_of(*q)[:, None]
        covariance = self.population.averages(centred, 1.0)
        for arm, (share, mean) in enumerate(zip(self._shares, self._means, strict=True)):
            bounded = np.maximum(share, bound)
            spread = share / (bounded * bounded) * self._dispersion * mean * (1.0 - mean)
            covariance[arm, arm] += float(self.population.mean_of(spread)[0])
        return congruence(self.L, covariance)

    def truncated_share(self, bound: float) -> float:
        """Return the share of the points with a g pi below the bound."""
        below = np.min(np.stack(self._shares), axis=0) < bound
        return float(self.population.mean_of(below.astype(np.float64))[0])

    def effective_sizes(self, bound: float) -> tuple[float, ...]:
        """Return (sum H)^2 / sum H^2 of those observed, for each arm, as n points predict it."""
        sizes = []
        for share in self._shares:
            H = 1.0 / np.maximum(share, bound)
            first, second = self.population.mean_of(share * H, share * H * H).tolist()
            sizes.append(self.n * first * first / second if second else 0.0)  # noise may leave no share
        return tuple(sizes)

    def mean_squares(self, bound: float) -> tuple[float, ...]:
        """Return sum H^2 / n of those observed, for each arm, as the points predict it."""
        inverse = [1.0 / np.maximum(share, bound) for share in self._shares]
        pairs = zip(self._shares, inverse, strict=True)
        return tuple(self.population.mean_of(*(share * H * H for share, H in pairs)).tolist())

    def range(self, bound: float) -> tuple[float, float]:
        """Return the centre and the radius of a public ball that the one-step terms lie in.

        One term is in [Q (1 - 1/b), Q + (1 - Q)/b], and all others in [0, 1]; a difference of the two arms'
        is within 1/b of 0.
        """
        reach = 1.0 / bound
        if any(min(row) < 0 for row in self.combination):
            return 0.0, reach
        return 0.5, math.sqrt((reach - 0.5) ** 2 + 0.25 * (len(self.combination) - 1))

    def chosen_bound(self, deviation: float) -> float:
        """Return the least bound with a predicted inflation of at most 1.1, given the noise of a unit ball.

        It truncates at most 3 % of the points and is at most half of the smallest arm's share. If no such
        bound has that inflation, the largest of them is returned.
        """
        smallest = min(float(self.population.mean_of(share)[0]) for share in self._shares) / 2
        best = BOUNDS[0]
        for bound in BOUNDS:
            if bound > smallest or self.truncated_share(bound) > MOST_TRUNCATED:
                break
            best = bound
            sampling = np.diag(self.predicted_covariance(bound)) / self.n
            noise = (self.range(bound)[1] * deviation / self.n) ** 2
            if all(noise <= (INFLATION**2 - 1.0) * float(s) for s in sampling):
                break
        return best

    def _bilinear(self, role: str, bound: float) -> list[Array]:
        """Return B for each row of L: the remainder is e' B f, e the errors of ``role``, f the outcome's."""
        population, total = self.population, []
        g, pi = population.arm_shares(self.fits), population.observed_shares(self.fits)
        by_arm = []
        for arm, (share, mean) in enumerate(zip(self._shares, self._means, strict=True)):
            relative = (1.0 - g[arm]) * (2.0 * arm - 1.0) if role == "treatment" else 1.0 - pi[arm]
            weight = relative * mean * (1.0 - mean) * (share >= bound)
            left, right = population.columns(role, arm), population.columns("outcome", arm)
            by_arm.append(population.cross_averages(left, weight, right))
        for row in self.combination:
            total.append(sum((c * B for c, B in zip(row, by_arm, strict=True)), np.zeros_like(by_arm[0])))
        return total

    def remainder(self, bound: float, strata: Sequence[PrivateFit] = ()) -> tuple[Array, Array]:
        """Return the covariance of the second-order remainders, and their expectations by shrinkage.

        There is one for everyone and one for each of ``strata``, whose models have the same errors.
        """
        k = len(self.combination) * (1 + len(strata))
        covariance, bias = np.zeros((k, k)), np.zeros(k)
        outcome = self.fits["outcome"]
        for role in ("treatment", "missingness"):
            if role not in self.fits:
                continue
            fit = self.fits[role]
            Bs = [B for part in (self, *strata) for B in part._bilinear(role, bound)]
            for i, B in enumerate(Bs):
                left = multiply(multiply(fit.P, B), outcome.P)
                pulled = multiply(B, outcome.shrinkage[:, None])[:, 0]
                bias[i] += math.fsum((fit.shrinkage * pulled).tolist())
                for j, other in enumerate(Bs):
                    covariance[i, j] += math.fsum((left * other).ravel().tolist())
        return covariance, bias


def study_design(study: Study, levels: Levels | None = None) -> PrivateDesign:
    """Return the designs of a study's models; the levels are the dictionary's, unless they are given."""
    models = {role: study.models[role] for role in ROLES if role in study.models}
    formulas = {role: model.parsed for role, model in models.items() if isinstance(model, GLM)}
    return private_design(
        effect_columns(study), formulas, study.levels if levels is None else levels, study.ranges
    )


def private_nuisances(study: Study, levels: Levels, n: int, silos: int) -> Flow[tuple[PrivateFit, Fraction]]:
    """Ask for the Gram matrix and two rounds of gradients; return the fits, and the budget that they took."""
    privacy = study.privacy
    if privacy is None:
        raise AssertionError("a study without privacy has another flow")
    design = study_design(study, levels)
    gram = GramColumns(design=design)
    query = noisy_query(study, gram, privacy.gram, n, silos)
    spent = query.spent
    population = Population.of(gram, (yield query).values(n), query.deviation / n)
    fits: dict[str, Coefficients] = {}
    for role in design.models:
        fits[role] = population.first_fit(role, fits)
    for _ in range(GRADIENT_ROUNDS):
        scores = GradientColumns(
            design=design, fits={role: design.models[role].fitted(fit.beta) for role, fit in fits.items()}
        )
        query = noisy_query(study, scores, privacy.gradients / GRADIENT_ROUNDS, n, silos)
        spent += query.spent
        means, at = (yield query).values(n), 0
        noise, current = (query.deviation / n) ** 2, dict(fits)
        for role, fit in current.items():
            score = means[at : at + len(fit.beta)]
            at += len(fit.beta)
            fits[role] = fit.updated(score, population.curvature(role, current), noise)
    contrast = study.target.contrast()
    components = study.target.components(())
    identity = tuple(tuple(float(i == j) for j in range(len(components))) for i in range(len(components)))
    private_fit = PrivateFit(
        population=population,
        fits=fits,
        combination=identity if contrast is None else (contrast,),
        n=n,
        is_binary=study.response == "binary",
    )
    return private_fit, spent


def known_bound(study: Study) -> float:
    """Return the least g that the dictionary declares for known probabilities of treatment, 0 if none.

    With missing outcomes it is 0 too: g pi is then estimated.
    """
    if not isinstance(study.treatment_model, Supplied) or "missingness" in study.models:
        return 0.0
    low, high = study.variables.ranges[study.treatment_model.columns[0]]
    return max(min(low, 1.0 - high), 0.0)


def closing_deviation(study: Study, silos: int) -> float:
    """Return the deviation of the noise in the last round's sum over everyone, for a unit ball.

    It is known before a bound is chosen. Rounding to the grid adds less than one part in a million to the
    sensitivity.
    """
    privacy = study.privacy
    if privacy is None:
        raise AssertionError("a study without privacy has another flow")
    share = float(privacy.part(privacy.closing)) * (silos - privacy.colluders) / silos
    strata = len(effect_columns(study).strata_levels)  # the sum over everyone has the noise of each of them
    return math.sqrt(max(strata, 1) * (4.0 + 2.0 * TRUNCATED_SCALE**2) / (2.0 * share))


def noisy_query(
    study: Study, columns: Columns, share: float, n: int, silos: int, phase: Phase = Phase.NUISANCE
) -> NoisySums:
    """Return the query for sums with a share of the study's budget."""
    privacy = study.privacy
    if privacy is None:
        raise AssertionError("a study without privacy has another flow")
    return NoisySums(
        columns=columns,
        n=n,
        rho=privacy.part(share),
        silos=silos,
        colluders=privacy.colluders,
        phase=phase,
        needs_masks=privacy.server == "untrusted",
    )


# After the last round of a differentially private study: estimates, their covariance, and the account.
#
# With strata, the sums of the last round are those of each stratum. The estimate in a stratum is a ratio of
# two noisy sums, m = T / N, with the variance of its noise
#
#     (sigma^2 + sigma_N^2 m^2) / N^2,   sigma and sigma_N those of T and of N,
#
# and the estimate for everyone is the sum of the strata's sums over n, which is public.

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
