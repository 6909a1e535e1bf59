"""Extra: how often the 95% intervals of the transport target cover the truth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from fedtmle.algorithms.coded import Coded
from fedtmle.model.types import Array
from fedtmle.reproduce.scenario import Cell, Data, Dgp, Partition, Scale, build
from fedtmle.runtime.result import Result
from fedtmle.solver import solve
from fedtmle.targets.benchmark import COVARIANCES, MEANS, PROBABILITIES
from fedtmle.targets.optimal_transport import OptimalTransport

Z = 1.959963984540054  # the normal quantile at 97.5%
NODES = 160  # of Gauss-Hermite, per coordinate
FIRST_SEED = 10_000  # apart from the figures' seeds


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """One data set and one coordinate: the estimate, its standard error, and the truth."""

    seed: int
    dgp: str
    name: str
    estimate: float
    std_error: float
    law_std_error: float  # with H over the (smoothed) law, as in D, in place of H over the rows
    truth: float

    @property
    def covers(self) -> bool:
        return abs(self.estimate - self.truth) <= Z * self.std_error

    @property
    def law_covers(self) -> bool:
        return abs(self.estimate - self.truth) <= Z * self.law_std_error


@cache
def truth(dgp: Dgp, nodes: int = NODES) -> tuple[float, ...]:
    """Psi of the distribution itself, by Gauss-Hermite quadrature in the variables that are Gaussian."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    weights = np.outer(w, w).ravel() / w.sum() ** 2
    first, second = (axis.ravel() for axis in np.meshgrid(x, x, indexing="ij"))
    if dgp is Dgp.GAUSSIAN:
        parts = [
            np.array(mean)[:, None] + np.linalg.cholesky(np.array(covariance)) @ np.stack([first, second])
            for mean, covariance in zip(MEANS, COVARIANCES, strict=True)
        ]
        shares: tuple[float, ...] = PROBABILITIES
    else:
        parts = [_curve(mean + sd * first, second) for mean, sd in ((-1.5, 0.6), (1.5, 0.9))]
        shares = (0.4, 0.6)
    masses = np.concatenate([share * weights for share in shares])
    return tuple(map(float, OptimalTransport().functional(np.concatenate(parts, axis=1), masses, None).psi))


def _curve(u: Array, z: Array) -> Array:
    return np.stack([u, 0.5 * u**2 + 0.3 * np.sin(2 * u) + (0.35 + 0.15 * u**2) * z])


def replicate(task: tuple[int, Dgp, Scale]) -> list[Coverage]:
    """One data set, targeted by Algorithm 4 over ten silos."""
    seed, dgp, scale = task
    cell = Cell(
        seed=FIRST_SEED + seed,
        dgp=dgp,
        partition=Partition.RANDOM,
        clients=scale.reference_clients,
        scale=scale,
    )
    data = build(cell)
    result = solve(data.problem, data.law, data.silos, Coded(tolerance=scale.coded_tolerance))
    if result.psi is None or result.std_error is None:
        raise AssertionError("a coded run has an estimate")
    return [
        Coverage(
            seed=cell.seed,
            dgp=dgp.value,
            name=name,
            estimate=float(estimate),
            std_error=float(error),
            law_std_error=float(law_error),
            truth=true,
        )
        for name, estimate, error, law_error, true in zip(
            result.names, result.psi, result.std_error, _law_std_error(data, result), truth(dgp), strict=True
        )
    ]


def _law_std_error(data: Data, result: Result) -> Array:
    """The standard errors of D(p^K) as it stands."""
    eif = result.law.functional.eif(data.problem.read(data.rows))
    return np.asarray(np.sqrt(np.var(eif, axis=1, ddof=1) / len(data.rows)))
