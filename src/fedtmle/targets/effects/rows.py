"""One silo's rows as an effect target sees them: outcome, arms, initial Q, and weights H."""

from __future__ import annotations

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
