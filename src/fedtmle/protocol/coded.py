"""Queries of Algorithm 4: a calibration that fixes the lattice, then rounded gradients."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.types import Array, Part, packed_size, unpack
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.lattice import LARGEST_EXPONENT, Lattice, Matrix, divide, floating
from fedtmle.protocol.query import AbstractQuery, Link, Local, Phase, Point, Problem

CURVATURE_BITS = 10  # of the largest entry of a silo's curvature: calibration needs no more


class Action(enum.IntEnum):
    """The two-bit action of eq. (protocol-action)."""

    STEP = 0b00  # ||g~|| > 3 delta/4: a gradient step
    ACCEPT = 0b01  # small at t > 0: accept eps^k, look at the new origin
    FINISH = 0b10  # small at t = 0: the certificate


class Curvature(enum.StrEnum):
    """Which matrix a silo reports when it calibrates."""

    ORIGIN = "origin"  # its Hessian at eps = 0, normaliser included: an estimate of smoothness
    CEILING = "ceiling"  # a bound of its rows' Hessian at every eps: certified


@dataclass(frozen=True, kw_only=True)
class SiloCurvature:
    """A symmetric matrix, rounded: ``entries[j] * 2^exponent``, upper triangle row by row."""

    exponent: int
    entries: tuple[int, ...]

    def matrix(self, dim: int) -> Array:
        return unpack(np.ldexp(np.array(self.entries, dtype=np.float64), self.exponent), dim)

    def rounding(self, dim: int) -> float:
        """A bound on the operator norm of what rounding changed."""
        return dim * 2.0 ** (self.exponent - 1)


@final
@dataclass(frozen=True, kw_only=True)
class CalibrationQuery(AbstractQuery[SiloCurvature, Lattice]):
    """One counted round that fixes beta, h and, where the law does not know it, C.

    Where C is public (raw coordinates, or a law that knows its curvature) a silo discloses one
    number, the norm of C H_m C^T, or that matrix if ``matrices``; else its curvature H_m.
    """

    problem: Problem
    law: Any
    delta: Fraction
    C: Matrix | None
    curvature: Curvature
    matrices: bool
    settle: Callable[[Mapping[str, SiloCurvature], Mapping[str, int]], Lattice]

    @property
    def phase(self) -> Phase:
        return Phase.CALIBRATION

    @property
    def tells(self) -> str:
        what = "the largest curvature" if self.sent_dim == 1 else "the curvature matrix"
        return f"{what} of the loss over the rows, rounded"

    @property
    def functionals(self) -> int:
        return packed_size(self.sent_dim)

    def points(self) -> tuple[Point, ...]:
        return (Point(self.problem, self.law, np.zeros(self.dim), curvature=self.sent_dim > 1),)

    @property
    def dim(self) -> int:
        return self.problem.dim

    @property
    def sent_dim(self) -> int:
        """The size of the matrix a silo sends: a norm is a matrix of size one."""
        return self.dim if self.matrices or self.C is None else 1

    def answer(self, local: Local) -> SiloCurvature:
        matrix = self._curvature(local, np.eye(self.dim) if self.C is None else floating(self.C))
        if self.sent_dim == 1:
            matrix = np.abs(np.linalg.eigvalsh(matrix)).max().reshape(1, 1)
        exponent = int(np.frexp(np.abs(matrix).max())[1]) - CURVATURE_BITS
        entries = np.rint(np.ldexp(matrix[np.triu_indices(self.sent_dim)], -exponent))
        return SiloCurvature(exponent=exponent, entries=tuple(int(entry) for entry in entries))

    def _curvature(self, local: Local, C: Array) -> Array:
        """C H_m C^T, or a bound of it at every eps."""
        submodel, normaliser = (
            local.submodel(self.problem, self.law),
            local.normaliser(self.problem, self.law),
        )
        if self.curvature is Curvature.CEILING:
            rows = C @ submodel.curvature_ceiling() @ C.T
            return np.asarray(rows + normaliser.curvature_ceiling(C) * np.eye(self.dim))
        origin = np.zeros(self.dim)
        sums = submodel.sums(origin, Part.HESSIAN).values(local.n_rows)
        return np.asarray(C @ (unpack(sums, self.dim) + normaliser.hessian(origin)) @ C.T)

    def write_answer(self, answer: SiloCurvature, out: BitWriter, link: Link) -> None:  # noqa: ARG002
        out.gamma((answer.exponent,))
        out.fixed(answer.entries, self._largest)

    def read_answer(self, bits: BitReader, link: Link) -> SiloCurvature:  # noqa: ARG002
        (exponent,) = bits.gamma(1)
        if abs(exponent) > LARGEST_EXPONENT:
            raise DecodeError("a curvature is out of the range of a double")
        return SiloCurvature(exponent=exponent, entries=bits.fixed(self._largest))

    def pool(self, answers: Mapping[str, SiloCurvature], sizes: Mapping[str, int]) -> Lattice:
        return self.settle(answers, sizes)

    def write_pooled(self, pooled: Lattice, out: BitWriter) -> None:
        pooled.write(out, public_C=self.C is not None)

    def read_pooled(self, bits: BitReader) -> Lattice:
        return Lattice.read(bits, dim=self.dim, delta=self.delta, C=self.C)

    def retires(self, answer: SiloCurvature) -> bool:  # noqa: ARG002
        return False

    @property
    def _largest(self) -> tuple[int, ...]:
        return (1 << CURVATURE_BITS,) * packed_size(self.sent_dim)


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """q_r and the action that the server derived from it; every party derives it again."""

    q: tuple[int, ...]
    action: Action


@final
@dataclass(frozen=True, kw_only=True)
class RoundedGradientQuery(AbstractQuery[tuple[int, ...], Rounded]):
    """z_m = round(C g_m / h) up, q = round(sum N_m z_m / n) and a two-bit action down.

    ``width`` None sends differences from the last message by signed Elias-gamma codes; a
    number J sends absolute values in [-J, J] at fixed width. The decoded values are the same.
    """

    problem: Problem
    law: Any
    eps: Array
    lattice: Lattice
    previous_q: tuple[int, ...]
    at_origin: bool
    n: int
    width: int | None

    @property
    def phase(self) -> Phase:
        return Phase.TARGETING

    @property
    def tells(self) -> str:
        return "the mean gradient over the rows, rounded to the public grid"

    @property
    def functionals(self) -> int:
        return self.lattice.dim

    def points(self) -> tuple[Point, ...]:
        return (Point(self.problem, self.law, self.eps),)

    def answer(self, local: Local) -> tuple[int, ...]:
        sums = local.submodel(self.problem, self.law).sums(self.eps, Part.GRADIENT)
        public = local.normaliser(self.problem, self.law).gradient(self.eps)
        return self.lattice.quantise(sums, public, local.n_rows)

    def pool(self, answers: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> Rounded:
        q = tuple(
            divide(sum(sizes[silo] * z[j] for silo, z in answers.items()), self.n)
            for j in range(self.lattice.dim)
        )
        return Rounded(q=q, action=self.action(q))

    def action(self, q: tuple[int, ...]) -> Action:
        """eq. (protocol-action), in exact arithmetic."""
        if not self.lattice.is_small(q):
            return Action.STEP
        return Action.FINISH if self.at_origin else Action.ACCEPT

    def write_answer(self, answer: tuple[int, ...], out: BitWriter, link: Link) -> None:
        self._write(answer, link.previous.get("z"), out)
        link.previous["z"] = answer

    def read_answer(self, bits: BitReader, link: Link) -> tuple[int, ...]:
        z = self._read(bits, link.previous.get("z"))
        link.previous["z"] = z
        return z

    def write_pooled(self, pooled: Rounded, out: BitWriter) -> None:
        self._write(pooled.q, self.previous_q, out)
        out.uint(pooled.action, 2)

    def read_pooled(self, bits: BitReader) -> Rounded:
        q = self._read(bits, self.previous_q)
        action = bits.uint(2)
        if action != self.action(q):
            raise DecodeError("the broadcast action does not follow from the broadcast gradient")
        return Rounded(q=q, action=Action(action))

    def retires(self, answer: tuple[int, ...]) -> bool:  # noqa: ARG002
        return False

    def _write(self, values: tuple[int, ...], previous: tuple[int, ...] | None, out: BitWriter) -> None:
        if self.width is not None:
            if any(abs(value) > self.width for value in values):
                raise OverflowError("fixed_width: a rounded gradient exceeds the declared range")
            out.fixed(values, (self.width,) * len(values))
        else:
            memory = previous or (0,) * len(values)
            out.gamma(value - before for value, before in zip(values, memory, strict=True))

    def _read(self, bits: BitReader, previous: tuple[int, ...] | None) -> tuple[int, ...]:
        dim = self.lattice.dim
        if self.width is not None:
            return bits.fixed((self.width,) * dim)
        memory = previous or (0,) * dim
        return tuple(before + step for before, step in zip(memory, bits.gamma(dim), strict=True))
