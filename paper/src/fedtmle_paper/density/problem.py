"""Targets of a full density: everything but the functional itself.

    p^{k+1}(o) = p^k(o) f(eps^k . D(p^k)(o)) / Z_k,   L(p)(o) = -log p(o).

Psi, D and Z are integrals of the law by one public quadrature rule, so no pooled statistic is needed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import DataError, InputError, NumericalError
from fedtmle.model.linear import congruence
from fedtmle.model.problem import (
    AbstractProblem,
    Estimate,
    PoolableRows,
    mean_and_covariance,
    second_moment_shifts,
    second_moments,
)
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.privacy.charts import AbstractMomentsChart, Tangent, chart_of
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, RowBound, exponent
from fedtmle_paper.density.fluctuation import AbstractFluctuation
from fedtmle_paper.density.law import AbstractFunctional, DensityLaw, Step
from fedtmle_paper.density.quadrature import DensityNormaliser, combined, reweight, second_moment
from fedtmle_paper.density.start import kernel_density


class AbstractDensityProblem(AbstractProblem[DensityLaw, Array], PoolableRows[Array]):
    """A functional of a density of q columns; a subclass is a frozen, hashable dataclass.

    Rows are held as contiguous columns, shape (q, N).
    """

    @property
    @abstractmethod
    def columns(self) -> int:
        """q: coordinates of an observation."""

    @property
    @abstractmethod
    def fluctuation(self) -> AbstractFluctuation:
        """f."""

    @property
    @abstractmethod
    def spacing(self) -> float:
        """The largest spacing of the quadrature grid in any coordinate."""

    @property
    @abstractmethod
    def strip(self) -> tuple[float, ...]:
        """Per coordinate j, an a > 0 such that D is analytic where only o_j is complex, |Im o_j| < a."""

    @abstractmethod
    def functional(self, nodes: Array, masses: Array, near: AbstractFunctional | None) -> AbstractFunctional:
        """Psi and D at the law with these masses, (J,), at nodes (q, J); ``near`` is a warm start."""

    # What everyone does with a law.

    @final
    def start(self, pilot: object) -> DensityLaw:
        """p^0: the kernel density of a pilot sample, shape (n0, q)."""
        density = kernel_density(pilot)
        if density.columns != self.columns:
            raise InputError(f"pilot: expected {self.columns} column(s), not {density.columns}")
        rule = density.quadrature(density.spacing(self.spacing, self.strip))
        functional = self.functional(rule.nodes, rule.masses, None)
        return DensityLaw(
            start=density,
            history=(),
            steps=(),
            rule=rule,
            masses=rule.masses,
            functional=functional,
            eif=functional.eif(rule.nodes),
        )

    @final
    def move(self, law: DensityLaw, eps: Array) -> DensityLaw:
        if not self.admits(law, eps):
            raise NumericalError(
                f"eps: expected {self.dim} finite number(s) for which eps . D does not overflow"
            )
        accepted = tuple(float(e) for e in eps)
        # Every silo repeats every move; those in one process share the quadrature.
        return law.moved.get((self, *law.history, accepted), lambda: self._moved(law, accepted))

    @final
    def admits(self, law: DensityLaw, eps: Array) -> bool:
        # D is bounded, so E^k is all of R^d, as far as eps . D does not overflow.
        with np.errstate(over="ignore"):
            return bool(np.shape(eps) == (self.dim,) and np.isfinite(4 * law.reach * np.abs(eps).sum()))

    @final
    def path(self, law: DensityLaw) -> tuple[tuple[float, ...], ...]:
        return law.history

    @final
    def normaliser(self, law: DensityLaw) -> DensityNormaliser:
        return DensityNormaliser(
            fluctuation=self.fluctuation, eif=law.eif, masses=law.masses, vertices=law.functional.vertices
        )

    @final
    def row_bound(self, law: DensityLaw) -> RowBound:
        # X = multiple D and |rho'| <= 1 for both families; rho'' has its own ceiling.
        x = self.fluctuation.multiple * law.reach
        ceiling = self.fluctuation.family.curvature_ceiling or 0.0
        return RowBound(gradient=exponent(x), curvature=exponent(ceiling * x * x))

    @final
    def moment_shifts(self, law: DensityLaw) -> tuple[int, ...]:
        return second_moment_shifts(law.exponents)

    @final
    def finish(self, law: DensityLaw, pooled: Sums, n: int) -> Estimate:
        mean, covariance = mean_and_covariance(pooled, self.dim, n)
        if n == 1:  # one row says nothing of its spread
            return Estimate(psi=law.psi, covariance=covariance)
        # A kernel density is wider than the data, and D takes expectations under it; the standard
        # errors take them over the rows. The closing moments hold all that this needs.
        T = law.functional.correction(mean, (n - 1) * covariance + np.outer(mean, mean))
        return Estimate(psi=law.psi, covariance=congruence(T, covariance), correction=T)

    @final
    def envelope(self, law: DensityLaw) -> float:
        return law.reach

    @final
    def curvature(self, law: DensityLaw) -> Array:
        """E_p[D D^T], for either fluctuation: Hess A(0) is what the rows' own curvature leaves of it."""
        return second_moment(law.masses, law.eif, max(law.exponents))

    @final
    def accuracy(self, law: DensityLaw) -> float:
        return law.quadrature_error

    @final
    def accuracy_at(self, law: DensityLaw, eps: Array) -> float:
        return law.gradient_error(self.fluctuation, eps) if eps.any() else self.accuracy(law)

    @property
    @final
    def curvature_is_fixed(self) -> bool:
        return False

    # What a silo does with its rows.

    @final
    def read(self, rows: object) -> Array:
        try:
            columns = np.ascontiguousarray(np.asarray(rows, dtype=np.float64).T)
        except (TypeError, ValueError):
            raise DataError(f"expected numbers, shape (N, {self.columns})") from None
        if columns.ndim != 2 or len(columns) != self.columns:
            raise DataError(f"expected shape (N, {self.columns}), not {columns.shape[::-1]}")
        if not columns.size:
            raise DataError("has no rows; leave the silo out of the study")
        if not np.isfinite(columns).all():
            raise DataError("has missing or infinite values; remove those rows")
        return columns

    @final
    def concatenate(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts, axis=1)

    @final
    def count(self, rows: Array) -> int:
        return int(rows.shape[1])

    @final
    def submodel(self, law: DensityLaw, rows: Array) -> GeneralisedLinear:
        return GeneralisedLinear(
            family=self.fluctuation.family,
            X=self.fluctuation.multiple * law.functional.eif(rows),
            bound=self.row_bound(law),
        )

    @final
    def losses(self, law: DensityLaw, rows: Array) -> Array:
        return -law.log_density(rows)

    @final
    def eif(self, law: DensityLaw, rows: Array, psi: Array) -> Array:  # noqa: ARG002 - the law knows psi
        return law.functional.eif(rows).T

    @final
    def moments(self, law: DensityLaw, rows: Array) -> Sums:
        return second_moments(law.functional.eif(rows), law.exponents)

    def _moved(self, law: DensityLaw, eps: tuple[float, ...]) -> DensityLaw:
        logs = self.fluctuation.log_factor(combined(np.array(eps), law.eif))
        masses, log_z = reweight(law.masses, logs)
        step = Step(eps=eps, fluctuation=self.fluctuation, functional=law.functional, log_z=log_z)
        functional = self.functional(law.rule.nodes, masses, law.functional)
        return DensityLaw(
            start=law.start,
            history=(*law.history, eps),
            steps=(*law.steps, step),
            rule=law.rule,
            masses=masses,
            functional=functional,
            eif=functional.eif(law.rule.nodes),
            moved=law.moved,
        )


@final
@dataclass(frozen=True)
class DensityChart(AbstractMomentsChart[DensityLaw, Array]):
    """A functional of a density: the coordinates of the observation, which enter through D."""

    problem: AbstractDensityProblem

    def submodel(self, law: DensityLaw, rows: Array) -> GeneralisedLinear:
        return self.problem.submodel(law, rows)

    @property
    def coordinates(self) -> tuple[str, ...]:
        return tuple(f"x{j}" for j in range(1, self.problem.columns + 1))

    def submodel_tangent(self, law: DensityLaw, rows: Array, name: str) -> Tangent:
        return Tangent(X=self.problem.fluctuation.multiple * self.closing_tangent(law, rows, name))

    def closing_columns(self, law: DensityLaw, rows: Array) -> Array:
        return law.functional.eif(rows)

    def closing_tangent(self, law: DensityLaw, rows: Array, name: str) -> Array:
        self.require_coordinate(name)
        return law.functional.tangent(rows, self.coordinates.index(name))


chart_of.register(AbstractDensityProblem, DensityChart)
