"""One silo's rows as an effect target sees them: outcome, arms, initial Q, and weights H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedtmle.model.types import Array, IntArray

BoolArray = NDArray[np.bool_]
BLOCK = 16_384  # rows whose moment columns stay in the cache


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
                spanned=self.spanned,
            )

    def taken(self, component: int) -> Array:
        """H_r(A_i, W_i) Delta_i: the clever covariate at the arm that was taken."""
        h = np.zeros(self.n_rows)
        for term in self.terms[component]:
            h += np.where(self.arm == term.arm, term.H, 0.0)
        return h * self.observed
