"""The components of an effect: means of the outcome under a regime in a population.

Every effect here is a function of components psi_r = E[Y(regime_r) | population_r], and every
component has the same EIF,

    D_r = H_r(A, W) Delta (Y - Q(A, W)) + v_r/P(v_r) (m_r(W) - psi_r),
    H_r(a, W) = d_r(a | W) E[v_r | W] / (g_a(W) pi_a(W) P(v_r)),   m_r = sum_a d_r(a | W) Q(a, W),

with v_r the indicator of the population, Delta that the outcome was observed and pi its
probability. Static arms, dynamic and stochastic rules differ in d_r; all, treated, untreated and
strata differ in v_r. In the overlap population v_r is a weight, which `OverlapWeighted` derives.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import DataError, InputError
from fedtmle.model.table import Table
from fedtmle_core.types import Array, Codes, IntArray, product

Scores = Callable[[], Array]


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

    def check_periods(self, periods: int) -> None:  # noqa: ARG002 - most hold in any number of periods
        """Raise `InputError` unless the regime is for treatment in this many periods."""
        return

    def at(self, period: int) -> AbstractRegime:  # noqa: ARG002 - most are the same in every period
        """Return the regime in one period of treatment over time, counted from 1."""
        return self

    @property
    def is_modified(self) -> bool:
        """Whether the regime modifies the observed treatment, a number, instead of assigning an arm."""
        return False


@final
@dataclass(frozen=True)
class Static(AbstractRegime):
    """The rule that gives everyone the same arm.

    Parameters
    ----------
    arm
        The arm.

    Examples
    --------
    >>> ft.Static("1")
    Static(arm='1')
    """

    needs = ()

    arm: str

    @property
    def label(self) -> str:
        return self.arm

    def check(self, arms: tuple[str, ...]) -> None:
        require_arms(arms, self.arm)

    def probabilities(self, table: Table, arms: tuple[str, ...]) -> Array:
        return np.broadcast_to(np.eye(len(arms))[arms.index(self.arm), :, None], (len(arms), table.n_rows))


@final
@dataclass(frozen=True)
class Threshold(AbstractRegime):
    """The rule that gives ``arm`` to people whose ``column`` is at least ``cut``.

    Parameters
    ----------
    column
        The name of a numeric variable.
    cut
        The threshold.
    arm
        The arm at or above the threshold.
    otherwise
        The arm below the threshold.

    Examples
    --------
    >>> ft.Threshold("age", 65, arm="1", otherwise="0")
    Threshold(column='age', cut=65, arm='1', otherwise='0')
    """

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
        require_arms(arms, self.arm, self.otherwise)

    def probabilities(self, table: Table, arms: tuple[str, ...]) -> Array:
        above = table.numeric[self.column] >= self.cut
        d = np.zeros((len(arms), table.n_rows))
        d[arms.index(self.arm)] += above
        d[arms.index(self.otherwise)] += ~above
        return d


@final
@dataclass(frozen=True)
class Stochastic(AbstractRegime):
    """The rule that gives each arm with a fixed probability.

    Parameters
    ----------
    shares
        The probability of each arm, in the order of the arms. They add up to 1.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Stochastic((0.3, 0.7))
    Stochastic(shares=(0.3, 0.7))
    """

    needs = ()

    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.shares or not min(self.shares) >= 0 or not abs(sum(self.shares) - 1) <= 1e-12:
            raise InputError("shares: expected probabilities that sum to 1")

    @property
    def label(self) -> str:
        return "shares " + "/".join(f"{share:g}" for share in self.shares)

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
    ``overlap`` is the sum of the overlap weights times those of the observations, where they are needed.
    """

    total: float
    by_arm: tuple[float, ...]
    by_stratum: tuple[float, ...]
    overlap: float = math.nan


class AbstractPopulation(ABC):
    """The population of a mean: its indicator v, its share P(v), and E[v | W] / g_a given g."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The population in words, as in "in arm 1"; empty for everyone."""

    @abstractmethod
    def indicator(self, table: Table, arm: Codes, strata: IntArray | None, g: Scores) -> Array:
        """Return v, shape (N,); ``g`` returns the propensity scores before truncation, shape (arms, N)."""

    @abstractmethod
    def share(self, weights: PooledWeights) -> float:
        """Return P(v): the population's share of the pooled weight."""

    @abstractmethod
    def ratio(self, v: Array, arm: int, g: Array, pi: Array, floor: float) -> tuple[Array, Array]:
        """Return numerator and denominator of E[v | W] / (g_a pi_a); g, pi are (arms, N).

        The caller truncates the denominator from below at ``floor``.
        """

    @property
    def needs_scores(self) -> bool:
        """Whether v is a function of the propensity scores."""
        return False

    def largest_ratio(self, inverse: float, *, is_complete: bool) -> float:  # noqa: ARG002 - for some
        """Return a bound of E[v | W] / (g_a pi_a), ``inverse`` that of 1/(g_a pi_a); complete: pi = 1."""
        return inverse

    def ratio_tangent(
        self, arm: int, g: Array, pi: Array, floor: float, dg: Array, d_pi: Array
    ) -> tuple[Array, Array]:
        """Return the derivatives of both parts of `ratio`, given those of g and pi."""
        del floor
        return np.zeros_like(pi[arm]), dg[arm] * pi[arm] + g[arm] * d_pi[arm]

    def indicator_tangent(self, arm: Codes, g: Array, dg: Array) -> Array:
        """Return the derivative of v given that of g: zero unless it is a function of g."""
        del g, dg
        return np.zeros(len(arm))


@final
@dataclass(frozen=True)
class Everyone(AbstractPopulation):
    """v = 1."""

    label = ""

    def indicator(self, table: Table, arm: Codes, strata: IntArray | None, g: Scores) -> Array:  # noqa: ARG002
        return np.broadcast_to(np.float64(1.0), (table.n_rows,))

    def share(self, weights: PooledWeights) -> float:  # noqa: ARG002 - everyone, whatever the weights
        return 1.0

    def ratio(self, v: Array, arm: int, g: Array, pi: Array, floor: float) -> tuple[Array, Array]:  # noqa: ARG002
        return v, product(g[arm], pi[arm])


@final
@dataclass(frozen=True)
class InArm(AbstractPopulation):
    """v = 1{A = arm}: the treated, or the untreated. Empirical (A, W); only Q is fluctuated.

    The odds g_v / g_a of another arm have both scores truncated from below, as R's tmle has them.
    """

    code: int
    arm: str

    @property
    def label(self) -> str:
        return f"in arm {self.arm}"

    def indicator(self, table: Table, arm: Codes, strata: IntArray | None, g: Scores) -> Array:  # noqa: ARG002
        return np.asarray(arm == self.code, dtype=np.float64)

    def share(self, weights: PooledWeights) -> float:
        return weights.by_arm[self.code] / weights.total

    def ratio(self, v: Array, arm: int, g: Array, pi: Array, floor: float) -> tuple[Array, Array]:
        # In the population's own arm g cancels: a rare arm has no positivity problem there.
        if arm == self.code:
            return np.ones_like(v), pi[arm]
        return np.maximum(g[self.code], floor), product(g[arm], pi[arm])

    def ratio_tangent(
        self, arm: int, g: Array, pi: Array, floor: float, dg: Array, d_pi: Array
    ) -> tuple[Array, Array]:
        if arm == self.code:
            return np.zeros_like(pi[arm]), d_pi[arm]
        moved = np.where(g[self.code] > floor, dg[self.code], 0.0)
        return moved, dg[arm] * pi[arm] + g[arm] * d_pi[arm]


@final
@dataclass(frozen=True)
class InStratum(AbstractPopulation):
    """v = 1{S = level}, S a function of W."""

    code: int
    level: str

    @property
    def label(self) -> str:
        return f"in {self.level}"

    def indicator(self, table: Table, arm: Codes, strata: IntArray | None, g: Scores) -> Array:  # noqa: ARG002
        if strata is None:
            raise DataError("the strata column was not read")
        return np.asarray(strata == self.code, dtype=np.float64)

    def share(self, weights: PooledWeights) -> float:
        return weights.by_stratum[self.code] / weights.total

    def ratio(self, v: Array, arm: int, g: Array, pi: Array, floor: float) -> tuple[Array, Array]:  # noqa: ARG002
        return v, product(g[arm], pi[arm])


@final
@dataclass(frozen=True)
class OverlapWeighted(AbstractPopulation):
    """Everyone with the weight h(W) = 1 / sum_a 1/g_a(W): g (1 - g) for two arms.

    A mean of it is psi = E[h m] / E[h]. As h depends on g, its EIF has a part in the score of g,

        sum_a (dh/dg_a) (1{A = a} - g_a) (m - psi) = {(h/g_A)^2 - h} (m - psi),   dh/dg_a = (h/g_a)^2,

    which with h (m - psi), the part in W, is v (m - psi) with v = (h/g_A)^2, for two arms (A - g)^2. So D
    has the common form with this v, E[v | W] = h, and the mean of v (m - psi) over the rows is zero if psi
    is the weighted mean of m: the equation in g is solved without a fluctuation of g. H = h / (g_a pi_a)
    needs no truncation of g, since h / g_a is at most 1.
    """

    label = "in the overlap population"
    needs_scores = True

    def largest_ratio(self, inverse: float, *, is_complete: bool) -> float:
        return 1.0 if is_complete else inverse

    def indicator(self, table: Table, arm: Codes, strata: IntArray | None, g: Scores) -> Array:  # noqa: ARG002
        return overlap_weight(g(), arm)

    def share(self, weights: PooledWeights) -> float:
        return weights.overlap / weights.total

    def ratio(self, v: Array, arm: int, g: Array, pi: Array, floor: float) -> tuple[Array, Array]:  # noqa: ARG002
        return _tilts(g)[arm], pi[arm]

    def ratio_tangent(
        self,
        arm: int,
        g: Array,
        pi: Array,  # noqa: ARG002 - of the observed share only its derivative
        floor: float,  # noqa: ARG002 - nothing is truncated
        dg: Array,
        d_pi: Array,
    ) -> tuple[Array, Array]:
        return _tilts_tangent(g, dg)[arm], d_pi[arm]

    def indicator_tangent(self, arm: Codes, g: Array, dg: Array) -> Array:
        taken = arm[None, :].astype(np.int64)
        tilt, moved = (
            np.take_along_axis(values, taken, axis=0)[0] for values in (_tilts(g), _tilts_tangent(g, dg))
        )
        return np.asarray(2.0 * tilt * moved)


def overlap_weight(g: Array, arm: Codes) -> Array:
    """Return v = (h / g_A)^2 of each row, shape (N,), from the scores of all arms, (arms, N)."""
    tilt = np.take_along_axis(_tilts(g), arm[None, :].astype(np.int64), axis=0)[0]
    return np.asarray(tilt * tilt)


def _tilts(g: Array) -> Array:
    """Return h / g_a = prod_{b != a} g_b / sum_c prod_{b != c} g_b, shape (arms, N); 0 if all are 0."""
    others = np.stack([np.prod([g[b] for b in range(len(g)) if b != a], axis=0) for a in range(len(g))])
    total = others.sum(axis=0)
    return np.asarray(np.divide(others, total, out=np.zeros_like(others), where=total > 0))


def _tilts_tangent(g: Array, dg: Array) -> Array:
    """Return the derivative of `_tilts`: with t = 1 / sum_b g_a/g_b, dt = -t^2 d(sum_b g_a/g_b)."""
    safe = np.maximum(g, np.finfo(np.float64).tiny)
    inverse, moved = (1.0 / safe).sum(axis=0), (dg / safe**2).sum(axis=0)
    return np.asarray(-(_tilts(g) ** 2) * (dg * inverse - g * moved))


@final
@dataclass(frozen=True)
class Component:
    """One mean: a regime in a population."""

    regime: AbstractRegime
    population: AbstractPopulation
    quantity: str | None = None  # the name of what has a mean, if it is not Y

    @property
    def name(self) -> str:
        population = f" {self.population.label}" if self.population.label else ""
        if self.quantity is not None:
            return f"{self.quantity} under {self.regime.label}{population}"
        return f"E[Y({self.regime.label})]{population}"

    def is_apart(self, other: Component) -> bool:
        """Return whether no record has clever covariates of both: they differ in arm or stratum."""
        regimes, populations = (self.regime, other.regime), (self.population, other.population)
        if all(isinstance(regime, Static) for regime in regimes) and regimes[0] != regimes[1]:
            return True
        return all(isinstance(part, InStratum) for part in populations) and populations[0] != populations[1]


def component_blocks(components: Sequence[Component]) -> tuple[tuple[int, ...], ...]:
    """Return blocks of components, by number, such that any two of one block are apart.

    A fluctuation of Q by the covariates of a block then treats each of its components as if it were the
    only one: no estimate depends on which others are asked for.
    """
    blocks: list[list[int]] = []
    for r, component in enumerate(components):
        for block in blocks:
            if all(component.is_apart(components[s]) for s in block):
                block.append(r)
                break
        else:
            blocks.append([r])
    return tuple(map(tuple, blocks))


def require_arms(arms: tuple[str, ...], *named: str) -> None:
    """Raise `InputError` unless every named arm is one of the arms."""
    for arm in named:
        if arm not in arms:
            raise InputError(f"rules: '{arm}' is not one of the arms {', '.join(arms)}")
