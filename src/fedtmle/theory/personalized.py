"""Section 4.4: what averaging local fits forfeits, and how it bounds the gaps of personalised targeting.

``alpha`` are base weights of the active silos and ``sizes`` their N_m, in the same order; ``fits`` has
shape (silos, d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fedtmle.model.types import Array

ZETA_FACTOR, ZETA_UNION = 8, 4
GRADIENT_TERM = Fraction(2, 3)
CURVATURE_TERM = Fraction(1, 6)
FOURTH_TERM = Fraction(1, 18)
QUADRATIC = Fraction(1, 2)
GAP = Fraction(1, 2)
LATTICE_GAP = Fraction(1, 8)
LATTICE_SCORE = Fraction(1, 2)

# lem:local-derivatives.


def mean_difference_tail(t: float, N_m: int, N_j: int) -> float:
    """P(|mean_m f - mean_j f| > t) <= 2 exp(-t^2/(2 (1/N_m + 1/N_j))) for one |f| <= 1: Hoeffding, S.2.6."""
    return 2 * math.exp(-(t**2) / (2 * (1 / N_m + 1 / N_j)))


def zeta(xi: float, M: int, log_cover: float) -> float:
    """zeta_n(xi) = sqrt(8 log(4 M^2 N_n/xi)), ``log_cover`` = log N_n."""
    return math.sqrt(ZETA_FACTOR * (math.log(ZETA_UNION * M**2 / xi) + log_cover))


def derivative_bound(scale: float, zeta: float, N_m: int, N_j: int) -> float:
    """scale zeta_n sqrt(1/N_m + 1/N_j): gradients with scale G_1, Hessians with scale beta.

    eq:local-derivative-comparison.
    """
    return scale * zeta * math.sqrt(1 / N_m + 1 / N_j)


def log_cover_compact(n: int, q: int, C: float) -> float:
    """log N_n <= log 2 + q log(2 + 2 C n sqrt(q)): the compact example after ass:local-complexity."""
    return math.log(2) + q * math.log(2 + 2 * C * n * math.sqrt(q))


# The sampling coefficient and the disagreement moments.


def chi(alpha: Sequence[float], sizes: Sequence[int]) -> float:
    """sum_m alpha_m/N_m (1 - alpha_m/a), a the active mass: the common form of S.2.8; 0 if none is active."""
    a = math.fsum(alpha)
    return math.fsum(w / N * (1 - w / a) for w, N in zip(alpha, sizes, strict=True))


def chi_uniform(sizes: Sequence[int], M: int) -> float:
    """(s - 1)/(M s) sum_m 1/N_m for alpha_m = 1/M, s silos active: eq:retirement-sampling-modes."""
    s = len(sizes)
    return (s - 1) / (M * s) * math.fsum(1 / N for N in sizes) if s else 0.0


def chi_size(active: int, n: int) -> float:
    """(s - 1)/n for alpha_m = N_m/n: eq:retirement-sampling-modes."""
    return (active - 1) / n if active else 0.0


def disagreement(order: int, alpha: Sequence[float], fits: Array) -> float:
    """V_r = sum_{m,j} alpha_m alpha_j ||fit_m - fit_j||^r/(2a), r = 2 or 4."""
    a = math.fsum(alpha)
    if a == 0:
        return 0.0
    return math.fsum(
        w * v * float(np.linalg.norm(x - y)) ** order
        for w, x in zip(alpha, fits, strict=True)
        for v, y in zip(alpha, fits, strict=True)
    ) / (2 * a)


def spread(alpha: Sequence[float], fits: Array) -> float:
    """sum_m alpha_m ||fit_m - average||^2, which is V_2: eq:proof-retire-second-moment."""
    a = math.fsum(alpha)
    average = np.asarray(alpha) @ fits / a
    return math.fsum(w * float(np.sum((x - average) ** 2)) for w, x in zip(alpha, fits, strict=True))


# lem:local-fourth-order.


def fourth_order_bound(
    G_1: float, beta: float, beta_4: float, zeta: float, chi: float, V_2: float, V_4: float
) -> float:
    """(2 G_1 zeta/3) sqrt(chi V_2) + (beta zeta/6) sqrt(chi V_4) + (beta_4/18) V_4.

    eq:local-fourth-order-error.
    """
    return (
        float(GRADIENT_TERM) * G_1 * zeta * math.sqrt(chi * V_2)
        + float(CURVATURE_TERM) * beta * zeta * math.sqrt(chi * V_4)
        + float(FOURTH_TERM) * beta_4 * V_4
    )


def quadratic_bound(beta: float, V_2: float) -> float:
    """beta V_2/2: lem:local-fourth-order, without any sampling assumption."""
    return float(QUADRATIC) * beta * V_2


def averaging_bound(quadratic: float, fourth_order: float | None) -> float:
    """The smaller of the two bounds of lem:local-fourth-order."""
    return quadratic if fourth_order is None else min(quadratic, fourth_order)


def diameter_bound(
    G_1: float, beta: float, beta_4: float, zeta: float, chi_over_a: float, diameter: float
) -> float:
    """The averaging error over the active mass, from the largest distance between fits (S.2.8)."""
    root = math.sqrt(chi_over_a / 2)
    return (
        float(GRADIENT_TERM) * G_1 * zeta * diameter * root
        + float(CURVATURE_TERM) * beta * zeta * diameter**2 * root
        + float(FOURTH_TERM) / 2 * beta_4 * diameter**4
    )


def disagreement_from_diameter(order: int, diameter: float) -> float:
    """V_r/a <= diameter^r/2 (S.2.8)."""
    return diameter**order / 2


# thm:personalized-convergence.


def gap_floor(beta: float, score_norm: float) -> float:
    """Delta_m(p) >= ||local EIF mean||^2/(2 beta): eq:proof-retire-gap-score."""
    return float(GAP) * score_norm**2 / beta


def convergence_bound(budget: float, averaging: Sequence[float], lattice: float = 0.0) -> float:
    """(1/K) {sum_m alpha_m (l_m(p^0) - inf l_m) + sum_k averaging bound_k}.

    eq:personalized-convergence-bound. ``lattice`` is what lattice retirement adds: the sum over rounds
    and retired silos of alpha_m `lattice_gap_bound`.
    """
    return (budget + math.fsum(averaging) + lattice) / len(averaging)


def client_factor(alpha_m: float) -> float:
    """1/alpha_m: Delta_m <= this times the weighted sum of gaps; M, or n/N_m."""
    return 1 / alpha_m


def imbalance(sizes: Sequence[int]) -> float:
    """(sum N)(sum 1/N)/s^2 >= 1, arithmetic over harmonic mean: eq:retirement-imbalance."""
    return math.fsum(sizes) * math.fsum(1 / N for N in sizes) / len(sizes) ** 2


def chi_total_size(retired_at: Sequence[float], K: int, n: int) -> float:
    """sum_{k<K} chi_k = {sum_m min(K, tau_m) - min(K, max tau)}/n for alpha_m = N_m/n (S.2.8)."""
    return (math.fsum(min(K, tau) for tau in retired_at) - min(K, max(retired_at))) / n


def chi_total_uniform(retired_at: Sequence[float], sizes: Sequence[int], K: int) -> float:
    """sum_{k<K} chi_k = (1/M) sum_m 1/N_m sum_{k<min(K, tau_m)} (1 - 1/|A_k|) for alpha_m = 1/M (S.2.8)."""
    active = [sum(k < tau for tau in retired_at) for k in range(K)]
    return math.fsum(
        (1 - 1 / active[k]) / N
        for tau, N in zip(retired_at, sizes, strict=True)
        for k in range(int(min(K, tau)))
    ) / len(sizes)


# Lattice retirement, `MATH`: fits rounded to multiples of lambda before they are averaged.


def lattice_gap_bound(beta: float, d: int, spacing: float) -> float:
    """beta d lambda^2/8: the gap that a fit which rounds to zero may leave."""
    return float(LATTICE_GAP) * beta * d * spacing**2


def lattice_score_bound(beta: float, d: int, spacing: float) -> float:
    """beta sqrt(d) lambda/2: the local EIF mean that it may leave."""
    return float(LATTICE_SCORE) * beta * math.sqrt(d) * spacing


def lattice_quadratic_bound(beta: float, V_2: float, d: int, spacing: float, mass: float) -> float:
    """beta V_2/2 + a beta d lambda^2/8, V_2 of the fits before rounding."""
    return quadratic_bound(beta, V_2) + mass * lattice_gap_bound(beta, d, spacing)
