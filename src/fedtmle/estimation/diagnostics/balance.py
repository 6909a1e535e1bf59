"""Covariates by arm, as they are and weighted by inverse probabilities: the numbers of a Love plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from fedtmle.estimation.diagnostics.base import AbstractDiagnostic, Pool
from fedtmle.targets.diagnostics import Balance, Covariate
from fedtmle_core.blocks import Block, Moments
from fedtmle_core.terms import ONE, Term, product
from fedtmle_core.types import Array

# Differences are shown in hundredths of a standard deviation, which may be a 50th of the declared range: a
# mean over a third of the people must err by less than 2e-4 of the range. Deviations need more: with x at the
# middle of its range, the mean of x^2 less the square of the mean errs by 1e-5, of a variance of 4e-4.
MEAN_ERROR = 4e-6


@final
@dataclass(frozen=True, kw_only=True)
class Measured:
    """A covariate on the unit scale of its range, 0 where it is not known."""

    covariate: Covariate
    x: Term
    known: Term = ONE


@final
@dataclass(frozen=True, kw_only=True)
class CovariateBalance(AbstractDiagnostic[tuple[Balance, ...]]):
    """For each covariate x and arm the sums of w x, w x^2 and H x; for each arm those of w and H.

    ``arms`` are indicators of those who take each arm (of those at risk, in a period), and ``weights`` their
    inverse probability weights H, times w, which are 0 in the other arms.
    """

    pool: Pool
    covariates: tuple[Measured, ...]
    arms: tuple[Term, ...]
    weights: tuple[Term, ...]
    weight: Term = ONE

    @property
    def blocks(self) -> tuple[Block, ...]:
        if not self.covariates:
            return ()
        columns: dict[Term, int] = {}
        places = self.pool.places(MEAN_ERROR)
        products = []
        for pair in self._sums:
            factors = [factor for factor in pair if factor != ONE] or [ONE]
            products.append(tuple(columns.setdefault(factor, len(columns)) for factor in factors))
        return (Moments(columns=tuple(columns), products=tuple(products), places=places),)

    @cached_property
    def _sums(self) -> tuple[tuple[Term, Term], ...]:
        """Each sum that is asked, as a product of two terms, once."""
        return tuple(dict.fromkeys(pair for each in self.covariates for pair in self._of(each)))

    def _of(self, each: Measured) -> list[tuple[Term, Term]]:
        """The sums of a covariate over its arms: w, w x, w x^2, H, H x."""
        x, square = each.x, each.x if each.covariate.is_indicator else product(each.x, each.x)
        found = []
        for arm, H in zip(self.arms, self.weights, strict=True):
            w = product(self.weight, arm)
            found += [(each.known, w), (x, w), (square, w), (each.known, H), (x, H)]
        return found

    def read(self, values: Sequence[Array]) -> tuple[Balance, ...]:
        if not self.covariates:
            return ()
        found = dict(zip(self._sums, values[0].tolist(), strict=True))
        return tuple(
            self._compared(each, [found[pair] for pair in self._of(each)]) for each in self.covariates
        )

    def _compared(self, each: Measured, sums: Sequence[float]) -> Balance:
        by_arm = [sums[k : k + 5] for k in range(0, len(sums), 5)]
        means = [_ratio(x, w) for w, x, _, _, _ in by_arm]
        squares = [_ratio(square, w) for w, _, square, _, _ in by_arm]
        weighted = [_ratio(x, h) for _, _, _, h, x in by_arm]
        variances = [max(square - m * m, 0.0) for square, m in zip(squares, means, strict=True)]
        scales = [math.sqrt((v + variances[0]) / 2) for v in variances]
        covariate = each.covariate
        return Balance(
            covariate=covariate,
            silos=self.pool.silos,
            means=tuple(map(covariate.on_scale, means)),
            sds=tuple((covariate.high - covariate.low) * math.sqrt(variance) for variance in variances),
            weighted_means=tuple(map(covariate.on_scale, weighted)),
            differences=tuple(_standardised(m - means[0], s) for m, s in zip(means, scales, strict=True)),
            weighted_differences=tuple(
                _standardised(m - weighted[0], s) for m, s in zip(weighted, scales, strict=True)
            ),
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _standardised(gap: float, scale: float) -> float:
    if gap == 0.0:
        return 0.0
    return gap / scale if scale > 0 else math.nan
