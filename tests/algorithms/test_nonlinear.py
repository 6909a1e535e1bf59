"""A target whose curvature grows along the path: a beta from the first law is too small at the last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import DataError, NumericalError
from fedtmle.model.problem import (
    AbstractProblem,
    Estimate,
    PoolableRows,
    mean_and_covariance,
    second_moment_shifts,
    second_moments,
)
from fedtmle.model.submodel import GeneralisedLinear, NoNormaliser
from fedtmle.protocol.outcome import Status
from fedtmle_core.types import Family, RowBound


class LogMean(NamedTuple):
    mu: float
    history: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class GeometricMean(AbstractProblem[Any, Any], PoolableRows):
    """Psi = exp E[log Y] for log Y in [-2, 2]: D = Psi (log y - mu), and the curvature is Psi^2."""

    names = ("geometric mean",)
    curvature_is_fixed = False

    def read(self, rows):
        logs = np.asarray(rows)
        if logs.dtype.kind != "f" or logs.ndim != 1 or not (abs(logs) <= 2).all():
            raise DataError("expected one column of numbers from -2 to 2")
        return logs

    def concatenate(self, parts):
        return np.concatenate(parts)

    def count(self, rows):
        return len(rows)

    def submodel(self, law, rows):
        X, offset = np.full((1, len(rows)), -math.exp(law.mu)), np.full(len(rows), law.mu)
        return GeneralisedLinear(
            family=Family.GAUSSIAN, X=X, offset=offset, y=rows, bound=self.row_bound(law)
        )

    def normaliser(self, law):  # noqa: ARG002
        return NoNormaliser(1)

    def row_bound(self, law):  # |psi (log y - mu)| <= 4 e^2 < 2^5, psi^2 <= e^4 < 2^6  # noqa: ARG002
        return RowBound(gradient=5, curvature=6)

    def losses(self, law, rows):
        return (rows - law.mu) ** 2 / 2

    def eif(self, law, rows, psi):
        return (psi[0] * (rows - law.mu))[:, None]

    def moments(self, law, rows):  # noqa: ARG002
        return second_moments(rows[None, :], (2,))

    def moment_shifts(self, law):  # noqa: ARG002
        return second_moment_shifts((2,))

    def finish(self, law, pooled, n):
        psi = math.exp(law.mu)
        covariance = psi**2 * mean_and_covariance(pooled, 1, n)[1]
        return Estimate(psi=np.array([psi]), covariance=covariance)

    def move(self, law, eps):
        if not self.admits(law, eps):
            raise NumericalError("eps: the mean of the logarithm would leave [-2, 2]")
        return LogMean(law.mu - math.exp(law.mu) * float(eps[0]), (*law.history, tuple(map(float, eps))))

    def admits(self, law, eps):
        return abs(law.mu - math.exp(law.mu) * float(eps[0])) <= 2

    def path(self, law):
        return law.history

    def curvature(self, law):
        return np.array([[math.exp(2 * law.mu)]])

    def accuracy(self, law):  # noqa: ARG002
        return 1e-15


@pytest.fixture
def silos() -> dict[str, Any]:
    logs = np.random.default_rng(3).normal(0.33, 0.6, 1000).clip(-2, 2)
    return {f"silo {m}": part for m, part in enumerate(np.array_split(logs, [100, 300, 600]))}


def test_it_keeps_what_its_interface_promises(silos: dict[str, Any]) -> None:
    ft.check_problem(GeometricMean(), LogMean(0.2), silos["silo 0"]).raise_if_failed()


@pytest.mark.parametrize("inner", ["auto", "step", "adaptive", "secant"])
def test_beta_follows_a_curvature_that_grows(inner: Any, silos: dict[str, Any]) -> None:
    """With beta = 1 of the first law and a curvature of 1.9 at the last, the gradient stayed at 2.6e-6."""
    algorithm = ft.Coded(tolerance=1e-6, max_rounds=60, inner=inner)
    result = ft.solve(GeometricMean(), LogMean(0.0), silos, algorithm)
    assert result.status is Status.CONVERGED
    assert result.rounds <= (5 if inner == "secant" else 12)  # 6 with a memory in units of the smaller beta
    assert result.psi[0] == pytest.approx(np.exp(np.concatenate(list(silos.values())).mean()), abs=1e-6)
