"""What a run proves about its estimate: the terms of thm:statistical, and its distance from convergence.

thm:statistical bounds ||Psi(p^K) - Psi(p_0) - P_n D(p_0)|| by delta + ||R_2|| + a process term + an envelope
term. The last two grow with H_K, the bits that describe how the sample chose the final law. R_2 and the
distance ||D(p^K) - D(p_0)|| in the process term need the truth: the term is stated for the distance
||D(p^K)||, and scales with the share of it that is wrong.

How far the estimate of a run that stopped may be from the estimate at convergence:
Targeting by a regression's fluctuation minimises one convex loss l(eps), whatever its steps: re-centring only
moves the origin. Let g be its gradient where the run stopped, H a lower bound of its Hessian there, and let
a unit step of coordinate k move the link of any record by at most x_k, one coordinate per record. The
logistic loss has |rho'''| <= rho'', so along a step of H-length s the Hessian is at least e^(-M s) H, with
M = max_k x_k sqrt((H^-1)_kk). If a minimum is at H-length s in the direction v,

    0 = v . grad l(eps + s v) >= -lambda + (1 - e^(-M s))/M,   lambda = ||g||_{H^-1},

so that M lambda < 1 implies that there is one, and s <= -log(1 - M lambda)/M. Then coordinate k is within
s sqrt((H^-1)_kk) of its limit, and psi within what its slopes make of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fedtmle.model.linear import invert
from fedtmle.model.problem import ConvergenceBounds
from fedtmle.protocol.codes import gamma_length

HISTORY = 20
ENVELOPE = Fraction(4, 3)  # |X| <= 4G, and l! >= 2 3^(l-2) in the moment series
VARIANCE = 2
LEVEL = 0.05  # xi: the bound holds with probability at least 1 - xi
SMALL = 0.1  # this share of a standard error is negligible
DOUBLE = 64  # bits
NOT_AT_ORIGIN = "the run stopped between the origins of two fluctuations, where no residual is known"
NO_REACH = (
    "the parties know no bound on the curvature between this fit and convergence: that needs a regression's "
    "fluctuation, a bound on the propensity score and rounded sums"
)
TOO_FAR = "the residual is too large for the curvature here to say where the equation holds"


# The history code's length, its price, and tolerances small enough.


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
    """eq:inference-conditions: three numbers that must tend to zero; None if data cannot decide it."""

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


# The terms on one run.


@dataclass(frozen=True, kw_only=True)
class Remainder:
    """The terms of thm:statistical, in the unit of psi; ``std_error`` is the norm of the standard errors.

    ``process`` is for an influence function that is wrong by its own size; ``largest_share`` is the share of
    that at which the process term is a tenth of a standard error. ``rows_needed`` is the n at which the
    envelope term would be a tenth, with the same history. ``process_alone`` and ``envelope_alone`` are the
    terms if the initial fit came from other records, H_init = 0. All about an unknown envelope is None.
    """

    level: float
    initial_bits: int  # H_init: the broadcasts that fix p^0 and the coordinates, to one silo
    history_bits: int  # H_K - H_init
    residual: float
    process: float
    largest_share: float
    envelope_constant: float | None  # G
    envelope: float | None
    rows_needed: float | None
    process_alone: float
    envelope_alone: float | None
    std_error: float
    condition_process: float  # the second of eq:inference-conditions, over the size of D
    condition_envelope: float | None  # the third, over the size of D


def history_of_doubles(updates: int, dim: int) -> int:
    """Return the bits of a history whose accepted eps are sent as doubles, K + 1 by its gamma code."""
    return 2 * (updates + 1).bit_length() - 1 + DOUBLE * updates * dim


def remainder(
    *,
    n: int,
    dim: int,
    initial_bits: int,
    history_bits: int,
    residual: float,
    std_error: float,
    envelope: float | None,
) -> Remainder:
    """Return the terms for n records; ``envelope`` is G, and ||D(p^K)|| is sqrt(n) times ``std_error``."""
    H, size = initial_bits + history_bits, math.sqrt(n) * std_error
    x, alone = (code_allowance(bits, dim, LEVEL) for bits in (H, history_bits))
    process = process_bound(dim, n, 0.0, x, size)
    of_envelope = None if envelope is None else process_bound(dim, n, envelope, x, 0.0)
    conditions = inference_conditions(n=n, d=dim, H=H, G=envelope or 0.0, eif_distance=size)
    needed = None
    if of_envelope is not None and std_error > 0:
        needed = (
            n * (of_envelope / (SMALL * std_error)) ** 2
        )  # the term falls as 1/n, the standard error as 1/sqrt(n)
    return Remainder(
        level=LEVEL,
        initial_bits=initial_bits,
        history_bits=history_bits,
        residual=residual,
        process=process,
        largest_share=SMALL * std_error / process if process > 0 else math.inf,
        envelope_constant=envelope,
        envelope=of_envelope,
        rows_needed=needed,
        process_alone=process_bound(dim, n, 0.0, alone, size),
        envelope_alone=None if envelope is None else process_bound(dim, n, envelope, alone, 0.0),
        std_error=std_error,
        condition_process=(conditions.process or 0.0) / size if size > 0 else math.nan,
        condition_envelope=None if envelope is None or not size > 0 else conditions.envelope / size,
    )


# The distance of a run that stopped from convergence.


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Bounds on |psi_k - its value at convergence|, or the reason why there are none."""

    bounds: tuple[float, ...] | None = None
    reason: str | None = None


def root_distance(decrement: float, rate: float) -> float:
    """Return -log(1 - M lambda)/M, the largest H-length to the minimum; infinite if M lambda >= 1."""
    if rate * decrement >= 1:
        return math.inf
    return -math.log1p(-rate * decrement) / rate if rate else decrement


def distance_to_convergence(residuals: Sequence[float], known: ConvergenceBounds | None) -> Distance:
    """Return the distance of psi from its value at convergence, where |g_k| <= ``residuals[k]``."""
    if not all(map(math.isfinite, residuals)):
        return Distance(reason=NOT_AT_ORIGIN)
    inverse = None if known is None else invert(np.array(known.curvature))
    if known is None or inverse is None:
        return Distance(reason=NO_REACH)
    sizes = np.sqrt(np.diag(inverse))
    g = np.array(residuals)
    decrement = math.sqrt(float(g @ np.abs(inverse) @ g))
    rate = float((np.array(known.covariates) * sizes).max())
    length = root_distance(decrement, rate)
    if not math.isfinite(length):
        return Distance(reason=TOO_FAR)
    return Distance(bounds=tuple((np.array(known.slopes) @ (length * sizes)).tolist()))
