"""Diagnostics at the targeted law: balance of covariates by arm, estimates under other truncation bounds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedtmle.model.table import (
    AbstractBins,
    AbstractBoundedColumns,
    AnyTable,
    Forecast,
    Group,
    Table,
    over_blocks,
)
from fedtmle.targets.diagnostics import AnyBin, Balance, Covariate, Rung
from fedtmle.targets.effects.moments import EffectRows
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle_core.exact import Sums
from fedtmle_core.kernels import OUTSIDE, column_sums
from fedtmle_core.parallel import mapped
from fedtmle_core.types import (
    Array,
    Codes,
    Columns,
    IntArray,
    UnitScaled,
    combine,
    exponent,
    first,
    product,
    unpack,
    upper_pairs,
)

# Covariates by arm, as they are and weighted by inverse probabilities: the numbers of a Love plot.

Result = TypeVar("Result")


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


def unit_column(covariate: Covariate, table: Table) -> Array | UnitScaled:
    """Return a covariate on the unit scale of its range, shape (N,)."""
    if covariate.level is not None:
        codes = table.factors[covariate.name].recode(covariate.levels)
        return np.asarray(codes == covariate.levels.index(covariate.level), dtype=np.float64)
    return UnitScaled(table.numeric[covariate.name], covariate.low, covariate.high - covariate.low)


@final
@dataclass(frozen=True, kw_only=True)
class BalanceBins(AbstractBins[ArmRows]):
    """For each covariate x, scaled to its range, the sums of w x, w x^2, w H, w H x and w in each arm.

    w is a record's weight and H the inverse probability weight. Without weights the sum of w is a count: left
    out. A silo discloses a covariate's sums if every value of it that few hold is held by enough in each arm.
    """

    label = "covariates by arm"

    weights: AbstractArmWeights
    covariates: tuple[Covariate, ...]
    arms: int
    has_weights: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.arms,) * len(self.covariates)

    @property
    def partitions(self) -> tuple[tuple[int, ...], ...]:
        levels: dict[str, list[int]] = {}
        for k, covariate in enumerate(self.covariates):
            if len(covariate.levels) > 2:  # else one level stands for both
                levels.setdefault(covariate.name, []).append(k)
        return tuple(map(tuple, levels.values()))

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
            x, terms, known = unit_column(covariate, piece.table), self._terms(len(values)), bins
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

    def compared(self, pooled: Sequence[Sequence[AnyBin]]) -> tuple[Balance, ...]:
        """Return the comparison of the arms from the pooled bins."""
        return tuple(map(_compare, self.covariates, pooled))


def _compare(covariate: Covariate, bins: Sequence[AnyBin]) -> Balance:
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


# The estimate under other bounds on the propensity score, from sums at the targeted law.
#
# With H_b the clever covariate truncated at b instead of the study's own bound, the one-step estimate
#
#     psi_b = low + P_n U_b,   U_b = sum_r L_r {w width H_b,r Delta (y - Q*) + w v_r/P(v_r) width m_r},
#
# needs no targeting of its own: its sums go with the other diagnostics. D_b = U_b - t (psi_b - low) gives its
# standard error. At the study's own bound D has mean zero at psi, so that psi_b is the estimate itself.

MEAN_PLACES = 12  # binary places of rounded sums of U and t, in the outcome's width
PRODUCT_PLACES = 8  # and of products of two U; both errors are far below a standard error


@final
@dataclass(frozen=True, kw_only=True)
class LadderColumns(AbstractBoundedColumns[EffectRows]):
    """U_b of the first population's coordinates at each bound, and products within clusters."""

    label = "sensitivity check with another bound"

    effect: EffectProblem
    law: EffectLaw
    floor: float  # the study's own bound
    bounds: tuple[float, ...]
    components: int  # number of components in the first population
    coordinates: int  # number of coordinates of its fluctuation
    has_clusters: bool

    @property
    def names(self) -> tuple[str, ...]:
        own, pairs = range(self.coordinates), upper_pairs(self.coordinates)
        by_bound = [
            name
            for bound in self.bounds
            for name in (
                *(f"U_{k} at {bound:.3g}" for k in own),
                *(f"U_{j} U_{k} at {bound:.3g}" for j, k in pairs),
                *(f"U_{k} t at {bound:.3g}" for k in own),
            )
        ]
        return (*by_bound, "t t", "t", "record")

    @property
    def judged(self) -> Sequence[int]:
        """U at every bound, t and the records themselves; the others are products of U and t."""
        size = 2 * self.coordinates + len(upper_pairs(self.coordinates))
        means = [size * b + k for b in range(len(self.bounds)) for k in range(self.coordinates)]
        return (*means, len(self.names) - 2, len(self.names) - 1)

    @cached_property
    def exponents(self) -> tuple[int, ...]:
        effect, linear = self.effect, 16.0 if self.effect.linear else 1.0
        share = max(sum(map(abs, row)) for row in effect.combination)
        t, cluster = effect.population_ceiling, effect.largest_cluster
        powers: list[int] = []
        for bound in self.bounds:
            looser = max(self.floor / bound, 1.0)
            u = effect.width * linear * share * (effect.ceiling * looser + t)
            powers += [exponent(u)] * self.coordinates
            powers += [exponent(u * u * cluster)] * len(upper_pairs(self.coordinates))
            powers += [exponent(u * t * cluster)] * self.coordinates
        return (*powers, exponent(t * t * cluster), exponent(t), exponent(1.0))

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid of rounded sums, as `TallyQuery` has it."""
        k, width = self.coordinates, exponent(self.effect.width)
        at_bound = (
            *[MEAN_PLACES - width] * k,
            *[PRODUCT_PLACES - 2 * width] * len(upper_pairs(k)),
            *[MEAN_PLACES - width] * k,
        )
        return (*at_bound * len(self.bounds), MEAN_PLACES, MEAN_PLACES, 0)

    @property
    def like(self) -> Sequence[int]:
        """Without weights t = 1, so U t = U. Neighbouring bounds differ only by the records between them."""
        k, size = self.coordinates, 2 * self.coordinates + len(upper_pairs(self.coordinates))
        first = [*range(size - k), *range(k)]
        count = size * len(self.bounds)
        return (*first, *range(count - size), count, count, count + 1)

    def over(self, rows: AnyTable, work: Callable[[EffectRows], Result]) -> Iterable[Result]:
        return self.effect.over(rows, work)

    @cached_property
    def terms(self) -> Sequence[tuple[int, ...]]:
        """Each U, their products and U t, in the columns of `evaluate`."""
        k, count = self.coordinates, self.coordinates * len(self.bounds)
        t, record = count, count + 1
        totals = count + 2 if self.has_clusters else 0  # the first cluster total, or the first column
        t_total = totals + count if self.has_clusters else t
        terms: list[tuple[int, ...]] = []
        for own in range(0, count, k):
            terms += [(own + j,) for j in range(k)]
            terms += [(own + i, totals + own + j) for i, j in upper_pairs(k)]
            terms += [(own + j, t_total) for j in range(k)]
        return (*terms, (t, t_total), (t,), (record,))

    def evaluate(self, piece: EffectRows) -> Columns:
        """Return U at each bound, t and ones; with clusters, each row's cluster totals of U and t besides."""
        at, count = self._at_bounds(piece), self.coordinates * len(self.bounds)
        U = np.tile(at.everywhere, (len(self.bounds), 1))
        U[:, at.near] = at.bounded
        columns = [*U, at.t, _ones(piece.n_rows)]
        if piece.cluster is not None:
            cluster = piece.cluster
            columns += [np.bincount(cluster, weights=own)[cluster] for own in columns[: count + 1]]
        return columns

    def summed(self, piece: EffectRows) -> Sums:
        if piece.cluster is not None:
            return super().summed(piece)
        # Records whose probability is above all bounds are summed from the one U that they have at each.
        at, k = self._at_bounds(piece), self.coordinates
        count, nothing = k * len(self.bounds), np.zeros(len(at.near))
        at.everywhere[:, at.near] = 0.0
        far = [tuple(j % k if j < count else j - count + k for j in term) for term in self.terms]
        near = [*self.terms[:-3], *[(count + 1,)] * 3]  # the sums of t and of records are those of all rows
        columns, exponents, what = [*at.everywhere, at.t, _ones(piece.n_rows)], self.exponents, self.label
        total = column_sums(columns, exponents, what=what, terms=far)
        if not len(at.near):
            return total
        return total + column_sums([*at.bounded, at.t[at.near], nothing], exponents, what=what, terms=near)

    def _at_bounds(self, piece: EffectRows) -> _AtBounds:
        moments, used = self.effect.moment_columns(self.law, piece), slice(0, self.components)
        m, u = moments.m[used], moments.u[used]
        L = np.array(self.effect.combination)[: self.coordinates, used]
        near = np.flatnonzero(piece.denominator < max(self.floor, *self.bounds))
        rest = u - m  # zero in components whose regime does not take the row's arm
        everywhere = _combined(L, m + rest)
        g, m, rest = piece.denominator[near], m[:, near], rest[:, near]
        floored = np.maximum(g, self.floor)
        bounded = [_combined(L, m + rest * (floored / np.maximum(g, bound))) for bound in self.bounds]
        t = _ones(piece.n_rows) if moments.counts else moments.t[0]
        return _AtBounds(everywhere, near, np.concatenate(bounded), t)

    def rungs(self, pooled: Sums, n: int) -> tuple[Rung, ...]:
        """Return the means at each bound from the pooled sums; none unless every silo disclosed them."""
        if round(float(pooled.values()[-1])) != n:
            return ()
        k, pairs = self.coordinates, len(upper_pairs(self.coordinates))
        found, size = pooled.values() / n, 2 * k + pairs
        return tuple(
            Rung(
                bound=bound,
                mean=part[:k],
                products=unpack(part[k : k + pairs], k),
                with_t=part[k + pairs :],
                t_squared=float(found[-3]),
                n=n,
                has_error=not self.effect.spanning,
            )
            for bound, part in zip(self.bounds, found[:-3].reshape(-1, size), strict=True)
        )


class _AtBounds(NamedTuple):
    """U of records above all bounds, shape (k, N); the others' numbers, and their U by bound; t."""

    everywhere: Array
    near: IntArray
    bounded: Array
    t: Array


def _combined(L: Array, columns: Array) -> Array:
    """Return L times the columns, added in order: the same bits in any partition."""
    total = np.empty((len(L), columns.shape[1]))
    for shares, row in zip(L.tolist(), total, strict=True):
        combine([(share, column) for share, column in zip(shares, columns, strict=True) if share], row)
    return total


def _ones(n_rows: int) -> Array:
    """Return ones that take no memory."""
    return np.broadcast_to(np.float64(1.0), (n_rows,))
