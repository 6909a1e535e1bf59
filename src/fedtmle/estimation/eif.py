"""The efficient influence function of means, its closing sums, and the estimate from their totals.

Whatever a study is of (effects at one point in time, times to an event, treatment over time), each of its
means has an EIF of the form

    D_r = u_r - t_r (psi_r - low),   u_r = w width {sum of H_r (y - Q) + v_r/P(v_r) m_r},   t_r = w v_r/P(v_r)

with m_r its plug-in, and `Influence` has its three parts. People of one cluster are added first. Sums of u,
of t, of w v/P(v) width m, of the products u u, u t and t t, and the number of clusters make psi and its
covariance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import final

from fedtmle.model.linear import congruence, multiply
from fedtmle.model.problem import Estimate
from fedtmle.targets.effects.moments import ClosingLayout, estimate_components
from fedtmle_core.blocks import Intervals, Moments, size
from fedtmle_core.exact import Sums
from fedtmle_core.terms import ONE, Apply, ByCluster, Term, product
from fedtmle_core.types import Array


@final
@dataclass(frozen=True, kw_only=True)
class Influence:
    """The parts of one mean's EIF, on the unit scale of the outcome.

    ``score`` is the sum of H (y - Q) over a person's records, ``mean`` the plug-in m, ``v`` is v / P(v).
    """

    score: Term
    mean: Term
    v: Term


@final
@dataclass(frozen=True)
class EIF:
    """The columns of the closing sums, one of each kind per mean."""

    u: tuple[Term, ...]
    t: tuple[Term, ...]
    m: tuple[Term, ...]
    cluster: str | None = None
    scores: tuple[Term, ...] = ()  # of u without its plug-in: w width sum of H (y - Q)

    @classmethod
    def of(
        cls, influences: Sequence[Influence], *, weight: Term, width: float, cluster: str | None = None
    ) -> EIF:
        """Return the columns of several means, of people of one weight."""
        t = tuple(product(weight, each.v) for each in influences)
        m = tuple(
            product(each, influence.mean) * width for each, influence in zip(t, influences, strict=True)
        )
        scores = tuple(product(weight, each.score) * width for each in influences)
        u = tuple(s + p for s, p in zip(scores, m, strict=True))
        return cls(u=u, t=t, m=m, cluster=cluster, scores=scores)

    @property
    def dim(self) -> int:
        """How many means there are."""
        return len(self.u)

    def rows(self, psi: Sequence[float]) -> tuple[Term, ...]:
        """Return D_r of each mean, where psi_r - low is given."""
        return tuple(u - t * value for u, t, value in zip(self.u, self.t, psi, strict=True))

    def envelope(self, intervals: Intervals) -> float:
        """Return a public bound of |D_r| over everyone, where |psi_r - low| is at most the width."""
        return max(size(intervals[u]) + size(intervals[m]) for u, m in zip(self.u, self.m, strict=True))

    @cached_property
    def closing(self) -> Closing:
        """The closing sums."""
        return Closing.of(self)


@final
@dataclass(frozen=True)
class Closing:
    """The block of closing sums: sum j of `ClosingLayout` is number ``places[j]`` of the block.

    Sums that are the same by their terms are asked once: without weights t = 1, and u t = u.
    """

    dim: int
    block: Moments
    places: tuple[int, ...]

    @classmethod
    def of(cls, eif: EIF) -> Closing:
        """Return the closing sums of an EIF, over people or clusters."""
        cluster = eif.cluster
        columns: list[Term] = [*eif.u, *eif.t, *eif.m]
        first: Term = ONE  # of the people of a cluster, one
        if cluster is not None:
            columns = [ByCluster(cluster, column) for column in columns]
            first = first_of(cluster)
        asked: dict[Term, int] = {}
        products: dict[tuple[int, ...], int] = {}

        def place(*factors: Term) -> int:
            kept = [factor for factor in factors if factor != ONE] or [ONE]
            key = tuple(sorted(asked.setdefault(factor, len(asked)) for factor in kept))
            return products.setdefault(key, len(products))

        listed = [place(*(columns[j] for j in term)) for term in ClosingLayout(eif.dim).terms()]
        listed.append(place(first))
        return cls(eif.dim, Moments(columns=tuple(asked), products=tuple(products)), tuple(listed))

    def read(self, totals: Array) -> Sums:
        """Return the totals of the block as closing sums."""
        return exact([totals[place] for place in self.places])

    def estimate(self, totals: Array, L: Array, low: float, *, one_step: bool = False) -> Estimate:
        """Return psi = L (means) and its covariance; ``low`` is that of the outcome's bounds."""
        return estimate(self.read(totals), L, low, one_step=one_step)


def estimate(
    closing: Sums, L: Array, low: float, *, one_step: bool = False, divides_by_n: bool = False
) -> Estimate:
    """Return psi = L (means) and its covariance from closing sums; ``one_step`` adds the mean of the EIF.

    The covariance is divided by the number of people (or clusters) less one, or by their number.
    """
    means, covariance = estimate_components(closing, L.shape[1], one_step=one_step)
    if divides_by_n:
        units = int(ClosingLayout(L.shape[1]).read(closing).clusters)
        covariance = covariance * ((units - 1) / units)
    psi = low * L.sum(axis=1) + multiply(L, means[:, None])[:, 0]
    return Estimate(psi=psi, covariance=congruence(L, covariance))


def first_of(cluster: str) -> Term:
    """Return 1 for one person of each cluster, else 0."""
    return Apply("step", ByCluster(cluster, ONE), low=1.0)


def exact(values: Sequence[float] | Array) -> Sums:
    """Return floats as sums on a grid of their own, without rounding."""
    ratios = [Fraction(float(value)) for value in values]
    shifts = tuple(ratio.denominator.bit_length() - 1 for ratio in ratios)
    return Sums(tuple(ratio.numerator for ratio in ratios), shifts)
