"""Discrete Gaussian noise, drawn exactly: integers and rationals only, from random integers to the draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

# The discrete Gaussian with variance parameter v is the law on the integers with P(x) proportional to
# exp(-x^2 / 2v). The sampler is the rejection sampler of Canonne, Kamath and Steinke (2020), algorithms 1 to
# 3: a discrete Laplace draw is accepted with a probability exp(-gamma), gamma rational, and a coin of that
# probability is tossed with random integers below a bound alone. No floating point is used, so that a draw
# has exactly this law whatever the processor. ``below(k)`` returns a uniform integer in [0, k):
# `secrets.randbelow` at a silo, a seeded generator in a test.

Below = Callable[[int], int]


def discrete_gaussian(variance: Fraction, below: Below) -> int:
    """Return a draw of the discrete Gaussian with variance parameter ``variance`` > 0."""
    t = math.isqrt(variance.numerator // variance.denominator) + 1
    a, b = variance.numerator, variance.denominator
    while True:
        y = _discrete_laplace(t, below)
        # exp(-(|y| - v/t)^2 / 2v) with v = a/b: ((|y| t b - a)^2) / (2 a b t^2).
        if _exp_coin((abs(y) * t * b - a) ** 2, 2 * a * b * t * t, below):
            return y


def _discrete_laplace(t: int, below: Below) -> int:
    """Return a draw with P(x) proportional to exp(-|x|/t), t a positive integer."""
    while True:
        u = below(t)
        if not _exp_coin(u, t, below):
            continue
        v = 0
        while _exp_coin(1, 1, below):
            v += 1
        x = u + t * v
        if below(2):
            if x:
                return -x
        else:
            return x


def _exp_coin(numerator: int, denominator: int, below: Below) -> bool:
    """Return True with probability exp(-numerator/denominator)."""
    while numerator > denominator:
        if not _small_exp_coin(1, 1, below):
            return False
        numerator -= denominator
    return _small_exp_coin(numerator, denominator, below)


def _small_exp_coin(numerator: int, denominator: int, below: Below) -> bool:
    """Return True with probability exp(-gamma), gamma = numerator/denominator at most 1.

    With K the first k at which a coin of probability gamma/k fails, P(K odd) is the series of exp(-gamma).
    """
    k = 1
    while below(denominator * k) < numerator:
        k += 1
    return k % 2 == 1
