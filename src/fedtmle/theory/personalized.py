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

GRADIENT_TERM = Fraction(2, 3)
CURVATURE_TERM = Fraction(1, 6)
FOURTH_TERM = Fraction(1, 18)
QUADRATIC = Fraction(1, 2)
GAP = Fraction(1, 2)
LATTICE_GAP = Fraction(1, 8)

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


def averaging_bound(quadratic: float, fourth_order: float | None) -> float:
    """Return the smaller of the two bounds of lem:local-fourth-order."""
    return quadratic if fourth_order is None else min(quadratic, fourth_order)


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


# Lattice retirement, `MATH`: fits rounded to multiples of lambda before they are averaged.


def lattice_gap_bound(beta: float, d: int, spacing: float) -> float:
    """beta d lambda^2/8: the gap that a fit which rounds to zero may leave."""
    return float(LATTICE_GAP) * beta * d * spacing**2


def lattice_quadratic_bound(beta: float, V_2: float, d: int, spacing: float, mass: float) -> float:
    """beta V_2/2 + a beta d lambda^2/8, V_2 of the fits before rounding."""
    return quadratic_bound(beta, V_2) + mass * lattice_gap_bound(beta, d, spacing)
