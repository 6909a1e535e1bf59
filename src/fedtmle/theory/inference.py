"""cor:inference and its proof (S.2.3): tolerances below the order of the sampling error, and their cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedtmle.theory.statistical import code_allowance, remainder_bound


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
