"""Queries of Algorithms 3 and 5: exact local fits, averaged by the server."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.exact import GRID_BITS, Sums, query_shifts
from fedtmle.model.fit import FitStatus, fit_local
from fedtmle.model.types import Array, Part
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.query import AbstractQuery, Link, Local, Phase, Point, Problem


class Weighting(enum.StrEnum):
    """The base weights alpha_m of eq. (retirement-weights)."""

    SIZE = "size"  # N_m / n
    UNIFORM = "uniform"  # 1 / M


class FitOutcome(enum.IntEnum):
    """What a silo says of its fit, in two bits."""

    FITTED = 0  # a minimum was found
    ZERO = 1  # zero is a minimiser, or rounds to zero, or is within the declared noise
    BOUNDARY = 2  # no minimum inside the public ball: never averaged silently
    STALLED = 3  # the solver could not reach its accuracy


@dataclass(frozen=True, kw_only=True)
class RetirementRule:
    """When a silo's fit counts as zero.

    An exact zero always does. With ``lattice`` = lambda, fits are rounded to multiples of
    lambda and one that rounds to zero counts. With ``noise`` = c, so does a fit whose EIF mean
    g is within that fraction of the silo's own sampling noise: g . Sigma^-1 g <= c^2 d, Sigma
    the covariance of the silo's own estimate. (For a likelihood loss that is 2 N_m Delta_m to
    second order; unlike it, it holds for every loss.)
    """

    lattice: float | None = None
    noise: float | None = None

    def round(self, eps: Array) -> Array:
        """The nearest lattice point, or eps itself."""
        return eps if self.lattice is None else np.rint(eps / self.lattice) * self.lattice

    def is_noise(self, gradient: Array, covariance: Array) -> bool:
        """Whether the silo's EIF mean is within the declared fraction of its sampling noise."""
        if self.noise is None or not np.isfinite(covariance).all():  # one row has no spread to compare
            return False
        return bool(gradient @ np.linalg.pinv(covariance) @ gradient <= self.noise**2 * len(gradient))


@dataclass(frozen=True, kw_only=True)
class FitAnswer:
    """A local fit, how it ended, and the local EIF sums at the origin."""

    outcome: FitOutcome
    eps: Array
    origin: Sums


@dataclass(frozen=True, kw_only=True)
class FitAverage:
    """The average over the silos still fitting, the pooled EIF sums, and what happened."""

    eps: Array
    origin: Sums
    fitting: int  # silos whose fit was averaged
    worst: FitOutcome


@final
@dataclass(frozen=True, kw_only=True)
class FitQuery(AbstractQuery[FitAnswer, FitAverage]):
    """Each silo's exact fit in the common submodel and its EIF sums; one exchange for both."""

    problem: Problem
    law: Any
    n: int
    update: int
    radius: float
    exhaustive: bool
    weights: Weighting | Mapping[str, float]
    rule: RetirementRule
    retiring: bool

    @property
    def phase(self) -> Phase:
        return Phase.TARGETING

    @property
    def tells(self) -> str:
        return "the fluctuation that fits the silo's own rows best, and exact sums of their gradient"

    @property
    def functionals(self) -> int:
        return 2 * self.dim

    def points(self) -> tuple[Point, ...]:
        return (Point(self.problem, self.law, np.zeros(self.dim)),)

    @property
    def dim(self) -> int:
        return self.problem.dim

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        return query_shifts(self.problem.row_bound(self.law), np.zeros(self.dim), Part.GRADIENT)

    def answer(self, local: Local) -> FitAnswer:
        submodel = local.submodel(self.problem, self.law)
        normaliser = local.normaliser(self.problem, self.law)
        fit = fit_local(submodel, normaliser, dim=self.dim, radius=self.radius, exhaustive=self.exhaustive)
        zero = np.zeros(self.dim)
        origin = submodel.sums(zero, Part.GRADIENT)
        if fit.status is not FitStatus.MINIMUM:
            outcome = FitOutcome.BOUNDARY if fit.status is FitStatus.BOUNDARY else FitOutcome.STALLED
            return FitAnswer(outcome=outcome, eps=fit.eps, origin=origin)
        eps = self.rule.round(fit.eps)
        if self.rule.noise is not None:
            score = origin.values(local.n_rows) + normaliser.gradient(zero)
            if self.rule.is_noise(score, local.estimate(self.problem, self.law).covariance):
                eps = zero
        outcome = FitOutcome.FITTED if eps.any() else FitOutcome.ZERO
        return FitAnswer(outcome=outcome, eps=eps, origin=origin)

    def pool(self, answers: Mapping[str, FitAnswer], sizes: Mapping[str, int]) -> FitAverage:
        # Algorithm 5 renormalises over the silos that did not retire; Algorithm 3 keeps all.
        kept = {
            silo: answer
            for silo, answer in answers.items()
            if not (self.retiring and answer.outcome is FitOutcome.ZERO)
        }
        alpha = {silo: self._weight(silo, sizes) for silo in kept}
        mass = math.fsum(alpha.values())
        eps = np.array(
            [
                math.fsum(alpha[silo] * float(answer.eps[j]) for silo, answer in kept.items()) / (mass or 1.0)
                for j in range(self.dim)
            ]
        )
        return FitAverage(
            eps=eps,
            origin=reduce(add, (answer.origin for answer in answers.values())),
            fitting=len(kept),
            worst=max((answer.outcome for answer in answers.values()), key=_severity),
        )

    def _weight(self, silo: str, sizes: Mapping[str, int]) -> float:
        if self.weights is Weighting.SIZE:
            return sizes[silo] / self.n
        if self.weights is Weighting.UNIFORM:
            return 1.0
        return dict(self.weights)[silo]

    def write_answer(self, answer: FitAnswer, out: BitWriter, link: Link) -> None:  # noqa: ARG002
        out.uint(answer.outcome, 2)
        _write_floats(answer.eps, out)
        out.fixed(answer.origin.units, self._largest)

    def read_answer(self, bits: BitReader, link: Link) -> FitAnswer:  # noqa: ARG002
        outcome = FitOutcome(bits.uint(2))
        eps = _read_floats(bits, self.dim)
        if outcome in (FitOutcome.ZERO, FitOutcome.FITTED) and eps.any() != (outcome is FitOutcome.FITTED):
            raise DecodeError("a fit's outcome does not agree with the fit")
        return FitAnswer(outcome=outcome, eps=eps, origin=Sums(bits.fixed(self._largest), self.shifts))

    def write_pooled(self, pooled: FitAverage, out: BitWriter) -> None:
        out.uint(pooled.worst, 2)
        out.gamma((pooled.fitting,))
        _write_floats(pooled.eps, out)
        out.fixed(pooled.origin.units, self._largest)

    def read_pooled(self, bits: BitReader) -> FitAverage:
        worst = FitOutcome(bits.uint(2))
        (fitting,) = bits.gamma(1)
        if fitting < 0:
            raise DecodeError("a count of fits is negative")
        eps = _read_floats(bits, self.dim)
        return FitAverage(
            eps=eps, origin=Sums(bits.fixed(self._largest), self.shifts), fitting=fitting, worst=worst
        )

    def gap_bound(self, local: Local) -> float | None:
        """What rounding a fit to zero on the lattice may leave of the local gap: beta d lambda^2/8.

        For beta a bound of the silo's Hessian at every eps. None without a lattice.
        """
        if self.rule.lattice is None:
            return None
        rows = local.submodel(self.problem, self.law).curvature_ceiling()
        public = local.normaliser(self.problem, self.law).curvature_ceiling(np.eye(self.dim))
        beta = float(np.linalg.norm(rows, 2)) + public
        return beta * self.dim * self.rule.lattice**2 / 8

    def retires(self, answer: FitAnswer) -> bool:
        return self.retiring and answer.outcome is FitOutcome.ZERO

    @property
    def _largest(self) -> tuple[int, ...]:
        return (self.n << GRID_BITS,) * self.dim


def _severity(outcome: FitOutcome) -> int:
    return {FitOutcome.ZERO: 0, FitOutcome.FITTED: 1, FitOutcome.STALLED: 2, FitOutcome.BOUNDARY: 3}[outcome]


def _write_floats(values: Array, out: BitWriter) -> None:
    for value in values:
        out.uint(int.from_bytes(struct.pack(">d", value), "big"), 64)


def _read_floats(bits: BitReader, count: int) -> Array:
    values = [struct.unpack(">d", bits.uint(64).to_bytes(8, "big"))[0] for _ in range(count)]
    if not all(map(math.isfinite, values)):
        raise DecodeError("a fit is not finite")
    return np.array(values)
