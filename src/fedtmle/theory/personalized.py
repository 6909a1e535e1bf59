"""Section 4.4: what averaging local fits forfeits, and how it bounds the gaps of personalised targeting.

``alpha`` are base weights of the active silos and ``sizes`` their N_m, in the same order; ``fits`` has
shape (silos, d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fedtmle_core.types import Array

GRADIENT_TERM = Fraction(2, 3)
CURVATURE_TERM = Fraction(1, 6)
FOURTH_TERM = Fraction(1, 18)
QUADRATIC = Fraction(1, 2)
GAP = Fraction(1, 2)
LATTICE_GAP = Fraction(1, 8)
LATTICE_OFFSET = Fraction(17, 32)  # in lambda: 1/2 for a fit's rounding, 1/32 for the average's

# The sampling coefficient and the disagreement moments.


def chi(alpha: Sequence[float], sizes: Sequence[int]) -> float:
    """sum_m alpha_m/N_m (1 - alpha_m/a), a the active mass: the common form of S.2.8; 0 if none is active."""
    a = math.fsum(alpha)
    return math.fsum(w / N * (1 - w / a) for w, N in zip(alpha, sizes, strict=True))


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


def averaging_bound(quadratic: float, fourth_order: float) -> float:
    """Return the smaller of the two bounds of lem:local-fourth-order."""
    return min(quadratic, fourth_order)


# thm:personalized-convergence.


def gap_floor(beta: float, score_norm: float) -> float:
    """Delta_m(p) >= ||local EIF mean||^2/(2 beta): eq:proof-retire-gap-score."""
    return float(GAP) * score_norm**2 / beta


def convergence_bound(budget: float, averaging: Sequence[float], retired: float = 0.0) -> float:
    """(1/K) {sum_m alpha_m (l_m(p^0) - inf l_m) + sum_k averaging bound_k + retired}.

    eq:personalized-convergence-bound. ``retired`` is what retirement with a gap above zero adds: the sum over
    rounds and retired silos of alpha_m times a bound of the silo's gap (`lattice_gap_bound`,
    `tolerance_gap_bound`, `noise_gap_bound`). A retired silo keeps its law, so its gap stays what it was.
    """
    return (budget + math.fsum(averaging) + retired) / len(averaging)


# Retirement before the fit is zero.


def tolerance_gap_bound(gap: float, spacing_bound: float = 0.0) -> float:
    """max(tau, lattice bound): the gap of a silo that retired because Delta_m <= tau.

    The convergence bound gains at most tau times the mass of the retired silos.
    """
    return max(gap, spacing_bound)


def noise_gap_bound(noise: float, d: int, variance: float, curvature: float) -> float:
    """c^2 d v/(2 mu): the gap of a silo that retired because g' Sigma^-1 g <= c^2 d.

    v is the largest eigenvalue of Sigma, so ||g||^2 <= c^2 d v; mu > 0 bounds the curvature of the silo's
    loss from below on the segment from zero to its fit, so Delta_m <= ||g||^2/(2 mu). No bound without
    mu > 0.
    """
    return math.inf if curvature <= 0 else float(GAP) * noise**2 * d * variance / curvature


# Fits that are no minima: ||grad l_m(fit_m)|| <= tau at each.


def inexact_bound(tau: float, mass: float, V_2: float, negative: float = 0.0) -> float:
    """tau sqrt(a V_2) + nu V_2/6: what both bounds of lem:local-fourth-order gain by inexact fits.

    Quadratic bound: sum alpha_m g_m . u_m <= tau sum alpha_m ||u_m|| <= tau sqrt(a V_2), with
    u_m = average - fit_m. Fourth-order bound: eq:proof-retire-interpolation keeps
    (2/3) sum alpha_m g_m . u_m, and the pair identity keeps 2 (g_j - g_m) . (fit_j - fit_m). The weighted
    half sum of the latter is at most 2 tau sqrt(a V_2), since
    sum alpha_m alpha_j ||g_j - g_m||^2 <= 2 (a tau)^2. That is (2/3 + 2/6) tau sqrt(a V_2) in all.
    ``negative`` is nu with Hessian >= -nu at each fit: zero where fits are minima to second order.
    """
    return tau * math.sqrt(mass * V_2) + float(CURVATURE_TERM) * negative * V_2


# Silos from different populations.


def population_bound(B_g: float, B_H: float, mass: float, V_2: float, V_4: float) -> float:
    """(2/3) B_g sqrt(a V_2/2) + (1/6) B_H sqrt(a V_4/2): lem:local-fourth-order gains it by population gaps.

    B_g and B_H bound the differences of two silos' population gradients and Hessians at a common point. The
    sample differences are at most those plus eq:local-derivative-comparison; Minkowski's inequality adds the
    two, and sum over m != j of alpha_m alpha_j is at most a^2.
    """
    return float(GRADIENT_TERM) * B_g * math.sqrt(mass * V_2 / 2) + float(CURVATURE_TERM) * B_H * math.sqrt(
        mass * V_4 / 2
    )


# Lattice retirement, `MATH`: fits rounded to multiples of lambda before they are averaged.


def lattice_gap_bound(beta: float, d: int, spacing: float) -> float:
    """beta d lambda^2/8: the gap that a fit which rounds to zero may leave."""
    return float(LATTICE_GAP) * beta * d * spacing**2


def lattice_quadratic_bound(beta: float, V_2: float, d: int, spacing: float, mass: float) -> float:
    """beta V_2/2 + a beta d (17 lambda/32)^2/2, V_2 of the fits before rounding.

    The update is within 17 lambda/32 of the average of the fits in every coordinate.
    """
    return (
        quadratic_bound(beta, V_2)
        + mass * float(QUADRATIC) * beta * d * (float(LATTICE_OFFSET) * spacing) ** 2
    )


def lattice_fourth_order(beta: float, V_2: float, d: int, spacing: float, mass: float) -> float:
    """beta sqrt(a V_2) s + a beta s^2/2 with s = 17 sqrt(d) lambda/32: what the fourth-order bound gains.

    ||sum alpha_m grad l_m|| at the average is at most beta sum alpha_m ||u_m|| <= beta sqrt(a V_2), since
    each silo's gradient is zero at its own fit.
    """
    offset = float(LATTICE_OFFSET) * math.sqrt(d) * spacing
    return beta * math.sqrt(mass * V_2) * offset + mass * float(QUADRATIC) * beta * offset**2
