"""Queries of a coded fit: gradients and curvatures in public coordinates, rounded to a public grid.

A model's coefficients are eps = C^T u, C public and invertible. A silo sends

    z_m = round(C g_m / k h)   or   the upper triangle of   Z_m = round(C H_m C^T / k h),

h = 2^exponent, k = 2 for gradients and 1 for Hessians, g_m and H_m the mean gradient and Hessian of its rows
at eps, and the parties receive q = round(k sum N_m z_m / n). So h q is within (k + 1) h/2 of the pooled one
in each coordinate, whatever the number of silos. With many silos their roundings cancel, hence the coarser
grid. The public part of the loss, such as a ridge, is added by every party itself.

A silo whose guard refuses the point answers None, if the query is ``declinable`` and sums are open. Then
nothing is pooled: the parties receive None, and the flow asks at another point.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.model.linear import congruence, multiply
from fedtmle.protocol.codes import AbstractCode, Declinable, Golomb, Integers, Triangle
from fedtmle.protocol.lattice import divide
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import (
    EVERYBODY,
    AbstractTotals,
    Derivatives,
    Evaluation,
    Law,
    Local,
    Model,
    Query,
    RowMeans,
    add_up,
)
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, Part, packed_size, unpack, upper_pairs

SLACK = 2.0**-20  # slack of a public bound, for the rounding of doubles
COARSER = 1  # binary places by which a silo's grid of gradients is coarser than the pooled one


@final
@dataclass(frozen=True)
class Near:
    """A public bound on pooled means before they are asked: each is within ``distance`` of ``values``.

    A gradient in the coordinates u moves by at most L |u - u'|, with L a bound of the curvature there
    (`programs.coded_fit`). A mean Hessian is positive semidefinite, so that L bounds its entries.
    """

    values: Array
    distance: float


class _Rounded(AbstractTotals[Integers | None, Integers | None]):
    """Means over a silo's rows on a public grid, pooled by their sizes; None where a silo declines."""

    model: Model
    near: Near | None
    eps: Array
    C: Array
    exponent: int
    n: int
    law: Law = None
    declinable: bool = False

    @abstractmethod
    def image(self, sums: Array) -> Array:
        """Return the numbers that are rounded, given the means over the rows; linear in these."""

    @property
    @abstractmethod
    def part(self) -> Part:
        """Which derivative is summed over the rows."""

    @property
    @abstractmethod
    def answer_exponent(self) -> int:
        """The exponent of the grid of an answer."""

    @property
    @abstractmethod
    def integers_code(self) -> AbstractCode[Integers]:
        """The code of the integers of an answer."""

    @property
    def broadcast_code(self) -> AbstractCode[Integers]:
        """The code of the pooled integers."""
        return self.integers_code

    @property
    def answer_code(self) -> Declinable:
        return Declinable(self.integers_code, self.declinable)

    @property
    def pooled_code(self) -> Declinable:
        return Declinable(self.broadcast_code, self.declinable)

    @property
    def is_declinable(self) -> bool:
        return self.declinable

    def suppress(self, answer: Integers | None, floor: Callable[[Query], int]) -> Integers | None:
        return None if self.declinable and floor(self) == EVERYBODY else answer

    def pool(self, answers: Mapping[str, Integers | None], sizes: Mapping[str, int]) -> Integers | None:
        return None if None in answers.values() else add_up(self, answers, sizes)

    @property
    def derivatives(self) -> Derivatives:
        return Derivatives(self.model, self.law, self.eps, self.part)

    def answer(self, local: Local) -> Integers:
        (sums,) = local.sums([self.derivatives])
        return self.answer_by(sums, local.n_rows)

    def answer_by(self, sums: Sums, n_rows: int) -> Integers:
        image = self.image(sums.values(n_rows))
        return tuple(int(z) for z in np.rint(np.ldexp(image, -self.answer_exponent)))

    @cached_property  # the guard, the masks and the looks ask for them
    def lanes(self) -> tuple[Lane, ...]:
        """The totals are sums of N_m z_m; each row's derivative has a public bound.

        Where more is public, lanes are as narrow as it allows, whatever single silos send. A silo rounds its
        mean to z_m 2^a, a the answer's exponent: |z_m 2^a - C g_m| <= 2^a / 2. With C g the pooled mean,

            |sum N_m z_m - n C g / 2^a| <= n / 2,   |C g - near| <= distance.

        The slack covers the rounding of doubles in C g_m and at the point u.
        """
        bounds = np.ldexp(self.largest_image(), -self.answer_exponent)
        wide = [Lane(self.n * (math.ceil(bound * (1.0 + 2.0**-30)) + 1)) for bound in bounds.tolist()]
        if self.near is None:
            return tuple(wide)
        distance = math.ldexp(self.near.distance, -self.answer_exponent) * (1.0 + SLACK)
        centres = np.ldexp(self.near.values, -self.answer_exponent).tolist()
        reach = math.ceil(self.n * (distance + 0.5 + 2.0**-6)) + 1
        near = [
            Lane(reach=reach + math.ceil(SLACK * self.n * abs(centre)), centre=round(self.n * centre))
            for centre in centres
        ]
        return tuple(min(lanes, key=lambda lane: lane.reach) for lanes in zip(near, wide, strict=True))

    @abstractmethod
    def largest_image(self) -> Array:
        """Return a bound of each number that is rounded."""

    def addends(self, answer: Integers | None, n_rows: int) -> Integers:
        if answer is None:
            raise AssertionError("an answer that is added is not declined")
        return tuple(n_rows * z for z in answer)

    def pool_totals(self, totals: Integers) -> Integers:
        finer = self.answer_exponent - self.exponent
        return tuple(divide(total << finer, self.n) for total in totals)

    def row_means(self, answer: Integers | None, local: Local) -> RowMeans | None:
        if answer is None:
            return None
        width = len(self.eps) if self.part is Part.GRADIENT else packed_size(len(self.eps))
        return RowMeans(
            label=f"rounded {'gradient' if self.part is Part.GRADIENT else 'curvature'} of a model",
            terms=(self.derivatives,),
            mix=np.stack([self.image(unit) for unit in np.eye(width)], axis=1),
            box=np.full(self.functionals, 2.0 ** (self.answer_exponent - 1)),
            sent=np.ldexp(np.array(answer, dtype=np.float64), self.answer_exponent),
            is_rounded=True,
        )

    @property
    def rounding(self) -> float:
        """How far a pooled number may be from the mean that it stands for."""
        return 2.0 ** (self.answer_exponent - 1) + 2.0 ** (self.exponent - 1)

    def values(self, pooled: Integers) -> Array:
        """Return the pooled means that the integers stand for."""
        return np.ldexp(np.array(pooled, dtype=np.float64), self.exponent)


@final
@dataclass(frozen=True, kw_only=True)
class FitGradientQuery(_Rounded):
    """The mean gradient of a model's loss at eps, as C g; answers of one ``stream`` are differences."""

    explanation = "the mean gradient of a nuisance model over the rows, rounded to a public grid"
    part = Part.GRADIENT

    model: Model
    eps: Array
    C: Array
    exponent: int
    n: int
    stream: str
    near: Near | None = None
    declinable: bool = False

    def image(self, sums: Array) -> Array:
        return multiply(self.C, sums[:, None])[:, 0]

    def largest_image(self) -> Array:
        return np.ldexp(_row_sums(self.C), self.model.row_bound(self.law).gradient)

    @property
    def integers_code(self) -> Golomb:
        return Golomb(blocks=(len(self.C),), stream=self.stream, exponent=self.answer_exponent)

    @property
    def broadcast_code(self) -> Golomb:
        return Golomb(blocks=(len(self.C),))

    @property
    def answer_exponent(self) -> int:
        return self.exponent + COARSER

    def evaluations(self) -> tuple[Evaluation, ...]:
        return (Evaluation(self.model, None, self.eps),)


@final
@dataclass(frozen=True, kw_only=True)
class FitCurvatureQuery(_Rounded):
    """The mean Hessian of a model's loss at eps, as C H C^T, on a grid that is coarse beside one record."""

    explanation = "the mean curvature of a model's loss over the rows, rounded to a coarse public grid"
    part = Part.HESSIAN

    model: Model
    eps: Array
    C: Array
    exponent: int
    n: int
    law: Law = None
    near: Near | None = None
    declinable: bool = False

    def image(self, sums: Array) -> Array:
        matrix = congruence(self.C, unpack(sums, len(self.eps)))
        return np.array([matrix[j, k] for j, k in upper_pairs(len(matrix))])

    def largest_image(self) -> Array:
        sums, exponent = _row_sums(self.C), self.model.row_bound(self.law).curvature
        products = [sums[j] * sums[k] for j, k in upper_pairs(len(sums))]
        return np.asarray(np.ldexp(products, exponent))

    @property
    def integers_code(self) -> Triangle:
        return Triangle(dim=len(self.C))

    @property
    def answer_exponent(self) -> int:
        return self.exponent

    def evaluations(self) -> tuple[Evaluation, ...]:
        return (Evaluation(self.model, self.law, self.eps, curvature=True, is_coarse=True, gradient=False),)

    def matrix(self, pooled: Integers) -> Array:
        """Return the pooled matrix."""
        return unpack(self.values(pooled), len(self.C))


def _row_sums(C: Array) -> Array:
    """Return the sum of |C_jk| over k for each j."""
    return np.array([math.fsum(map(abs, row)) for row in C.tolist()])
