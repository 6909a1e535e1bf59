"""Budgets of differential privacy: zero-concentrated, which add up, and (epsilon, delta), which people state.

A mechanism is rho-zCDP if the Renyi divergence of order alpha between its answers on two neighbouring data
sets is at most rho alpha, for every alpha > 1 (Bun and Steinke, 2016). Neighbours differ in one record, which
has another value; n is public. Budgets of several mechanisms add up. By Canonne, Kamath and Steinke (2020),
proposition 12, rho-zCDP implies (epsilon, delta)-privacy for every alpha > 1 with

    delta = exp((alpha - 1)(alpha rho - epsilon)) / (alpha - 1) * (1 - 1/alpha)^alpha.

All parties derive the noise from these numbers, so they are computed in decimals, whose logarithm and
exponential are correctly rounded everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import lru_cache
from typing import Literal, final

from fedtmle.errors import InputError
from fedtmle.model.arguments import expect_integer, expect_number

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
        (`model.noise.sharing_loss`).
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
