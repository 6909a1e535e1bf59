"""Covariates by arm, as they are and weighted by inverse probabilities: the numbers of a Love plot."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, final

import numpy as np

from fedtmle.model.kernels import OUTSIDE
from fedtmle.model.parallel import mapped
from fedtmle.model.statistics import AbstractBins, Forecast, Group
from fedtmle.model.table import AnyTable, Table, over_blocks
from fedtmle.model.types import Array, Codes, IntArray, UnitScaled, exponent, first, product
from fedtmle.targets.effects.problem import EffectProblem
from fedtmle.targets.effects.rows import EffectRows

Result = TypeVar("Result")


class ArmSums(Protocol):
    """One arm's sums over the silos that disclose them."""

    @property
    def silos(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def sums(self) -> tuple[float, ...]: ...


@final
@dataclass(frozen=True, kw_only=True)
class ArmRows:
    """Records with the code of their arm, their weight and its inverse probability weight, shape (N,)."""

    table: Table
    arm: IntArray | Codes
    weight: Array
    inverse: Array


class AbstractArmWeights(ABC):
    """Weighs records by the inverse probability of their arm.

    ``ceiling`` bounds a weight times its inverse probability weight, ``population_ceiling`` a weight.
    """

    @property
    @abstractmethod
    def ceiling(self) -> float: ...

    @property
    @abstractmethod
    def population_ceiling(self) -> float: ...

    @abstractmethod
    def over(self, rows: AnyTable, work: Callable[[ArmRows], Result]) -> Iterable[Result]:
        """Return ``work`` of consecutive records, in order."""


@final
@dataclass(frozen=True, kw_only=True)
class CleverWeights(AbstractArmWeights):
    """The clever covariates of the first population's ``components``: static arms, never two other than 0."""

    effect: EffectProblem
    components: int

    @property
    def ceiling(self) -> float:
        return self.effect.ceiling

    @property
    def population_ceiling(self) -> float:
        return self.effect.population_ceiling

    def over(self, rows: AnyTable, work: Callable[[ArmRows], Result]) -> Iterable[Result]:
        if not isinstance(rows, Table):
            return over_blocks(rows, lambda block: work(self._weighed(self.effect.prepare(block), block)))
        prepared = self.effect.rows(rows)
        if prepared.cluster is not None:
            return (work(self._weighed(prepared, rows)),)
        pairs = zip(prepared.blocks(), rows.blocks(), strict=True)
        return mapped(lambda pair: work(self._weighed(*pair)), pairs)

    def _weighed(self, rows: EffectRows, table: Table) -> ArmRows:
        weight = np.broadcast_to(first(rows.weight), (rows.n_rows,))
        inverse = rows.covariates[: self.components].sum(axis=0)
        return ArmRows(table=table, arm=rows.arm, weight=weight, inverse=inverse)


@final
@dataclass(frozen=True, kw_only=True)
class Covariate:
    """A number with its declared range, or one level of a category."""

    name: str
    level: str | None = None
    levels: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0

    def of(self, table: Table) -> Array | UnitScaled:
        """Return the covariate on the unit scale of its range, shape (N,)."""
        if self.level is not None:
            codes = table.factors[self.name].recode(self.levels)
            return np.asarray(codes == self.levels.index(self.level), dtype=np.float64)
        return UnitScaled(table.numeric[self.name], self.low, self.high - self.low)

    def on_scale(self, mean: float) -> float:
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
class BalanceBins(AbstractBins[ArmRows]):
    """For each covariate x, scaled to its range, the sums of w x, w x^2, w H, w H x and w in each arm.

    w is a record's weight and H the inverse probability weight. Without weights the sum of w is a count: left
    out. A silo discloses a covariate's sums if every value of it that few hold is held by enough in each arm.
    """

    weights: AbstractArmWeights
    covariates: tuple[Covariate, ...]
    arms: int
    has_weights: bool

    @property
    def label(self) -> str:
        return "covariates by arm"

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.arms,) * len(self.covariates)

    @property
    def exponents(self) -> tuple[int, ...]:
        weight, inverse = exponent(self.weights.population_ceiling), exponent(self.weights.ceiling)
        return (weight, weight, inverse, inverse, *([weight] if self.has_weights else []))

    @property
    def places(self) -> tuple[int, ...]:
        """The binary places of rounded sums: most for squares, as a range may be 50 standard deviations."""
        return (8, 12, 4, 8, *([8] if self.has_weights else []))

    @property
    def forecasts(self) -> tuple[Forecast, ...]:
        """The sum of x^2 equals that of x if x is 0 or 1; weighted means are near unweighted ones."""
        return ((0, 0), (1, 0), None, (1, 3), *([None] if self.has_weights else []))

    def over(self, rows: AnyTable, work: Callable[[ArmRows], Result]) -> Iterable[Result]:
        return self.weights.over(rows, work)

    def groups(self, piece: ArmRows) -> Sequence[Group]:
        bins, weight = piece.arm.astype(np.uint8), piece.weight
        h = product(piece.inverse, weight)
        # One list for all covariates, so that all of them are summed in one pass.
        values: list[Array | UnitScaled] = [h, weight] if self.has_weights else [h]
        groups = []
        for covariate in self.covariates:
            x, terms, known = covariate.of(piece.table), self._terms(len(values)), bins
            if isinstance(x, UnitScaled) and not math.isfinite(piece.table.reach[covariate.name]):
                known = np.where(np.isfinite(x.column), bins, np.uint8(OUTSIDE))
            values.append(x)
            if self.has_weights:
                values.append(weight * (x.part(slice(None)) if isinstance(x, UnitScaled) else x))
            groups.append(Group(bins=known, values=values, sensitive=x, terms=terms))
        return groups

    def _terms(self, own: int) -> Sequence[tuple[int, ...]]:
        """The sums of a covariate x as columns, or products of two, of H, w, and at ``own`` x and w x.

        Without weights there are only H and x.
        """
        if self.has_weights:
            return ((own + 1,), (own + 1, own), (0,), (0, own), (1,))
        return ((own,), (own, own), (0,), (0, own))

    def compared(self, pooled: Sequence[Sequence[ArmSums]]) -> tuple[Balance, ...]:
        """Return the comparison of the arms from the pooled bins."""
        return tuple(map(_compare, self.covariates, pooled))


def _compare(covariate: Covariate, bins: Sequence[ArmSums]) -> Balance:
    sums, silos = [arm.sums for arm in bins], min(arm.silos for arm in bins)
    masses = [arm.sums[4] if len(arm.sums) > 4 else float(arm.count) for arm in bins]
    means = [_ratio(s[0], mass) for s, mass in zip(sums, masses, strict=True)]
    squares = [_ratio(s[1], mass) for s, mass in zip(sums, masses, strict=True)]
    weighted = [_ratio(s[3], s[2]) for s in sums]
    variances = [max(square - m * m, 0.0) for square, m in zip(squares, means, strict=True)]
    scales = [math.sqrt((v + variances[0]) / 2) for v in variances]
    return Balance(
        covariate=covariate,
        silos=silos,
        means=tuple(map(covariate.on_scale, means)),
        sds=tuple((covariate.high - covariate.low) * math.sqrt(variance) for variance in variances),
        weighted_means=tuple(map(covariate.on_scale, weighted)),
        differences=tuple(_standardised(m - means[0], s) for m, s in zip(means, scales, strict=True)),
        weighted_differences=tuple(
            _standardised(m - weighted[0], s) for m, s in zip(weighted, scales, strict=True)
        ),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _standardised(gap: float, scale: float) -> float:
    if gap == 0.0:
        return 0.0
    return gap / scale if scale > 0 else math.nan
