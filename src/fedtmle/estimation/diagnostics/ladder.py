"""The estimate under other bounds on the propensity score, from sums at the targeted law.

With H_b the clever covariate truncated at b instead of the study's own bound, the one-step estimate

    psi_b = low + P_n U_b,   U_b = sum_r L_r {m_r + sum_s S_rs max(g_s, floor) / max(g_s, b)},

needs no targeting of its own: its sums go with the other diagnostics. m_r is the plug-in part of the EIF
(`eif.py`), S_rs = w H_r (y - Q) its score, in period s where there are several, and g_s the denominator of H
before truncation at the treatment taken. D_b = U_b - t (psi_b - low) gives the standard error. At the study's
own bound D has mean zero at psi, so that psi_b is the estimate itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.estimation.diagnostics.base import AbstractDiagnostic, Pool
from fedtmle.targets.diagnostics import Rung
from fedtmle_core.blocks import Block, Cells, Moments
from fedtmle_core.terms import ONE, Apply, ByCluster, Term, product, total
from fedtmle_core.types import Array, unpack, upper_pairs

# An estimate is published to a hundredth of its standard error, which is at least a tenth of the outcome's
# width over sqrt(n): half of that hundredth. A product U U' errs by a thousandth of the least variance.
ESTIMATE_ERROR = 5e-4
PRODUCT_ERROR = 1e-5


def moved_by(denominator: Term, floor: float, bound: float) -> Term:
    """Return the factor by which H moves at another bound: max(g, floor) / max(g, bound)."""
    moved = product(Apply("clip", denominator, low=floor, high=1.0), Apply("inverse", denominator, low=bound))
    # Its public bound, which interval arithmetic does not see: g is the same in both factors.
    return Apply("clip", moved, low=0.0, high=max(floor / bound, 1.0))


@final
@dataclass(frozen=True)
class Scores:
    """w H_r (y - Q) of each component in one period, and the denominator of H before truncation."""

    by_component: tuple[Term, ...]
    denominator: Term


@final
@dataclass(frozen=True, kw_only=True)
class BoundLadder(AbstractDiagnostic[tuple[Rung, ...]]):
    """The sums of U_b, of products of two of its coordinates and of U t at each bound, within clusters.

    The components are of one population, so that ``t`` is the same for all; ``L`` combines them into
    coordinates. ``m`` and scores are in the outcome's unit, of which its range has the ``width``. People of
    the ``groups`` below each bound are counted: two estimates tell about those between their bounds.
    """

    pool: Pool
    scores: tuple[Scores, ...]  # one, or one for each period
    m: tuple[Term, ...]
    t: Term
    L: tuple[tuple[float, ...], ...]
    floor: float
    bounds: tuple[float, ...]
    groups: tuple[Term, ...]  # per arm, 1 for those who took it and were observed
    width: float
    cluster: str | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        if not self.bounds:
            return ()
        columns = [self._summed(column) for bound in self.bounds for column in self._at(bound)]
        k, t = len(self.L), len(columns)
        columns.append(self._summed(self.t))
        products: list[tuple[int, ...]] = []
        for b in range(len(self.bounds)):
            own = range(b * k, b * k + k)
            products += [(j,) for j in own]
            products += [(own[i], own[j]) for i, j in upper_pairs(k)]
            products += [(j, t) for j in own if not self._counts]
        if not self._counts:
            products.append((t, t))
        error = min(ESTIMATE_ERROR / math.sqrt(max(self.pool.n, 1)), PRODUCT_ERROR)
        people = (
            Cells(of=self._is_below(bound), edges=(0.5,), groups=self.groups)
            for bound in self.bounds
            if self.groups
        )
        places = self.pool.places(error)
        return (Moments(columns=tuple(columns), products=tuple(products), places=places), *people)

    @property
    def _counts(self) -> bool:
        """Whether t is 1 for everyone and nobody is in a cluster: then U t = U, and t t is n."""
        return self.t == ONE and self.cluster is None

    def _at(self, bound: float) -> list[Term]:
        """Return U_b over the outcome's width, one for each coordinate."""
        parts: list[tuple[tuple[Term, ...], Term]] = [(self.m, ONE)]
        for scores in self.scores:
            moved = moved_by(scores.denominator, self.floor, bound)
            parts.append((scores.by_component, moved))
        return [
            total([product(total(terms, [f / self.width for f in row]), ratio) for terms, ratio in parts])
            for row in self.L
        ]

    def _is_below(self, bound: float) -> Term:
        """Return 1 for people with a denominator below a bound, in some period."""
        steps = [Apply("step", scores.denominator, low=bound) for scores in self.scores]
        return 1.0 - product(*steps)

    def _summed(self, column: Term) -> Term:
        return column if self.cluster is None else ByCluster(self.cluster, column)

    def read(self, values: Sequence[Array]) -> tuple[Rung, ...]:
        if not values:
            return ()
        n, k = self.pool.n, len(self.L)
        counts, end = self._counts, k + len(upper_pairs(k))
        found, cells = values[0] if counts else values[0][:-1], values[1:]
        by_bound = found.reshape(len(self.bounds), -1)
        people = cells or [np.zeros(0)] * len(self.bounds)
        return tuple(
            Rung(
                bound=bound,
                mean=row[:k] * (self.width / n),
                products=unpack(row[k:end] * (self.width**2 / n), k),
                with_t=(row[:k] if counts else row[end : end + k]) * (self.width / n),
                t_squared=1.0 if counts else float(values[0][-1]) / n,
                n=n,
                has_error=True,
                people=tuple(map(round, below[1::2])),  # of each group the bin above 1/2
            )
            for bound, row, below in zip(self.bounds, by_bound, people, strict=True)
        )
