"""Overlap: whose weights are truncated, and how many people the weights behind each mean count as."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.errors import FitError
from fedtmle.estimation.diagnostics.base import AbstractDiagnostic, Pool
from fedtmle.targets.diagnostics import Overlap
from fedtmle_core.blocks import Block, Cells, Moments
from fedtmle_core.terms import ONE, Term
from fedtmle_core.types import Array

# An effective sample size is shown with three digits, and so are the other ratios of these sums. H has mean
# 1 or so, and its square a larger one: errors of this size in both means are below half a unit of the fourth.
WEIGHT_ERROR = 2e-5


@final
@dataclass(frozen=True, kw_only=True)
class WeightOverlap(AbstractDiagnostic[Overlap]):
    """(sum H)^2 / sum H^2 of each mean's weights H, their mean squares and largest shares; truncated people.

    ``weights`` are those of people times 1/probability, at the treatment taken, 0 for those who do not follow
    or are not observed: one a mean, or one a mean and period. ``truncated`` marks people, per arm or rule.
    """

    pool: Pool
    weights: tuple[Term, ...]
    ceilings: tuple[float, ...]  # public bounds of the weights
    truncated: tuple[Term, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        count = len(self.weights)
        products = (*((r,) for r in range(count)), *((r, r) for r in range(count)))
        places = self.pool.places(WEIGHT_ERROR)
        return (
            Moments(columns=self.weights, products=products, places=places),
            # A count by bins is no sum of a column: nobody has to be behind it for the study to go on.
            *(Cells(of=mark, edges=(0.5,), groups=(ONE,)) for mark in self.truncated),
        )

    def read(self, values: Sequence[Array]) -> Overlap:
        count = len(self.weights)
        found, *marked = (each.tolist() for each in values)
        sums, squares, truncated = found[:count], found[count:], [below for _, below in marked]
        return Overlap(
            truncated=tuple(map(round, truncated)),
            disclosing=(self.pool.silos,) * len(truncated),
            effective_sizes=tuple(a * a / b if b > 0 else 0.0 for a, b in zip(sums, squares, strict=True)),
            # Nobody's weight is above its bound, nor its square above the sum of squares.
            largest_shares=tuple(
                min(most, math.sqrt(b)) / a if a > 0 else 0.0
                for most, a, b in zip(self.ceilings, sums, squares, strict=True)
            ),
            mean_squares=tuple(b / self.pool.n for b in squares),
            predicted=(0.0, 0.0),
        )


def refuse_no_overlap(
    overlap: Overlap, *, means: Sequence[str], groups: Sequence[str], n: int, floor: float
) -> None:
    """Raise `FitError` if nobody contributes to a mean, or the weights of a group are not there to be had.

    ``groups`` are the arms or rules whose people are truncated, by the ``floor``: 0 if the study has none.
    """
    for group, people in zip(groups, overlap.truncated, strict=True):
        if people and not floor:
            raise FitError(
                "overlap",
                f"g_bounds: the probability of {group} is nearly 0 for {people} of {n} people, and nothing "
                "bounds it; give a bound, or leave g_bounds out",
            )
        if people > n / 2:
            raise FitError(
                "overlap",
                f"g_bounds: the probability of {group} is below {floor:.3g} for {people} of {n} people; "
                "there is no overlap to learn from. Restrict the cohort, or simplify the models of treatment "
                "and follow-up",
            )
    for name, size in zip(means, overlap.effective_sizes, strict=True):
        if not size > 0:
            raise FitError("arm", f"target: no observed outcome contributes to {name}")
