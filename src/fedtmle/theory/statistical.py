"""thm:statistical and its proof (S.2.2): length of the history code, Kraft sums, concentration, remainder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from fedtmle.protocol.bits import gamma_length

HISTORY_SUM = 64  # sum of history integers over d beta Delta/delta^2: PATH_LENGTH / FINEST
HISTORY = 20
HISTORY_RATE = 19  # the line before: 1 + 19 K d log2(...)
ENVELOPE = Fraction(4, 3)  # |X| <= 4G, and l! >= 2 3^(l-2) in the moment series
VARIANCE = 2


def history_sum_bound(d: int, beta: float, Delta: float, S: int, h: float) -> float:
    """sum over k, j of |beta eps_j^k/h| <= sqrt(6 d beta Delta S)/h."""
    return math.sqrt(6 * d * beta * Delta * S) / h


def history_sum_ceiling(d: int, beta: float, Delta: float, delta: float) -> float:
    """The same without S and h: 64 d beta Delta/delta^2."""
    return HISTORY_SUM * d * beta * Delta / delta**2


def history_bits(history: Sequence[Sequence[int]]) -> int:
    """H_K - H_init = 2 floor(log2(K + 1)) + 1 + sum |enc(beta eps_j^k/h)|, exactly."""
    count = 2 * (len(history) + 1).bit_length() - 1
    return count + sum(gamma_length(value) for vector in history for value in vector)


def history_bits_bound(K: int, d: int, total: float) -> float:
    """1 + 2 log2(K + 1) + 3 K d + 2 K d log2(1 + total/(K d)), total = sum of |history integers|."""
    if K == 0:
        return 1.0
    return 1 + 2 * math.log2(K + 1) + 3 * K * d + 2 * K * d * math.log2(1 + total / (K * d))


def history_bits_rate(K: int, d: int, beta: float, Delta: float, delta: float) -> float:
    """1 + 19 K d log2(2 + beta Delta/(K delta^2)): the sharpest closed form of S.2.2."""
    return 1.0 if K == 0 else 1 + HISTORY_RATE * _leading(K, d, beta, Delta, delta)


def history_bits_ceiling(K: int, d: int, beta: float, Delta: float, delta: float) -> float:
    """H_K - H_init <= 20 {1 + K d log2(2 + beta Delta/(K delta^2))}, and 1 at K = 0: eq:history-length."""
    return 1.0 if K == 0 else HISTORY * (1 + _leading(K, d, beta, Delta, delta))


def _leading(K: int, d: int, beta: float, Delta: float, delta: float) -> float:
    return K * d * math.log2(2 + beta * Delta / (K * delta**2))


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


def code_allowance(H: float, d: int, xi: float) -> float:
    """x_K = H_K log 2 + log(2d/xi): thm:statistical."""
    return H * math.log(2) + math.log(2 * d / xi)


def process_bound(d: int, n: int, G: float, x: float, eif_distance: float) -> float:
    """sqrt(2x/n) ||D(p^K) - D(p_0)|| + 4 G sqrt(d) x/(3n): eq:proof-vector-concentration."""
    return math.sqrt(VARIANCE * x / n) * eif_distance + float(ENVELOPE) * G * math.sqrt(d) * x / n


def remainder_bound(
    d: int, n: int, delta: float, R_2: float, G: float, x: float, eif_distance: float
) -> float:
    """delta + ||R_2|| + the process bound: eq:history-statistical-bound."""
    return delta + R_2 + process_bound(d, n, G, x, eif_distance)
