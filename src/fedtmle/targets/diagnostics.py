"""What the diagnostics of a study say: plain results, which documents, reports and figures read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from fedtmle_core.types import Array

# Edges of the propensity score's histogram: tenths, and twentieths at both ends, where overlap is lost.
PROBABILITY_EDGES = (0.0, 0.05, *(round(0.1 * k, 1) for k in range(1, 10)), 0.95, 1.0)

# Inner edges of histograms of weights: doubling, as weights over periods are products.
WEIGHT_EDGES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

MULTIPLES = (0.25, 0.5, 2.0, 4.0)  # multiples of the study's own bound on g
WITHOUT_BOUND = (0.01, 0.025, 0.05, 0.1)  # bounds if the study has none
LARGEST_BOUND = 0.5  # beyond it, both of two arms would be truncated


class AnyBin(Protocol):
    """One bin over all silos, or over those that show theirs."""

    @property
    def silos(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def sums(self) -> tuple[float, ...]: ...


@final
@dataclass(frozen=True, kw_only=True)
class Bin:
    """One bin over all ``silos``: how many people are in it, and sums over them; 0 silos if it is hidden."""

    silos: int
    count: int
    sums: tuple[float, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap from pooled sums; ``truncated`` is over the silos that disclose theirs."""

    truncated: tuple[int, ...]  # rows whose g pi is below the bound, per arm
    disclosing: tuple[int, ...]  # silos that disclose their count, per arm; the others have too few rows
    effective_sizes: tuple[float, ...]  # (sum H)^2 / sum H^2 of those observed, per component
    # Mean and standard deviation of Q(A, W) on the unit scale, over the silos that disclose them.
    predicted: tuple[float, float]
    largest_shares: tuple[float, ...] = ()  # a bound of max H / sum H, per component; of times, none
    mean_squares: tuple[float, ...] = ()  # sum H^2 / n, per component; of times, none


@final
@dataclass(frozen=True, kw_only=True)
class Histogram:
    """P(arm ``of`` | W) among those in ``arm``, between consecutive `PROBABILITY_EDGES`."""

    of: str
    arm: str
    bins: tuple[AnyBin, ...]
    period: int | None = None  # where there are several


@final
@dataclass(frozen=True, kw_only=True)
class WeightHistogram:
    """The weights of those who follow a rule up to a period: below and above consecutive `WEIGHT_EDGES`."""

    name: str
    bins: tuple[AnyBin, ...]
    period: int | None = None


def shown_arms(arms: int) -> tuple[int, ...]:
    """Return the arms whose propensity score is shown: of two arms, the second one only."""
    return () if arms == 1 else (1,) if arms == 2 else tuple(range(arms))


@final
@dataclass(frozen=True, kw_only=True)
class OutcomeFit:
    """How well Q(A, W) predicts the outcomes that were observed, on the unit scale.

    ``r_squared`` and ``deviance`` (the share explained, of a binary outcome) are before and after
    targeting; ``residual_variance`` is the mean of (y - Q)^2 before and after, ``variance`` that of y.
    A calibration bin has the sums of w, w y, w Q before and w Q after.
    """

    r_squared: tuple[float, float]
    deviance: tuple[float, float] | None
    variance: float
    residual_variance: tuple[float, float]
    edges: tuple[float, ...]  # inner edges, of Q before targeting
    calibration: tuple[AnyBin, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Covariate:
    """A number with its declared range, or one level of a category."""

    name: str
    level: str | None = None
    levels: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0
    is_binary: bool = False  # a number that is 0 or 1

    @property
    def is_indicator(self) -> bool:
        """Whether it is 0 or 1 on the unit scale, so that it is its own square and its mean a share."""
        return self.level is not None or self.is_binary

    def on_scale(self, mean: float) -> float:
        """Return a mean on the unit scale of the range on the covariate's own scale."""
        return self.low + (self.high - self.low) * mean


@final
@dataclass(frozen=True, kw_only=True)
class Balance:
    """One covariate: mean and deviation in each arm, each arm's standardised difference from the reference.

    The difference is (m_a - m_0) / sqrt((s_a^2 + s_0^2) / 2), with the unweighted standard deviations for the
    weighted means too. ``silos`` is how many silos the line is from; without any, all numbers are NaN.
    """

    covariate: Covariate
    silos: int
    means: tuple[float, ...]
    sds: tuple[float, ...]
    weighted_means: tuple[float, ...]
    differences: tuple[float, ...]
    weighted_differences: tuple[float, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Rung:
    """Means over the rows at one bound, of k coordinates: U, their products U U', U t and t t.

    Products are within clusters. ``has_error`` is False if clusters span silos: their products are unknown.
    ``people`` are those of each arm whose probability is below the bound, if they are counted.
    """

    bound: float
    mean: Array  # (k,)
    products: Array  # (k, k)
    with_t: Array  # (k,)
    t_squared: float
    n: int
    has_error: bool
    people: tuple[int, ...] = ()

    def estimate(self, low: Array) -> tuple[Array, Array]:
        """Return psi, shape (k,), and its covariance; ``low`` is the outcome's lower bound in psi's units."""
        cross = np.outer(self.with_t, self.mean)
        scatter = self.products - cross - cross.T + np.outer(self.mean, self.mean) * self.t_squared
        return low + self.mean, scatter / (self.n - 1)


def ladder_bounds(floor: float) -> tuple[float, ...]:
    """Return the bounds to compare with the study's own, in rising order."""
    bounds = tuple(floor * multiple for multiple in MULTIPLES) if floor else WITHOUT_BOUND
    return tuple(bound for bound in bounds if bound < LARGEST_BOUND)


@final
@dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """Overlap, how well the outcome model predicts, and the estimate under other bounds on g."""

    overlap: tuple[Histogram, ...]
    fit: OutcomeFit
    ladder: tuple[Rung, ...]
    balance: tuple[Balance, ...] | None  # None without static arms, or without covariates


def histogram_pairs(arms: int) -> list[tuple[int, int]]:
    """Return one (arm of the probability, observed arm) pair per histogram of propensity scores."""
    return [(a, b) for a in shown_arms(arms) for b in range(arms)]


def named_histograms(
    bins: Sequence[Sequence[AnyBin]], arms: Sequence[str], period: int | None = None
) -> tuple[Histogram, ...]:
    """Return the histograms of propensity scores with the names of their arms."""
    pairs = histogram_pairs(len(arms))
    return tuple(
        Histogram(of=arms[a], arm=arms[b], bins=tuple(pooled), period=period)
        for (a, b), pooled in zip(pairs, bins, strict=True)
    )


@final
@dataclass(frozen=True, kw_only=True)
class Characteristic:
    """One row of Table 1: the mean and standard deviation, or the share (``sd`` is None), in each arm.

    ``difference`` is the largest standardised difference to the reference arm. A tuple is empty where its
    numbers are hidden; with the means the row is, and ``silos`` is 0.
    """

    name: str
    level: str | None
    mean: tuple[float, ...]
    sd: tuple[float, ...] | None
    difference: float | None
    silos: int


@final
@dataclass(frozen=True, kw_only=True)
class Count:
    """A count over all silos, which have ``of`` records."""

    name: str
    count: int
    of: int


@final
@dataclass(frozen=True, kw_only=True)
class BaselineTable:
    """Table 1: people by arm, who is lost at each step, missing values, and the characteristics by arm."""

    n: int
    arms: tuple[Count, ...]
    lost: tuple[Count, ...]
    missing: tuple[Count, ...]
    lines: tuple[Characteristic, ...]


def largest_difference(means: Sequence[float], variances: Sequence[float]) -> float | None:
    """Return the largest standardised difference to arm 0, (m_a - m_0) / sqrt((v_a + v_0) / 2)."""
    differences = []
    for mean, variance in zip(means[1:], variances[1:], strict=True):
        scale = math.sqrt((variance + variances[0]) / 2)
        gap = mean - means[0]
        if gap == 0 or scale > 0:
            differences.append(gap / scale if gap else 0.0)
    return max(differences, key=abs, default=None)
