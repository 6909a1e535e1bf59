"""Queries of Algorithms 3 and 5, local fits that the server averages, and of adaptive switching.

Fits and their average travel as integers of a public lattice, or as doubles if there is none. Algorithm 3
tests the pooled EIF equation, so its answers hold exact EIF sums too; Algorithm 5 does not, and sends none.

In Algorithm 5 a silo that has retired goes on answering, with zeros, so that the average over the silos still
fitting is a quotient of two totals over all silos,

    eps = lambda sum_m w_m z_m / sum_m w_m,   z_m = w_m = 0 at a retired silo,

w_m = N_m or 1, and masks hide who retired. With one or two silos left, such a total would disclose the fit of
one of them. `FitCountQuery` therefore counts, one round earlier, how many silos still fit; the algorithm does
not ask for the fits of too few.
"""

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
from fedtmle.model.fit import EXACT_NEWTON, FitStatus, LocalMinimum, LocalSolver, fit_local
from fedtmle.protocol.codes import (
    MOST_SILOS,
    TARGETING,
    AbstractCode,
    BitReader,
    BitWriter,
    Integers,
    Memory,
    Remembered,
    read_count,
    read_floats,
    write_floats,
)
from fedtmle.protocol.lattice import Lattice, divide, floating, root_up
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import (
    AbstractQuery,
    AbstractTotals,
    Derivatives,
    Evaluation,
    Law,
    Local,
    Phase,
    Problem,
    RowMeans,
    add_up,
)
from fedtmle.protocol.sums import mean_gradient, norm
from fedtmle_core.exact import GRID_BITS, Sums, query_shifts
from fedtmle_core.types import Array, Part

AVERAGE_STEPS = 16  # the lattice of averages is this many times finer than that of fits


class Weighting(enum.StrEnum):
    """The base weights alpha_m of eq. (retirement-weights)."""

    SIZE = "size"  # N_m / n
    UNIFORM = "uniform"  # 1 / M


class FitOutcome(enum.IntEnum):
    """How a silo's fit ended, in two bits."""

    FITTED = 0  # a minimum was found
    ZERO = 1  # zero is a minimiser, or rounds to zero, or is within the declared noise
    BOUNDARY = 2  # no minimum inside the public ball: never averaged silently
    STALLED = 3  # the solver could not reach its accuracy


@dataclass(frozen=True)
class FitCounts:
    """How many silos' fits ended in each way; a retired silo's counts as zero."""

    by_outcome: Mapping[FitOutcome, int]

    @classmethod
    def of(cls, totals: Integers) -> FitCounts:
        """Return the counts in the order of `FitOutcome`, or raise `DecodeError`."""
        if min(totals) < 0 or not sum(totals):
            raise DecodeError("a number of silos is below zero, or there are none")
        return cls(dict(zip(FitOutcome, totals, strict=True)))

    @property
    def silos(self) -> int:
        """All silos that were asked."""
        return sum(self.by_outcome.values())

    @property
    def fitting(self) -> int:
        """The silos whose fit is not zero."""
        return self.silos - self.by_outcome[FitOutcome.ZERO]

    @property
    def worst(self) -> FitOutcome:
        return max((outcome for outcome in FitOutcome if self.by_outcome[outcome]), key=_severity)


ENDINGS = (Lane(MOST_SILOS),) * len(FitOutcome)


@final
@dataclass(frozen=True)
class FitOutcomeCode(AbstractCode[FitOutcome]):
    """How one fit ended, in two bits."""

    numbers = 1

    def write(self, value: FitOutcome, out: BitWriter) -> None:
        out.uint(value, 2)

    def read(self, bits: BitReader) -> FitOutcome:
        return FitOutcome(bits.uint(2))


@final
@dataclass(frozen=True)
class FitCountsCode(AbstractCode[FitCounts]):
    """The number of silos for each way in which a fit ends."""

    @property
    def numbers(self) -> int:
        return len(FitOutcome)

    def write(self, value: FitCounts, out: BitWriter) -> None:
        out.gamma(value.by_outcome[outcome] for outcome in FitOutcome)

    def read(self, bits: BitReader) -> FitCounts:
        return FitCounts.of(tuple(read_count(bits, MOST_SILOS) for _ in FitOutcome))


@dataclass(frozen=True, kw_only=True)
class RetirementRule:
    """When a silo's fit counts as zero.

    An exact zero always does. With ``lattice`` = lambda, fits are rounded to multiples of lambda, and a fit
    that rounds to zero counts as zero. With ``gap`` = tau, so does a fit that lowers the loss by at most tau:
    Delta_m <= tau. With ``noise`` = c, so does a fit whose EIF mean g is within that fraction of the silo's
    own sampling noise: g . Sigma^-1 g <= c^2 d, Sigma the covariance of the silo's own estimate. (For a
    likelihood loss the left side is 2 N_m Delta_m to second order; the rule applies to every loss.)
    """

    lattice: float | None = None
    noise: float | None = None
    gap: float | None = None

    def is_noise(self, gradient: Array, covariance: Array) -> bool:
        """Return whether the silo's EIF mean is within the declared fraction of its sampling noise."""
        if self.noise is None or not np.isfinite(covariance).all():  # one row has no spread to compare
            return False
        # The silo alone decides, and sends its decision: parties cannot disagree over LAPACK's last bits.
        return bool(gradient @ np.linalg.pinv(covariance) @ gradient <= self.noise**2 * len(gradient))


@dataclass(frozen=True, kw_only=True)
class FitLattice:
    """The lattice of rounded fits, eps = lambda z for integers z, and the finer one of their averages.

    ``spacing`` is lambda; averages have the spacing lambda/16. ``reach`` bounds each |z|: fits lie in a
    public ball.
    """

    spacing: Fraction
    reach: int

    @property
    def of_averages(self) -> FitLattice:
        return FitLattice(spacing=self.spacing / AVERAGE_STEPS, reach=self.reach * AVERAGE_STEPS)

    def steps(self, eps: Array) -> tuple[int, ...]:
        """Return the integers z nearest to eps / lambda, half to even."""
        nearest = [round(Fraction(float(e)) / self.spacing) for e in eps]
        return tuple(min(max(z, -self.reach), self.reach) for z in nearest)

    def eps(self, steps: Sequence[int]) -> Array:
        """Return lambda z, each coordinate correctly rounded."""
        return np.array([float(self.spacing * z) for z in steps])

    def average(self, fits: Sequence[tuple[Fraction, tuple[int, ...]]], dim: int) -> tuple[int, ...]:
        """Return sum_m w_m z_m / sum_m w_m for pairs (w_m, z_m), in steps of averages, half to even.

        The order of the pairs does not matter.
        """
        mass = sum((weight for weight, _ in fits), Fraction(0)) or Fraction(1)
        totals = [sum((weight * z[j] for weight, z in fits), Fraction(0)) for j in range(dim)]
        return tuple(round(AVERAGE_STEPS * total / mass) for total in totals)


@dataclass(frozen=True, kw_only=True)
class FitAnswer:
    """A local fit, how it ended, and the local EIF sums at the origin if the query asks for them.

    ``steps`` holds the integers eps / lambda if fits are rounded to a lattice, and is None otherwise.
    """

    outcome: FitOutcome
    eps: Array
    origin: Sums | None = None
    steps: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class FitAverage:
    """The average over the silos still fitting, the pooled EIF sums if asked for, and how the fits ended.

    ``people`` is the number of rows of the silos still fitting, where silos retire and have weights by size.
    """

    eps: Array
    fitting: int  # silos whose fit was averaged
    worst: FitOutcome
    people: int | None = None
    origin: Sums | None = None
    steps: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """The parts that a fit and an average of fits have in common: d numbers, and EIF sums or none."""

    dim: int
    lattice: FitLattice | None
    shifts: tuple[int, ...]
    largest: tuple[int, ...]  # empty if no EIF sums are sent

    def write(self, eps: Array, steps: tuple[int, ...] | None, origin: Sums | None, out: BitWriter) -> None:
        if self.lattice is None or steps is None:
            write_floats(eps, out)
        else:
            out.fixed(steps, (self.lattice.reach,) * self.dim)
        if origin is not None:
            out.fixed(origin.units, self.largest)

    def read(self, bits: BitReader) -> tuple[Array, tuple[int, ...] | None, Sums | None]:
        steps = None if self.lattice is None else bits.fixed((self.lattice.reach,) * self.dim)
        if self.lattice is None or steps is None:
            eps = read_floats(bits, self.dim)
        else:
            eps = self.lattice.eps(steps)
        return eps, steps, Sums(bits.fixed(self.largest), self.shifts) if self.largest else None

    @property
    def numbers(self) -> int:
        return self.dim + len(self.largest)


@final
@dataclass(frozen=True, kw_only=True)
class FitCode(AbstractCode[FitAnswer]):
    """How the fit ended in two bits, the fit (integers on a lattice, else doubles), and any EIF sums."""

    fields: _Fields

    @property
    def numbers(self) -> int:
        return self.fields.numbers

    def write(self, value: FitAnswer, out: BitWriter) -> None:
        out.uint(value.outcome, 2)
        self.fields.write(value.eps, value.steps, value.origin, out)

    def read(self, bits: BitReader) -> FitAnswer:
        outcome = FitOutcome(bits.uint(2))
        eps, steps, origin = self.fields.read(bits)
        if outcome in (FitOutcome.ZERO, FitOutcome.FITTED) and eps.any() != (outcome is FitOutcome.FITTED):
            raise DecodeError("a fit's outcome does not agree with the fit")
        return FitAnswer(outcome=outcome, eps=eps, origin=origin, steps=steps)


@final
@dataclass(frozen=True, kw_only=True)
class FitAverageCode(AbstractCode[FitAverage]):
    """The worst ending, how many fits were averaged, of how many people, the average, any pooled EIF sums."""

    fields: _Fields
    n: int | None = None  # a bound of the number of people, None if it is not sent

    @property
    def numbers(self) -> int:
        return self.fields.numbers

    def write(self, value: FitAverage, out: BitWriter) -> None:
        out.uint(value.worst, 2)
        out.gamma((value.fitting,))
        if value.people is not None:
            out.gamma((value.people,))
        self.fields.write(value.eps, value.steps, value.origin, out)

    def read(self, bits: BitReader) -> FitAverage:
        worst = FitOutcome(bits.uint(2))
        fitting = read_count(bits, MOST_SILOS)
        people = None if self.n is None else read_count(bits, self.n)
        eps, steps, origin = self.fields.read(bits)
        return FitAverage(eps=eps, origin=origin, fitting=fitting, worst=worst, people=people, steps=steps)


@final
@dataclass(frozen=True, kw_only=True)
class FitQuery(AbstractQuery[FitAnswer, FitAverage]):
    """Each silo's fit in the common submodel, and its EIF sums unless silos retire; one exchange for both."""

    phase = Phase.TARGETING

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
    solver: LocalSolver = EXACT_NEWTON

    @property
    def explanation(self) -> str:
        fit = "the fluctuation that fits the silo's own rows best"
        return fit if self.retiring else f"{fit}, and exact sums of their gradient"

    @property
    def answer_code(self) -> FitCode:
        return FitCode(fields=self._fields(self.lattice))

    @property
    def pooled_code(self) -> FitAverageCode:
        fields = self._fields(None if self.lattice is None else self.lattice.of_averages)
        return FitAverageCode(fields=fields, n=self.n if self._counts_people else None)

    @property
    def _counts_people(self) -> bool:
        """Whether the rows of the silos still fitting are counted: the weights are divided by their total."""
        return self.retiring and self.weights is Weighting.SIZE

    def _fields(self, lattice: FitLattice | None) -> _Fields:
        largest = () if self.retiring else (self.n << GRID_BITS,) * self.dim
        return _Fields(dim=self.dim, lattice=lattice, shifts=self.shifts, largest=largest)

    def evaluations(self) -> tuple[Evaluation, ...]:
        return (Evaluation(self.problem, self.law, np.zeros(self.dim)),)

    def own_evaluations(self, rows: Local) -> tuple[Evaluation, ...]:
        fit = self._found(rows)
        is_sent = fit.status is FitStatus.MINIMUM and not self._retires_early(rows, fit)
        return (Evaluation(self.problem, self.law, fit.eps),) if is_sent and fit.eps.any() else ()

    def residual(self, pooled: FitAverage) -> float | None:
        if pooled.origin is None:  # each silo has a law of its own, so there is no pooled residual
            return None
        return norm(mean_gradient(self.problem, self.law, np.zeros(self.dim), pooled.origin, self.n))

    def retirement(self, answer: FitAnswer) -> FitQuery | None:
        return self if self.retiring and answer.outcome is FitOutcome.ZERO else None

    def retirement_by(self, addends: Integers) -> FitQuery | None:
        return self if self.retiring and addends[FitOutcome.ZERO - len(FitOutcome)] else None

    def retired_answer(self) -> FitAnswer | None:
        return self._rounded(FitOutcome.ZERO, np.zeros(self.dim), None) if self.retiring else None

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
        fit = self._found(local)
        zero = np.zeros(self.dim)
        origin = None
        if not self.retiring:
            origin = local.submodel(self.problem, self.law).sums(zero, Part.GRADIENT)
        if fit.status is not FitStatus.MINIMUM:
            outcome = FitOutcome.BOUNDARY if fit.status is FitStatus.BOUNDARY else FitOutcome.STALLED
            return self._rounded(outcome, fit.eps, origin)
        answer = self._rounded(FitOutcome.FITTED, fit.eps, origin)
        if self._retires_early(local, fit):
            answer = self._rounded(FitOutcome.ZERO, zero, origin)
        return answer if answer.eps.any() else replace(answer, outcome=FitOutcome.ZERO)

    @property
    def _settings(self) -> tuple[object, ...]:
        """The settings, beside problem and law, that a fit depends on."""
        return ("fit", self.radius, self.exhaustive, self.solver)

    def _found(self, local: Local) -> LocalMinimum:
        """Return the minimum of the silo's own loss in the public ball, which is searched once."""
        return local.once(
            self.problem,
            self.law,
            self._settings,
            lambda: fit_local(
                local.submodel(self.problem, self.law),
                local.normaliser(self.problem, self.law),
                dim=self.dim,
                radius=self.radius,
                exhaustive=self.exhaustive,
                solver=self.solver,
            ),
        )

    def _retires_early(self, local: Local, fit: LocalMinimum) -> bool:
        """Return whether a rule lets the silo retire although its fit is not zero."""
        if self.rule.gap is not None and fit.decrease <= self.rule.gap:
            return True
        if self.rule.noise is None:
            return False
        zero = np.zeros(self.dim)
        sums = local.submodel(self.problem, self.law).sums(zero, Part.GRADIENT)
        score = sums.values(local.n_rows) + local.normaliser(self.problem, self.law).gradient(zero)
        return self.rule.is_noise(score, local.estimate(self.problem, self.law).covariance)

    def _rounded(self, outcome: FitOutcome, eps: Array, origin: Sums | None) -> FitAnswer:
        """Return the answer with the fit on the lattice, if there is one."""
        if self.lattice is None:
            return FitAnswer(outcome=outcome, eps=eps, origin=origin)
        steps = self.lattice.steps(eps)
        return FitAnswer(outcome=outcome, eps=self.lattice.eps(steps), origin=origin, steps=steps)

    @property
    def lanes(self) -> tuple[Lane, ...] | None:
        """The weighted steps, any EIF sums, any people still fitting, and how many silos ended in each way.

        Fits as doubles and given weights are not pooled by addition.
        """
        if self.lattice is None or not isinstance(self.weights, Weighting):
            return None
        heaviest = self.n if self.weights is Weighting.SIZE else MOST_SILOS
        steps = (Lane(heaviest * self.lattice.reach),) * self.dim
        sums = () if self.retiring else (Lane(self.n << GRID_BITS),) * self.dim
        people = (Lane(self.n),) if self._counts_people else ()
        return (*steps, *sums, *people, *ENDINGS)

    def addends(self, answer: FitAnswer, n_rows: int) -> Integers:
        if answer.steps is None:
            raise AssertionError("a fit that is added has steps")
        weight = n_rows if self.weights is Weighting.SIZE else 1
        sums = () if answer.origin is None else answer.origin.units
        people = (n_rows * (answer.outcome is not FitOutcome.ZERO),) if self._counts_people else ()
        return (*(weight * z for z in answer.steps), *sums, *people, *_ended(answer.outcome))

    def pool_totals(self, totals: Integers) -> FitAverage:
        if self.lattice is None:
            raise AssertionError("fits that are added have a lattice")
        d, first = self.dim, len(totals) - len(FitOutcome)
        counts = FitCounts.of(totals[first:])
        people = totals[first - 1] if self._counts_people else None
        fitting = counts.fitting if self.retiring else counts.silos
        mass = fitting if self.weights is Weighting.UNIFORM else self.n if people is None else people
        if self.retiring and (mass > 0) != (fitting > 0):
            raise DecodeError("the people of the silos that still fit do not agree with their number")
        steps = tuple(round(Fraction(AVERAGE_STEPS * total, mass or 1)) for total in totals[:d])
        return FitAverage(
            eps=self.lattice.of_averages.eps(steps),
            steps=steps,
            origin=None if self.retiring else Sums(totals[d : 2 * d], self.shifts),
            fitting=fitting,
            people=people,
            worst=counts.worst,
        )

    def pool(self, answers: Mapping[str, FitAnswer], sizes: Mapping[str, int]) -> FitAverage:
        if self.lanes is not None:
            return add_up(self, answers, sizes)
        # Algorithm 5 renormalises over the silos that did not retire; Algorithm 3 keeps all.
        fitting = {
            silo: answer
            for silo, answer in answers.items()
            if not (self.retiring and answer.outcome is FitOutcome.ZERO)
        }
        if self.lattice is None:
            eps, steps = self._average(fitting, sizes), None
        else:
            fits = [(self._exact_weight(silo, sizes), answer.steps or ()) for silo, answer in fitting.items()]
            steps = self.lattice.average(fits, self.dim)
            eps = self.lattice.of_averages.eps(steps)
        origins = [answer.origin for answer in answers.values() if answer.origin is not None]
        return FitAverage(
            eps=eps,
            steps=steps,
            origin=reduce(add, origins) if origins else None,
            fitting=len(fitting),
            people=sum(sizes[silo] for silo in fitting) if self._counts_people else None,
            worst=max((answer.outcome for answer in answers.values()), key=_severity),
        )

    def _average(self, fitting: Mapping[str, FitAnswer], sizes: Mapping[str, int]) -> Array:
        """Return the average of eq. (retirement-weights) in floats."""
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
        """Return the gradient at the fit, which is disclosed to be zero, and any gradient at the origin."""
        zero = np.zeros(self.dim)
        fine = 2.0 ** -np.array(self.shifts, dtype=np.float64)
        coarse = fine + (self.solver.gradient or 0.0)
        if self.rule.lattice is not None:  # rounded: the gradient is zero within beta lambda sqrt(d)/2
            beta = float(np.linalg.norm(local.submodel(self.problem, self.law).curvature_ceiling(), 2))
            coarse = coarse + beta * self.rule.lattice * np.sqrt(self.dim) / 2
        disclosed = [(answer.eps, coarse)] if answer.eps.any() or answer.origin is None else []
        if answer.origin is not None:
            disclosed.append((zero, fine))
        return RowMeans(
            label="local fit",
            terms=tuple(Derivatives(self.problem, self.law, eps, Part.GRADIENT) for eps, _ in disclosed),
            box=np.concatenate([box for _, box in disclosed]),
        )

    def gap_bound(self, local: Local) -> float | None:
        """Return a bound of the local gap that remains when a silo retires; None if no rule gives one.

        A fit that rounds to zero leaves at most beta d lambda^2/8, for beta a bound of the silo's Hessian at
        every eps; a retirement by gap leaves at most that gap.
        """
        if self.rule.noise is not None or (self.rule.lattice is None and self.rule.gap is None):
            return None
        rounded = 0.0
        if self.rule.lattice is not None:
            rows = local.submodel(self.problem, self.law).curvature_ceiling()
            public = local.normaliser(self.problem, self.law).curvature_ceiling(np.eye(self.dim))
            beta = float(np.linalg.norm(rows, 2)) + public
            rounded = beta * self.dim * self.rule.lattice**2 / 8
        return max(rounded, self.rule.gap or 0.0)


@final
@dataclass(frozen=True, kw_only=True)
class FitCountQuery(AbstractTotals[FitOutcome, FitCounts]):
    """How many silos' fits ended in each way, before any fit is sent: those of too few are not asked for."""

    phase = Phase.TARGETING
    explanation = "whether the silo's own rows still move the fluctuation"
    lanes = ENDINGS

    fits: FitQuery  # the query that may follow

    @property
    def answer_code(self) -> FitOutcomeCode:
        return FitOutcomeCode()

    @property
    def pooled_code(self) -> FitCountsCode:
        return FitCountsCode()

    def answer(self, local: Local) -> FitOutcome:
        return self.fits.answer(local).outcome

    def evaluations(self) -> tuple[Evaluation, ...]:
        return self.fits.evaluations()  # that a fit is zero says as much as any other fit

    def own_evaluations(self, rows: Local) -> tuple[Evaluation, ...]:
        return self.fits.own_evaluations(rows)

    def row_means(self, answer: FitOutcome, local: Local) -> RowMeans | None:
        zero = self.fits.retired_answer()
        return None if zero is None or answer is not FitOutcome.ZERO else self.fits.row_means(zero, local)

    def addends(self, answer: FitOutcome, n_rows: int) -> Integers:
        return _ended(answer)

    def pool_totals(self, totals: Integers) -> FitCounts:
        return FitCounts.of(totals)

    def retirement(self, answer: FitOutcome) -> FitQuery | None:
        return self.fits if answer is FitOutcome.ZERO else None

    def retirement_by(self, addends: Integers) -> FitQuery | None:
        return self.fits.retirement_by(addends)

    def retired_answer(self) -> FitOutcome:
        return FitOutcome.ZERO


def _ended(outcome: FitOutcome) -> Integers:
    """Return one silo's counts of the ways in which fits end."""
    return tuple(int(outcome is each) for each in FitOutcome)


def _severity(outcome: FitOutcome) -> int:
    return {FitOutcome.ZERO: 0, FitOutcome.FITTED: 1, FitOutcome.STALLED: 2, FitOutcome.BOUNDARY: 3}[outcome]


# The query of adaptive switching: a rounded gradient and a local fit, and which of them is used.
#
# With alpha_m = N_m/n, a silo's own fit decreases its loss by at least ||g_m||^2/(2 beta), and moving on to
# the average of the fits forfeits at most beta V_2/2 (lem:local-fourth-order). A gradient step decreases the
# pooled loss by at least ||g||^2/(6 beta). So the average is taken if
#
#     sum_m alpha_m ||g_m||^2/(2 beta) - beta V_2/2 >= c ||g||^2/(6 beta),
#
# c the relative cost of a local round. In units of h^2/(2 beta), with integers z_m of the gradients, w_m of
# the fits and w of their average (one unit is h/beta), and the roundings on the safe side:
#
#     sum_m alpha_m max(0, |z_m| - sqrt(d)/2)^2 - sum_m alpha_m (|w_m - w| + sqrt(d)/2)^2 >= (c/3) |q|^2.


class Choice(enum.IntEnum):
    """What the server chose, in two bits."""

    GRADIENT = 0  # a gradient step, and gradients from here on
    LOCAL = 1  # the average of the fits
    FINISH = 2  # the gradient is small: the certificate


@dataclass(frozen=True, kw_only=True)
class SwitchAnswer:
    """A silo's rounded gradient, and its fit in lattice steps; None if it found no minimum."""

    z: tuple[int, ...]
    steps: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Switched:
    """The pooled rounded gradient, the choice, and the average of the fits if that was chosen."""

    q: tuple[int, ...]
    choice: Choice
    steps: tuple[int, ...] | None


@final
@dataclass(frozen=True, kw_only=True)
class SwitchAnswerCode(AbstractCode[SwitchAnswer]):
    """The gradient's integers, one bit for a fit, and its integers: signed Elias-gamma codewords."""

    dim: int

    @property
    def numbers(self) -> int:
        return 2 * self.dim

    def memory(self, value: SwitchAnswer) -> Memory:
        return {TARGETING: Remembered(value.z)}  # Algorithm 4 goes on with differences from it

    def write(self, value: SwitchAnswer, out: BitWriter) -> None:
        out.gamma(value.z)
        out.uint(value.steps is not None, 1)
        out.gamma(value.steps or ())

    def read(self, bits: BitReader) -> SwitchAnswer:
        z = bits.gamma(self.dim)
        return SwitchAnswer(z=z, steps=bits.gamma(self.dim) if bits.uint(1) else None)


@final
@dataclass(frozen=True, kw_only=True)
class SwitchedCode(AbstractCode[Switched]):
    """q, the choice in two bits, and the average of the fits if it was chosen."""

    query: SwitchQuery

    @property
    def numbers(self) -> int:
        return 2 * self.query.lattice.dim

    def write(self, value: Switched, out: BitWriter) -> None:
        out.gamma(value.q)
        out.uint(value.choice, 2)
        out.gamma(value.steps or ())

    def read(self, bits: BitReader) -> Switched:
        lattice = self.query.lattice
        q, code = bits.gamma(lattice.dim), bits.uint(2)
        if code not in set(Choice) or (code == Choice.FINISH) != lattice.is_small(q):
            raise DecodeError("the broadcast choice does not follow from the broadcast gradient")
        steps = bits.gamma(lattice.dim) if code == Choice.LOCAL else None
        if steps is not None and not any(steps):
            raise DecodeError("the broadcast average of fits is zero")
        return Switched(q=q, choice=Choice(code), steps=steps)


@final
@dataclass(frozen=True, kw_only=True)
class SwitchQuery(AbstractQuery[SwitchAnswer, Switched]):
    """Asks each silo for its rounded gradient at the origin and its own fit; the server uses one of them."""

    phase = Phase.TARGETING
    explanation = (
        "the mean gradient over the rows, and the fluctuation that fits them best, on the public grid"
    )

    problem: Problem
    law: Law
    lattice: Lattice
    n: int
    cost: float
    radius: float
    solver: LocalSolver
    tolerance: float | None = None

    @property
    def answer_code(self) -> SwitchAnswerCode:
        return SwitchAnswerCode(dim=self.lattice.dim)

    @property
    def pooled_code(self) -> SwitchedCode:
        return SwitchedCode(query=self)

    def evaluations(self) -> tuple[Evaluation, ...]:
        return (Evaluation(self.problem, self.law, self._origin),)

    @property
    def _origin(self) -> Array:
        return np.zeros(self.lattice.dim)

    def answer(self, local: Local) -> SwitchAnswer:
        submodel = local.submodel(self.problem, self.law)
        normaliser = local.normaliser(self.problem, self.law)
        public = normaliser.gradient(self._origin)
        z = self.lattice.quantise(submodel.sums(self._origin, Part.GRADIENT), public, local.n_rows)
        fit = self._found(local)
        return SwitchAnswer(z=z, steps=self._steps(fit.eps) if fit.status is FitStatus.MINIMUM else None)

    def own_evaluations(self, rows: Local) -> tuple[Evaluation, ...]:
        fit = self._found(rows)
        is_sent = fit.status is FitStatus.MINIMUM and fit.eps.any()
        return (Evaluation(self.problem, self.law, fit.eps),) if is_sent else ()

    def _found(self, local: Local) -> LocalMinimum:
        """Return the minimum of the silo's own loss in the public ball, which is searched once."""
        return local.once(
            self.problem,
            self.law,
            ("fit", self.radius, self.solver),
            lambda: fit_local(
                local.submodel(self.problem, self.law),
                local.normaliser(self.problem, self.law),
                dim=self.lattice.dim,
                radius=self.radius,
                solver=self.solver,
            ),
        )

    def _steps(self, eps: Array) -> tuple[int, ...]:
        """Return the integers nearest to beta u/h, eps = C^T u."""
        unit = self.lattice.h / self.lattice.beta
        exact = [Fraction(float(value)) for value in eps]
        B, d = self.lattice.B, self.lattice.dim
        return tuple(round(sum((B[j][i] * exact[j] for j in range(d)), Fraction(0)) / unit) for i in range(d))

    def pool(self, answers: Mapping[str, SwitchAnswer], sizes: Mapping[str, int]) -> Switched:
        d = self.lattice.dim
        q = tuple(divide(sum(sizes[silo] * a.z[j] for silo, a in answers.items()), self.n) for j in range(d))
        if self.lattice.is_small(q):
            return Switched(q=q, choice=Choice.FINISH, steps=None)
        fits = {silo: a.steps for silo, a in answers.items() if a.steps is not None}
        if len(fits) == len(answers):
            average = tuple(
                divide(sum(sizes[silo] * w[j] for silo, w in fits.items()), self.n) for j in range(d)
            )
            if any(average) and self._gain(answers, sizes, average) >= self.cost / 3 * _norm(q) ** 2:
                return Switched(q=q, choice=Choice.LOCAL, steps=average)
        return Switched(q=q, choice=Choice.GRADIENT, steps=None)

    def _gain(
        self, answers: Mapping[str, SwitchAnswer], sizes: Mapping[str, int], average: tuple[int, ...]
    ) -> float:
        """Return a lower bound of the decrease by the average of the fits, in units of h^2/(2 beta)."""
        half = math.sqrt(self.lattice.dim) / 2
        return math.fsum(
            sizes[silo]
            / self.n
            * (
                max(0.0, _norm(a.z) - half) ** 2
                - (_norm([w - v for w, v in zip(a.steps or (), average, strict=True)]) + half) ** 2
            )
            for silo, a in answers.items()
        )

    def row_means(self, answer: SwitchAnswer, local: Local) -> RowMeans:
        """Return the rounded gradient at the origin, and that at the fit, which is zero at a minimum."""
        C, h, d = floating(self.lattice.C), float(self.lattice.h), self.lattice.dim
        terms = [Derivatives(self.problem, self.law, self._origin, Part.GRADIENT)]
        mix, box = C, np.full(d, h / 2)
        if answer.steps is not None:
            eps = self.lattice.eps(answer.steps)
            terms.append(Derivatives(self.problem, self.law, eps, Part.GRADIENT))
            mix = np.block([[C, np.zeros((d, d))], [np.zeros((d, d)), C]])
            # The fit is half a step off in each coordinate, and beta bounds the slope of C g along u.
            box = np.concatenate([box, np.full(d, h * math.sqrt(d) / 2)])
        return RowMeans(label="gradient and fit", terms=tuple(terms), mix=mix, box=box)

    def residual(self, pooled: Switched) -> float:
        return root_up(self.lattice.raw_norm_squared(pooled.q))


def _norm(vector: tuple[int, ...] | list[int]) -> float:
    return math.sqrt(sum(entry * entry for entry in vector))
