"""One silo's rows as an effect target sees them, and the closing sums over them: psi and the EIF covariance.

The covariance accounts for weights and clusters. Row by row D_r = u_r - t_r (psi_r - low) with

    u_r = w {width H_r Delta (y - Q) + v_r/P(v_r) width m_r},   t_r = w v_r / P(v_r).

Rows of one cluster are added first; then sums of u, t, of w v/P(v) width m, of the products u u,
u t and t t, and the number of clusters make psi and sum D D^T for any psi.

A cluster c with parts in several silos m has u_c = sum_m u_mc, and u_c u_c^T is no sum over silos of
u_mc u_mc^T: the products between parts are missing. But u_c and t_c are such sums. So the parts of a
cluster that spans silos stay out of the products and of the count; they are sent as sums of their own, one
set of (u, t, 1) for each such cluster, and the products are taken once these have been added:

    sum_c D_c D_c^T = sum_m sum_{c in m only} D_mc D_mc^T + sum_{c spanning} (sum_m D_mc)(sum_m D_mc)^T.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol, final

import numpy as np

from fedtmle.model.problem import ClosingBlock
from fedtmle.targets.diagnostics import PROBABILITY_EDGES
from fedtmle_core import kernels
from fedtmle_core.exact import Sums, column_shifts
from fedtmle_core.kernels import column_sums
from fedtmle_core.parallel import done, pieces
from fedtmle_core.types import (
    Array,
    Bools,
    Bytes,
    Codes,
    Columns,
    IntArray,
    Scaled,
    combine,
    exponent,
    first,
    is_one,
    product,
    upper_pairs,
)

# One silo's rows as an effect target sees them: outcome, arms, initial Q, weights H, and the fluctuation.


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
    denominator: Array  # (N,): of the first population's H before truncation, in the arm that was taken
    spanned: IntArray | None = None  # (clusters,): the place among those that span silos, or -1
    fits: tuple[Array, ...] = ()  # of g before `arm_probabilities`, (N,) or (arms, N), if it is diagnosed

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
            denominator=self.denominator[rows],
            spanned=self.spanned,
            fits=tuple(fit[..., rows] for fit in self.fits),
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


WHAT = "EIF term"  # the columns' name in error messages


@final
@dataclass(frozen=True)
class MomentColumns:
    """u, t and the plug-in part m of u, each of shape (components, N).

    ``counts`` says that t is one in every row: nobody has a weight, and everyone is of the population.
    """

    stacked: Array  # (3, components, N)
    counts: bool = False

    @property
    def u(self) -> Array:
        return np.asarray(self.stacked[0])

    @property
    def t(self) -> Array:
        return np.asarray(self.stacked[1])

    @property
    def m(self) -> Array:
        return np.asarray(self.stacked[2])

    @property
    def flat(self) -> Array:
        """All columns one below the other, shape (3 components, N)."""
        return self.stacked.reshape(3 * self.stacked.shape[1], -1)

    @property
    def summed(self) -> Columns:
        """The columns of `flat`; a t of ones takes no memory, so that no product with it is summed."""
        if not self.counts:
            return self.flat
        return [*self.u, *[np.broadcast_to(np.float64(1.0), self.t[0].shape)] * len(self.t), *self.m]


def moment_columns(
    rows: EffectRows, regressions: Iterable[tuple[Sequence[int], Columns]], width: float
) -> MomentColumns:
    """Return the columns whose sums close a run, given components and their Q_a at the law by arm."""
    weight, columns = first(rows.weight), np.empty((3, len(rows.terms), rows.n_rows))
    for components, q in regressions:
        residual = width * (rows.y - rows.factual(q))
        for r in components:
            u, t, m = columns[:, r]
            t[:] = weight * first(rows.v[r])
            combine([(first(term.d), q[term.arm]) for term in rows.terms[r]], m)
            m *= weight * first(rows.v[r]) * width
            np.multiply(product(rows.taken(r), rows.weight), residual, out=u)
            u += m
    constant = (column.strides == (0,) and is_one(column) for column in (rows.weight, *rows.v))
    return MomentColumns(columns, counts=all(constant))


class Clustered(Protocol):
    """Rows with clusters: codes from 0, None if each row is its own, and each cluster's place among those
    that span silos."""

    @property
    def cluster(self) -> IntArray | None: ...

    @property
    def spanned(self) -> IntArray | None: ...


class SpanningCluster(NamedTuple):
    """The sums of u and t over the parts of one cluster that spans silos."""

    u: list[Fraction]
    t: list[Fraction]


class ClosingSums(NamedTuple):
    """The closing sums by name: over components (u, t, m), pairs r <= s (uu, tt), and all pairs (ut)."""

    u: list[Fraction]
    t: list[Fraction]
    m: list[Fraction]
    uu: list[Fraction]
    ut: list[Fraction]
    tt: list[Fraction]
    clusters: Fraction
    spanning: list[SpanningCluster]


@final
@dataclass(frozen=True)
class ClosingLayout:
    """The order of the closing sums of ``d`` components.

    u, t and m, d each; u_r u_s over r <= s; u_r t_s over all r, s; t_r t_s over r <= s; the number of
    clusters; then u, t and 1 for each cluster that spans silos.
    """

    d: int

    @property
    def pairs(self) -> int:
        """How many pairs r <= s there are."""
        return self.d * (self.d + 1) // 2

    @property
    def linear(self) -> int:
        """How many of the sums are of single columns; products follow."""
        return 3 * self.d

    @property
    def count_at(self) -> int:
        """Where the number of clusters stands."""
        return self.linear + 2 * self.pairs + self.d**2

    @property
    def part_size(self) -> int:
        """How many sums there are for each cluster that spans silos."""
        return 2 * self.d + 1

    def similar(self, spanning: int) -> list[int]:
        """Return for each sum the place of an earlier one that it is likely near, or its own place.

        Without weights and in the whole population t = 1: then u t = u, and t t is the number of rows.
        """
        d, pairs = self.d, self.pairs
        upper, first_pair = upper_pairs(d), self.linear
        return [
            *range(d),
            *[d] * d,
            *range(d),
            first_pair,
            *range(first_pair, first_pair + pairs - 1),
            *(r for r in range(d) for _ in range(d)),
            *(d + r for r, _ in upper),
            d,
            *range(self.count_at + 1, self.count_at + 1 + spanning * self.part_size),
        ]

    def terms(self) -> list[tuple[int, ...]]:
        """Return which rows of `MomentColumns.flat`, or products of two of them, are summed."""
        d, upper = self.d, upper_pairs(self.d)
        cross = [(r, d + s) for r in range(d) for s in range(d)]
        return [*((j,) for j in range(3 * d)), *upper, *cross, *((d + r, d + s) for r, s in upper)]

    def exponents(self, u: float, t: float, spanning: int) -> list[int]:
        """Return the exponents of all sums, given bounds of u and t in a cluster."""
        d, pairs = self.d, self.pairs
        return [
            *[exponent(u)] * d,
            *[exponent(t)] * d,
            *[exponent(u)] * d,
            *[exponent(u * u)] * pairs,
            *[exponent(u * t)] * (d * d),
            *[exponent(t * t)] * pairs,
            1,  # clusters are counted
            *[*[exponent(u)] * d, *[exponent(t)] * d, 1] * spanning,
        ]

    def read(self, pooled: Sums) -> ClosingSums:
        """Return pooled sums by name, with the clusters that span silos and have a member here."""
        d, total = self.d, iter(pooled.fractions())

        def following(count: int) -> list[Fraction]:
            return [next(total) for _ in range(count)]

        u, t, m = following(d), following(d), following(d)
        uu, ut, tt = following(self.pairs), following(d * d), following(self.pairs)
        (clusters,) = following(1)
        spanning = []
        for value in total:
            part, present = [value, *following(2 * d - 1)], next(total)
            if present:
                spanning.append(SpanningCluster(part[:d], part[d:]))
        return ClosingSums(u, t, m, uu, ut, tt, clusters, spanning)


def closing_sums(rows: Clustered, columns: MomentColumns, exponents: Sequence[int]) -> Sums:
    """Return the sums over rows or, if there are any, clusters; the last is their count."""
    layout, flat = ClosingLayout(len(columns.u)), columns.summed
    linear, terms = layout.linear, layout.terms()
    if rows.cluster is not None:
        flat = _by_cluster(rows.cluster, columns.flat)
    count = len(flat[0])
    if rows.spanned is None:
        sums = column_sums(flat, exponents[: layout.count_at], what=WHAT, terms=terms)
    else:  # products are only of clusters that do not span silos
        here = rows.spanned < 0
        count = int(np.count_nonzero(here))
        sums = column_sums(flat, exponents[:linear], what=WHAT)
        products = exponents[linear : layout.count_at]
        sums = sums.joined(column_sums(np.asarray(flat) * here, products, what=WHAT, terms=terms[linear:]))
    (shift,) = column_shifts(exponents[layout.count_at : layout.count_at + 1])
    return sums.joined(Sums((count << shift,), (shift,)))


def spanning_sums(rows: Clustered, columns: MomentColumns, exponents: Sequence[int], count: int) -> Sums:
    """Return u, t and 1 of the parts here of each of ``count`` clusters that span silos."""
    layout = ClosingLayout(len(columns.u))
    parts = np.zeros((count, layout.part_size))
    if rows.cluster is not None and rows.spanned is not None:
        here = rows.spanned >= 0
        sums = _by_cluster(rows.cluster, columns.flat[: 2 * layout.d])
        parts[rows.spanned[here], :-1] = sums[:, here].T
        parts[rows.spanned[here], -1] = 1.0
    return column_sums(parts.reshape(-1, 1), exponents[layout.count_at + 1 :], what=WHAT)


def judged_columns(rows: Clustered, columns: MomentColumns) -> Array:
    """Return the columns by which the guard judges closing sums, shape (p, N); m comes last.

    The closing message discloses products of clusters' sums, in which a cluster of one person may dominate.
    With clusters, a second group of columns therefore has (u_c, t_c) sqrt(s), c the person's cluster and s
    the person's share of t in it: 1/N_c in a cluster of N_c people who count alike. The sum of squares of
    these columns is that of the clusters' sums. Who has no weight, or is not of the population, hides nobody.
    Clusters that span silos are not in the products.
    """
    if rows.cluster is None:
        return columns.flat
    linear = columns.flat[: 2 * len(columns.u)]
    size = np.bincount(rows.cluster)
    by_cluster = _by_cluster(rows.cluster, linear)
    if rows.spanned is not None:
        by_cluster = by_cluster * (rows.spanned < 0)
    if columns.counts:
        of_cluster = (by_cluster / np.sqrt(np.maximum(size, 1)))[:, rows.cluster]
    else:
        total = by_cluster[len(columns.t) :, rows.cluster]
        alike = np.broadcast_to(1.0 / size[rows.cluster], total.shape)
        share = np.divide(columns.t, total, out=alike.copy(), where=total > 0)
        of_cluster = by_cluster[:, rows.cluster] * np.sqrt(np.concatenate([share, share]))
    return np.concatenate([linear, of_cluster, columns.m])


MOST_TOGETHER = 16  # components whose closing sums masked silos judge together


def closing_blocks(d: int, u: float, t: float, largest_cluster: int) -> tuple[ClosingBlock, ...]:
    """Return how `judged_columns` of ``d`` components fall into blocks; u and t bound a person's values.

    With clusters of up to so many people, |sum of u over a cluster| / sqrt(N_c) is at most sqrt(N_c) u.
    """
    if d > MOST_TOGETHER:
        return ()
    names = (*(f"the mean {r + 1}" for r in range(d)), *(f"the population of mean {r + 1}" for r in range(d)))
    groups = [math.sqrt(size) for size in ((1, largest_cluster) if largest_cluster > 1 else (1,))]
    together = [
        ClosingBlock(
            names=names,
            columns=tuple(range(2 * d * k, 2 * d * (k + 1))),
            sizes=(root * u,) * d + (root * t,) * d,
            uneven=(True,) * d + (False,) * d,
            alike=tuple(range(d, 2 * d)),
        )
        for k, root in enumerate(groups)
    ]
    first = 2 * d * len(groups)
    alone = [ClosingBlock((names[r],), (first + r,), (u,), (True,)) for r in range(d)]
    return (*together, *alone)


def _by_cluster(cluster: IntArray, columns: Array) -> Array:
    clusters = int(cluster.max(initial=-1)) + 1
    sums = [np.bincount(cluster, weights=column, minlength=clusters) for column in columns]
    return np.asarray(np.stack(sums), dtype=np.float64)


def estimate_components(pooled: Sums, d: int, *, one_step: bool = False) -> tuple[Array, Array]:
    """Return psi - low per component and the covariance of its estimator, in exact rationals.

    ``one_step`` adds the mean EIF to the plug-in: for part of the silos, whose own equation the
    pooled fluctuation does not solve.

    C/(C - 1) sum over clusters of D_r D_s / (sum t_r sum t_s), centred: over all silos sum t = n, so
    with no clusters cov(D)/n, divisor n - 1; over some of them sum t is their share of the population.
    """
    total = ClosingLayout(d).read(pooled)
    u, t, clusters = total.u, total.t, total.clusters + len(total.spanning)
    if not all(t):  # the population of some component is empty here
        return np.full(d, np.nan), np.full((d, d), np.inf)
    psi = [mean / mass for mean, mass in zip(u if one_step else total.m, t, strict=True)]
    covariance = np.zeros((d, d))
    for index, (r, s) in enumerate(upper_pairs(d)):
        scatter = total.uu[index] + psi[r] * psi[s] * total.tt[index]
        scatter -= psi[s] * total.ut[r * d + s] + psi[r] * total.ut[s * d + r]
        for part in total.spanning:
            scatter += (part.u[r] - psi[r] * part.t[r]) * (part.u[s] - psi[s] * part.t[s])
        centred = scatter - (u[r] - psi[r] * t[r]) * (u[s] - psi[s] * t[s]) / clusters
        if clusters > 1:
            covariance[r, s] = float(centred * clusters / ((clusters - 1) * t[r] * t[s]))
        else:
            covariance[r, s] = np.inf
        covariance[s, r] = covariance[r, s]
    return np.array([float(value) for value in psi]), covariance
