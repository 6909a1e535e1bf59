"""The estimate under other bounds on the propensity score, from sums at the targeted law.

With H_b the clever covariate truncated at b instead of the study's own bound, the one-step estimate

    psi_b = low + P_n U_b,   U_b = sum_r L_r {w width H_b,r Delta (y - Q*) + w v_r/P(v_r) width m_r},

needs no targeting of its own: its sums go with the other diagnostics. D_b = U_b - t (psi_b - low) gives its
standard error. At the study's own bound D has mean zero at psi, so that psi_b is the estimate itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedtmle.model.exact import Sums
from fedtmle.model.kernels import column_sums
from fedtmle.model.statistics import AbstractBoundedColumns
from fedtmle.model.table import AnyTable
from fedtmle.model.types import Array, Columns, IntArray, combine, exponent, unpack, upper_pairs
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle.targets.effects.rows import EffectRows

Result = TypeVar("Result")

MULTIPLES = (0.25, 0.5, 2.0, 4.0)  # multiples of the study's own bound
WITHOUT_BOUND = (0.01, 0.025, 0.05, 0.1)  # if the study has none
LARGEST_BOUND = 0.5
MEAN_PLACES = 12  # binary places of rounded sums of U and t, in the outcome's width
PRODUCT_PLACES = 8  # and of products of two U; both errors are far below a standard error


def ladder_bounds(floor: float) -> tuple[float, ...]:
    """Return the bounds to compare with the study's own, in rising order."""
    bounds = tuple(floor * multiple for multiple in MULTIPLES) if floor else WITHOUT_BOUND
    return tuple(bound for bound in bounds if bound < LARGEST_BOUND)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Means over the rows at one bound, of k coordinates: U, their products U U', U t and t t.

    Products are within clusters. ``has_error`` is False if clusters span silos: their products are unknown.
    """

    bound: float
    mean: Array  # (k,)
    products: Array  # (k, k)
    with_t: Array  # (k,)
    t_squared: float
    n: int
    has_error: bool

    def estimate(self, low: Array) -> tuple[Array, Array]:
        """Return psi, shape (k,), and its covariance; ``low`` is the outcome's lower bound in psi's units."""
        cross = np.outer(self.with_t, self.mean)
        scatter = self.products - cross - cross.T + np.outer(self.mean, self.mean) * self.t_squared
        return low + self.mean, scatter / (self.n - 1)


@final
@dataclass(frozen=True, kw_only=True)
class LadderColumns(AbstractBoundedColumns[EffectRows]):
    """U_b of the first population's coordinates at each bound, and products within clusters."""

    effect: EffectProblem
    law: EffectLaw
    floor: float  # the study's own bound
    bounds: tuple[float, ...]
    components: int  # number of components in the first population
    coordinates: int  # number of coordinates of its fluctuation
    has_clusters: bool

    @property
    def label(self) -> str:
        return "sensitivity check with another bound"

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
        return total + column_sums([*at.bounded, at.t[at.near], nothing], exponents, what=what, terms=near)

    def _at_bounds(self, piece: EffectRows) -> _AtBounds:
        moments, used = self.effect.moment_columns(self.law, piece), slice(0, self.components)
        m, u = moments.m[used], moments.u[used]
        L = np.array(self.effect.combination)[: self.coordinates, used]
        g = piece.denominators
        near = np.flatnonzero((g < max(self.floor, *self.bounds)).any(axis=0))
        rest = u - m
        everywhere = _combined(L, m + rest)
        g, m, rest = g[:, near], m[:, near], rest[:, near]
        floored = np.maximum(g, self.floor)
        bounded = [_combined(L, m + rest * (floored / np.maximum(g, bound))) for bound in self.bounds]
        return _AtBounds(everywhere, near, np.concatenate(bounded), moments.t[0])

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
