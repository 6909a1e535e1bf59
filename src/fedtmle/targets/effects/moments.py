"""What stands for a cluster's identifier wherever clusters of several silos are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from fedtmle.model.columns import column_sums
from fedtmle.model.exact import Sums, column_shifts
from fedtmle.model.types import Array, IntArray, first, upper_pairs
from fedtmle.targets.effects.rows import EffectRows

DIGEST = 16  # bytes: none collide by chance


def cluster_digest(label: str) -> bytes:
    """128 bits of SHA-256."""
    return hashlib.sha256(b"fedtmle cluster:" + label.encode()).digest()[:DIGEST]


# The closing sums of an effect: psi, and an EIF covariance that knows weights and clusters.
#
# Row by row D_r = u_r - t_r (psi_r - low) with
#
# u_r = w {width H_r Delta (y - Q) + v_r/P(v_r) width m_r},   t_r = w v_r / P(v_r).
#
# Rows of one cluster are added first; then sums of u, t, of w v/P(v) width m, of the products u u,
# u t and t t, and the number of clusters make psi and sum D D^T for any psi.
#
# A cluster c with parts in several silos m has u_c = sum_m u_mc, and u_c u_c^T is no sum over silos of
# u_mc u_mc^T: the products between parts are missing. But u_c and t_c are such sums. So the parts of a
# cluster that spans silos stay out of the products and of the count; they are sent as sums of their own, one
# set of (u, t, 1) for each such cluster, and the products are taken once these have been added:
#
# sum_c D_c D_c^T = sum_m sum_{c in m only} D_mc D_mc^T + sum_{c spanning} (sum_m D_mc)(sum_m D_mc)^T.


def moment_columns(own: EffectRows, q: Array, width: float) -> Array:
    """u, t and the plug-in part m of u, one after the other, each of shape (components, N)."""
    residual = width * (own.y - own.factual(q))
    weight, columns = first(own.weight), np.empty((3, len(own.terms), own.n_rows))
    for r, terms in enumerate(own.terms):
        u, t, m = columns[:, r]
        t[:] = weight * first(own.v[r])
        m[:] = 0.0
        for term in terms:
            m += first(term.d) * q[term.arm]
        m *= weight * first(own.v[r]) * width
        np.multiply(weight * own.taken(r), residual, out=u)
        u += m
    return columns


def closing_terms(d: int) -> list[tuple[int, ...]]:
    """Which of the columns u, t and m, one after the other, or products of two of them are summed."""
    upper = upper_pairs(d)
    cross = [(r, d + s) for r in range(d) for s in range(d)]
    return [*((j,) for j in range(3 * d)), *upper, *cross, *((d + r, d + s) for r, s in upper)]


def closing_sums(rows: EffectRows, columns: Array, exponents: Sequence[int]) -> Sums:
    """The sums that close a run, over rows or, where there are any, clusters; the last is their count."""
    what, d = "EIF term", columns.shape[1]
    flat, terms = columns.reshape(3 * d, -1), closing_terms(d)
    if rows.cluster is not None:
        flat = _by_cluster(rows.cluster, flat)
    count = flat.shape[1]
    if rows.spanned is None:
        sums = column_sums(flat, exponents[:-1], what=what, terms=terms)
    else:  # the products are of clusters that are here alone
        here = rows.spanned < 0
        count = int(np.count_nonzero(here))
        sums = column_sums(flat, exponents[: 3 * d], what=what)
        sums = sums.joined(column_sums(flat * here, exponents[3 * d : -1], what=what, terms=terms[3 * d :]))
    (shift,) = column_shifts(exponents[-1:])
    return sums.joined(Sums((count << shift,), (shift,)))


def spanning_sums(rows: EffectRows, columns: Array, count: int) -> Array:
    """(u, t, 1) of the parts here of each of ``count`` clusters that span silos, as one column."""
    d = columns.shape[1]
    if rows.cluster is None or rows.spanned is None:
        return np.zeros((count * (2 * d + 1), 1))
    parts = np.zeros((count, 2 * d + 1))
    here = rows.spanned >= 0
    sums = _by_cluster(rows.cluster, columns[:2].reshape(2 * d, -1))
    parts[rows.spanned[here], :-1] = sums[:, here].T
    parts[rows.spanned[here], -1] = 1.0
    return parts.reshape(-1, 1)


def _by_cluster(cluster: IntArray, columns: Array) -> Array:
    clusters = int(cluster.max(initial=-1)) + 1
    sums = [np.bincount(cluster, weights=column, minlength=clusters) for column in columns]
    return np.asarray(np.stack(sums), dtype=np.float64)


def estimate_components(pooled: Sums, d: int, *, one_step: bool = False) -> tuple[Array, Array]:
    """psi - low per component and the covariance of its estimator, in exact rationals.

    ``one_step`` adds the mean EIF to the plug-in: for part of the silos, whose own equation the
    pooled fluctuation does not solve.

    C/(C - 1) sum over clusters of D_r D_s / (sum t_r sum t_s), centred: over all silos sum t = n, so
    with no clusters cov(D)/n, divisor n - 1; over some of them sum t is their share of the population.
    """
    total = pooled.fractions()
    u, t, m = total[:d], total[d : 2 * d], total[2 * d : 3 * d]
    pairs = d * (d + 1) // 2
    uu = total[3 * d : 3 * d + pairs]
    ut = total[3 * d + pairs : 3 * d + pairs + d * d]
    last = 3 * d + 2 * pairs + d * d
    tt, clusters = total[last - pairs : last], total[last]
    size = 2 * d + 1
    parts = [total[k : k + size] for k in range(last + 1, len(total), size)]
    spanning = [(part[:d], part[d : 2 * d]) for part in parts if part[-1]]  # those that anyone here has
    clusters += len(spanning)
    if not all(t):  # nobody here is in some component's population
        return np.full(d, np.nan), np.full((d, d), np.inf)
    psi = [mean / mass for mean, mass in zip(u if one_step else m, t, strict=True)]
    covariance = np.zeros((d, d))
    for index, (r, s) in enumerate(zip(*map(np.ndarray.tolist, np.triu_indices(d)), strict=True)):
        scatter = uu[index] - psi[s] * ut[r * d + s] - psi[r] * ut[s * d + r] + psi[r] * psi[s] * tt[index]
        scatter += sum((v[r] - psi[r] * q[r]) * (v[s] - psi[s] * q[s]) for v, q in spanning)
        sums = (u[r] - psi[r] * t[r]) * (u[s] - psi[s] * t[s])
        centred = scatter - sums / clusters
        if clusters > 1:
            covariance[r, s] = float(centred * clusters / ((clusters - 1) * t[r] * t[s]))
        else:
            covariance[r, s] = np.inf
        covariance[s, r] = covariance[r, s]
    return np.array([float(value) for value in psi]), covariance
