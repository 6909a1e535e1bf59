"""thm:communication and its proof (S.2.1): rounds, bits, and what each is derived from.

In whitened coordinates the theorem holds, verbatim, for the target C Psi: every gradient, beta, kappa
and G is that of C g, and delta is the working tolerance over b >= ||C^-1|| (`scaled_tolerance`).
Constants are named once, so that a test can replace one and see another test fail.
"""

from __future__ import annotations

import math
from fractions import Fraction

from fedtmle.protocol.lattice import Lattice

DECREASE = Fraction(1, 6)  # share of ||g~||^2/beta that a rounded step keeps
ENERGY = 6
STEPS = Fraction(32, 3)
ROUNDS = Fraction(64, 3)
FINEST = Fraction(1, 8)  # and above this
ROUND_BITS, LOG_BITS = 8, 4  # for one coordinate in one round, over both links of a silo
UNIVERSAL_BITS = 256


def scaled_tolerance(lattice: Lattice) -> float:
    """delta/b: the tolerance of the theorems in the run's coordinates."""
    return math.sqrt(lattice.scaled_delta_squared)


def residual_bound(beta: float, eps_norm: float, gradient_norm: float) -> float:
    """r^k <= beta ||eps^k|| + ||grad l_k(eps^k)||: section 2.3."""
    return beta * eps_norm + gradient_norm


# Code lengths.


def fixed_width_bits(G: float, h: float) -> int:
    """b = ceil(log2(2 ceil(G/h) + 1)), exactly: the bits that number 0..2 ceil(G/h)."""
    return (2 * math.ceil(G / h)).bit_length()


def fixed_width_cost(M: int, d: int, b: int, R: int) -> int:
    """2 M d b R + 2 M R: the absolute protocol at fixed width."""
    return 2 * M * d * b * R + 2 * M * R


# Descent, energy, steps and rounds.


def step_decrease(norm: float, beta: float) -> float:
    """||g~||^2/(6 beta): the least decrease of a rounded step once ||g~|| > 3 delta/4."""
    return float(DECREASE) * norm**2 / beta


def energy_bound(beta: float, Delta: float) -> float:
    """sum over steps of ||g~||^2 <= 6 beta Delta: eq:proof-energy-and-steps."""
    return ENERGY * beta * Delta


def step_bound(beta: float, Delta: float, delta: float) -> float:
    """S <= 32 beta Delta/(3 delta^2): eq:proof-energy-and-steps."""
    return float(STEPS) * beta * Delta / delta**2


def round_bound(beta: float, Delta: float, delta: float) -> float:
    """R <= 1 + 64 beta Delta/(3 delta^2): eq:main-communication."""
    return 1 + float(ROUNDS) * beta * Delta / delta**2


def one_step_round_bound(beta: float, Delta: float, delta: float) -> float:
    """R = S + 1 <= 1 + 32 beta Delta/(3 delta^2) where every step is an update at once.

    The descent of S.2.1 is that of single steps, and re-centring keeps the loss, so S is bounded as there;
    every query is an origin, so no other round is needed. A silo's gradients then differ by
    kappa ||eps^k|| = (kappa/beta) ||g~_r|| from round to round, less than (2 + kappa/beta) ||g~_r||, so the
    bounds of variation, bits and history hold as they stand.
    """
    return 1 + step_bound(beta, Delta, delta)


# Path length and variation.


def variation_bound(beta: float, kappa: float, Delta: float, S: int) -> float:
    """sum_r ||g_{m,r} - g_{m,r-1}|| <= (2 + kappa/beta) sqrt(6 beta Delta S): eq:variation-summary."""
    return (2 + kappa / beta) * math.sqrt(ENERGY * beta * Delta * S)


# Bits.


def bits_at_spacing(M: int, d: int, R: int, G: float, h: float, variation: float) -> float:
    """8 M d R + 4 M d log2(2 + G/h) + 4 M d (R-1) log2(3 + V/((R-1) h sqrt(d))): eq:proof-pathwise-bits."""
    later = 0.0
    if R > 1:
        later = LOG_BITS * M * d * (R - 1) * math.log2(3 + variation / ((R - 1) * h * math.sqrt(d)))
    return ROUND_BITS * M * d * R + LOG_BITS * M * d * math.log2(2 + G / h) + later


def pathwise_bit_bound(
    M: int, d: int, R: int, S: int, beta: float, kappa: float, Delta: float, G: float, delta: float
) -> float:
    """`bits_at_spacing` with V = (2 + kappa/beta) sqrt(6 beta Delta S) and 1/h < 8 sqrt(d)/delta.

    eq:pathwise-bit-bound.
    """
    h = float(FINEST) * delta / math.sqrt(d)
    return bits_at_spacing(M, d, R, G, h, variation_bound(beta, kappa, Delta, S))


def planned_bit_bound(
    M: int, d: int, beta: float, kappa: float, Delta: float, G: float, delta: float
) -> float:
    """M d {8 + 512 a/3 + 4 log2(2 + 8x) + (256 a/3) log2(3 + 3 sqrt(2) c)}, before the run.

    a = beta Delta/delta^2, c = 2 + kappa/beta, x = G sqrt(d)/delta: the last line of S.2.1 that keeps
    its constants apart, so the sharpest bound that knows neither R nor S.
    """
    a, c, x = beta * Delta / delta**2, 2 + kappa / beta, G * math.sqrt(d) / delta
    later = float(ROUNDS) * a * (ROUND_BITS + LOG_BITS * math.log2(3 + 3 * math.sqrt(2) * c))
    return M * d * (ROUND_BITS + LOG_BITS * math.log2(2 + x / float(FINEST)) + later)


def universal_bit_bound(
    M: int, d: int, beta: float, kappa: float, Delta: float, G: float, delta: float
) -> float:
    """256 M d {(1 + a) log2(4 + kappa/beta) + log2(2 + G sqrt(d)/delta)}: eq:main-communication."""
    a = beta * Delta / delta**2
    first = math.log2(2 + G * math.sqrt(d) / delta)
    return UNIVERSAL_BITS * M * d * ((1 + a) * math.log2(4 + kappa / beta) + first)
