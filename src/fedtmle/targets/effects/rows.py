"""One silo's rows as an effect target sees them: outcome, arms, initial Q, and weights H."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedtmle.model.types import Array, IntArray


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
    v: Array  # (components, N), indicators over their pooled shares
    terms: tuple[tuple[Term, ...], ...]  # per component
    cluster: IntArray  # codes 0..; every row its own cluster if none was named

    @property
    def n_rows(self) -> int:
        return len(self.y)

    def taken(self, component: int) -> Array:
        """H_r(A_i, W_i) Delta_i: the clever covariate at the arm that was taken."""
        h = np.zeros(self.n_rows)
        for term in self.terms[component]:
            h += np.where(self.arm == term.arm, term.H, 0.0)
        return h * self.observed


def concatenate(parts: Sequence[EffectRows]) -> EffectRows:
    """The pooled rows; clusters of different silos stay apart."""
    offsets = np.cumsum([0, *(int(part.cluster.max(initial=-1)) + 1 for part in parts)])
    terms = tuple(
        tuple(
            Term(group[0].arm, np.concatenate([t.d for t in group]), np.concatenate([t.H for t in group]))
            for group in zip(*(part.terms[r] for part in parts), strict=True)
        )
        for r in range(len(parts[0].terms))
    )
    return EffectRows(
        y=np.concatenate([part.y for part in parts]),
        observed=np.concatenate([part.observed for part in parts]),
        arm=np.concatenate([part.arm for part in parts]),
        q=np.concatenate([part.q for part in parts], axis=1),
        weight=np.concatenate([part.weight for part in parts]),
        v=np.concatenate([part.v for part in parts], axis=1),
        terms=terms,
        cluster=np.concatenate([p.cluster + shift for p, shift in zip(parts, offsets, strict=False)]),
    )
