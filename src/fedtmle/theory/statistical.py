"""thm:statistical and cor:inference: the history code's length, its price, and tolerances small enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fedtmle.protocol.codes import gamma_length

HISTORY = 20
ENVELOPE = Fraction(4, 3)  # |X| <= 4G, and l! >= 2 3^(l-2) in the moment series
VARIANCE = 2


def history_bits(history: Sequence[Sequence[int]]) -> int:
    """H_K - H_init = 2 floor(log2(K + 1)) + 1 + sum |enc(beta eps_j^k/h)|, exactly."""
    count = 2 * (len(history) + 1).bit_length() - 1
    return count + sum(gamma_length(value) for vector in history for value in vector)


def history_bits_ceiling(K: int, d: int, beta: float, Delta: float, delta: float) -> float:
    """H_K - H_init <= 20 {1 + K d log2(2 + beta Delta/(K delta^2))}, and 1 at K = 0: eq:history-length."""
    return 1.0 if K == 0 else HISTORY * (1 + K * d * math.log2(2 + beta * Delta / (K * delta**2)))


def tolerance_schedule(n: int, a_n: float) -> float:
    """delta_n = 1/(a_n sqrt(n)): cor:inference."""
    return 1 / (a_n * math.sqrt(n))


def negligible_tolerance(std_error: float, share: float) -> float:
    """Return the tolerance whose numerical error, r^K <= delta, is ``share`` of a standard error."""
    return share * std_error


def code_allowance(H: float, d: int, xi: float) -> float:
    """x_K = H_K log 2 + log(2d/xi): thm:statistical."""
    return H * math.log(2) + math.log(2 * d / xi)


def process_bound(d: int, n: int, G: float, x: float, eif_distance: float) -> float:
    """sqrt(2x/n) ||D(p^K) - D(p_0)|| + 4 G sqrt(d) x/(3n): eq:proof-vector-concentration."""
    return math.sqrt(VARIANCE * x / n) * eif_distance + float(ENVELOPE) * G * math.sqrt(d) * x / n


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
