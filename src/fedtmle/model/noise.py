"""Discrete Gaussian noise, drawn exactly: integers and rationals only, from random integers to the draw.

The discrete Gaussian with variance parameter v is the law on the integers with P(x) proportional to
exp(-x^2 / 2v). The sampler is the rejection sampler of Canonne, Kamath and Steinke (2020), algorithms 1 to 3:
a discrete Laplace draw is accepted with a probability exp(-gamma), gamma rational, and a coin of that
probability is tossed with random integers below a bound alone. No floating point is used, so that a draw has
exactly this law whatever the processor. ``below(k)`` returns a uniform integer in [0, k): `secrets.randbelow`
at a silo, a seeded generator in a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

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


def share_variance(variance: Fraction, silos: int, colluders: int) -> Fraction:
    """Return the variance of one silo's share of noise.

    The shares of all silos but ``colluders`` add up to ``variance``: silos that pool what they know can take
    their own shares away, and no others.
    """
    return variance / (silos - colluders)


def sharing_loss(share: Fraction, silos: int, lanes: int) -> Fraction:
    """Return a bound of the zCDP that is lost because a sum of discrete Gaussians is not one of them.

    By Kairouz, Liu and Steinke (2021), theorem 1, the sum of M shares of variance v in d lanes satisfies
    rho-zCDP with rho = Delta^2 / (2 M v) + d tau / 4, where

        tau = 10 sum_{k=1}^{M-1} exp(-2 pi^2 v k / (k + 1))  <=  10 (M - 1) exp(-pi^2 v).
    """
    if silos < 2:
        return Fraction(0)
    halvings = min(12 * share.numerator // share.denominator, 256)  # exp(-pi^2 v) < 2^(-12 v)
    return Fraction(10 * (silos - 1) * lanes, 4 << halvings)
