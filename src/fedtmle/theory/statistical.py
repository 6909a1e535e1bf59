"""thm:statistical and its proof (S.2.2): length of the history code, Kraft sums, concentration, remainder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fedtmle.protocol.codes import gamma_length

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


# cor:inference and its proof (S.2.3): tolerances below the order of the sampling error, and their cost.


def tolerance_schedule(n: int, a_n: float) -> float:
    """delta_n = 1/(a_n sqrt(n)): cor:inference."""
    return 1 / (a_n * math.sqrt(n))


def negligible_tolerance(std_error: float, share: float) -> float:
    """The tolerance at which the numerical error, at most r^K <= delta, is ``share`` of a standard error."""
    return share * std_error


def cost_order(n: int, a_n: float) -> float:
    """n a_n^2, the order of R and of B/(M d): eq:inference-cost."""
    return n * a_n**2


def history_order(K: int, d: int, n: int, a_n: float) -> float:
    """1 + K d log(2 + n a_n^2/max(K, 1)), the order of H_K - H_init: eq:history-asymptotic."""
    return 1 + K * d * math.log(2 + cost_order(n, a_n) / max(K, 1))


def history_order_constant(A: float) -> float:
    """1 + log2 max(1, A): log2(2 + A u) is at most this times log2(2 + u), for every u >= 0."""
    return 1 + math.log2(max(1.0, A))


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """eq:inference-conditions: three numbers that must tend to zero; None where data cannot tell."""

    remainder: float | None  # sqrt(n) ||R_2(p^K, p_0)||
    process: float | None  # sqrt(H_K + log n) ||D(p^K) - D(p_0)||
    envelope: float  # G sqrt(d) (H_K + log n)/sqrt(n)


def inference_conditions(
    *, n: int, d: int, H: float, G: float, R_2: float | None = None, eif_distance: float | None = None
) -> Conditions:
    """The three numbers of eq:inference-conditions; R_2 and the distance are known in simulation only."""
    complexity = H + math.log(n)
    return Conditions(
        remainder=None if R_2 is None else math.sqrt(n) * R_2,
        process=None if eif_distance is None else math.sqrt(complexity) * eif_distance,
        envelope=G * math.sqrt(d) * complexity / math.sqrt(n),
    )


def root_n_bound(*, n: int, d: int, a_n: float, H: float, G: float, R_2: float, eif_distance: float) -> float:
    """sqrt(n) times the remainder bound at delta_n and xi = 1/n: eq:proof-root-n-bound, first line."""
    x = code_allowance(H, d, 1 / n)
    return math.sqrt(n) * remainder_bound(d, n, tolerance_schedule(n, a_n), R_2, G, x, eif_distance)
