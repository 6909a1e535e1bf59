"""thm:statistical and cor:inference: the length of the history code, and tolerances that are small enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedtmle.protocol.codes import gamma_length

HISTORY = 20


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
