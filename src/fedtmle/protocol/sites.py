"""Queries about the silos: their departure from pooled models, their own estimates, their populations."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model import linear
from fedtmle.protocol.codes import (
    MOST_SILOS,
    AbstractCode,
    BitReader,
    BitWriter,
    Integers,
    read_count,
)
from fedtmle.protocol.query import (
    AbstractQuery,
    Derivatives,
    Evaluation,
    IntegerSums,
    Law,
    Local,
    Phase,
    Problem,
    Query,
    RowMeans,
)
from fedtmle_core.exact import GRID_BITS, Sums, query_shifts
from fedtmle_core.types import Array, Part, packed_size, upper_pairs

DEPARTURE_BITS = 16  # binary places of a departure
OWN_PLACES = 16  # binary places of a silo's own estimate, in units of its standard error
LARGEST_EXPONENT = 300  # largest exponent of a standard error
LARGEST_PSI = 1 << 53  # in units of 2^-16 standard errors


class AbstractDepartures(ABC):
    """A statistic of one silo for each of some models: how far the silo departs from the pooled fit."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """One name for each model."""

    @abstractmethod
    def of(self, local: Local) -> tuple[tuple[float, float], ...]:
        """Return sum r and sum r^2 of the residuals r of each model over the silo's independent units."""


@final
@dataclass(frozen=True, kw_only=True)
class DeparturesQuery(IntegerSums):
    """The sum over the silos of T_m = (sum r)^2 / sum r^2, r the residuals of a pooled model at silo m.

    The second half of the answer counts the silos whose residuals are not all zero. T_m is at most N_m.
    """

    row_units = 1 << DEPARTURE_BITS

    departures: AbstractDepartures
    n: int
    phase: Phase = Phase.DIAGNOSTICS

    @property
    def shifts(self) -> tuple[int, ...]:
        count = len(self.departures.names)
        return (DEPARTURE_BITS,) * count + (0,) * count

    @property
    def largest(self) -> tuple[int, ...]:
        count = len(self.departures.names)
        return (self.n << DEPARTURE_BITS,) * count + (MOST_SILOS,) * count

    @property
    def like(self) -> range:
        return range(len(self.shifts))

    @property
    def explanation(self) -> str:
        models = " and ".join(self.departures.names)
        return f"how far the silo departs from the pooled fit of the {models}: one number for each model"

    def answer(self, local: Local) -> Sums:
        sums = self.departures.of(local)
        values = [total * total / squares if squares > 0 else 0.0 for total, squares in sums]
        counted = [int(squares > 0) for _, squares in sums]
        most = local.n_rows << DEPARTURE_BITS
        units = [min(round(math.ldexp(value, DEPARTURE_BITS)), most) for value in values]
        return Sums((*units, *counted), self.shifts)


class OwnStatus(enum.IntEnum):
    """Whether a silo sent an estimate of its own, or why not."""

    SENT = 0
    WITHHELD = 1
    FEW = 2
    ARM = 3
    SEPARATION = 4
    COLLINEAR = 5
    OVERLAP = 6
    CONVERGENCE = 7
    OTHER = 8
    PENALISED = 9

    @property
    def reason(self) -> str:
        """Why the silo has no estimate of its own, in words."""
        return _REASONS[self]

    @property
    def has_estimate(self) -> bool:
        """Whether an estimate comes with the status."""
        return self in (OwnStatus.SENT, OwnStatus.PENALISED)


_REASONS = {
    OwnStatus.SENT: "it has one",
    OwnStatus.WITHHELD: "its owner does not release it",
    OwnStatus.FEW: "an arm has too few records with an outcome there",
    OwnStatus.ARM: "an arm or a stratum is absent from it",
    OwnStatus.SEPARATION: "a model's response is perfectly predicted there (separation)",
    OwnStatus.COLLINEAR: "a column of a model is constant or determined by others there",
    OwnStatus.OVERLAP: "its arms do not overlap",
    OwnStatus.CONVERGENCE: "a fit did not converge there",
    OwnStatus.OTHER: "the study's models cannot be fitted to its records alone",
    OwnStatus.PENALISED: "it has one, from weakly penalised fits",
}


@dataclass(frozen=True, kw_only=True)
class OwnEstimate:
    """A silo's own psi, shape (d,), and its covariance, (d, d); None unless the status has an estimate."""

    status: OwnStatus
    psi: Array | None = None
    covariance: Array | None = None

    def rounded(self) -> OwnEstimate:
        """Return the estimate as it is sent: psi to 2^-16 of its standard error (`OwnIntegers`)."""
        integers = OwnIntegers.of(self)
        return self if integers is None else integers.estimate(self.status)


WITHHELD = OwnEstimate(status=OwnStatus.WITHHELD)


class OwnIntegers(NamedTuple):
    """An own estimate in integers, with P = `OWN_PLACES`.

    The standard error of psi_k is errors[k] 2^(exponents[k] - P) with 2^P <= errors[k] < 2^(P + 1), or zero,
    psi_k is psi[k] 2^(exponents[k] - P), and a correlation is an entry of ``correlations``, the upper
    triangle in its order, times 2^-P. All these numbers and their products are doubles without rounding.
    """

    exponents: Integers
    errors: Integers
    psi: Integers
    correlations: Integers

    @classmethod
    def of(cls, own: OwnEstimate) -> OwnIntegers | None:
        """Return the integers nearest to an estimate, None if there is none."""
        if own.psi is None or own.covariance is None:
            return None
        raw = [math.sqrt(max(value, 0.0)) for value in np.diag(own.covariance).tolist()]
        errors = [_significant(error) for error in raw]
        exponents = [math.frexp(error)[1] - 1 if error else 0 for error in errors]
        units = [exponent - OWN_PLACES for exponent in exponents]
        correlations = []
        for j, k in upper_pairs(len(raw)):
            if j < k:
                scale = raw[j] * raw[k]
                share = own.covariance[j, k] / scale if scale else 0.0
                correlations.append(round(math.ldexp(min(max(share, -1.0), 1.0), OWN_PLACES)))
        return cls(
            exponents=tuple(exponents),
            errors=tuple(round(math.ldexp(e, -unit)) for e, unit in zip(errors, units, strict=True)),
            psi=tuple(round(math.ldexp(p, -unit)) for p, unit in zip(own.psi.tolist(), units, strict=True)),
            correlations=tuple(correlations),
        )

    def estimate(self, status: OwnStatus) -> OwnEstimate:
        """Return the estimate that the integers are."""
        units = np.array(self.exponents) - OWN_PLACES
        errors = np.ldexp(np.array(self.errors, dtype=np.float64), units)
        covariance, shares = np.diag(errors * errors), iter(self.correlations)
        for j, k in upper_pairs(len(errors)):
            if j < k:
                covariance[j, k] = covariance[k, j] = errors[j] * errors[k] * next(shares) * 2.0**-OWN_PLACES
        psi = np.ldexp(np.array(self.psi, dtype=np.float64), units)
        return OwnEstimate(status=status, psi=psi, covariance=covariance)


def _significant(value: float) -> float:
    """Return a nonnegative number rounded to `OWN_PLACES` + 1 significant binary digits."""
    exponent = math.frexp(value)[1] - 1 - OWN_PLACES
    return math.ldexp(round(math.ldexp(value, -exponent)), exponent)


class AbstractOwnFit(ABC):
    """How a silo estimates the target, of ``dim`` numbers, from its own rows alone."""

    dim: int

    @abstractmethod
    def estimate(self, local: Local) -> OwnEstimate:
        """Return the estimate, or the reason why there is none."""


@dataclass(frozen=True)
class _Pending:
    """An estimate that is computed when it is written: a silo that withholds it computes nothing."""

    own_fit: AbstractOwnFit
    local: Local

    @cached_property
    def estimate(self) -> OwnEstimate:
        return self.own_fit.estimate(self.local).rounded()


@final
@dataclass(frozen=True)
class OwnCode(AbstractCode["OwnEstimate | _Pending"]):
    """A status and, if there is an estimate, its integers: exponents, errors, psi, correlations."""

    numbers = 0  # unknown: a silo that withholds its estimate sends none

    dim: int

    def write(self, value: OwnEstimate | _Pending, out: BitWriter) -> None:
        own = value.estimate if isinstance(value, _Pending) else value
        out.uint(own.status, 4)
        integers = OwnIntegers.of(own)
        if integers is None:
            return
        out.golomb(integers.exponents)
        for error in integers.errors:
            out.uint(error, OWN_PLACES + 1)
        out.golomb(integers.psi)
        out.fixed(integers.correlations, self._largest)

    def read(self, bits: BitReader) -> OwnEstimate:
        number = bits.uint(4)
        if number not in OwnStatus._value2member_map_:
            raise DecodeError("a silo's own estimate has an unknown status")
        status = OwnStatus(number)
        if not status.has_estimate:
            return OwnEstimate(status=status)
        integers = OwnIntegers(
            exponents=bits.golomb(self.dim),
            errors=tuple(bits.uint(OWN_PLACES + 1) for _ in range(self.dim)),
            psi=bits.golomb(self.dim),
            correlations=bits.fixed(self._largest),
        )
        if max(map(abs, integers.exponents)) > LARGEST_EXPONENT or max(map(abs, integers.psi)) > LARGEST_PSI:
            raise DecodeError("a silo's own estimate is out of range")
        own = integers.estimate(status)
        if OwnIntegers.of(own) != integers:
            raise DecodeError("a silo's own estimate is not in its one form")
        return own

    @property
    def _largest(self) -> Integers:
        return (1 << OWN_PLACES,) * (self.dim * (self.dim - 1) // 2)


@final
@dataclass(frozen=True)
class OwnsCode(AbstractCode[tuple[OwnEstimate, ...]]):
    """The estimates of all silos, in the order of the roster."""

    numbers = 0

    own: OwnCode

    def write(self, value: tuple[OwnEstimate, ...], out: BitWriter) -> None:
        out.gamma((len(value),))
        for own in value:
            self.own.write(own, out)

    def read(self, bits: BitReader) -> tuple[OwnEstimate, ...]:
        return tuple(self.own.read(bits) for _ in range(read_count(bits, MOST_SILOS, least=1)))


@final
@dataclass(frozen=True, kw_only=True)
class OwnEstimateQuery(AbstractQuery["OwnEstimate | _Pending", tuple[OwnEstimate, ...]]):
    """Each silo's own estimate, where its owner releases it, broadcast as it is."""

    explanation = "the silo's own estimate, if its owner releases it, else that it is withheld"
    floors = ("release",)
    open_consent = ""  # a silo whose owner does not consent reports that it withholds its estimate

    own_fit: AbstractOwnFit
    phase: Phase = Phase.DIAGNOSTICS

    @property
    def answer_code(self) -> OwnCode:
        return OwnCode(self.own_fit.dim)

    @property
    def pooled_code(self) -> OwnsCode:
        return OwnsCode(self.answer_code)

    def answer(self, local: Local) -> _Pending:
        return _Pending(self.own_fit, local)

    def suppress(
        self, answer: OwnEstimate | _Pending, floor: Callable[[Query], int]
    ) -> OwnEstimate | _Pending:
        return answer if floor(self) else WITHHELD

    def pool(
        self, answers: Mapping[str, OwnEstimate | _Pending], sizes: Mapping[str, int]
    ) -> tuple[OwnEstimate, ...]:
        return tuple(own.estimate if isinstance(own, _Pending) else own for own in answers.values())


# Queries that ask whether the silos' rows are draws from one population.
#
# With g_m the mean gradient of silo m's N_m rows at a common law, g that of all rows, and Sigma the
# covariance of a row's gradient within silos,
#
#     T = sum_m N_m (g_m - g)' Sigma^-1 (g_m - g)
#
# is close to chi^2 with d (M - 1) degrees of freedom if every row is a draw from the same law.

PRODUCT_BITS = 40  # binary places of a product of gradients, relative to the bound of one row's
STATISTIC_BITS = 20  # binary places of a silo's part of T
MOST_GROUPS = 256  # groups of rows whose means give the spread; with fewer rows, each row is a group


@final
@dataclass(frozen=True, kw_only=True)
class SpreadQuery(IntegerSums):
    """The sum of the rows' gradients at eps = 0, and their spread within the silo.

    The spread is A_m = sum_b n_b (g_b - g_m)(g_b - g_m)' over groups b of the silo's rows, with its degrees
    of freedom, one less than the groups: A_m over these is an unbiased estimate of Sigma.
    """

    row_units = 1 << GRID_BITS
    explanation = "exact sums over the rows of the gradient of the targeting step, and their covariance"

    problem: Problem
    law: Law
    n: int
    phase: Phase = Phase.DIAGNOSTICS

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        bound = self.problem.row_bound(self.law)
        products = (PRODUCT_BITS - 2 * bound.gradient,) * packed_size(self.problem.dim)
        return (*query_shifts(bound, self._origin, Part.GRADIENT), *products, 0)

    @property
    def largest(self) -> tuple[int, ...]:
        d = self.problem.dim
        # |g_b - g_m| is at most twice a row's bound.
        products = (self.n << PRODUCT_BITS + 2,) * packed_size(d)
        return ((self.n << GRID_BITS,) * d) + products + (self.n,)

    @property
    def _origin(self) -> Array:
        return np.zeros(self.problem.dim)

    def evaluations(self) -> tuple[Evaluation, ...]:
        return (Evaluation(self.problem, self.law, self._origin),)

    def answer(self, local: Local) -> Sums:
        submodel, d = local.submodel(self.problem, self.law), self.problem.dim
        sums = submodel.sums(self._origin, Part.GRADIENT)
        own = sums.values(submodel.n_rows)
        groups = list(submodel.gradients_by_group(self._origin, MOST_GROUPS))
        products = [
            math.fsum(size * float(g[j] - own[j]) * float(g[k] - own[k]) for size, g in groups)
            for j, k in upper_pairs(d)
        ]
        spread = self.shifts[d:-1]
        units = [round(math.ldexp(value, shift)) for value, shift in zip(products, spread, strict=True)]
        return Sums((*sums.units, *units, len(groups) - 1), self.shifts)

    def row_means(self, answer: Sums | None, local: Local) -> RowMeans:
        d = self.problem.dim
        return RowMeans(
            label="gradient",
            terms=(Derivatives(self.problem, self.law, self._origin, Part.GRADIENT),),
            box=self.grid_box[:d],
            sent=None if answer is None else answer.values(local.n_rows)[:d],
        )


@final
@dataclass(frozen=True, kw_only=True)
class PopulationsQuery(IntegerSums):
    """The sum over the silos of T_m = N_m |C (g_m - g)|^2, and the number of silos.

    ``mean`` is g, and ``root`` is C with C'C = Sigma^-1. T_m is truncated at n.
    """

    shifts = (STATISTIC_BITS, 0)
    row_units = 1 << STATISTIC_BITS
    explanation = "how far the mean gradient of the silo's rows is from that of all silos: one number"

    problem: Problem
    law: Law
    n: int
    mean: Array
    root: Array
    phase: Phase = Phase.DIAGNOSTICS

    def answer(self, local: Local) -> Sums:
        submodel = local.submodel(self.problem, self.law)
        own = submodel.sums(np.zeros(self.problem.dim), Part.GRADIENT).values(submodel.n_rows)
        gap = (own - self.mean).tolist()
        distance = [linear.dot(row, gap) for row in self.root.tolist()]
        statistic = submodel.n_rows * linear.dot(distance, distance)
        return Sums((round(math.ldexp(min(statistic, float(self.n)), STATISTIC_BITS)), 1), self.shifts)
