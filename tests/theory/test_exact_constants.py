"""Universal constants by exact fractions, from the two numbers that Algorithm 4 chooses: 3/4 and 1/4.

Runs cannot check these (`MATH`: realised rounds are up to 60,000 times below), so each is derived again.
"""

from __future__ import annotations

from fractions import Fraction
from math import factorial, isqrt

from fedtmle.protocol.fits import AVERAGE_STEPS
from fedtmle.theory import communication as c
from fedtmle.theory import personalized as p
from fedtmle.theory import statistical as s
from fedtmle_paper import lemmas as lem

THRESHOLD, ROUNDING = Fraction(3, 4), Fraction(1, 4)  # eq. (protocol-action); h sqrt(d) <= delta/4


def test_the_certificate_splits_the_tolerance() -> None:
    assert THRESHOLD + ROUNDING == 1
    assert (lem.THRESHOLD, lem.COARSEST) == (THRESHOLD, ROUNDING)
    assert c.FINEST == ROUNDING / 2  # h is a power of two, so within a factor two of the coarsest


def test_descent_energy_steps_and_rounds() -> None:
    # ||g~||^2/(2 beta) (1 - 2 h sqrt(d)/||g~||) with ||g~|| > 3 delta/4
    assert Fraction(1, 2) * (1 - 2 * ROUNDING / THRESHOLD) == c.DECREASE == Fraction(1, 6)
    assert c.DECREASE * THRESHOLD**2 == lem.DECREASE_FLOOR == Fraction(3, 32)
    assert 1 / c.DECREASE == c.ENERGY == 6
    assert 1 / lem.DECREASE_FLOOR == c.STEPS == Fraction(32, 3)
    assert 2 * c.STEPS == c.ROUNDS == Fraction(64, 3)  # R = S + K + 1 <= 2S + 1
    assert c.ENERGY * c.STEPS == lem.PATH_LENGTH**2 == 64
    assert isqrt(64) == lem.PATH_LENGTH


def test_bits_of_one_round() -> None:
    # |enc(a)| = 2 floor(log2 iota) + 1 <= 1 + 2 log2(2|a| + 1) <= 3 + 2 log2(1 + |a|)
    assert (lem.CODE_BASE, lem.CODE_RATE) == (1 + 2, 2)
    assert c.ROUND_BITS == 2 * lem.CODE_BASE + 2  # up, down and at most two bits of control per coordinate
    assert c.LOG_BITS == 2 * lem.CODE_RATE


def test_the_universal_constant_of_bits() -> None:
    """The last chain of S.2.1 by coefficients, with L = log2(c + 2) >= 2 and X = log2(2 + x) >= 1."""
    flat = c.ROUND_BITS * c.ROUNDS  # 512/3, of a
    logarithmic = c.LOG_BITS * c.ROUNDS  # 256/3, of a log2(3 + 3 sqrt(2) c) <= 2 a L
    assert (flat, logarithmic) == (Fraction(512, 3), Fraction(256, 3))
    assert 8**2 * 6 / c.ROUNDS == 18  # A/sqrt(u) = 8 c sqrt(6a/u) = 3 sqrt(2) c at u = 64 a/3
    assert 2 * 6**2 <= 13**2  # (c + 2)^2 - (3 + 3 sqrt(2) c) = (c - 2)(c + 6 - 3 sqrt(2)) + 13 - 6 sqrt(2)
    of_a = flat / 2 + 2 * logarithmic  # flat <= flat L/2
    assert of_a == c.UNIVERSAL_BITS == 256
    constant = c.ROUND_BITS + c.LOG_BITS * 3  # log2(2 + 8x) <= 3 + X
    assert constant == 20
    assert constant <= c.UNIVERSAL_BITS * 2  # covered by 256 L
    assert c.LOG_BITS <= c.UNIVERSAL_BITS  # covered by 256 X


def test_history_constants() -> None:
    assert lem.PATH_LENGTH / c.FINEST == lem.HISTORY_SUM == 64
    # 2 log2(K+1) <= 2 K d, 3 K d, and 2 K d (6 + log2(2 + u)); log2(2 + u) >= 1
    assert lem.HISTORY_SUM == 2**6  # log2(1 + 64u) <= 6 + log2(2 + u)
    flat = 2 + 3 + 2 * 6
    assert flat == 17
    assert flat + 2 == lem.HISTORY_RATE == 19
    assert lem.HISTORY_RATE + 1 == s.HISTORY == 20


def test_moment_series_gives_the_envelope_constant() -> None:
    for order in range(2, 30):
        assert factorial(order) >= 2 * 3 ** (order - 2)
    assert factorial(3) == 2 * 3  # attained, so 3 cannot be larger
    assert Fraction(2 + 2, 3) == s.ENVELOPE  # |X| <= |f| + P_0|f| <= 4G, over 3
    assert s.VARIANCE == 2


def test_fourth_order_terms() -> None:
    """eq. (proof-retire-average-identity): 1/3 gradient, 1/6 curvature, and two fourth-order remainders."""
    gradient, curvature = Fraction(1, 3), Fraction(1, 6)
    in_pair = {"gradient": 2, "hessian": 1}  # eq. (proof-retire-pair-curvature) after averaging
    kernel_pair = Fraction(1, 2) * 2 * _beta_integral(1, 1)  # (1/2) int t(1-t) 2 beta_4
    assert kernel_pair == Fraction(1, 6)
    assert gradient + curvature * in_pair["gradient"] == p.GRADIENT_TERM == Fraction(2, 3)
    assert curvature * in_pair["hessian"] == p.CURVATURE_TERM == Fraction(1, 6)
    remainder = Fraction(1, 6) * _beta_integral(1, 2) * 2  # sum alpha ||u||^4 <= 2 V_4
    assert remainder == Fraction(1, 36)
    assert curvature * kernel_pair + remainder == p.FOURTH_TERM == Fraction(1, 18)


def test_other_constants_of_section_4_4() -> None:
    # The union bound spends xi: 2 M (M-1) N exp(-zeta^2/8) <= xi/2 with zeta^2 = 8 log(4 M^2 N/xi).
    assert lem.ZETA_FACTOR == 2 * 2**2  # exp(-t^2/(2s)) at t = zeta sqrt(s)/2: half of zeta pays for covering
    assert lem.ZETA_UNION == 4
    assert p.QUADRATIC == p.GAP == _beta_integral(1, 0) == Fraction(1, 2)  # int_0^1 t dt
    assert Fraction(1, 2) * Fraction(1, 2) ** 2 == p.LATTICE_GAP  # beta/2 (sqrt(d) lambda/2)^2
    assert Fraction(1, 2) == lem.LATTICE_SCORE
    assert Fraction(1, 2) + Fraction(1, 2) / AVERAGE_STEPS == p.LATTICE_OFFSET


def _beta_integral(a: int, b: int) -> Fraction:
    """int_0^1 t^a (1-t)^b dt."""
    return Fraction(factorial(a) * factorial(b), factorial(a + b + 1))
