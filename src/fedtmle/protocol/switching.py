"""The query of adaptive switching: a rounded gradient and a local fit, and which of them is used.

With alpha_m = N_m/n, a silo's own fit decreases its loss by at least ||g_m||^2/(2 beta), and moving on to the
average of the fits forfeits at most beta V_2/2 (lem:local-fourth-order). A gradient step decreases the pooled
loss by at least ||g||^2/(6 beta). So the average is taken if

    sum_m alpha_m ||g_m||^2/(2 beta) - beta V_2/2 >= c ||g||^2/(6 beta),

c the relative cost of a local round. In units of h^2/(2 beta), with integers z_m of the gradients, w_m of the
fits and w of their average (one unit is h/beta), and the roundings on the safe side:

    sum_m alpha_m max(0, |z_m| - sqrt(d)/2)^2 - sum_m alpha_m (|w_m - w| + sqrt(d)/2)^2 >= (c/3) |q|^2.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.fit import FitStatus, LocalSolver, fit_local
from fedtmle.model.types import Array, Part
from fedtmle.protocol.codes import TARGETING, AbstractCode, BitReader, BitWriter, Memory, Remembered
from fedtmle.protocol.lattice import Lattice, divide, floating, root_up
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

    problem: Problem
    law: Law
    lattice: Lattice
    n: int
    cost: float
    radius: float
    solver: LocalSolver
    tolerance: float | None = None

    @property
    def phase(self) -> Phase:
        return Phase.TARGETING

    @property
    def explanation(self) -> str:
        return "the mean gradient over the rows, and the fluctuation that fits them best, on the public grid"

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
        fit = fit_local(submodel, normaliser, dim=self.lattice.dim, radius=self.radius, solver=self.solver)
        return SwitchAnswer(z=z, steps=self._steps(fit.eps) if fit.status is FitStatus.MINIMUM else None)

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
