"""One silo's rows as an effect target sees them: outcome, arms, initial Q, weights H, and the fluctuation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.parallel import done, pieces
from fedtmle.model.types import Array, Bools, Bytes, Codes, Columns, IntArray, Scaled, first, is_one

# Edges of the propensity score's histogram; a row stores only the number of its bin.
PROBABILITY_EDGES = (0.0, 0.05, *(round(0.1 * k, 1) for k in range(1, 10)), 0.95, 1.0)


@dataclass(frozen=True)
class Term:
    """One arm of a component's regime: its probability ``d`` and its weight H(arm, W), shape (N,) each."""

    arm: int
    d: Array
    H: Array


@dataclass(frozen=True, kw_only=True)
class EffectRows:
    """Prepared rows. Columns have shape (N,) unless stated; y and Q are on the unit scale of the bounds."""

    y: Array  # zero where not observed
    observed: Array  # Delta, 0 or 1
    arm: Codes
    q: Array  # (arms, N), strictly inside (0, 1) unless the study does not truncate predictions
    logit_q: Array  # (arms, N), of the truncated q
    weight: Array  # observation weights over their pooled mean
    v: tuple[Array, ...]  # per component, the indicator over its pooled share
    terms: tuple[tuple[Term, ...], ...]  # per component
    truncated: Bools  # (arms, N): where the propensity score of some component is truncated
    cluster: IntArray | None  # codes 0..; None: every row is its own cluster
    g_bins: Bytes  # (shown arms, N): the bin of each row's propensity score
    covariates: Array  # (components, N): H_r(A, W) Delta, the clever covariates at the arm that was taken
    denominators: Array  # (shown, N): g pi before truncation, of the arm that was taken, else 1
    spanned: IntArray | None = None  # (clusters,): the place among those that span silos, or -1

    @property
    def n_rows(self) -> int:
        return len(self.y)

    def blocks(self) -> Iterator[EffectRows]:
        """Return consecutive pieces of the rows without copying; clusters are not split."""
        whole = (slice(0, self.n_rows),)
        return map(self.part, pieces(self.n_rows) if self.cluster is None else whole)

    def part(self, rows: slice) -> EffectRows:
        """Return some rows, without copying; clusters stay those of all rows."""
        return EffectRows(
            y=self.y[rows],
            observed=self.observed[rows],
            arm=self.arm[rows],
            q=self.q[:, rows],
            logit_q=self.logit_q[:, rows],
            weight=self.weight[rows],
            v=tuple(v[rows] for v in self.v),
            terms=tuple(tuple(Term(t.arm, t.d[rows], t.H[rows]) for t in terms) for terms in self.terms),
            truncated=self.truncated[:, rows],
            cluster=self.cluster,
            g_bins=self.g_bins[:, rows],
            covariates=self.covariates[:, rows],
            denominators=self.denominators[:, rows],
            spanned=self.spanned,
        )

    def taken(self, component: int) -> Array:
        """Return H_r(A_i, W_i) Delta_i."""
        return np.asarray(self.covariates[component])

    def factual_link(self, *, linear: bool) -> Array:
        """Return the link of the initial Q(A, W), shape (N,), a new array."""
        return self.factual(self.q if linear else self.logit_q)

    def factual(self, per_arm: Columns) -> Array:
        """Return the value of the arm taken, a new array, from a value for each arm, shape (arms, N)."""
        return kernels.chosen(per_arm, self.arm)


def shown_arms(arms: int) -> tuple[int, ...]:
    """Return the arms whose propensity score is shown: of two arms, the second one only."""
    return () if arms == 1 else (1,) if arms == 2 else tuple(range(arms))


def probability_bins(g: Array) -> Bytes:
    """Return the bin of each probability, the last bin closed; any shape."""
    return kernels.bins_between(PROBABILITY_EDGES[1:-1], g)


def is_ever(column: Array) -> bool:
    """Return whether a column is other than zero anywhere."""
    return bool(first(column).any())


def part(column: Array, rows: slice) -> Array:
    """Return some rows of columns of shape (..., N). A constant column stays one row."""
    return column[..., :1] if column.strides[-1] == 0 else column[..., rows]


Combination = tuple[tuple[float, ...], ...]  # L, (d, components)


@final
@dataclass(frozen=True)
class Fluctuation:
    """The parts of an effect's submodel that are the same at every law.

    X_k = -width sum_r L_kr H_r of the arm that was taken, shape (d, N), w (None: ones), and the link of the
    initial Q(A, W). With ``as_weight``, H is the weight and its sign the covariate.
    """

    combination: Combination
    X: Scaled
    w: Array | None
    link: Array

    @classmethod
    def of(
        cls, rows: EffectRows, combination: Combination, width: float, *, linear: bool, as_weight: bool
    ) -> Fluctuation:
        columns, factors = [], np.ones(len(combination))
        for k, row in enumerate(combination):
            shares = {r: -width * share for r, share in enumerate(row) if share}
            if len(shares) == 1 and not as_weight:  # a multiple of one covariate stays where that is
                ((r, factors[k]),) = shares.items()
                columns.append(rows.covariates[r])
            else:
                columns.append(_combined(rows, shares, as_weight))
        weight = rows.weight * rows.covariates.sum(axis=0) if as_weight else rows.weight
        largest = np.array([kernels.largest(column) for column in columns])
        return cls(
            combination=combination,
            X=Scaled(tuple(columns), factors, largest),
            w=None if is_one(weight) else weight,
            link=rows.factual_link(linear=linear),
        )


def _combined(rows: EffectRows, shares: Mapping[int, float], as_weight: bool) -> Array:
    """Return the sum of covariates times their shares, shape (N,)."""
    combined = np.zeros(rows.n_rows)

    def fill(place: slice) -> None:
        for r, share in shares.items():
            taken = rows.covariates[r, place]
            combined[place] += share * (np.sign(taken) if as_weight else taken)

    done(fill, pieces(rows.n_rows))
    return combined
