"""Queries for exact sums over rows: loss, gradient and Hessian at (law, eps), and closing moments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any, final

from fedtmle.model.exact import FINE_BITS, GRID_BITS, Sums, query_shifts
from fedtmle.model.types import Array, IntArray, Part
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.query import AbstractQuery, Link, Local, Model, Phase, Point, Problem

_PARTS = {Part.LOSS: "loss", Part.GRADIENT: "gradient", Part.HESSIAN: "curvature"}


class AbstractSums(AbstractQuery[Sums, Sums]):
    """Sums add up; each travels in the fixed width that its public bound allows.

    A width that depends on the value would tell the value's size to whoever counts bytes.
    """

    n: int

    @property
    @abstractmethod
    def shifts(self) -> tuple[int, ...]:
        """The public grid."""

    @property
    @abstractmethod
    def row_units(self) -> int:
        """The most grid units that one row can contribute to one sum."""

    @property
    def functionals(self) -> int:
        return len(self.shifts)

    def pool(self, answers: Mapping[str, Sums], sizes: Mapping[str, int]) -> Sums:  # noqa: ARG002
        return reduce(add, answers.values())

    def write_answer(self, answer: Sums, out: BitWriter, link: Link) -> None:  # noqa: ARG002
        self.write_pooled(answer, out)

    def read_answer(self, bits: BitReader, link: Link) -> Sums:  # noqa: ARG002
        return self.read_pooled(bits)

    def write_pooled(self, pooled: Sums, out: BitWriter) -> None:
        out.fixed(pooled.units, self._largest)

    def read_pooled(self, bits: BitReader) -> Sums:
        return Sums(bits.fixed(self._largest), self.shifts)

    def retires(self, answer: Sums) -> bool:  # noqa: ARG002
        return False

    @property
    def _largest(self) -> tuple[int, ...]:
        return (self.n * self.row_units,) * len(self.shifts)


@final
@dataclass(frozen=True, kw_only=True)
class SumsQuery(AbstractSums):
    """Sums of the asked parts of the row loss at (law, eps), over all rows or a pooled batch."""

    problem: Model
    law: Any
    eps: Array
    parts: Part
    n: int
    batch: IntArray | None = None
    phase: Phase = Phase.TARGETING

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        return query_shifts(self.problem.row_bound(self.law), self.eps, self.parts)

    @property
    def row_units(self) -> int:
        return 1 << GRID_BITS

    @property
    def tells(self) -> str:
        parts = [name for part, name in _PARTS.items() if part in self.parts]
        of = "a nuisance model" if self.phase is Phase.NUISANCE else "the targeting step"
        rows = "the rows" if self.batch is None else "a batch of the rows"
        return f"exact sums over {rows}: {', '.join(parts)} of {of}"

    def points(self) -> tuple[Point, ...]:
        curvature = Part.HESSIAN in self.parts
        return (Point(self.problem, self.law, self.eps, self.batch, curvature),)

    def answer(self, local: Local) -> Sums:
        return local.submodel(self.problem, self.law, self.batch).sums(self.eps, self.parts)


@final
@dataclass(frozen=True, kw_only=True)
class MomentsQuery(AbstractSums):
    """Additive sums for psi and the EIF covariance: the closing message, or a first look at the SE."""

    problem: Problem
    law: Any
    n: int
    phase: Phase = Phase.CLOSING

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        return self.problem.moment_shifts(self.law)

    @property
    def row_units(self) -> int:
        return 1 << (GRID_BITS + FINE_BITS)

    @property
    def tells(self) -> str:
        return "exact sums over the rows for the estimate and its standard error"

    def answer(self, local: Local) -> Sums:
        return local.moments(self.problem, self.law)
