"""Queries of Algorithm 4: a calibration that fixes the lattice, then rounded gradients."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from operator import mul
from typing import Literal, final

import numpy as np

from fedtmle.errors import DecodeError, InputError
from fedtmle.model.linear import congruence, eigen, multiply, operator_norm_squared, symmetric_norm
from fedtmle.protocol.codes import AbstractCode, BitReader, BitWriter, Differences, Integers
from fedtmle.protocol.lattice import (
    LARGEST_EXPONENT,
    Lattice,
    Matrix,
    build_lattice,
    divide,
    floating,
    root_up,
    significant,
    whitener,
)
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import (
    AbstractQuery,
    AbstractTotals,
    CurvatureBound,
    Derivatives,
    Evaluation,
    KnownLaw,
    Law,
    Local,
    Phase,
    Problem,
    RowMeans,
    add_up,
    law_at,
)
from fedtmle_core.types import Array, Part, packed_size, unpack, upper_pairs

CURVATURE_BITS = 10  # significant bits of the largest entry of a silo's curvature; calibration needs no more
FINEST_CURVATURE = 60  # binary places below the public bound of a curvature's entries


class Action(enum.IntEnum):
    """The two-bit action of eq. (protocol-action)."""

    STEP = 0b00  # ||g~|| > 3 delta/4: a gradient step
    ACCEPT = 0b01  # small at t > 0: accept eps^k, and ask at the new origin
    FINISH = 0b10  # small at t = 0: the certificate


class Curvature(enum.StrEnum):
    """Which matrix a silo reports when it calibrates."""

    ORIGIN = "origin"  # its Hessian at eps = 0, normaliser included: an estimate of smoothness
    CEILING = "ceiling"  # a bound of its rows' Hessian at every eps: certified


@final
@dataclass(frozen=True, kw_only=True)
class Certified:
    """Take the smoothness beta from a bound on the Hessian.

    It is the sum of sup rho'' w X X^T over the rows, plus the normaliser's.

    Parameters
    ----------
    along
        "segments" bounds the curvature of the public normaliser on the segment of each step; beta is
        settled at the first step and doubled where a later segment needs more. "everywhere" takes one bound
        for every eps, as the paper does, which is much larger. Regressions have no normaliser, and both are
        the same.
    over
        As in `Estimated`.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Coded(smoothness=ft.Certified()).smoothness.along
    'segments'
    """

    along: Literal["segments", "everywhere"] = "segments"
    over: Literal["silos", "pooled"] = "silos"

    def __post_init__(self) -> None:
        if self.along not in ("segments", "everywhere"):
            raise InputError(f"along: expected 'segments' or 'everywhere', not {self.along!r}")
        _require_over(self.over)


@final
@dataclass(frozen=True, kw_only=True)
class Estimated:
    """The smoothness beta as a multiple of the curvature at the origin: an estimate, so rounds are capped.

    Parameters
    ----------
    factor
        The multiple.
    over
        "silos" takes the largest curvature of the silos, the paper's assumption. "pooled" takes the pooled
        one: it needs fewer rounds, but each silo sends a matrix, and the bounds on bits do not apply.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Estimated().factor
    1.05
    """

    factor: float = 1.05
    over: Literal["silos", "pooled"] = "silos"

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise InputError(f"factor: expected at least 1, not {self.factor}")
        _require_over(self.over)


def _require_over(over: str) -> None:
    if over not in ("silos", "pooled"):
        raise InputError(f"over: expected 'silos' or 'pooled', not {over!r}")


SmoothnessRule = float | Certified | Estimated


@dataclass(frozen=True, kw_only=True)
class SiloCurvature:
    """A symmetric matrix, rounded: ``entries[j] * 2^exponent``, upper triangle row by row."""

    exponent: int
    entries: tuple[int, ...]

    def matrix(self, dim: int) -> Array:
        return unpack(np.ldexp(np.array(self.entries, dtype=np.float64), self.exponent), dim)


@final
@dataclass(frozen=True)
class CurvatureCode(AbstractCode[SiloCurvature]):
    """The exponent as a gamma codeword, then the entries at fixed width."""

    dim: int

    @property
    def numbers(self) -> int:
        return packed_size(self.dim)

    def write(self, value: SiloCurvature, out: BitWriter) -> None:
        out.gamma((value.exponent,))
        out.fixed(value.entries, self._largest)

    def read(self, bits: BitReader) -> SiloCurvature:
        (exponent,) = bits.gamma(1)
        if abs(exponent) > LARGEST_EXPONENT:
            raise DecodeError("a curvature is out of the range of a double")
        return SiloCurvature(exponent=exponent, entries=bits.fixed(self._largest))

    @property
    def _largest(self) -> tuple[int, ...]:
        return (1 << CURVATURE_BITS,) * packed_size(self.dim)


@final
@dataclass(frozen=True, kw_only=True)
class LatticeCode(AbstractCode[Lattice]):
    """beta, and C's lower triangle unless all know C (`Lattice.write`)."""

    dim: int
    delta: Fraction
    C: Matrix | None

    @property
    def numbers(self) -> int:
        return 1 if self.C is not None else 1 + packed_size(self.dim)

    def write(self, value: Lattice, out: BitWriter) -> None:
        value.write(out, public_C=self.C is not None)

    def read(self, bits: BitReader) -> Lattice:
        return Lattice.read(bits, dim=self.dim, delta=self.delta, C=self.C)


@final
@dataclass(frozen=True, kw_only=True)
class CalibrationQuery(AbstractQuery[SiloCurvature, Lattice]):
    """One counted round that fixes beta, h and, unless it is public, C.

    Where C is public (raw coordinates, or a law that knows its curvature) a silo discloses one number, the
    norm of C H_m C^T, or that matrix if beta is that of the pooled curvature; else its curvature H_m.
    The pooled value is a function of totals, unless beta is the largest of the silos' own.
    """

    phase = Phase.CALIBRATION

    problem: Problem
    law: Law
    n: int
    delta: Fraction
    C: Matrix | None
    smoothness: SmoothnessRule

    @property
    def explanation(self) -> str:
        size = "the largest curvature" if self.sent_dim == 1 else "the curvature matrix"
        return f"{size} of the loss over the rows, rounded"

    @property
    def answer_code(self) -> CurvatureCode:
        return CurvatureCode(self.sent_dim)

    @property
    def pooled_code(self) -> LatticeCode:
        return LatticeCode(dim=self.dim, delta=self.delta, C=self.C)

    def evaluations(self) -> tuple[Evaluation, ...]:
        is_matrix = self.sent_dim > 1
        return (Evaluation(self.problem, self.law, np.zeros(self.dim), curvature=is_matrix, is_coarse=True),)

    @property
    def dim(self) -> int:
        return self.problem.dim

    @property
    def curvature(self) -> Curvature:
        """Which matrix a silo reports."""
        return Curvature.CEILING if isinstance(self.smoothness, Certified) else Curvature.ORIGIN

    @property
    def is_pooled(self) -> bool:
        """Whether beta is that of the pooled curvature."""
        return not isinstance(self.smoothness, int | float) and self.smoothness.over == "pooled"

    @property
    def sent_dim(self) -> int:
        """The size of the matrix a silo sends: a norm is a matrix of size one."""
        return self.dim if self.is_pooled or self.C is None else 1

    def answer(self, local: Local) -> SiloCurvature:
        matrix = self._curvature(local, np.eye(self.dim) if self.C is None else floating(self.C))
        if self.sent_dim == 1:
            matrix = np.array([[symmetric_norm(matrix)]])
        exponent = max(int(np.frexp(np.abs(matrix).max())[1]) - CURVATURE_BITS, self.finest)
        entries = np.rint(np.ldexp(matrix[np.triu_indices(self.sent_dim)], -exponent))
        return SiloCurvature(exponent=exponent, entries=tuple(int(entry) for entry in entries))

    def _curvature(self, local: Local, C: Array) -> Array:
        """Return C H_m C^T, or a bound of it at every eps."""
        submodel, normaliser = (
            local.submodel(self.problem, self.law),
            local.normaliser(self.problem, self.law),
        )
        if self.curvature is Curvature.CEILING:
            rows = congruence(C, submodel.curvature_ceiling())
            if isinstance(self.smoothness, Certified) and self.smoothness.along == "segments":
                return rows
            return np.asarray(rows + normaliser.curvature_ceiling(C) * np.eye(self.dim))
        origin = np.zeros(self.dim)
        sums = submodel.sums(origin, Part.HESSIAN).values(local.n_rows)
        return congruence(C, unpack(sums, self.dim) + normaliser.hessian(origin))

    def row_means(self, answer: SiloCurvature, local: Local) -> RowMeans:
        """Return a curvature as means over the rows; for a norm, along its eigenvector (first order)."""
        dim, upper = self.dim, upper_pairs(self.dim)
        C = np.eye(dim) if self.C is None else floating(self.C)
        zero, submodel = np.zeros(dim), local.submodel(self.problem, self.law)
        if self.sent_dim == dim:
            wide = [congruence(C.T, _symmetric(j, k, dim)) for j, k in upper]
        else:
            rows = (
                submodel.curvature_ceiling()
                if self.curvature is Curvature.CEILING
                else unpack(submodel.sums(zero, Part.HESSIAN).values(local.n_rows), dim)
            )
            _, vectors = eigen(congruence(C, rows))
            along = multiply(C.T, vectors[:, -1:])[:, 0]
            wide = [np.outer(along, along)]
        # An entry of C H C^T is a combination of H's upper triangle; off the diagonal both halves count.
        mix = np.array([[m[j, k] * (1.0 if j == k else 2.0) for j, k in upper] for m in wide])
        return RowMeans(
            label="curvature" if self.sent_dim == dim else "curvature's norm",
            terms=(
                CurvatureBound(self.problem, self.law)
                if self.curvature is Curvature.CEILING
                else Derivatives(self.problem, self.law, zero, Part.HESSIAN),
            ),
            mix=mix,
            box=np.full(len(mix), 2.0 ** (answer.exponent - 1)),
        )

    @cached_property
    def _largest(self) -> int:
        """The exponent of a public bound of the entries that a silo sends."""
        C = np.eye(self.dim) if self.C is None else np.abs(floating(self.C))
        public = float(np.abs(self.problem.normaliser(self.law).hessian(np.zeros(self.dim))).max())
        row = 2.0 ** self.problem.row_bound(self.law).curvature + public
        return math.frexp(row * float(C.sum(axis=1).max()) ** 2)[1] + 1

    @property
    def finest(self) -> int:
        """The exponent of the finest grid on which a silo sends its curvature."""
        return self._largest - FINEST_CURVATURE

    @property
    def lanes(self) -> tuple[Lane, ...] | None:
        """The entries of N_m H_m, then N_m times the unit of its grid, all on the finest grid."""
        if self.sent_dim < self.dim or not (self.is_pooled or isinstance(self.smoothness, int | float)):
            return None
        lane = Lane(self.n << FINEST_CURVATURE + 1)
        return (lane,) * (packed_size(self.dim) + 1)

    def addends(self, answer: SiloCurvature, n_rows: int) -> Integers:
        scale = n_rows << (answer.exponent - self.finest)
        return (*(scale * entry for entry in answer.entries), scale)

    def pool_totals(self, totals: Integers) -> Lattice:
        *entries, units = (math.ldexp(total / self.n, self.finest) for total in totals)
        return self._lattice([unpack(np.array(entries), self.dim)], _rounding(units, self.dim))

    def pool(self, answers: Mapping[str, SiloCurvature], sizes: Mapping[str, int]) -> Lattice:
        if self.lanes is not None:
            return add_up(self, answers, sizes)
        size = self.sent_dim
        coarsest = max(_rounding(2.0**answer.exponent, size) for answer in answers.values())
        return self._lattice([answer.matrix(size) for answer in answers.values()], coarsest, sizes)

    def _lattice(
        self, matrices: Sequence[Array], rounding: float, sizes: Mapping[str, int] | None = None
    ) -> Lattice:
        """Return the lattice for the pooled curvature alone, or for those of silos of the given ``sizes``.

        beta has 8 significant bits: as given, or the factor times a norm of C H C^T. Over silos it is the
        largest of theirs (assumption smooth); pooled, that of their mean, which is all that descent needs.
        ``rounding`` bounds the operator norm of what rounding changed.
        """
        C = self.C
        if C is None:
            pooled = matrices[0] if sizes is None else _mean(matrices, list(sizes.values()))
            C = whitener(pooled, rounding)
        if isinstance(self.smoothness, int | float):
            return build_lattice(delta=self.delta, beta=significant(self.smoothness, up=True), C=C)
        # The answers are in the coordinates of a public C already.
        along = np.eye(self.sent_dim) if self.C is not None else floating(C)
        # The server sends beta, but a replay of the answers must compute the same value: use plain floats.
        norms = [symmetric_norm(congruence(along, matrix)) for matrix in matrices]
        spread = operator_norm_squared(along) * rounding
        factor = self.smoothness.factor if isinstance(self.smoothness, Estimated) else 1.0
        return build_lattice(delta=self.delta, beta=significant(factor * (max(norms) + spread), up=True), C=C)


def _symmetric(j: int, k: int, dim: int) -> Array:
    """Return the matrix whose inner product with H is H_jk."""
    matrix = np.zeros((dim, dim))
    matrix[j, k] += 0.5
    matrix[k, j] += 0.5
    return matrix


def _mean(matrices: Sequence[Array], sizes: Sequence[int]) -> Array:
    """Return the pooled curvature: the silos' weighted by N_m/n."""
    n = sum(sizes)
    return np.asarray(sum(size / n * matrix for size, matrix in zip(sizes, matrices, strict=True)))


def _rounding(unit: float, dim: int) -> float:
    """Return a bound on the operator norm of a symmetric matrix with entries of at most half a unit."""
    return dim * unit / 2


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """q_r and the action that the server derived from it; every party derives the action again."""

    q: tuple[int, ...]
    action: Action


@final
@dataclass(frozen=True, kw_only=True)
class RoundedCode(AbstractCode[Rounded]):
    """q as differences from the last one, then the two-bit action, which must follow from q."""

    query: RoundedGradientQuery

    @property
    def numbers(self) -> int:
        return self._q.numbers

    @property
    def _q(self) -> Differences:
        return replace(self.query.answer_code, previous=self.query.previous_q)

    def write(self, value: Rounded, out: BitWriter) -> None:
        self._q.write(value.q, out)
        out.uint(value.action, 2)

    def read(self, bits: BitReader) -> Rounded:
        q = self._q.read(bits)
        action = bits.uint(2)
        if action != self.query.action(q):
            raise DecodeError("the broadcast action does not follow from the broadcast gradient")
        return Rounded(q=q, action=Action(action))


@final
@dataclass(frozen=True, kw_only=True)
class RoundedGradientQuery(AbstractTotals[Integers, Rounded]):
    """z_m = round(C g_m / h) up, q = round(sum N_m z_m / n) and a two-bit action down.

    ``width`` None sends differences from the last message by signed Elias-gamma codes; a
    number J sends absolute values in [-J, J] at fixed width. The decoded values are the same.
    """

    phase = Phase.TARGETING
    explanation = "the mean gradient over the rows, rounded to the public grid"

    problem: Problem
    law: Law
    eps: Array
    lattice: Lattice
    previous_q: tuple[int, ...]
    at_origin: bool
    n: int
    width: int | None
    tolerance: float | None = None

    @property
    def answer_code(self) -> Differences:
        return Differences(dim=self.lattice.dim, width=self.width)

    @property
    def pooled_code(self) -> RoundedCode:
        return RoundedCode(query=self)

    def evaluations(self) -> tuple[Evaluation, ...]:
        return (Evaluation(self.problem, self.law, self.eps),)

    def answer(self, local: Local) -> tuple[int, ...]:
        sums = local.submodel(self.problem, self.law).sums(self.eps, Part.GRADIENT)
        public = local.normaliser(self.problem, self.law).gradient(self.eps)
        return self.lattice.quantise(sums, public, local.n_rows)

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The totals are sums of N_m z_m, and each row's gradient has a public bound."""
        if self.width is not None:
            return (Lane(self.n * self.width),) * self.lattice.dim
        public = self.problem.normaliser(self.law).gradient(self.eps)
        row = 2.0 ** self.problem.row_bound(self.law).gradient
        largest = [Fraction(row + abs(a) * (1.0 + 2.0**-30) + 2.0**-50) for a in public.tolist()]
        images = (sum(map(mul, map(abs, C), largest), Fraction(0)) for C in self.lattice.C)
        return tuple(Lane(self.n * (math.ceil(image / self.lattice.h) + 1)) for image in images)

    def addends(self, answer: Integers, n_rows: int) -> Integers:
        return tuple(n_rows * z for z in answer)

    def pool_totals(self, totals: Integers) -> Rounded:
        q = tuple(divide(total, self.n) for total in totals)
        return Rounded(q=q, action=self.action(q))

    def action(self, q: tuple[int, ...]) -> Action:
        """Return the action of eq. (protocol-action), in exact arithmetic."""
        if not self.lattice.is_small(q):
            return Action.STEP
        return Action.FINISH if self.at_origin else Action.ACCEPT

    def row_means(self, answer: tuple[int, ...], local: Local) -> RowMeans:
        C, h = floating(self.lattice.C), float(self.lattice.h)
        public = multiply(C, self.problem.normaliser(self.law).gradient(self.eps)[:, None])[:, 0]
        return RowMeans(
            label="rounded gradient",
            terms=(Derivatives(self.problem, self.law, self.eps, Part.GRADIENT),),
            mix=C,
            box=np.full(len(C), h / 2),
            sent=h * np.array(answer, dtype=np.float64) - public,
            is_rounded=True,
        )

    def residual(self, pooled: Rounded) -> float:
        return root_up(self.lattice.raw_norm_squared(pooled.q))

    def known_law(self, pooled: Rounded) -> KnownLaw | None:
        law = law_at(self.problem, self.law, self.eps)
        if law is None:
            return None
        return KnownLaw(
            problem=self.problem, law=law, residuals=self.lattice.coordinate_certificates(pooled.q)
        )
