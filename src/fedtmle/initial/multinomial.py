"""Multinomial regression across silos: one softmax model of all arms, the same in whichever order they are.

The reference class only fixes coordinates: the fitted probabilities do not depend on it. A ridge penalises
the coefficients of each column around their mean over all classes, that of the reference being zero,

    A = ridge sum_a {sum_j beta_ja^2 - (sum_j beta_ja)^2 / J},

which does not depend on the reference either, and for two classes is the ridge of a logistic GLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.initial.design import column_names, scaled_design
from fedtmle.initial.glm import AbstractRegressionModel, AbstractResponse, Levels
from fedtmle.initial.syntax import Formula
from fedtmle.model import kernels
from fedtmle.model.families import Family
from fedtmle.model.multinomial import Multinomial
from fedtmle.model.parallel import done
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel, StreamedLinear
from fedtmle.model.table import AnyTable, StreamedTable, Table
from fedtmle.model.types import Array, RowBound, exponent


@final
@dataclass(frozen=True)
class ClassRidge(AbstractNormaliser):
    """The penalty A above; ``free`` marks the intercept among the columns, shape (p,)."""

    ridge: float
    free: Array
    classes: int

    @cached_property
    def _matrix(self) -> Array:
        spread = np.eye(self.classes - 1) - 1.0 / self.classes
        return np.asarray(2.0 * self.ridge * np.kron(spread, np.diag(1.0 - self.free)), dtype=np.float64)

    def value(self, eps: Array) -> float:
        return 0.5 * math.fsum(eps * self.gradient(eps))

    def gradient(self, eps: Array) -> Array:
        return np.array([math.fsum(row * eps) for row in self._matrix])  # the same bits at every party

    def hessian(self, eps: Array) -> Array:  # noqa: ARG002 - constant
        return self._matrix

    def curvature_ceiling(self, C: Array) -> float:
        return 2.0 * self.ridge * float(np.linalg.norm(C, 2)) ** 2


@final
@dataclass(frozen=True, kw_only=True)
class MultinomialModel(AbstractRegressionModel):
    """The loss whose minimiser is the softmax fit of the classes of ``response`` on the formula's columns."""

    formula: Formula
    levels: Levels
    scales: tuple[int, ...]  # column a is divided by 2^scales[a]
    classes: int
    response: AbstractResponse
    weight_ceiling: float = 1.0
    ridge: float = 0.0

    @property
    def dim(self) -> int:
        return (self.classes - 1) * len(self.scales)

    def submodel(self, law: None, rows: AnyTable) -> AbstractSubmodel:
        if isinstance(rows, StreamedTable):
            return StreamedLinear(
                table=rows,
                family=Family.LOGISTIC,
                dim=self.dim,
                bound=self.row_bound(law),
                design=self.design,
            )
        return self.design(rows)

    def design(self, rows: Table) -> Multinomial:
        """Return the submodel of rows in memory."""
        y, w = self.response.of(rows)
        return Multinomial(
            X=scaled_design(self.formula, rows, self.levels, self.scales),
            y=y.astype(np.int64),
            w=w,
            classes=self.classes,
            bound=self.row_bound(None),
        )

    def normaliser(self, law: None) -> ClassRidge:  # noqa: ARG002 - there is no law
        return self._ridge

    @cached_property
    def _ridge(self) -> ClassRidge:
        names = column_names(self.formula, self.levels)
        return ClassRidge(self.ridge, np.array([float(name == "1") for name in names]), self.classes)

    def row_bound(self, law: None) -> RowBound:  # noqa: ARG002 - there is no law
        return RowBound(gradient=exponent(self.weight_ceiling), curvature=exponent(self.weight_ceiling / 4))


@final
@dataclass(frozen=True, kw_only=True)
class FittedMultinomial:
    """A fitted softmax model: coefficients of each class but the first, in the order of the columns.

    ``error`` and ``bits`` are those of a coded fit, as of `FittedGLM`.
    """

    formula: Formula
    levels: Levels
    coefficients: tuple[tuple[float, ...], ...]
    error: float = 0.0
    bits: int | None = None

    def predict(self, table: Table) -> Array:
        """Return the probability of each class, shape (J, N): the same bits in any partition."""
        p = np.empty((len(self.coefficients) + 1, table.n_rows))

        def fill(place: tuple[slice, Table]) -> None:
            rows, block = place
            p[:, rows] = self._block(block)

        done(fill, table.placed_blocks())
        return p

    def _block(self, table: Table) -> Array:
        zeros = [0] * len(self.coefficients[0])
        X = scaled_design(self.formula, table, self.levels, zeros)
        eta = np.zeros((len(self.coefficients) + 1, table.n_rows))
        for j, beta in enumerate(self.coefficients, start=1):
            rows = kernels.glm_rows(Family.GAUSSIAN, X)  # the Gaussian mean is the predictor
            eta[j] = kernels.glm_means(rows, np.array(beta))
        return kernels.softmax(eta)
