"""How well the outcome model predicts, before and after targeting: R^2, explained deviance, calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.estimation.diagnostics.base import AbstractDiagnostic, Pool, read_bins
from fedtmle.targets.diagnostics import Bin, OutcomeFit
from fedtmle_core import kernels
from fedtmle_core.blocks import Block, Cells, Moments
from fedtmle_core.terms import ONE, Apply, Term, product, total
from fedtmle_core.types import Array

SMALLEST_CHANCE = 2.0**-44  # of what happened: a log loss of 30 for a confident prediction that is wrong
# R^2 and variances are shown with three digits. The least variance of interest is that of an outcome whose
# range is ten standard deviations, 0.01: errors of this size are a hundredth of its third digit.
SQUARE_ERROR = 1e-6
# A point of the calibration figure is a mean over a tenth of the people, seen to a hundredth of the range.
POINT_ERROR = 5e-4
TENTH = 0.1
# The 10 %, ..., 90 % points of a normal distribution, in few digits: they are the same on every processor.
DECILES = (-1.2816, -0.8416, -0.5244, -0.2533, 0.0, 0.2533, 0.5244, 0.8416, 1.2816)


@final
@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An outcome on the unit scale and its prediction: once a person, or once a period at risk."""

    y: Term
    observed: Term  # 1 where the outcome was observed
    weight: Term
    before: Term  # Q of the treatment taken, before targeting
    after: Term  # and after it

    @property
    def among(self) -> Term:
        """The weight of those whose outcome was observed."""
        return product(self.weight, self.observed)


@final
@dataclass(frozen=True, kw_only=True)
class PredictionSpread(AbstractDiagnostic[tuple[float, float]]):
    """Mean and standard deviation of the predictions before targeting, from which `bin_edges` follow."""

    pool: Pool
    predictions: tuple[Prediction, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        # Linear predictions may leave the outcome's bounds.
        pairs = [(each.among, Apply("clip", each.before, low=0.0, high=1.0)) for each in self.predictions]
        columns = (
            total([w for w, _ in pairs]),
            total([product(w, q) for w, q in pairs]),
            total([product(w, q, q) for w, q in pairs]),
        )
        return (Moments.of(columns, places=self.pool.places(POINT_ERROR * TENTH)),)

    def read(self, values: Sequence[Array]) -> tuple[float, float]:
        ((mass, sums, squares),) = (each.tolist() for each in values)
        if not mass > 0:
            return 0.0, 0.0
        mean = sums / mass
        return mean, math.sqrt(max(squares / mass - mean * mean, 0.0))


def bin_edges(predicted: tuple[float, float]) -> tuple[float, ...]:
    """Return the deciles of a normal distribution of this mean and deviation; none if it does not vary."""
    mean, deviation = predicted
    edges = tuple(mean + deviation * z for z in DECILES)
    return edges if len(set(edges)) == len(edges) else ()


@final
@dataclass(frozen=True, kw_only=True)
class PredictionFit(AbstractDiagnostic[OutcomeFit]):
    """Squared errors, of a binary outcome log losses, and outcomes by bins of the prediction.

    Both predictions are compared in the bins of the one before targeting. Sums over a bin are those of w y,
    w Q before and w Q after, and with weights of w.
    """

    pool: Pool
    predictions: tuple[Prediction, ...]
    edges: tuple[float, ...]  # inner edges
    is_binary: bool
    has_weights: bool

    @property
    def blocks(self) -> tuple[Block, ...]:
        errors = Moments.of(self._errors(), places=self.pool.places(SQUARE_ERROR))
        return (errors, *map(self._cells, self.predictions))

    def _errors(self) -> tuple[Term, ...]:
        """The sums of w, w y and w y^2, of squared errors, and of a binary outcome log losses."""
        parts = [self._parts(each) for each in self.predictions]
        return tuple(total(column) for column in zip(*parts, strict=True))

    def _parts(self, each: Prediction) -> list[Term]:
        """Return one period's part of these sums; (y - q)^2 as y^2, y and 1 with predictions as factors."""
        y, sides = each.y, (each.before, each.after)
        square = y if self.is_binary else product(y, y)
        found = [ONE, y, square]
        found += [total([square, product(y, q), product(q, q)], [1.0, -2.0, 1.0]) for q in sides]
        if self.is_binary:
            found += [_log_loss(y, q) for q in sides]
        return [product(each.among, part) for part in found]

    def _cells(self, each: Prediction) -> Cells:
        clipped = [Apply("clip", q, low=-1.0, high=2.0) for q in (each.before, each.after)]
        sums = tuple(product(each.weight, column) for column in (each.y, *clipped))
        return Cells(
            of=each.before,
            edges=self.edges,
            groups=(each.observed,),
            sums=(each.weight, *sums) if self.has_weights else sums,
            places=self.pool.places(POINT_ERROR * TENTH),
        )

    def read(self, values: Sequence[Array]) -> OutcomeFit:
        mass, y, y_squared, *rest = values[0].tolist()
        errors, losses = rest[:2], rest[2:]
        scatter = y_squared - y * y / mass
        return OutcomeFit(
            r_squared=_explained(errors, scatter),
            deviance=_explained(losses, mass * _entropy(y / mass)) if self.is_binary else None,
            variance=max(scatter / mass, 0.0),
            residual_variance=(errors[0] / mass, errors[1] / mass),
            edges=self.edges,
            calibration=self._calibration(np.sum(values[1:], axis=0)),
        )

    def _calibration(self, totals: Array) -> tuple[Bin, ...]:
        """Return the bins with the sums of w, w y, w Q before and w Q after."""
        sums = 4 if self.has_weights else 3
        (bins,) = read_bins(totals, groups=1, sums=sums, silos=self.pool.silos)
        if self.has_weights:
            return bins
        return tuple(Bin(silos=b.silos, count=b.count, sums=(float(b.count), *b.sums)) for b in bins)


def _log_loss(y: Term, q: Term) -> Term:
    """Return -log of the probability q that y is 1, or 1 - q that it is 0.

    Written as -log(1 - q) - y logit q it is a sum of predictions times judged columns.
    """
    bounded = Apply("clip", q, low=SMALLEST_CHANCE, high=1.0 - SMALLEST_CHANCE)
    return total([Apply("log", 1.0 - bounded), product(y, Apply("logit", bounded))], [-1.0, -1.0])


def _entropy(p: float) -> float:
    return -sum(share * kernels.log(share) for share in (p, 1.0 - p) if share > 0)


def _explained(errors: Sequence[float], whole: float) -> tuple[float, float]:
    """Return the share of ``whole`` that is explained, from the error before and after targeting."""
    before, after = (1.0 - error / whole if whole > 0 else math.nan for error in errors)
    return before, after
