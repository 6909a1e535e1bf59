"""A second small target: means of two arms, from supplied outcome regressions and propensity scores.

A `Study` with `Supplied` models estimates the same. Here every formula is in one file: tests and benchmarks
use it as a second target.

Psi = (E[Y(1)], E[Y(0)]). Only the outcome regression Q moves; the covariate marginal is the
pooled empirical one and is never shared. With y = (Y - low)/(high - low), one clever covariate
per arm and g_1 = g, g_0 = 1 - g,

    logit Q_a(eps) = logit Q_a + eps . X_a,   X_a = -(high - low) e_a / g_a,
    L = -y log Q_A - (1 - y) log(1 - Q_A),
    D_a = (high - low) 1{A = a}/g_a (y - Q_a)  +  {low + (high - low) Q_a - Psi_a}.

The score of L at eps = 0 is the first term of D; the second has pooled mean exactly zero,
because Psi_a is the pooled mean of Q_a (`MATH`: it needs no eps). X does not depend on Q, so
accepted fluctuations add up and the law is their sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import DataError, InputError, NumericalError
from fedtmle.model.problem import (
    AbstractProblem,
    Estimate,
    PoolableRows,
    mean_and_covariance,
    second_moment_shifts,
    second_moments,
)
from fedtmle.model.submodel import GeneralisedLinear, NoNormaliser
from fedtmle.privacy.charts import AbstractMomentsChart, Tangent, chart_of
from fedtmle_core import kernels
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, Family, RowBound, exponent

COLUMNS = ("outcome", "treatment", "Q1", "Q0", "g")
LOGIT_REACH = 64.0  # |eps . X_a| beyond this is a runaway fluctuation, not a fit


@final
@dataclass(frozen=True, kw_only=True)
class TwoArmLaw:
    """The accepted fluctuations; Q and g are functions that each silo has already evaluated."""

    history: tuple[tuple[float, float], ...] = ()

    def total(self) -> Array:
        """The sum of the accepted fluctuations, correctly rounded: no order, no drift."""
        return np.array([math.fsum(step) for step in zip(*self.history, strict=True)] or [0.0, 0.0])


@final
@dataclass(frozen=True, kw_only=True)
class TwoArmRows:
    """Columns of one silo, each of shape (N,): y in [0, 1], logits of Q_1 and Q_0, 1/g_1 and 1/g_0."""

    y: Array
    treated: Array
    logit_q: Array  # (2, N): arm 1, arm 0
    inverse_g: Array  # (2, N)


@final
@dataclass(frozen=True, kw_only=True)
class TwoArm(AbstractProblem[TwoArmLaw, TwoArmRows], PoolableRows[TwoArmRows]):
    """E[Y(1)] and E[Y(0)] for an outcome within ``outcome_bounds``.

    ``weight_ceiling`` declares a bound on 1/g_a over all rows; a row beyond it is an error. The
    exact sums' grid depends on it, so it is part of the study and never taken from the data.
    """

    outcome_bounds: tuple[float, float] = (0.0, 1.0)
    weight_ceiling: float = 4096.0

    def __post_init__(self) -> None:
        low, high = self.outcome_bounds
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(
                f"outcome_bounds: expected finite (low, high) with low < high, not {self.outcome_bounds}"
            )
        if not 1 < self.weight_ceiling < 2.0**20:
            raise InputError(f"weight_ceiling: expected a number in (1, 2^20), not {self.weight_ceiling}")

    @property
    def names(self) -> tuple[str, ...]:
        return ("E[Y(1)]", "E[Y(0)]")

    @property
    def width(self) -> float:
        return self.outcome_bounds[1] - self.outcome_bounds[0]

    def start(self) -> TwoArmLaw:
        """No fluctuation yet: the law is the supplied Q."""
        return TwoArmLaw()

    def read(self, rows: object) -> TwoArmRows:
        if isinstance(rows, TwoArmRows):
            return rows
        columns = _columns(rows)
        low, _ = self.outcome_bounds
        y = (columns["outcome"] - low) / self.width
        if (y < 0).any() or (y > 1).any():
            raise DataError(f"column 'outcome' leaves the declared bounds {self.outcome_bounds}")
        treated = columns["treatment"]
        if not np.isin(treated, (0.0, 1.0)).all():
            raise DataError("column 'treatment' must hold only 0 and 1")
        q = (np.stack([columns["Q1"], columns["Q0"]]) - low) / self.width
        if (q <= 0).any() or (q >= 1).any():
            raise DataError(
                f"columns 'Q1' and 'Q0' must lie strictly within the outcome's bounds {self.outcome_bounds}"
            )
        g = columns["g"]
        if (g <= 0).any() or (g >= 1).any():
            raise DataError("column 'g' must hold probabilities strictly between 0 and 1")
        inverse_g = 1.0 / np.stack([g, 1.0 - g])
        if (inverse_g > self.weight_ceiling).any():
            raise DataError(
                f"1/g exceeds the declared weight_ceiling {self.weight_ceiling:g} in some rows; "
                "truncate g, or declare a higher ceiling"
            )
        return TwoArmRows(y=y, treated=treated, logit_q=kernels.logit(q), inverse_g=inverse_g)

    def concatenate(self, parts: Sequence[TwoArmRows]) -> TwoArmRows:
        return TwoArmRows(
            y=np.concatenate([p.y for p in parts]),
            treated=np.concatenate([p.treated for p in parts]),
            logit_q=np.concatenate([p.logit_q for p in parts], axis=1),
            inverse_g=np.concatenate([p.inverse_g for p in parts], axis=1),
        )

    def count(self, rows: TwoArmRows) -> int:
        return len(rows.y)

    def submodel(self, law: TwoArmLaw, rows: TwoArmRows) -> GeneralisedLinear:
        taken = _taken(rows)
        return GeneralisedLinear(
            family=Family.LOGISTIC,
            X=-self.width * taken * rows.inverse_g,
            offset=np.where(rows.treated == 1.0, *self._logits(law, rows)),
            y=rows.y,
            bound=self.row_bound(law),
        )

    def losses(self, law: TwoArmLaw, rows: TwoArmRows) -> Array:
        eta = np.where(rows.treated == 1.0, *self._logits(law, rows))
        return kernels.softplus(eta) - rows.y * eta

    def eif(self, law: TwoArmLaw, rows: TwoArmRows, psi: Array) -> Array:
        return (self._uncentred(law, rows) - (psi - self.outcome_bounds[0])[:, None]).T

    def moments(self, law: TwoArmLaw, rows: TwoArmRows) -> Sums:
        q = self._regression(law, rows)
        return second_moments(np.concatenate([q, self._uncentred(law, rows)]), self._exponents())

    def move(self, law: TwoArmLaw, eps: Array) -> TwoArmLaw:
        if not self.admits(law, eps):
            raise NumericalError(
                "eps: the fluctuation would move a predicted logit by more than "
                f"{LOGIT_REACH:g}; a silo or an arm may be perfectly separated"
            )
        return TwoArmLaw(history=(*law.history, (float(eps[0]), float(eps[1]))))

    def admits(self, law: TwoArmLaw, eps: Array) -> bool:  # noqa: ARG002 - the same set at every law
        # |eps . X_a| <= LOGIT_REACH for the smallest weight that any row can have, 1/g = 1.
        return bool(np.isfinite(eps).all() and (np.abs(eps) * self.width <= LOGIT_REACH).all())

    def path(self, law: TwoArmLaw) -> tuple[tuple[float, ...], ...]:
        return law.history

    def displacement(self, law: TwoArmLaw) -> Array:
        return law.total()

    def normaliser(self, law: TwoArmLaw) -> NoNormaliser:  # noqa: ARG002 - a regression loss
        return NoNormaliser(2)

    def row_bound(self, law: TwoArmLaw) -> RowBound:  # noqa: ARG002 - declared, for every law
        x = self.width * self.weight_ceiling
        return RowBound(gradient=exponent(x), curvature=exponent(0.25 * x * x))

    def moment_shifts(self, law: TwoArmLaw) -> tuple[int, ...]:  # noqa: ARG002 - as above
        return second_moment_shifts(self._exponents())

    def finish(self, law: TwoArmLaw, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - Psi is pooled
        mean, covariance = mean_and_covariance(pooled, 4, n)
        return Estimate(psi=self.outcome_bounds[0] + mean[:2], covariance=covariance[2:, 2:])

    def curvature(self, law: TwoArmLaw) -> None:  # noqa: ARG002 - it is a sum over rows
        return None

    def accuracy(self, law: TwoArmLaw) -> float:  # noqa: ARG002 - no quadrature
        return 0.0

    @property
    def curvature_is_fixed(self) -> bool:
        return True

    def _logits(self, law: TwoArmLaw, rows: TwoArmRows) -> tuple[Array, Array]:
        moved = rows.logit_q - self.width * law.total()[:, None] * rows.inverse_g
        return moved[0], moved[1]

    def _regression(self, law: TwoArmLaw, rows: TwoArmRows) -> Array:
        """Q_1 - low and Q_0 - low at the law, in outcome units; shape (2, N).

        Above ``low``, because squares of outcomes far from zero would cost the variance its digits.
        """
        return self.width * kernels.expit(np.stack(self._logits(law, rows)))

    def _uncentred(self, law: TwoArmLaw, rows: TwoArmRows) -> Array:
        """D + Psi - low, shape (2, N)."""
        q = self._regression(law, rows)
        return _taken(rows) * rows.inverse_g * (self.width * rows.y - q) + q

    def _exponents(self) -> tuple[int, ...]:
        q = exponent(self.width)
        d = exponent(self.width * (self.weight_ceiling + 1.0))
        return (q, q, d, d)


def _columns(rows: object) -> dict[str, Array]:
    """The five columns of a mapping or data frame, as equally long float arrays."""
    if not isinstance(rows, Mapping) and not hasattr(rows, "__getitem__"):
        raise DataError(f"expected a mapping or data frame with the columns {COLUMNS}")
    columns: dict[str, Array] = {}
    for name in COLUMNS:
        try:
            column = np.ascontiguousarray(rows[name], dtype=np.float64)
        except (KeyError, IndexError):
            raise DataError(f"column '{name}' is missing; expected the columns {COLUMNS}") from None
        except (TypeError, ValueError):
            raise DataError(f"column '{name}' must be numeric") from None
        if column.ndim != 1:
            raise DataError(f"column '{name}' must have shape (N,)")
        if not np.isfinite(column).all():
            raise DataError(f"column '{name}' has missing or infinite values")
        columns[name] = column
    if len({len(column) for column in columns.values()}) != 1:
        raise DataError(f"the columns {COLUMNS} must be equally long")
    if not len(columns["outcome"]):
        raise DataError("has no rows; leave the silo out of the study")
    return columns


@final
@dataclass(frozen=True)
class TwoArmChart(AbstractMomentsChart[TwoArmLaw, TwoArmRows]):
    """Derivatives in the outcome, the supplied regressions and the supplied propensity score."""

    problem: TwoArm

    def submodel(self, law: TwoArmLaw, rows: TwoArmRows) -> GeneralisedLinear:
        return self.problem.submodel(law, rows)

    @property
    def coordinates(self) -> tuple[str, ...]:
        return ("outcome", "Q1", "Q0", "g")

    def submodel_tangent(self, law: TwoArmLaw, rows: TwoArmRows, name: str) -> Tangent:
        self.require_coordinate(name)
        width = self.problem.width
        if name == "outcome":
            return Tangent(y=np.full(len(rows.y), 1.0 / width))
        taken = _taken(rows)
        X = -width * taken * _inverse_g_tangent(rows) if name == "g" else None
        return Tangent(X=X, offset=(taken * self._logits_tangent(law, rows, name)).sum(axis=0))

    def closing_columns(self, law: TwoArmLaw, rows: TwoArmRows) -> Array:
        q = self._fluctuated(law, rows)
        return np.concatenate([q, _taken(rows) * rows.inverse_g * (self.problem.width * rows.y - q) + q])

    def closing_tangent(self, law: TwoArmLaw, rows: TwoArmRows, name: str) -> Array:
        self.require_coordinate(name)
        width, q, taken = self.problem.width, self._fluctuated(law, rows), _taken(rows)
        weight = taken * rows.inverse_g
        if name == "outcome":
            return np.concatenate([np.zeros_like(q), weight])
        dq = q * (1.0 - q / width) * self._logits_tangent(law, rows, name)
        moved = (1.0 - weight) * dq
        if name == "g":
            moved = moved + taken * _inverse_g_tangent(rows) * (width * rows.y - q)
        return np.concatenate([dq, moved])

    def _fluctuated(self, law: TwoArmLaw, rows: TwoArmRows) -> Array:
        """Return Q_a - low at the law, in outcome units, (2, N)."""
        width = self.problem.width
        logits = rows.logit_q - width * law.total()[:, None] * rows.inverse_g
        return np.asarray(width / (1.0 + np.exp(-logits)))

    def _logits_tangent(self, law: TwoArmLaw, rows: TwoArmRows, name: str) -> Array:
        """Return d logit Q_a(law) in g, or in Q_1 or Q_0 in outcome units: 1/(width q (1 - q)); (2, N)."""
        width = self.problem.width
        if name == "g":
            return -width * law.total()[:, None] * _inverse_g_tangent(rows)
        logits, arm = np.zeros_like(rows.logit_q), 0 if name == "Q1" else 1
        q = 1.0 / (1.0 + np.exp(-rows.logit_q[arm]))
        logits[arm] = 1.0 / (width * q * (1.0 - q))
        return logits


chart_of.register(TwoArm, TwoArmChart)


def _taken(rows: TwoArmRows) -> Array:
    """Return the indicators of arm 1 and arm 0, (2, N)."""
    return np.stack([rows.treated, 1.0 - rows.treated])


def _inverse_g_tangent(rows: TwoArmRows) -> Array:
    """Return d(1/g, 1/(1 - g))/dg, (2, N)."""
    return np.stack([-(rows.inverse_g[0] ** 2), rows.inverse_g[1] ** 2])
