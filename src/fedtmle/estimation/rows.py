"""The Q of effects: a regression for each arm, moved along the clever covariates of each mean.

Components are in blocks, and each block moves a Q of its own. On the unit scale of the outcome, with k over
the coordinates of the block and Delta in H,

    link Q_a(eps) = link Q_a + sum_k eps_k X_k(a),   X_k(a) = -width sum_r L_kr H_r(a, W),

with a logistic (or linear, by choice) loss. The score at eps = 0 is L times the first part of D; the second
has pooled mean exactly zero, because psi is the pooled mean of m. X does not depend on Q, so that a law is
the sum of what was accepted. The clever covariates of one block are never both other than zero, so that the
estimate of a component is the same whichever others are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from fedtmle.estimation.effect import EffectTerms
from fedtmle.estimation.eif import EIF, Influence
from fedtmle.estimation.fluctuated import AbstractFluctuated, Law
from fedtmle.model.linear import multiply
from fedtmle.model.problem import Calibration, ConvergenceBounds
from fedtmle_core import kernels
from fedtmle_core.blocks import Intervals, Layer, size
from fedtmle_core.terms import ONE, ZERO, Apply, Kept, Term, product, total
from fedtmle_core.types import Array, Family

Q_MARGIN = 1e-6  # predictions are truncated this far inside the outcome's bounds, on the unit scale
LINEAR_REACH = 16.0  # linear predictions are kept within this many widths of the outcome's bounds
LINK_REACH = 64.0  # a predicted logit moved further than this is a runaway fluctuation, not a fit


class MovedPart(NamedTuple):
    """A block: the components whose means are those of one moved Q, and the coordinates that move it."""

    components: tuple[int, ...]
    coordinates: tuple[int, ...]


def initial(prediction: Term, *, fluctuates: bool) -> Term:
    """Return the initial Q of an arm on the unit scale, truncated if it is moved on the logistic scale."""
    if fluctuates:
        return Kept(Apply("clip", prediction, low=Q_MARGIN, high=1.0 - Q_MARGIN))
    return Kept(Apply("clip", prediction, low=1.0 - LINEAR_REACH, high=LINEAR_REACH))


@final
@dataclass(frozen=True, kw_only=True)
class FluctuatedArms(AbstractFluctuated):
    """The Q of an effect; ``blocks`` lists the components that share a moved Q, none: all of them do.

    ``as_weight`` puts H into the weight of the loss, and its sign into the covariate.
    """

    effect: EffectTerms
    labels: tuple[str, ...]
    combination: tuple[tuple[float, ...], ...]
    blocks: tuple[tuple[int, ...], ...] = ()
    is_linear: bool = False
    as_weight: bool = False
    is_common = True

    @property
    def outcome_bounds(self) -> tuple[float, float]:
        return self.effect.outcome_bounds

    @property
    def family(self) -> Family:
        return Family.GAUSSIAN if self.is_linear else Family.LOGISTIC

    @cached_property
    def parts(self) -> tuple[MovedPart, ...]:
        """The blocks, each with its components and its coordinates."""
        blocks = self.blocks or (tuple(range(len(self.combination[0]))),)
        return tuple(
            MovedPart(block, tuple(k for k, row in enumerate(self.combination) if any(row[r] for r in block)))
            for block in blocks
        )

    @cached_property
    def links(self) -> tuple[Term, ...]:
        """The link of the initial Q, per arm."""
        if self.is_linear:
            return self.effect.q
        return tuple(Kept(Apply("logit", q)) for q in self.effect.q)

    @cached_property
    def _link_taken(self) -> Term:
        return Kept(self.effect.at_arm(self.links))

    def layers(self, law: Law) -> tuple[Layer, ...]:
        return tuple(self._layer(law, part) for part in self.parts)

    def _layer(self, law: Law, part: MovedPart) -> Layer:
        columns: list[Term] = [ZERO] * self.dim
        factors = [1.0] * self.dim
        for k in part.coordinates:
            shares = {r: -self.width * share for r, share in enumerate(self.combination[k]) if share}
            if len(shares) == 1:  # a multiple of one covariate stays where that is
                ((r, factors[k]),) = shares.items()
                columns[k] = self._covariate(self.effect.H[r])
            else:
                columns[k] = Kept(
                    total([self._covariate(self.effect.H[r]) for r in shares], list(shares.values()))
                )
        weight = self.effect.weights
        if self.as_weight:
            weight = Kept(product(weight, total([self.effect.H[r] for r in part.components])))
        offset = self._moved(self._link_taken, self.shifts(law, part), dict(enumerate(self.effect.H)))
        return Layer(X=tuple(columns), factors=tuple(factors), offset=offset, y=self.effect.y, w=weight)

    def eif(self, law: Law) -> EIF:
        influences: dict[int, Influence] = {}
        for part in self.parts:
            q = self.means(law, part)
            residual = self.effect.y - self.effect.at_arm(q)
            for r in part.components:
                d = self.effect.d[r]
                mean = total([product(share, each) for share, each in zip(d, q, strict=True)])
                influences[r] = Influence(
                    score=product(self.effect.H[r], residual), mean=mean, v=self.effect.v[r]
                )
        return EIF.of(
            [influences[r] for r in range(len(influences))],
            weight=self.effect.weights,
            width=self.width,
            cluster=self.effect.cluster,
        )

    def means(self, law: Law, part: MovedPart) -> tuple[Term, ...]:
        """Return Q_a of one block at the law on the unit scale, per arm."""
        shifts = self.shifts(law, part)
        if not shifts:
            return self.effect.q
        moved = []
        for a, link in enumerate(self.links):
            H = {r: self._per_arm(r, a) for r in shifts}
            if all(each == ZERO for each in H.values()):
                moved.append(self.effect.q[a])
                continue
            eta = self._moved(link, shifts, H)
            moved.append(eta if self.is_linear else Apply("expit", eta))
        return tuple(moved)

    def factual(self, law: Law) -> Term:
        """Return Q(A, W) at the law on the unit scale, that of the overall means if there are several Q."""
        return self.effect.at_arm(self.means(law, self.parts[0]))

    def shifts(self, law: Law, part: MovedPart) -> dict[int, float]:
        """Return the factors of the components' H on the link scale at the law, unless they are 0."""
        moved = law.total(self.dim).tolist()
        factors = {
            r: -self.width * math.fsum(self.combination[k][r] * moved[k] for k in part.coordinates)
            for r in part.components
        }
        return {r: factor for r, factor in factors.items() if factor}

    def _moved(self, link: Term, shifts: Mapping[int, float], H: Mapping[int, Term]) -> Term:
        if not shifts:
            return link
        return total([link, *(self._covariate(H[r]) for r in shifts)], [1.0, *shifts.values()])

    def _per_arm(self, r: int, a: int) -> Term:
        """Return H_r(a, W); of a weight only its sign matters, and that is 1 for who has the arm."""
        return ONE if self.as_weight and self.effect.d[r][a] == ONE else self.effect.H_arm[r][a]

    def _covariate(self, H: Term) -> Term:
        """Return the covariate of a component: H or, if H is the weight, its sign."""
        return Apply("sign", H) if self.as_weight and H not in (ZERO, ONE) else H

    def admits(self, eps: Array) -> bool:
        return bool((np.abs(eps) * self.width <= LINK_REACH).all())

    def bounds(self, law: Law, known: Calibration, intervals: Intervals) -> ConvergenceBounds | None:
        """Return bounds from the curvature at the start.

        The logistic loss has |third derivative| <= second derivative, so that the Hessian at the law is at
        least e^-s times that at the start, s the largest move of a record's link. And m_r moves by rho'' H_r
        for a unit of the link; psi_r is a mean of m_r.
        """
        largest = 1.0 if self.as_weight else max(size(intervals[H]) for H in self.effect.H)
        widths = self.width * np.abs(self.L).max(axis=1)
        x = np.zeros(self.dim) if self.is_linear else widths * largest
        farthest = float((x * np.abs(law.total(self.dim))).max())
        start = np.array(known.curvature) - known.rounding * np.eye(self.dim)
        bend = 1.0 if self.is_linear else 0.25
        slopes = bend * largest * self.width**2 * multiply(np.abs(self.L), np.abs(self.L).T)
        return ConvergenceBounds(
            curvature=tuple(map(tuple, (kernels.exp(-farthest) * start).tolist())),
            covariates=tuple(x.tolist()),
            slopes=tuple(map(tuple, slopes.tolist())),
        )


def contrast_rows(populations: Sequence[object], contrast: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Return L with one contrast for each population."""
    zero = (0.0,) * len(contrast)
    return tuple(
        tuple(w for other in populations for w in (contrast if other == own else zero)) for own in populations
    )
