"""The smallest target: Psi(p) = E_p[Y].

    D(p)(y) = y - Psi(p),   L(p)(y) = (y - mu)^2 / 2,   mu(eps) = mu - eps,

so grad_eps L at eps = 0 is y - mu = D, eq. (local-score). The law is mu itself, the Hessian
is one, and one exact step solves the problem. Start here to write your own target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fedtmle.errors import DataError, InputError, NumericalError
from fedtmle.model.problem import (
    AbstractProblem,
    ConvergenceBounds,
    Estimate,
    PoolableRows,
    mean_and_covariance,
    second_moment_shifts,
    second_moments,
)
from fedtmle.model.submodel import GeneralisedLinear, NoNormaliser
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, Family, RowBound, exponent


@final
@dataclass(frozen=True, kw_only=True)
class MeanLaw:
    """mu: the only feature of the density that this target sees, and the fluctuations that led to it."""

    mu: float
    history: tuple[tuple[float, ...], ...] = field(default=(), compare=False)  # laws of one mu are equal


@final
@dataclass(frozen=True, kw_only=True)
class Mean(AbstractProblem[MeanLaw, Array], PoolableRows[Array]):
    """The mean of a bounded outcome: the smallest target, to copy from.

    Parameters
    ----------
    bounds
        The least and the largest possible outcome.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> result = ft.solve(problem, problem.start(5.0), {"a": [1.0, 2.0], "b": [6.0]}, ft.Gradient())
    >>> round(float(result.psi[0]), 6)
    3.0
    """

    names = ("mean",)
    curvature_is_fixed = True

    bounds: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(f"bounds: expected finite (low, high) with low < high, not {self.bounds}")

    def start(self, mu: float) -> MeanLaw:
        """Return the initial law; ``mu`` is an initial estimate within the bounds."""
        if not self.bounds[0] <= mu <= self.bounds[1]:
            raise InputError(f"mu: expected a number within the bounds {self.bounds}, not {mu}")
        return MeanLaw(mu=float(mu))

    def read(self, rows: object) -> Array:
        try:
            y = np.ascontiguousarray(rows, dtype=np.float64)
        except (TypeError, ValueError):  # numpy's message would quote the value
            raise DataError("expected one column of numbers") from None
        if y.ndim != 1:
            raise DataError(f"expected one column of outcomes, shape (N,), not shape {y.shape}")
        if not y.size:
            raise DataError("has no rows; leave the silo out of the study")
        if not np.isfinite(y).all():
            raise DataError("has missing or infinite outcomes; remove those rows")
        if (y < self.bounds[0]).any() or (y > self.bounds[1]).any():
            raise DataError(f"has outcomes outside the declared bounds {self.bounds}")
        return y

    def concatenate(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def count(self, rows: Array) -> int:
        return len(rows)

    def submodel(self, law: MeanLaw, rows: Array) -> GeneralisedLinear:
        return GeneralisedLinear(
            family=Family.GAUSSIAN,
            X=np.full((1, len(rows)), -1.0),
            offset=np.full(len(rows), law.mu),
            y=rows,
            bound=self.row_bound(law),
        )

    def losses(self, law: MeanLaw, rows: Array) -> Array:
        residual = rows - law.mu
        return 0.5 * residual * residual

    def eif(self, law: MeanLaw, rows: Array, psi: Array) -> Array:  # noqa: ARG002 - D sees the law through psi
        return np.asarray(rows - psi[0])[:, None]

    def moments(self, law: MeanLaw, rows: Array) -> Sums:  # noqa: ARG002 - as above
        return second_moments((rows - self._centre)[None, :], self._exponents())

    def move(self, law: MeanLaw, eps: Array) -> MeanLaw:
        if not self.admits(law, eps):
            raise NumericalError("eps: the fluctuation would move the mean outside its declared bounds")
        step = float(eps[0])
        return MeanLaw(mu=law.mu - step, history=(*law.history, (step,)))

    def admits(self, law: MeanLaw, eps: Array) -> bool:
        # Half a width of slack: a rounded gradient step may pass a mean that lies on the boundary.
        low, high = self.bounds
        slack = 0.5 * (high - low)
        return bool(low - slack <= law.mu - float(eps[0]) <= high + slack)

    def path(self, law: MeanLaw) -> tuple[tuple[float, ...], ...]:
        return law.history

    def displacement(self, law: MeanLaw) -> Array:
        return np.array([-law.mu])

    def normaliser(self, law: MeanLaw) -> NoNormaliser:  # noqa: ARG002 - zero at every law
        return NoNormaliser(1)

    def row_bound(self, law: MeanLaw) -> RowBound:  # noqa: ARG002 - the bounds fix it
        low, high = self.bounds
        return RowBound(gradient=exponent(4 * (high - low)), curvature=0)

    def moment_shifts(self, law: MeanLaw) -> tuple[int, ...]:  # noqa: ARG002 - as above
        return second_moment_shifts(self._exponents())

    def finish(self, law: MeanLaw, pooled: Sums, n: int) -> Estimate:
        _, covariance = mean_and_covariance(pooled, 1, n)
        return Estimate(psi=np.array([law.mu]), covariance=covariance)

    def convergence_bounds(self, law: MeanLaw) -> ConvergenceBounds:  # noqa: ARG002 - the loss is quadratic
        return ConvergenceBounds(curvature=((1.0,),), covariates=(0.0,), slopes=((1.0,),))

    def envelope(self, law: MeanLaw) -> float:  # noqa: ARG002 - of outcomes within their bounds
        return self.bounds[1] - self.bounds[0]

    def curvature(self, law: MeanLaw) -> Array:  # noqa: ARG002 - one at every law
        return np.eye(1)

    def accuracy(self, law: MeanLaw) -> float:  # noqa: ARG002 - exact
        return 0.0

    @property
    def _centre(self) -> float:
        """A public centre of the outcomes, so that their squares cost the variance no digits."""
        return 0.5 * (self.bounds[0] + self.bounds[1])

    def _exponents(self) -> tuple[int]:
        return (exponent(self.bounds[1] - self.bounds[0]),)
