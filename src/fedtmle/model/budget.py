"""Differential privacy and randomness: budgets, shares of noise, and random draws by public rules."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from itertools import count
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray

from fedtmle.defects import expect_integer, expect_number
from fedtmle.errors import InputError
from fedtmle_core import kernels
from fedtmle_core.types import Array

# Budgets of differential privacy: zero-concentrated, which add up, and (epsilon, delta), which people state.
#
# A mechanism is rho-zCDP if the Renyi divergence of order alpha between its answers on two neighbouring data
# sets is at most rho alpha, for every alpha > 1 (Bun and Steinke, 2016). Neighbours differ in one record,
# which has another value; n is public. Budgets of several mechanisms add up. By Canonne, Kamath and Steinke
# (2020), proposition 12, rho-zCDP implies (epsilon, delta)-privacy for every alpha > 1 with
#
#     delta = exp((alpha - 1)(alpha rho - epsilon)) / (alpha - 1) * (1 - 1/alpha)^alpha.
#
# All parties derive the noise from these numbers, so they are computed in decimals, whose logarithm and
# exponential are correctly rounded everywhere.

PLACES = 48  # binary places of rho, which is rounded down
DIGITS = 26
OWNER_DELTA = 1e-6  # the delta of the epsilon by which owners limit all studies together
SEARCH = 55  # steps of the golden-section search: to 1e-11 in log(alpha - 1), where the minimum is flat


@lru_cache(maxsize=64)
def epsilon_of(rho: float, delta: float) -> float:
    """Return the least epsilon that rho-zCDP gives at ``delta``."""
    if not rho:
        return 0.0
    with localcontext(prec=DIGITS):
        return float(_conversion(Decimal(rho), Decimal(delta))[0])


@lru_cache(maxsize=64)
def rho_of(epsilon: float, delta: float) -> Fraction:
    """Return the largest rho, rounded down, for which rho-zCDP gives (epsilon, delta)-privacy.

    Newton's method: epsilon is concave in rho, and its slope is the alpha at which the minimum is.
    """
    with localcontext(prec=DIGITS):
        goal, log_delta = Decimal(epsilon), Decimal(delta).ln()
        rho = (
            (goal - log_delta).sqrt() - (-log_delta).sqrt()
        ) ** 2  # by epsilon = rho + 2 sqrt(-rho ln delta)
        for _ in range(8):
            found, alpha = _conversion(rho, Decimal(delta))
            rho += (goal - found) / alpha
        return Fraction(int(rho * 2**PLACES) - 1, 2**PLACES)


def _conversion(rho: Decimal, delta: Decimal) -> tuple[Decimal, Decimal]:
    """Return the minimum of rho alpha + ln(1 - 1/alpha) - ln(delta alpha)/(alpha - 1), and its alpha."""

    def at(log_excess: Decimal) -> Decimal:
        excess = log_excess.exp()  # alpha - 1
        alpha = 1 + excess
        return rho * alpha + (excess / alpha).ln() - (delta * alpha).ln() / excess

    # The minimum is near alpha - 1 = sqrt(ln(1/delta)/rho); there is one in the logarithm of alpha - 1.
    centre = (-delta.ln() / rho).ln() / 2
    low, high = centre - 2, centre + 2
    ratio = (Decimal(5).sqrt() - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = at(left), at(right)
    for _ in range(SEARCH):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = at(right)
    best, place = min((at_left, left), (at_right, right))
    return max(best, Decimal(0)), 1 + place.exp()


@final
@dataclass(frozen=True, kw_only=True)
class Privacy:
    """How much a study may disclose about one person: differential privacy at the level of a record.

    The silos add noise in shares, such that it suffices against the server, the public and ``colluders`` of
    the silos together.

    Parameters
    ----------
    epsilon
        The guarantee's epsilon, for two data sets that differ in one record.
    delta
        The guarantee's delta.
    colluders
        The number of silos that may share what they know.
    gram
        The share of the budget of the first round.
    gradients
        The share of the two rounds that fit the models.
    closing
        The share of the round that estimates.
    server
        "untrusted" needs masked sums. With "trusted" the server may see each silo's sums with that silo's
        share of noise alone, and the guarantee is for everyone else.

    Raises
    ------
    InputError
        A number is out of its range, or the shares do not add up to 1.

    Examples
    --------
    >>> float(ft.Privacy(epsilon=1.0).delta)
    1e-06
    """

    epsilon: float
    delta: float = 1e-6
    colluders: int = 1
    gram: float = 0.15
    gradients: float = 0.1
    closing: float = 0.75
    server: Literal["untrusted", "trusted"] = "untrusted"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta", "gram", "gradients", "closing"):
            expect_number(name, getattr(self, name))
        expect_integer("colluders", self.colluders)
        if not 0.01 <= self.epsilon <= 20:
            raise InputError(f"epsilon: expected a number from 0.01 to 20, not {self.epsilon}")
        if not 1e-12 <= self.delta <= 1e-3:
            raise InputError(f"delta: expected a number from 1e-12 to 0.001, not {self.delta}")
        if self.colluders < 0:
            raise InputError(f"colluders: expected a number of silos, at least 0, not {self.colluders}")
        shares = (self.gram, self.gradients, self.closing)
        if not (min(shares) >= 0.01 and abs(sum(shares) - 1.0) <= 1e-9):
            raise InputError(
                "gram, gradients, closing: expected shares of the budget of at least 0.01 that add up to 1"
            )
        if self.server not in ("untrusted", "trusted"):
            raise InputError(f"server: expected 'untrusted' or 'trusted', not {self.server!r}")

    @property
    def rho(self) -> Fraction:
        """The whole budget, as zCDP."""
        return rho_of(self.epsilon, self.delta)

    @property
    def taken(self) -> Fraction:
        """What a study takes of an owner's budget, as zCDP: all of its rounds, answered or not.

        The last term exceeds the loss by sharing the noise, for up to 2^20 silos and sums
        (`model.budget.sharing_loss`).
        """
        halves = 2 * self.part(self.gradients / 2)
        return self.part(self.gram) + halves + self.part(self.closing) + Fraction(1, 1 << 200)

    @property
    def owners_epsilon(self) -> float:
        """`taken` as an epsilon at the owner's delta, which need not be the study's."""
        return epsilon_of(float(self.taken), OWNER_DELTA)

    def part(self, share: float) -> Fraction:
        """Return a share of the budget, rounded down."""
        return Fraction(int(self.rho * Fraction(share) * 2**PLACES), 2**PLACES)


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


# Random draws by public rules: the same at every party, and for a record whatever silo it is in.
#
# A stream is named by a text, such as a study's seed and what is drawn. The draw of record i is a function of
# the stream and of i alone (a counter-based generator), so that neither the order in which records are
# visited nor their partition into silos changes it. Draws that all parties make are computed without libm.

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def stream_key(name: str) -> int:
    """Return the 64-bit key of a stream, from SHA-256 of its name."""
    return int.from_bytes(hashlib.sha256(f"fedtmle draw:{name}".encode()).digest()[:8], "big")


def uniforms(key: int, numbers: Array) -> Array:
    """Return one draw in (0, 1) for each record number, shape (N,): two rounds of SplitMix64's mixer.

    The numbers are whole and below 2^53. A draw is an odd multiple of 2^-54.
    """
    words = numbers.astype(np.uint64)
    for round_key in (key, key ^ _GOLDEN):
        words = _mixed(words * np.uint64(_GOLDEN) + np.uint64(round_key))
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIXERS:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))


def uniform_stream(key: int) -> Iterator[float]:
    """Yield draws in (0, 1): those of records 0, 1, 2, ..."""
    for number in count():
        yield float(uniforms(key, np.array([float(number)]))[0])


# Wichura (1988), algorithm AS 241: numerator and denominator of each of three pieces, ascending powers.
_CENTRAL = (
    (3.3871328727963666080, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
     2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_MIDDLE = (
    (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
     1.27045825245236838258, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187, 1.67638483018380384940, 6.89767334985100004550e-1,
     1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
     1.05075007164441684324e-9),
)  # fmt: skip
_TAIL = (
    (6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5,
     2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
     2.04426310338993978564e-15),
)  # fmt: skip


def normal_quantile(p: float) -> float:
    """Return the quantile of the standard normal law at p in (0, 1), without libm (AS 241)."""
    q = p - 0.5
    if abs(q) <= 0.425:
        return q * _ratio(_CENTRAL, 0.180625 - q * q)
    r = math.sqrt(-kernels.log(p if q < 0 else 1.0 - p))
    value = _ratio(_MIDDLE, r - 1.6) if r <= 5.0 else _ratio(_TAIL, r - 5.0)
    return -value if q < 0 else value


def _ratio(pair: tuple[tuple[float, ...], tuple[float, ...]], x: float) -> float:
    above, below = (_polynomial(coefficients, x) for coefficients in pair)
    return above / below


def _polynomial(coefficients: tuple[float, ...], x: float) -> float:
    total = 0.0
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total


def normals(draws: Iterator[float], size: int) -> list[float]:
    """Return independent standard normal draws."""
    return [normal_quantile(next(draws)) for _ in range(size)]


def chi_square(draws: Iterator[float], df: float) -> float:
    """Return a draw of chi^2 with df >= 1 degrees of freedom: twice a gamma draw (Marsaglia and Tsang)."""
    shape, boost = df / 2.0, 1.0
    if shape < 1.0:  # gamma(a) = gamma(a + 1) U^(1/a); a is 1/2
        boost, shape = next(draws) ** 2, shape + 1.0
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    while True:
        x = normal_quantile(next(draws))
        v = 1.0 + c * x
        if v <= 0.0:
            continue
        v = v * v * v
        if kernels.log(next(draws)) < 0.5 * x * x + d - d * v + d * kernels.log(v):
            return 2.0 * d * v * boost
