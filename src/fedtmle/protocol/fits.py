"""Queries of Algorithms 3 and 5: exact local fits, averaged by the server."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, reduce
from operator import add
from typing import final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.exact import GRID_BITS, Sums, query_shifts
from fedtmle.model.fit import FitStatus, fit_local
from fedtmle.model.types import Array, Part
from fedtmle.protocol.codes import (
    MOST_SILOS,
    AbstractCode,
    BitReader,
    BitWriter,
    read_count,
    read_floats,
    write_floats,
)
from fedtmle.protocol.query import (
    AbstractQuery,
    Derivatives,
    Evaluation,
    Law,
    Local,
    Phase,
    Problem,
    RowMeans,
)
from fedtmle.protocol.sums import mean_gradient, norm


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

    def is_noise(self, gradient: Array, covariance: Array) -> bool:
        """Return whether the silo's EIF mean is within the declared fraction of its sampling noise."""
        if self.noise is None or not np.isfinite(covariance).all():  # one row has no spread to compare
            return False
        # The silo alone decides, and sends its decision: LAPACK's last bits cannot set parties apart.
        return bool(gradient @ np.linalg.pinv(covariance) @ gradient <= self.noise**2 * len(gradient))


@dataclass(frozen=True, kw_only=True)
class FitLattice:
    """The lattice of rounded fits: eps = lambda z for integers z, so an average of fits is exact.

    ``spacing`` is lambda. ``reach`` bounds each |z|: fits lie in a public ball.
    """

    spacing: Fraction
    reach: int

    def steps(self, eps: Array) -> tuple[int, ...]:
        """Return the integers z nearest to eps / lambda, half to even."""
        nearest = [round(Fraction(float(e)) / self.spacing) for e in eps]
        return tuple(min(max(z, -self.reach), self.reach) for z in nearest)

    def eps(self, steps: Sequence[int]) -> Array:
        """Return lambda z, each coordinate correctly rounded."""
        return np.array([float(self.spacing * z) for z in steps])

    def average(self, fits: Sequence[tuple[Fraction, tuple[int, ...]]], dim: int) -> Array:
        """Return lambda sum_m w_m z_m / sum_m w_m for pairs (w_m, z_m), correctly rounded.

        It is zero if and only if the rational average is, and the order of the pairs does not matter.
        """
        mass = sum((weight for weight, _ in fits), Fraction(0)) or Fraction(1)
        totals = [sum((weight * z[j] for weight, z in fits), Fraction(0)) for j in range(dim)]
        return np.array([float(self.spacing * total / mass) for total in totals])


@dataclass(frozen=True, kw_only=True)
class FitAnswer:
    """A local fit, how it ended, and the local EIF sums at the origin.

    ``steps`` holds the integers eps / lambda if fits are rounded to a lattice, and is None otherwise.
    """

    outcome: FitOutcome
    eps: Array
    origin: Sums
    steps: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class FitAverage:
    """The average over the silos still fitting, the pooled EIF sums, and what happened."""

    eps: Array
    origin: Sums
    fitting: int  # silos whose fit was averaged
    worst: FitOutcome


@final
@dataclass(frozen=True, kw_only=True)
class FitCode(AbstractCode[FitAnswer]):
    """How the fit ended in two bits, the fit (integers on a lattice, else doubles), and the EIF sums."""

    dim: int
    lattice: FitLattice | None
    shifts: tuple[int, ...]
    largest: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return 2 * self.dim

    def write(self, value: FitAnswer, out: BitWriter) -> None:
        out.uint(value.outcome, 2)
        if self.lattice is None or value.steps is None:
            write_floats(value.eps, out)
        else:
            out.fixed(value.steps, (self.lattice.reach,) * self.dim)
        out.fixed(value.origin.units, self.largest)

    def read(self, bits: BitReader) -> FitAnswer:
        outcome = FitOutcome(bits.uint(2))
        steps = None if self.lattice is None else bits.fixed((self.lattice.reach,) * self.dim)
        if self.lattice is None or steps is None:
            eps = read_floats(bits, self.dim)
        else:
            eps = self.lattice.eps(steps)
        if outcome in (FitOutcome.ZERO, FitOutcome.FITTED) and eps.any() != (outcome is FitOutcome.FITTED):
            raise DecodeError("a fit's outcome does not agree with the fit")
        origin = Sums(bits.fixed(self.largest), self.shifts)
        return FitAnswer(outcome=outcome, eps=eps, origin=origin, steps=steps)


@final
@dataclass(frozen=True, kw_only=True)
class FitAverageCode(AbstractCode[FitAverage]):
    """The worst ending, how many fits were averaged, the average as doubles, and the pooled EIF sums."""

    dim: int
    shifts: tuple[int, ...]
    largest: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return 2 * self.dim

    def write(self, value: FitAverage, out: BitWriter) -> None:
        out.uint(value.worst, 2)
        out.gamma((value.fitting,))
        write_floats(value.eps, out)
        out.fixed(value.origin.units, self.largest)

    def read(self, bits: BitReader) -> FitAverage:
        worst = FitOutcome(bits.uint(2))
        fitting = read_count(bits, MOST_SILOS)
        eps = read_floats(bits, self.dim)
        origin = Sums(bits.fixed(self.largest), self.shifts)
        return FitAverage(eps=eps, origin=origin, fitting=fitting, worst=worst)


@final
@dataclass(frozen=True, kw_only=True)
class FitQuery(AbstractQuery[FitAnswer, FitAverage]):
    """Each silo's exact fit in the common submodel and its EIF sums; one exchange for both."""

    problem: Problem
    law: Law
    n: int
    update: int
    radius: float
    exhaustive: bool
    weights: Weighting | Mapping[str, float]
    rule: RetirementRule
    retiring: bool
    tolerance: float | None = None

    @property
    def phase(self) -> Phase:
        return Phase.TARGETING

    @property
    def explanation(self) -> str:
        return "the fluctuation that fits the silo's own rows best, and exact sums of their gradient"

    @property
    def answer_code(self) -> FitCode:
        return FitCode(dim=self.dim, lattice=self.lattice, shifts=self.shifts, largest=self._largest)

    @property
    def pooled_code(self) -> FitAverageCode:
        return FitAverageCode(dim=self.dim, shifts=self.shifts, largest=self._largest)

    def evaluations(self) -> tuple[Evaluation, ...]:
        return (Evaluation(self.problem, self.law, np.zeros(self.dim)),)

    def residual(self, pooled: FitAverage) -> float | None:
        if self.retiring:  # the silos that left are not asked, so no pooled residual is known
            return None
        return norm(mean_gradient(self.problem, self.law, np.zeros(self.dim), pooled.origin, self.n))

    def retirement(self, answer: FitAnswer) -> FitQuery | None:
        return self if self.retiring and answer.outcome is FitOutcome.ZERO else None

    @property
    def dim(self) -> int:
        return self.problem.dim

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        return query_shifts(self.problem.row_bound(self.law), np.zeros(self.dim), Part.GRADIENT)

    @cached_property
    def lattice(self) -> FitLattice | None:
        """The lattice of fits in the ball of ``radius``, None if fits are not rounded."""
        if self.rule.lattice is None:
            return None
        spacing = Fraction(self.rule.lattice)
        return FitLattice(spacing=spacing, reach=round(Fraction(self.radius) / spacing))

    def answer(self, local: Local) -> FitAnswer:
        submodel = local.submodel(self.problem, self.law)
        normaliser = local.normaliser(self.problem, self.law)
        fit = fit_local(submodel, normaliser, dim=self.dim, radius=self.radius, exhaustive=self.exhaustive)
        zero = np.zeros(self.dim)
        origin = submodel.sums(zero, Part.GRADIENT)
        if fit.status is not FitStatus.MINIMUM:
            outcome = FitOutcome.BOUNDARY if fit.status is FitStatus.BOUNDARY else FitOutcome.STALLED
            return self._rounded(outcome, fit.eps, origin)
        answer = self._rounded(FitOutcome.FITTED, fit.eps, origin)
        if self.rule.noise is not None:
            score = origin.values(local.n_rows) + normaliser.gradient(zero)
            if self.rule.is_noise(score, local.estimate(self.problem, self.law).covariance):
                answer = self._rounded(FitOutcome.ZERO, zero, origin)
        return answer if answer.eps.any() else replace(answer, outcome=FitOutcome.ZERO)

    def _rounded(self, outcome: FitOutcome, eps: Array, origin: Sums) -> FitAnswer:
        """Return the answer with the fit on the lattice, if there is one."""
        if self.lattice is None:
            return FitAnswer(outcome=outcome, eps=eps, origin=origin)
        steps = self.lattice.steps(eps)
        return FitAnswer(outcome=outcome, eps=self.lattice.eps(steps), origin=origin, steps=steps)

    def pool(self, answers: Mapping[str, FitAnswer], sizes: Mapping[str, int]) -> FitAverage:
        # Algorithm 5 renormalises over the silos that did not retire; Algorithm 3 keeps all.
        fitting = {
            silo: answer
            for silo, answer in answers.items()
            if not (self.retiring and answer.outcome is FitOutcome.ZERO)
        }
        return FitAverage(
            eps=self._average(fitting, sizes),
            origin=reduce(add, (answer.origin for answer in answers.values())),
            fitting=len(fitting),
            worst=max((answer.outcome for answer in answers.values()), key=_severity),
        )

    def _average(self, fitting: Mapping[str, FitAnswer], sizes: Mapping[str, int]) -> Array:
        """Return the average of eq. (retirement-weights): exact on a lattice, else in floats."""
        if self.lattice is not None:
            fits = [(self._exact_weight(silo, sizes), answer.steps or ()) for silo, answer in fitting.items()]
            return self.lattice.average(fits, self.dim)
        alpha = {silo: self._weight(silo, sizes) for silo in fitting}
        mass = math.fsum(alpha.values())
        return np.array(
            [
                math.fsum(alpha[silo] * float(answer.eps[j]) for silo, answer in fitting.items())
                / (mass or 1.0)
                for j in range(self.dim)
            ]
        )

    def _weight(self, silo: str, sizes: Mapping[str, int]) -> float:
        if self.weights is Weighting.SIZE:
            return sizes[silo] / self.n
        if self.weights is Weighting.UNIFORM:
            return 1.0
        return dict(self.weights)[silo]

    def _exact_weight(self, silo: str, sizes: Mapping[str, int]) -> Fraction:
        """Return the weight as a rational; N_m stands for N_m/n, since the average divides by the total."""
        if self.weights is Weighting.SIZE:
            return Fraction(sizes[silo])
        return Fraction(self._weight(silo, sizes))

    def row_means(self, answer: FitAnswer, local: Local) -> RowMeans:
        """Return the gradient at the fit, which a minimiser discloses to be zero, and that at the origin."""
        zero = np.zeros(self.dim)
        points = [answer.eps, zero] if answer.eps.any() else [zero]
        fine = 2.0 ** -np.array(self.shifts, dtype=np.float64)
        coarse = np.zeros(self.dim)
        if self.rule.lattice is not None:  # rounded: the gradient is zero within beta lambda sqrt(d)/2
            beta = float(np.linalg.norm(local.submodel(self.problem, self.law).curvature_ceiling(), 2))
            coarse += beta * self.rule.lattice * np.sqrt(self.dim) / 2
        return RowMeans(
            label="local fit",
            terms=tuple(Derivatives(self.problem, self.law, eps, Part.GRADIENT) for eps in points),
            box=np.concatenate([fine + coarse, fine]) if len(points) == 2 else fine,
        )

    def gap_bound(self, local: Local) -> float | None:
        """Return a bound of the local gap that is left when a fit is rounded to zero: beta d lambda^2/8.

        For beta a bound of the silo's Hessian at every eps. None without a lattice.
        """
        if self.rule.lattice is None:
            return None
        rows = local.submodel(self.problem, self.law).curvature_ceiling()
        public = local.normaliser(self.problem, self.law).curvature_ceiling(np.eye(self.dim))
        beta = float(np.linalg.norm(rows, 2)) + public
        return beta * self.dim * self.rule.lattice**2 / 8

    @property
    def _largest(self) -> tuple[int, ...]:
        return (self.n << GRID_BITS,) * self.dim


def _severity(outcome: FitOutcome) -> int:
    return {FitOutcome.ZERO: 0, FitOutcome.FITTED: 1, FitOutcome.STALLED: 2, FitOutcome.BOUNDARY: 3}[outcome]
