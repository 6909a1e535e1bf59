"""Steps of the paper's proofs that no run evaluates: intermediate bounds, orders, and identities.

The bounds that certificates and plans evaluate are in `fedtmle.theory`. Constants are named once, so that a
test can replace one and see another test fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from fedtmle.theory.communication import ENERGY, FINEST, LOG_BITS, ROUND_BITS
from fedtmle.theory.personalized import CURVATURE_TERM, FOURTH_TERM, GRADIENT_TERM
from fedtmle.theory.statistical import (
    ENVELOPE,
    VARIANCE,
    code_allowance,
    process_bound,
    tolerance_schedule,
)
from fedtmle_core.types import Array

THRESHOLD = Fraction(3, 4)  # action 00 iff ||g~|| > 3 delta/4
DECREASE_FLOOR = Fraction(3, 32)  # of delta^2/beta: DECREASE times THRESHOLD squared
COARSEST = Fraction(1, 4)  # h sqrt(d)/delta is at most this,
PATH_LENGTH = 8
CODE_BASE, CODE_RATE = 3, 2  # |enc(a)| <= 3 + 2 log2(1 + |a|)
HISTORY_SUM = 64  # sum of history integers over d beta Delta/delta^2: PATH_LENGTH / FINEST
HISTORY_RATE = 19  # the line before: 1 + 19 K d log2(...)
ZETA_FACTOR, ZETA_UNION = 8, 4
LATTICE_SCORE = Fraction(1, 2)


# thm:communication and its proof (S.2.1).


def spacing_range(delta: float, d: int) -> tuple[float, float]:
    """delta/(8 sqrt(d)) < h <= delta/(4 sqrt(d)): eq:lattice-spacing."""
    return float(FINEST) * delta / math.sqrt(d), float(COARSEST) * delta / math.sqrt(d)


def rounding_bound(h: float, d: int) -> float:
    """||g~ - grad|| <= h sqrt(d): eq:rounding-guarantee."""
    return h * math.sqrt(d)


def code_length_bound(values: Iterable[int]) -> float:
    """|enc(v)| <= 3d + 2 sum_j log2(1 + |v_j|): eq:proof-code-length."""
    return math.fsum(CODE_BASE + CODE_RATE * math.log2(1 + abs(value)) for value in values)


def rounded_step_decrease(norm: float, beta: float, h: float, d: int) -> float:
    """||g~||^2/(2 beta) (1 - 2 h sqrt(d)/||g~||): what a rounded step decreases the loss by, at least."""
    return norm**2 / (2 * beta) * (1 - 2 * rounding_bound(h, d) / norm)


def step_decrease_floor(delta: float, beta: float) -> float:
    """3 delta^2/(32 beta): `step_decrease` without the gradient."""
    return float(DECREASE_FLOOR) * delta**2 / beta


def rounds(S: int, K: int) -> int:
    """R = S + K + 1: eq:proof-rounds."""
    return S + K + 1


def path_length_bound(beta: float, Delta: float, S: int) -> float:
    """sum_k ||eps^k|| <= sqrt(6 Delta S/beta): eq:proof-path-length."""
    return math.sqrt(ENERGY * Delta * S / beta)


def path_length_ceiling(Delta: float, delta: float) -> float:
    """sum_k ||eps^k|| <= 8 Delta/delta: eq:proof-path-length without S."""
    return PATH_LENGTH * Delta / delta


def variation_within(norm: float) -> float:
    """||g_{m,r+1} - g_{m,r}|| <= ||g~_r|| after a step: eq:proof-within-variation."""
    return norm


def variation_across(beta: float, kappa: float, eps_norm: float) -> float:
    """||g_{m,r+1} - g_{m,r}|| <= (kappa + beta) ||eps^k|| when re-centred: eq:proof-recenter-variation."""
    return (kappa + beta) * eps_norm


def first_message_bits(M: int, d: int, G: float, h: float) -> float:
    """8 M d + 4 M d log2(2 + G/h): eq:proof-initial-bits."""
    return ROUND_BITS * M * d + LOG_BITS * M * d * math.log2(2 + G / h)


def upload_bits(M: int, d: int, R: int, h: float, variation: float) -> float:
    """3 M d (R-1) + 2 M d (R-1) log2(2 + V/((R-1) h sqrt(d))): eq:proof-upload-sum."""
    return _difference_bits(M, d, R, h, variation, reach=2)


def broadcast_bits(M: int, d: int, R: int, h: float, variation: float) -> float:
    """The same with 3 for 2 in the logarithm, since q carries two roundings: eq:proof-broadcast-sum."""
    return _difference_bits(M, d, R, h, variation, reach=3)


def _difference_bits(M: int, d: int, R: int, h: float, variation: float, *, reach: int) -> float:
    if R == 1:
        return 0.0
    per_round = variation / ((R - 1) * h * math.sqrt(d))
    return M * d * (R - 1) * (CODE_BASE + CODE_RATE * math.log2(reach + per_round))


# thm:statistical, cor:inference and their proofs (S.2.2, S.2.3).


def history_sum_bound(d: int, beta: float, Delta: float, S: int, h: float) -> float:
    """sum over k, j of |beta eps_j^k/h| <= sqrt(6 d beta Delta S)/h."""
    return math.sqrt(6 * d * beta * Delta * S) / h


def history_sum_ceiling(d: int, beta: float, Delta: float, delta: float) -> float:
    """The same without S and h: 64 d beta Delta/delta^2."""
    return HISTORY_SUM * d * beta * Delta / delta**2


def history_bits_bound(K: int, d: int, total: float) -> float:
    """1 + 2 log2(K + 1) + 3 K d + 2 K d log2(1 + total/(K d)), total = sum of |history integers|."""
    if K == 0:
        return 1.0
    return 1 + 2 * math.log2(K + 1) + 3 * K * d + 2 * K * d * math.log2(1 + total / (K * d))


def history_bits_rate(K: int, d: int, beta: float, Delta: float, delta: float) -> float:
    """1 + 19 K d log2(2 + beta Delta/(K delta^2)): the sharpest closed form of S.2.2."""
    return 1.0 if K == 0 else 1 + HISTORY_RATE * K * d * math.log2(2 + beta * Delta / (K * delta**2))


def integer_kraft(levels: int) -> Fraction:
    """sum of 2^-|enc(a)| over the a with iota(a) < 2^levels; one in the limit: eq:proof-integer-kraft."""
    return sum((Fraction(2**j, 2 ** (2 * j + 1)) for j in range(levels)), Fraction(0))


def history_kraft(levels: int, updates: int, d: int) -> Fraction:
    """sum of 2^-|w| over histories of K < ``updates`` whose integers have iota < 2^levels, below one.

    eq:proof-history-kraft.
    """
    mass = integer_kraft(levels)
    return sum(
        (Fraction(1, 2 ** (2 * (K + 1).bit_length() - 1)) * mass ** (K * d) for K in range(updates)),
        Fraction(0),
    )


def fixed_code_deviation(variance: float, G: float, x: float, n: int) -> float:
    """t_x = sqrt(2 v x/n) + 4 G x/(3n)."""
    return math.sqrt(VARIANCE * variance * x / n) + float(ENVELOPE) * G * x / n


def fixed_code_tail(x: float) -> float:
    """P{|(P_n - P_0) f| > t_x} <= 2 e^-x, for one fixed code and coordinate."""
    return 2 * math.exp(-x)


def remainder_bound(
    d: int, n: int, delta: float, R_2: float, G: float, x: float, eif_distance: float
) -> float:
    """delta + ||R_2|| + the process bound: eq:history-statistical-bound."""
    return delta + R_2 + process_bound(d, n, G, x, eif_distance)


def cost_order(n: int, a_n: float) -> float:
    """n a_n^2, the order of R and of B/(M d): eq:inference-cost."""
    return n * a_n**2


def history_order(K: int, d: int, n: int, a_n: float) -> float:
    """1 + K d log(2 + n a_n^2/max(K, 1)), the order of H_K - H_init: eq:history-asymptotic."""
    return 1 + K * d * math.log(2 + cost_order(n, a_n) / max(K, 1))


def history_order_constant(A: float) -> float:
    """1 + log2 max(1, A): log2(2 + A u) is at most this times log2(2 + u), for every u >= 0."""
    return 1 + math.log2(max(1.0, A))


def root_n_bound(*, n: int, d: int, a_n: float, H: float, G: float, R_2: float, eif_distance: float) -> float:
    """sqrt(n) times the remainder bound at delta_n and xi = 1/n: eq:proof-root-n-bound, first line."""
    x = code_allowance(H, d, 1 / n)
    return math.sqrt(n) * remainder_bound(d, n, tolerance_schedule(n, a_n), R_2, G, x, eif_distance)


# Section 4.4: averaging local fits and personalised targeting.


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


def chi_uniform(sizes: Sequence[int], M: int) -> float:
    """(s - 1)/(M s) sum_m 1/N_m for alpha_m = 1/M, s silos active: eq:retirement-sampling-modes."""
    s = len(sizes)
    return (s - 1) / (M * s) * math.fsum(1 / N for N in sizes) if s else 0.0


def chi_size(active: int, n: int) -> float:
    """(s - 1)/n for alpha_m = N_m/n: eq:retirement-sampling-modes."""
    return (active - 1) / n if active else 0.0


def spread(alpha: Sequence[float], fits: Array) -> float:
    """sum_m alpha_m ||fit_m - average||^2, which is V_2: eq:proof-retire-second-moment."""
    a = math.fsum(alpha)
    average = np.asarray(alpha) @ fits / a
    return math.fsum(w * float(np.sum((x - average) ** 2)) for w, x in zip(alpha, fits, strict=True))


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


def lattice_score_bound(beta: float, d: int, spacing: float) -> float:
    """beta sqrt(d) lambda/2: the local EIF mean that it may leave."""
    return float(LATTICE_SCORE) * beta * math.sqrt(d) * spacing
