"""The components of an effect: means of the outcome under a regime in a population.

Every effect here is a function of components psi_r = E[Y(regime_r) | population_r], and every
component has the same EIF,

    D_r = H_r(A, W) Delta (Y - Q(A, W)) + v_r/P(v_r) (m_r(W) - psi_r),
    H_r(a, W) = d_r(a | W) E[v_r | W] / (g_a(W) pi_a(W) P(v_r)),   m_r = sum_a d_r(a | W) Q(a, W),

with v_r the indicator of the population, Delta that the outcome was observed and pi its
probability. Static arms, dynamic and stochastic rules differ in d_r; all, treated, untreated and
strata differ in v_r.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import DataError, InputError
from fedtmle.model.table import Table
from fedtmle.model.types import Array, Codes, IntArray, product


class AbstractRegime(ABC):
    """A regime: d(a | W), the probability of each arm given the covariates."""

    @property
    @abstractmethod
    def label(self) -> str: ...

    @abstractmethod
    def probabilities(self, table: Table, arms: tuple[str, ...]) -> Array:
        """Return d(a | W), shape (arms, N)."""

    @property
    @abstractmethod
    def needs(self) -> tuple[str, ...]:
        """The numeric columns that the regime reads."""

    @abstractmethod
    def check(self, arms: tuple[str, ...]) -> None:
        """Raise `InputError` unless the regime assigns these arms only."""


@final
@dataclass(frozen=True)
class Static(AbstractRegime):
    """Everyone gets one arm."""

    arm: str

    @property
    def label(self) -> str:
        return self.arm

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def check(self, arms: tuple[str, ...]) -> None:
        _require_arms(arms, self.arm)

    def probabilities(self, table: Table, arms: tuple[str, ...]) -> Array:
        return np.broadcast_to(np.eye(len(arms))[arms.index(self.arm), :, None], (len(arms), table.n_rows))


@final
@dataclass(frozen=True)
class Threshold(AbstractRegime):
    """A known dynamic rule: ``arm`` where ``column`` >= ``cut``, else ``otherwise``."""

    column: str
    cut: float
    arm: str
    otherwise: str

    @property
    def label(self) -> str:
        return f"{self.arm} if {self.column} >= {self.cut:g} else {self.otherwise}"

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.column,)

    def check(self, arms: tuple[str, ...]) -> None:
        _require_arms(arms, self.arm, self.otherwise)

    def probabilities(self, table: Table, arms: tuple[str, ...]) -> Array:
        above = table.numeric[self.column] >= self.cut
        d = np.zeros((len(arms), table.n_rows))
        d[arms.index(self.arm)] += above
        d[arms.index(self.otherwise)] += ~above
        return d


@final
@dataclass(frozen=True)
class Stochastic(AbstractRegime):
    """A known stochastic rule: each arm with a fixed probability, in the order of the arms."""

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares or not min(self.shares) >= 0 or not abs(sum(self.shares) - 1) <= 1e-12:
            raise InputError("shares: expected probabilities that sum to 1")

    @property
    def label(self) -> str:
        return "shares " + "/".join(f"{share:g}" for share in self.shares)

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def check(self, arms: tuple[str, ...]) -> None:
        if len(self.shares) != len(arms):
            raise InputError(f"shares: expected one per arm, {len(arms)}, not {len(self.shares)}")

    def probabilities(self, table: Table, arms: tuple[str, ...]) -> Array:
        return np.broadcast_to(np.array(self.shares)[:, None], (len(arms), table.n_rows))


@final
@dataclass(frozen=True, kw_only=True)
class PooledWeights:
    """Sums of the observation weights over all silos: in all, per arm and per stratum.

    Without weights every record counts 1. ``by_arm`` and ``by_stratum`` follow the codes of arms and strata.
    """

    total: float
    by_arm: tuple[float, ...]
    by_stratum: tuple[float, ...]


class AbstractPopulation(ABC):
    """The population of a mean: its indicator v, its share P(v), and E[v | W] / g_a given g."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The population in words, as in "in arm 1"; empty for everyone."""

    @abstractmethod
    def indicator(self, table: Table, arm: Codes, strata: IntArray | None) -> Array:
        """Return v, shape (N,)."""

    @abstractmethod
    def share(self, weights: PooledWeights) -> float:
        """Return P(v): the population's share of the pooled weight."""

    @abstractmethod
    def ratio(self, v: Array, arm: int, g: Array, pi: Array) -> tuple[Array, Array]:
        """Return numerator and denominator (to be bounded) of E[v | W] / (g_a pi_a); g, pi are (arms, N)."""

    def ratio_tangent(self, arm: int, g: Array, pi: Array, dg: Array, d_pi: Array) -> tuple[Array, Array]:
        """Return the derivatives of both parts of `ratio`, given those of g and pi; v does not move."""
        return np.zeros_like(pi[arm]), dg[arm] * pi[arm] + g[arm] * d_pi[arm]


@final
@dataclass(frozen=True)
class Everyone(AbstractPopulation):
    """v = 1."""

    @property
    def label(self) -> str:
        return ""

    def indicator(self, table: Table, arm: Codes, strata: IntArray | None) -> Array:  # noqa: ARG002
        return np.broadcast_to(np.float64(1.0), (table.n_rows,))

    def share(self, weights: PooledWeights) -> float:  # noqa: ARG002 - everyone, whatever the weights
        return 1.0

    def ratio(self, v: Array, arm: int, g: Array, pi: Array) -> tuple[Array, Array]:
        return v, product(g[arm], pi[arm])


@final
@dataclass(frozen=True)
class InArm(AbstractPopulation):
    """v = 1{A = arm}: the treated, or the untreated. Empirical (A, W); only Q is fluctuated."""

    code: int
    arm: str

    @property
    def label(self) -> str:
        return f"in arm {self.arm}"

    def indicator(self, table: Table, arm: Codes, strata: IntArray | None) -> Array:  # noqa: ARG002
        return np.asarray(arm == self.code, dtype=np.float64)

    def share(self, weights: PooledWeights) -> float:
        return weights.by_arm[self.code] / weights.total

    def ratio(self, v: Array, arm: int, g: Array, pi: Array) -> tuple[Array, Array]:
        # In the population's own arm g cancels: a rare arm has no positivity problem there.
        return (np.ones_like(v), pi[arm]) if arm == self.code else (g[self.code], product(g[arm], pi[arm]))

    def ratio_tangent(self, arm: int, g: Array, pi: Array, dg: Array, d_pi: Array) -> tuple[Array, Array]:
        if arm == self.code:
            return np.zeros_like(pi[arm]), d_pi[arm]
        return dg[self.code], dg[arm] * pi[arm] + g[arm] * d_pi[arm]


@final
@dataclass(frozen=True)
class InStratum(AbstractPopulation):
    """v = 1{S = level}, S a function of W."""

    code: int
    level: str

    @property
    def label(self) -> str:
        return f"in {self.level}"

    def indicator(self, table: Table, arm: Codes, strata: IntArray | None) -> Array:  # noqa: ARG002
        if strata is None:
            raise DataError("the strata column was not read")
        return np.asarray(strata == self.code, dtype=np.float64)

    def share(self, weights: PooledWeights) -> float:
        return weights.by_stratum[self.code] / weights.total

    def ratio(self, v: Array, arm: int, g: Array, pi: Array) -> tuple[Array, Array]:
        return v, product(g[arm], pi[arm])


@final
@dataclass(frozen=True)
class Component:
    """One mean: a regime in a population."""

    regime: AbstractRegime
    population: AbstractPopulation

    @property
    def name(self) -> str:
        population = f" {self.population.label}" if self.population.label else ""
        return f"E[Y({self.regime.label})]{population}"


def _require_arms(arms: tuple[str, ...], *named: str) -> None:
    for arm in named:
        if arm not in arms:
            raise InputError(f"rules: '{arm}' is not one of the arms {', '.join(arms)}")
