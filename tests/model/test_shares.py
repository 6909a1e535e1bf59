"""The share of noise of each silo, and what sharing loses."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fedtmle.model.budget import share_variance, sharing_loss


def test_shares_of_those_who_do_not_collude_add_up() -> None:
    variance = Fraction(1000)
    assert share_variance(variance, 10, 3) * 7 == variance
    assert share_variance(variance, 1, 0) == variance


def test_the_loss_by_sharing_is_that_of_the_theorem() -> None:
    """Kairouz, Liu, Steinke, theorem 1: tau = 10 sum_k exp(-2 pi^2 v k / (k + 1)), the loss d tau / 4."""
    for share, silos, lanes in ((0.5, 3, 7), (1.0, 10, 100), (2.0, 50, 3)):
        tau = 10 * sum(math.exp(-2 * math.pi**2 * share * k / (k + 1)) for k in range(1, silos))
        bound = float(sharing_loss(Fraction(share), silos, lanes))
        assert lanes * tau / 4 <= bound
    assert sharing_loss(Fraction(10**12), 10, 100) < Fraction(1, 10**60)
    assert sharing_loss(Fraction(1), 1, 100) == 0


def test_the_sum_of_shares_is_nearly_one_discrete_gaussian() -> None:
    """The divergence of the sum of two from one of twice the variance, by convolution, is in the bound."""
    share, reach = 0.5, 60
    x = np.arange(-reach, reach + 1)

    def law(variance: float) -> np.ndarray:
        weight = np.exp(-(x**2) / (2 * variance))
        return weight / weight.sum()

    both = np.convolve(law(share), law(share), mode="same")
    one = law(2 * share)
    central = np.abs(x) <= 5  # beyond, both are zero to rounding
    ratio = np.abs(np.log(both[central] / one[central])).max()
    tau = 10 * math.exp(-(math.pi**2) * share)
    assert 1e-4 < ratio <= tau
