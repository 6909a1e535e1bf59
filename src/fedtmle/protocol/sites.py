"""Queries about the silos themselves: how far each departs from the pooled models, and its own estimate."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.exact import Sums
from fedtmle.model.types import Array, IntArray
from fedtmle.protocol.codes import (
    MOST_SILOS,
    AbstractCode,
    BitReader,
    BitWriter,
    read_count,
    read_floats,
    write_floats,
)
from fedtmle.protocol.query import AbstractQuery, IntegerSums, Local, Phase, Query

DEPARTURE_BITS = 20  # binary places of a departure


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

    departures: AbstractDepartures
    n: int
    phase: Phase = Phase.DIAGNOSTICS

    @property
    def shifts(self) -> tuple[int, ...]:
        count = len(self.departures.names)
        return (DEPARTURE_BITS,) * count + (0,) * count

    @property
    def row_units(self) -> int:
        return 1 << DEPARTURE_BITS

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


WITHHELD = OwnEstimate(status=OwnStatus.WITHHELD)


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
        return self.own_fit.estimate(self.local)


@final
@dataclass(frozen=True)
class OwnCode(AbstractCode["OwnEstimate | _Pending"]):
    """A status and, if there is an estimate, psi and the upper triangle of its covariance as doubles."""

    dim: int

    @property
    def numbers(self) -> int:
        return 0  # none of a silo that withholds its estimate

    def write(self, value: OwnEstimate | _Pending, out: BitWriter) -> None:
        own = value.estimate if isinstance(value, _Pending) else value
        out.uint(own.status, 4)
        if own.psi is not None and own.covariance is not None:
            write_floats(own.psi, out)
            write_floats(own.covariance[_upper(self.dim)], out)

    def read(self, bits: BitReader) -> OwnEstimate:
        number = bits.uint(4)
        if number not in OwnStatus._value2member_map_:
            raise DecodeError("a silo's own estimate has an unknown status")
        status = OwnStatus(number)
        if not status.has_estimate:
            return OwnEstimate(status=status)
        psi = read_floats(bits, self.dim)
        upper = read_floats(bits, self.dim * (self.dim + 1) // 2)
        covariance = np.empty((self.dim, self.dim))
        rows, columns = _upper(self.dim)
        covariance[rows, columns] = covariance[columns, rows] = upper
        return OwnEstimate(status=status, psi=psi, covariance=covariance)


def _upper(dim: int) -> tuple[IntArray, IntArray]:
    return np.triu_indices(dim)


@final
@dataclass(frozen=True)
class OwnsCode(AbstractCode[tuple[OwnEstimate, ...]]):
    """The estimates of all silos, in the order of the roster."""

    own: OwnCode

    @property
    def numbers(self) -> int:
        return 0

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

    own_fit: AbstractOwnFit
    phase: Phase = Phase.DIAGNOSTICS

    @property
    def explanation(self) -> str:
        return "the silo's own estimate, if its owner releases it, else that it is withheld"

    @property
    def answer_code(self) -> OwnCode:
        return OwnCode(self.own_fit.dim)

    @property
    def pooled_code(self) -> OwnsCode:
        return OwnsCode(self.answer_code)

    @property
    def floors(self) -> tuple[str, ...]:
        return ("release",)

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
