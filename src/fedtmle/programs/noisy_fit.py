"""From noisy sums to nuisance models: what every party computes from the broadcasts of a private study.

The noisy Gram matrix gives the mean and covariance of the covariates, shrunk where noise drowns it. A
fixed set of normal points with these moments stands for the population: curvatures, biases and variances at
any coefficients are averages over the points, so that no further sums are asked. Coefficients are a Gaussian
posterior: the prior is weak, the products with the responses update it, and each noisy gradient updates it
again with the gain of a Kalman filter,

    K = P H (H P H + R)^-1,   beta <- beta + K s,   P <- P - K H P,

s the mean score, H the curvature over the points, R the variance of the noise and of the error of H. The
arithmetic is that of `model.linear` and of exact sums: the same bits at every party.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import final

import numpy as np

from fedtmle.model.budget import normal_quantile, stream_key, uniforms
from fedtmle.model.linear import cholesky, congruence, eigen, invert, invert_lower, multiply
from fedtmle.targets.effects.noisy import GramColumns, PrivateDesign
from fedtmle_core import kernels
from fedtmle_core.kernels import column_sums
from fedtmle_core.types import Array, Family, exponent, unpack, upper_pairs

POINTS = 512  # points that stand for the population; mirror images are added
PRIOR_SLOPE = 2.0  # standard deviation of a coefficient of a column in [-1, 1]
PRIOR_INTERCEPT = 3.0
APPROXIMATION = 0.005  # error of a mean score by the normal approximation
CURVATURE_ERROR = 0.1  # relative error of a curvature by the normal approximation
SMALLEST_VARIANCE = 2.0  # least variance of a covariate, in deviations of a covariance's noise
SMALLEST_EIGENVALUE = 0.25  # least eigenvalue of the covariance, as a share of the smallest variance
SMALLEST_MASS = 0.05
STEPS = 8  # steps of the first fit
LARGEST_LOGIT = 6.0  # largest logit of a mean probability, for the prior's centre


@lru_cache(maxsize=8)
def normal_points(dim: int) -> Array:
    """Return points with mean 0 and covariance I to rounding, and their mirror images; shape (dim, 1024)."""
    draws = uniforms(stream_key(f"population {dim}"), np.arange(float(dim * POINTS)))
    points = np.array([normal_quantile(u) for u in draws.tolist()]).reshape(dim, POINTS)
    both = np.concatenate([points, -points], axis=1)
    factor = cholesky(averages(both, 1.0))
    if factor is None:
        raise AssertionError("there are more points than dimensions")
    return _combined(invert_lower(factor), both)


def _combined(matrix: Array, columns: Array) -> Array:
    """Return matrix times columns, in a fixed order; shapes (q, p) and (p, N)."""
    out = np.zeros((len(matrix), columns.shape[1]))
    for k, row in enumerate(matrix.tolist()):
        for weight, column in zip(row, columns, strict=True):
            out[k] += weight * column
    return out


def averages(columns: Array, weight: Array | float) -> Array:
    """Return the weighted mean of the products z z' over the points, shape (d, d), from exact sums."""
    pairs = upper_pairs(len(columns))
    weighted = columns * weight
    both = np.concatenate([columns, weighted])
    terms = [(j, len(columns) + k) for j, k in pairs]
    return unpack(_means(both, terms), len(columns))


def mean_of(*columns: Array) -> Array:
    """Return the mean of each column over the points."""
    stacked = np.stack(columns)
    return _means(stacked, [(j,) for j in range(len(stacked))])


def _means(columns: Array, terms: Sequence[tuple[int, ...]]) -> Array:
    largest = [kernels.largest(column) for column in columns]
    bounds = [exponent(math.prod(largest[j] for j in term) * (1 + 1e-9)) for term in terms]
    sums = column_sums(columns, bounds, what="population", terms=terms)
    return sums.values(columns.shape[1])


def shrunk_root(noisy: Array, deviation: float) -> Array:
    """Return a root G of an estimate G G' of a covariance, positive definite, from one S with noise.

    The variances are kept, and all covariances are multiplied by 1 - lambda, lambda = p (p - 1) deviation^2 /
    sum_{j != k} S_jk^2: the least expected squared error, with the expectations estimated by the noise's
    variance and by S (Ledoit and Wolf, 2004). No variance of a column in [-1, 1] is above 1. To raise small
    eigenvalues instead would enlarge the curvature of every direction that noise drowns, and so shrink the
    coefficients.
    """
    p = len(noisy)
    variances = np.clip(np.diag(noisy), min(max(SMALLEST_VARIANCE * deviation, 1e-3), 1.0), 1.0)
    covariances = noisy - np.diag(np.diag(noisy))
    energy = math.fsum((covariances * covariances).ravel().tolist())
    drowned = p * (p - 1) * deviation**2
    kept = 0.0 if energy <= drowned else 1.0 - drowned / energy
    widest = np.sqrt(variances[:, None] * variances[None, :])
    values, vectors = eigen(np.diag(variances) + np.clip(kept * covariances, -widest, widest))
    smallest = SMALLEST_EIGENVALUE * float(variances.min())
    return np.asarray(vectors * np.sqrt(np.maximum(values, smallest)))


@final
@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """A posterior of a model's coefficients: mean ``beta`` and covariance ``P``, with the prior's moments."""

    beta: Array
    P: Array
    centre: Array
    prior: Array  # variances

    def updated(self, score: Array, H: Array, noise: float) -> Coefficients:
        """Return the posterior after a noisy mean score; ``noise`` is the variance of each entry."""
        seen = congruence(H, self.P)  # H is symmetric
        R = np.diag([noise] * len(H)) + CURVATURE_ERROR**2 * np.diag(np.diag(seen))
        gain = _gain(self.P, H, seen + R)
        beta = self.beta + multiply(gain, score[:, None])[:, 0]
        return replace(self, beta=beta, P=_reduced(self.P, gain, H))

    @property
    def shrinkage(self) -> Array:
        """The expected bias of the mean, as a share of its distance from the prior's centre."""
        pull = (self.beta - self.centre) / self.prior
        return multiply(self.P, pull[:, None])[:, 0]


def _gain(P: Array, H: Array, S: Array) -> Array:
    inverse = invert(S)
    if inverse is None:
        raise AssertionError("a covariance with noise is positive definite")
    return multiply(multiply(P, H), inverse)


def _reduced(P: Array, gain: Array, H: Array) -> Array:
    """Return P - K H P, symmetric."""
    left = P - multiply(gain, multiply(H, P))
    return np.asarray((left + left.T) / 2)


@final
@dataclass(frozen=True, kw_only=True)
class Population:
    """The noisy means of a study over n rows, and the points that stand for its people.

    Rows of the Gram matrix have the weight w^2, so that the points stand for people with that weight.
    Averages over everyone have the weight 1/w^2 at a point, and those of a gradient, whose rows have w, 1/w.
    """

    gram: GramColumns
    matrix: Array  # the mean of z z' over rows with the weight w^2, noisy
    deviation: float  # standard deviation of the noise of an entry
    mass: float  # the mean of w^2, noisy
    stratum: int | None = None  # the code of the stratum that the points stand for; None: for everyone

    @classmethod
    def of(cls, gram: GramColumns, means: Array, deviation: float) -> Population:
        """Return the population from the noisy means of the Gram's columns, with the noise's deviation."""
        matrix = gram.matrix(means)
        mass = min(max(float(matrix[0, 0]), SMALLEST_MASS), 1.0)
        matrix = matrix / mass
        matrix[0, 0] = 1.0
        return cls(gram=gram, matrix=matrix, deviation=deviation / (mass * math.sqrt(2.0)), mass=mass)

    @cached_property
    def weight(self) -> Array:
        """w at the points."""
        return self.design.weight(self.covariates)

    @cached_property
    def everyone(self) -> Array:
        """The weight of each point in an average over everyone; their mean is 1."""
        inverse = 1.0 / (self.weight * self.weight)
        return np.asarray(inverse / float(_means(inverse[None], [(0,)])[0]))

    def averages(self, columns: Array, weight: Array | float) -> Array:
        """Return the mean over everyone of weight z z', shape (d, d)."""
        return averages(columns, self.everyone * weight)

    def cross_averages(self, left: Array, weight: Array, right: Array) -> Array:
        """Return the mean over everyone of weight x z', shape (p, q)."""
        both = np.concatenate([left, right * (weight * self.everyone)])
        terms = [(j, len(left) + k) for j in range(len(left)) for k in range(len(right))]
        return _means(both, terms).reshape(len(left), len(right))

    def mean_of(self, *columns: Array) -> Array:
        """Return the mean of each column over everyone."""
        return mean_of(*(column * self.everyone for column in columns))

    @property
    def design(self) -> PrivateDesign:
        return self.gram.design

    @cached_property
    def covariates(self) -> Array:
        """The points, shape (p, N): normal with the noisy mean and the shrunk noisy covariance.

        Those of a stratum are moved to its mean; the covariates that it decides have their value in it.
        """
        p = len(self.design.covariates)
        if not p:
            return np.zeros((0, 2 * POINTS))
        mean = np.clip(self.matrix[0, 1 : 1 + p], -1.0, 1.0)
        covariance = self.matrix[1 : 1 + p, 1 : 1 + p] - mean[:, None] * mean[None, :]
        root = shrunk_root(covariance, self.deviation)
        if self.stratum is None:
            return _combined(root, normal_points(p)) + mean[:, None]
        points = _combined(root, normal_points(p)) + self._stratum_mean(self.stratum)[:, None]
        for place, values in self.design.strata.items():
            points[place] = values[self.stratum]
        return points

    def _stratum_mean(self, code: int) -> Array:
        """Return the covariates' mean in a stratum, E[1{S = s} x] / P(S = s), or everyone's.

        It is everyone's where the two differ by less than twice the noise of their difference.
        """
        places = self.design.stratum_places
        others = [place for place in places if place is not None]
        own = places[code]
        # 1{S = s} is (1 + z) / 2 with z its own covariate; the reference is 1 less all others.
        mix = {own: 0.5} if own is not None else dict.fromkeys(others, -0.5)
        constant = 0.5 if own is not None else 1.0 - 0.5 * len(others)
        joint = constant * self.matrix[0]
        for place, factor in mix.items():
            joint = joint + factor * self.matrix[1 + place]
        p = len(self.design.covariates)
        everyone, share = self.matrix[0, 1 : 1 + p], max(float(joint[0]), SMALLEST_MASS)
        noise = self.deviation * math.sqrt(0.25 * len(mix)) / share
        mean = np.clip(joint[1 : 1 + p] / share, -1.0, 1.0)
        return np.asarray(np.where(np.abs(mean - everyone) > 2.0 * noise, mean, everyone))

    def entry(self, name: str) -> Array:
        """Return the noisy means of z times the entry of this name, in the order of z."""
        return np.asarray(self.matrix[self.gram.labels.index(name)])

    def mean(self, name: str) -> float:
        """Return the share of rows in the second arm, or with an outcome, kept from 0.01 to 0.99."""
        if name not in self.gram.labels:
            return 1.0
        return min(max((1.0 + float(self.entry(name)[0])) / 2, 0.01), 0.99)

    def columns(self, role: str, arm: int) -> Array:
        """Return the columns of a model at the points, with everyone in one arm; shape (d, N)."""
        model = self.design.models[role]
        return model.stacked(self.covariates, np.full(self.covariates.shape[1], 2.0 * arm - 1.0))

    def predicted(self, role: str, fits: Mapping[str, Coefficients], arm: int) -> Array:
        """Return the mean response of a model at the points, in one arm."""
        return probability(self.columns(role, arm), fits[role].beta)

    def arm_shares(self, fits: Mapping[str, Coefficients]) -> tuple[Array, ...]:
        """Return the probability of each arm at the points."""
        ones = np.ones(self.covariates.shape[1])
        if self.design.columns.treatment is None:
            return (ones,)
        g = self.predicted("treatment", fits, 0) if "treatment" in fits else self.mean("arm") * ones
        return 1.0 - g, g

    def observed_shares(self, fits: Mapping[str, Coefficients]) -> tuple[Array, ...]:
        """Return the probability of an outcome at the points, in each arm."""
        arms = 1 if self.design.columns.treatment is None else 2
        if "missingness" not in fits:
            return (np.ones(self.covariates.shape[1]),) * arms
        return tuple(self.predicted("missingness", fits, arm) for arm in range(arms))

    def curvature(self, role: str, fits: Mapping[str, Coefficients], *, as_gram: bool = False) -> Array:
        """Return the mean curvature of a model's loss at its coefficients, of rows with the weight w.

        ``as_gram`` gives that of rows with the weight of the Gram matrix, normalised.
        """
        total = None
        of_row = 1.0 if as_gram else self.everyone * self.weight
        for arm, share in enumerate(self._weights(role, fits)):
            mu = self.predicted(role, fits, arm)
            part = averages(self.columns(role, arm), of_row * share * mu * (1.0 - mu))
            total = part if total is None else total + part
        return np.asarray(total)

    def _weights(self, role: str, fits: Mapping[str, Coefficients]) -> tuple[Array, ...]:
        """Return the share of a model's rows in each arm, at the points."""
        if role == "treatment":
            return (np.ones(self.covariates.shape[1]),)
        shares = self.arm_shares(fits)
        if role == "missingness":
            return shares
        return tuple(a * b for a, b in zip(shares, self.observed_shares(fits), strict=True))

    def _products(self, role: str) -> tuple[Array, float]:
        """Return the noisy means of a model's columns times its response, and the mean of the response."""
        model = self.design.models[role]
        places = [0, *(1 + k for k in model.covariates)]
        if model.treated is not None:
            places.append(self.gram.labels.index("arm"))
        one = self.matrix[0][places]
        if role == "treatment":
            return (one + self.entry("arm")[places]) / 2, self.mean("arm")
        share = self.mean("observed")
        seen = one if "observed" not in self.gram.labels else (one + self.entry("observed")[places]) / 2
        if role == "missingness":
            return seen, share
        products = (seen + self.entry("outcome")[places]) / 2
        return products, float(products[0]) / share

    def first_fit(self, role: str, fits: Mapping[str, Coefficients]) -> Coefficients:
        """Fit a model to the noisy products alone: the most probable coefficients, by Gauss and Newton."""
        model = self.design.models[role]
        products, level = self._products(role)
        level = min(max(level, 0.002), 0.998)
        centre = np.zeros(model.dim)
        centre[0] = min(max(kernels.logit(level), -LARGEST_LOGIT), LARGEST_LOGIT)
        prior = np.array([PRIOR_INTERCEPT**2, *[PRIOR_SLOPE**2] * (model.dim - 1)])
        fit = Coefficients(beta=centre, P=np.diag(prior), centre=centre, prior=prior)
        weights = self._weights(role, fits)
        for _ in range(STEPS):
            current = {**fits, role: fit}
            H = self.curvature(role, current, as_gram=True)
            score = products - self._expected(role, current, weights)
            bend = float(H[0, 0])
            spread = 0.5 + bend * bend * math.fsum((fit.beta[1:] ** 2).tolist())
            noise = self.deviation**2 * spread + APPROXIMATION**2
            gain = _gain(np.diag(prior), H, congruence(H, np.diag(prior)) + np.diag([noise] * model.dim))
            ahead = score + multiply(H, (fit.beta - centre)[:, None])[:, 0]
            beta = centre + multiply(gain, ahead[:, None])[:, 0]
            step = np.clip(beta - fit.beta, -1.0, 1.0)
            P = _reduced(np.diag(prior), gain, H)
            moved = fit.beta + step
            fit = replace(fit, beta=moved, P=P)
        return fit

    def _expected(self, role: str, fits: Mapping[str, Coefficients], weights: tuple[Array, ...]) -> Array:
        """Return the mean of a model's columns times its prediction, at the points."""
        total = np.zeros(self.design.models[role].dim)
        for arm, share in enumerate(weights):
            columns = self.columns(role, arm)
            total = total + mean_of(*(columns * (share * probability(columns, fits[role].beta))))
        return total


def probability(columns: Array, beta: Array) -> Array:
    """Return the logistic mean of columns, shape (d, N), at beta."""
    return kernels.glm_means(kernels.glm_rows(Family.LOGISTIC, np.ascontiguousarray(columns)), beta)
