"""The estimate under other bounds on the propensity score, from sums at the targeted law.

With H_b the clever covariate truncated at b instead of the study's own bound, the one-step estimate

    psi_b = psi + P_n D_b,   D_b = sum_r L_r {w width H_b,r Delta (y - Q*) + w v_r/P(v_r) width m_r} - t psi,

needs no targeting of its own: its sums go with the other diagnostics. At the study's own bound D has mean
zero, so that psi_b is the estimate itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, final

import numpy as np

from fedtmle.model.exact import Sums
from fedtmle.model.statistics import AbstractBoundedColumns
from fedtmle.model.table import AnyTable
from fedtmle.model.types import Array, IntArray, exponent, unpack, upper_pairs
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle.targets.effects.rows import EffectRows

Result = TypeVar("Result")

MULTIPLES = (0.25, 0.5, 2.0, 4.0)  # of the study's own bound
WITHOUT_BOUND = (0.01, 0.025, 0.05, 0.1)  # if the study has none
LARGEST_BOUND = 0.5


def ladder_bounds(floor: float) -> tuple[float, ...]:
    """Return the bounds to compare with the study's own, in rising order."""
    bounds = tuple(floor * multiple for multiple in MULTIPLES) if floor else WITHOUT_BOUND
    return tuple(bound for bound in bounds if bound < LARGEST_BOUND)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """The estimates at one bound, shape (k,), and their covariance; None where clusters span silos."""

    bound: float
    psi: Array
    covariance: Array | None


@final
@dataclass(frozen=True, kw_only=True)
class LadderColumns(AbstractBoundedColumns[EffectRows]):
    """D_b of the first population's coordinates at each bound, and their products within clusters."""

    effect: EffectProblem
    law: EffectLaw
    floor: float  # the study's own bound
    bounds: tuple[float, ...]
    components: int  # of the first population
    psi: tuple[float, ...]  # of its coordinates

    @property
    def label(self) -> str:
        return "EIF term under another bound"

    @property
    def coordinates(self) -> int:
        return len(self.psi)

    @property
    def names(self) -> tuple[str, ...]:
        pairs = upper_pairs(self.coordinates)
        return tuple(
            name
            for bound in self.bounds
            for name in (
                *(f"D_{k} at {bound:.3g}" for k in range(self.coordinates)),
                *(f"D_{j} D_{k} at {bound:.3g}" for j, k in pairs),
            )
        )

    @cached_property
    def exponents(self) -> tuple[int, ...]:
        effect, linear = self.effect, 16.0 if self.effect.linear else 1.0
        share = max(sum(map(abs, row)) for row in effect.combination)
        powers: list[int] = []
        for bound in self.bounds:
            looser = max(self.floor / bound, 1.0)
            largest = (
                effect.width * linear * share * (effect.ceiling * looser + 2 * effect.population_ceiling)
            )
            powers += [exponent(largest)] * self.coordinates
            square = largest * largest * effect.largest_cluster
            powers += [exponent(square)] * len(upper_pairs(self.coordinates))
        return tuple(powers)

    def over(self, rows: AnyTable, work: Callable[[EffectRows], Result]) -> Iterable[Result]:
        return self.effect.over(rows, work)

    def evaluate(self, piece: EffectRows) -> Array:
        moments, effect = self.effect.moment_columns(self.law, piece), self.effect
        used = slice(0, self.components)
        m, rest, t = moments.m[used], (moments.u - moments.m)[used], moments.t[0]
        L = np.array(effect.combination)[: self.coordinates, used]
        centre = np.array(self.psi) - effect.outcome_bounds[0] * L.sum(axis=1)
        bounded = np.maximum(piece.denominators, self.floor)
        columns: list[Array] = []
        for bound in self.bounds:
            u = m + rest * (bounded / np.maximum(piece.denominators, bound))
            D = [_combined(row, u) - t * c for row, c in zip(L, centre, strict=True)]
            totals = [_gathered(piece.cluster, column) for column in D]
            columns += D
            columns += [D[j] * totals[k] for j, k in upper_pairs(self.coordinates)]
        return np.stack(columns)

    def rungs(self, pooled: Sums, n: int) -> tuple[Rung, ...]:
        """Return the estimates at each bound from the pooled sums."""
        k, size = self.coordinates, self.coordinates + len(upper_pairs(self.coordinates))
        values, rungs = pooled.values(), []
        for bound, start in zip(self.bounds, range(0, len(values), size), strict=True):
            mean, products = values[start : start + k] / n, unpack(values[start + k : start + size], k)
            covariance = (products / n - np.outer(mean, mean)) / (n - 1)
            rungs.append(
                Rung(
                    bound=bound,
                    psi=np.array(self.psi) + mean,
                    covariance=None if self.effect.spanning else covariance,
                )
            )
        return tuple(rungs)


def _gathered(cluster: IntArray | None, column: Array) -> Array:
    """Return each row's cluster total; the column itself without clusters."""
    return (
        column if cluster is None else np.asarray(np.bincount(cluster, weights=column)[cluster], np.float64)
    )


def _combined(shares: Array, columns: Array) -> Array:
    """Return the columns times their shares, added in order: the same bits in any partition."""
    total = np.zeros(columns.shape[1])
    for share, column in zip(shares, columns, strict=True):
        if share:
            total += share * column
    return total
