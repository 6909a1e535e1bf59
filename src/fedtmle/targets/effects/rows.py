"""One silo's rows as an effect target sees them: outcome, arms, initial Q, and weights H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedtmle.model.types import Array, IntArray

BoolArray = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
BLOCK = 16_384  # rows whose moment columns stay in the cache
# Where the histogram of a probability is cut; a row keeps only the number of its bin.
PROBABILITY_EDGES = (0.0, 0.05, *(round(0.1 * k, 1) for k in range(1, 10)), 0.95, 1.0)


@dataclass(frozen=True)
class Term:
    """Where a component puts its mass: ``arm``, with probability ``d`` and weight H(arm, W); (N,)."""

    arm: int
    d: Array
    H: Array


@dataclass(frozen=True, kw_only=True)
class EffectRows:
    """Columns of shape (N,) unless stated; y and Q are on the unit scale of the outcome's bounds."""

    y: Array  # zero where not observed
    observed: Array  # Delta, 0 or 1
    arm: IntArray
    q: Array  # (arms, N), strictly inside (0, 1)
    weight: Array  # observation weights over their pooled mean
    v: tuple[Array, ...]  # per component, the indicator over its pooled share
    terms: tuple[tuple[Term, ...], ...]  # per component
    truncated: BoolArray  # (arms, N), where some component's probability is at the bound
    cluster: IntArray | None  # codes 0..; None: every row is its own cluster
    g_bins: Bytes  # (shown arms, N): where each row's probability of an arm lies among the edges
    spanned: IntArray | None = None  # (clusters,): the place among those that span silos, or -1

    @property
    def n_rows(self) -> int:
        return len(self.y)

    def blocks(self) -> Iterator[EffectRows]:
        """Consecutive rows without copying, for sums of many columns; clusters are not cut."""
        step = BLOCK if self.cluster is None else self.n_rows
        for start in range(0, self.n_rows, step):
            rows = slice(start, start + step)
            yield EffectRows(
                y=self.y[rows],
                observed=self.observed[rows],
                arm=self.arm[rows],
                q=self.q[:, rows],
                weight=self.weight[rows],
                v=tuple(v[rows] for v in self.v),
                terms=tuple(tuple(Term(t.arm, t.d[rows], t.H[rows]) for t in own) for own in self.terms),
                truncated=self.truncated[:, rows],
                cluster=self.cluster,
                g_bins=self.g_bins[:, rows],
                spanned=self.spanned,
            )

    def taken(self, component: int) -> Array:
        """H_r(A_i, W_i) Delta_i: the clever covariate at the arm that was taken."""
        h = np.zeros(self.n_rows)
        for term in self.terms[component]:
            h += np.where(self.arm == term.arm, term.H, 0.0)
        return h * self.observed


def shown_arms(arms: int) -> tuple[int, ...]:
    """The arms whose probability is shown: of two, one tells the other's."""
    return () if arms == 1 else (1,) if arms == 2 else tuple(range(arms))


def probability_bins(g: Array) -> Bytes:
    """Where probabilities lie among the edges, the last bin closed; any shape."""
    return np.searchsorted(PROBABILITY_EDGES[1:-1], g, side="right").astype(np.uint8)
