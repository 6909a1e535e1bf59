"""Extra experiments, which the paper does not have: one function per experiment, one dataclass per row.

`panels` and `robustness` have two more.

`costs`: bits and rounds of Algorithm 4 against its tolerance, beside the bounds of thm:communication.
`rebounds`: the pooled loss under uniform weights and a spatial partition, over many samples.
`retirements`: when silos retire in FedTMLE-LR, with uniform and with sample-size weights.
`replicate`: whether the 95% intervals of the transport target cover the truth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Literal, TypeVar

import numpy as np

from fedtmle.algorithms.base import arithmetic_error
from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.gradient import Gradient
from fedtmle.algorithms.local import Personalized
from fedtmle.algorithms.optimizers import Newton
from fedtmle.protocol.fits import Weighting
from fedtmle.protocol.lattice import Lattice, build_lattice, identity, whitener, working_tolerance
from fedtmle.runtime.result import Result
from fedtmle.solver import solve
from fedtmle.theory import communication
from fedtmle.theory.path import first_gradient, follow, loss_budget, recentering
from fedtmle_core.types import Array
from fedtmle_paper.benchmark import COVARIANCES, MEANS, PROBABILITIES
from fedtmle_paper.lemmas import chi_total_size, chi_total_uniform
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.reproduce.measure import observed
from fedtmle_paper.reproduce.scenario import Data, Dgp, Method, Partition, Profile, Scale, Scenario, build

TOLERANCES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)
Coordinates = Literal["raw", "whitened"]
Inner = Literal["adaptive", "step"]
COORDINATES: tuple[Coordinates, ...] = ("raw", "whitened")
INNER: tuple[Inner, ...] = ("adaptive", "step")
ROUND_BOUNDS = {"adaptive": communication.round_bound, "step": communication.one_step_round_bound}


@dataclass(frozen=True, kw_only=True)
class CodedCost:
    """One coded run: what it cost, and what the theorem allows for its own beta, kappa, Delta and G."""

    seed: int
    dgp: str
    partition: str
    clients: int
    coordinates: str
    inner: str
    tolerance: float
    residual_bound: float
    rounds: int
    bits: int
    updates: int
    history_bits: int  # H_K less H_init
    round_bound: float  # eq:main-communication; half of it for one step per update
    pathwise_bit_bound: float  # eq:pathwise-bit-bound
    universal_bit_bound: float  # eq:main-communication, with the constant of its proof
    fixed_width_bits: int  # the absolute protocol on the same trajectory, at the width of its first gradient


def costs(scenario: Scenario, tolerances: tuple[float, ...] = TOLERANCES) -> list[CodedCost]:
    """Both coordinates and inner solves at every tolerance, on one scenario."""
    data = build(scenario)
    return [
        _cost(scenario, data, tolerance, coordinates, inner)
        for coordinates in COORDINATES
        for inner in INNER
        for tolerance in tolerances
    ]


def _cost(
    scenario: Scenario, data: Data, tolerance: float, coordinates: Coordinates, inner: Inner
) -> CodedCost:
    problem = data.problem
    algorithm = Coded(tolerance=tolerance, coordinates=coordinates, inner=inner)
    result = solve(problem, data.law, data.silos, algorithm)
    lattice = _lattice(data, result, tolerance, coordinates)
    rows = {name: problem.read(own) for name, own in data.silos.items()}
    path = follow(problem, data.law, rows, result.trajectory.points, result.trajectory.accepted, lattice)
    beta, delta = float(lattice.beta), communication.scaled_tolerance(lattice)
    Delta, kappa, G = loss_budget(path).value, recentering(path).value, first_gradient(path).value
    M, d, R = len(data.silos), problem.dim, result.rounds
    width = communication.fixed_width_bits(G, float(lattice.h))
    own, bound = result.certificate, ROUND_BOUNDS[inner]
    return CodedCost(
        seed=scenario.seed,
        dgp=scenario.dgp.value,
        partition=scenario.partition.value,
        clients=scenario.clients,
        coordinates=coordinates,
        inner=inner,
        tolerance=tolerance,
        residual_bound=float("inf") if result.residual is None else result.residual,
        rounds=R,
        bits=result.bits,
        updates=result.updates,
        history_bits=0 if own is None else own.history_bits or 0,
        round_bound=bound(beta, Delta, delta),
        pathwise_bit_bound=communication.pathwise_bit_bound(
            M, d, R, result.steps, beta, kappa, Delta, G, delta
        ),
        universal_bit_bound=communication.universal_bit_bound(M, d, beta, kappa, Delta, G, delta),
        fixed_width_bits=communication.fixed_width_cost(M, d, width, R),
    )


def _lattice(data: Data, result: Result, tolerance: float, coordinates: Coordinates) -> Lattice:
    """The run's lattice: C is public for a density, and beta is in the certificate."""
    certificate = result.certificate
    if certificate is None or certificate.smoothness is None:
        raise AssertionError("a coded run has a certificate and a smoothness")
    problem, law = data.problem, data.law
    return build_lattice(
        delta=working_tolerance(tolerance, arithmetic_error(problem, law)),
        beta=Fraction(certificate.smoothness.value),
        C=identity(problem.dim) if coordinates == "raw" else whitener(problem.curvature(law)),
    )


REBOUND_SEED = 20_000  # apart from the figures' seeds and from those of coverage
OPTIMUM = 1e-6  # r^K of the pooled optimum


@dataclass(frozen=True, kw_only=True)
class Rebound:
    """One sample: P_n L(p^0) and its changes under uniform weights, beside the pooled optimum."""

    seed: int
    dgp: str
    clients: int
    updates: int
    decrease: float  # from P_n L(p^0) to the pooled optimum
    rise: float  # the largest above an earlier loss; zero or less if it only fell
    excess: float  # of the last loss over the pooled optimum


def largest_rise(losses: Iterable[float]) -> float:
    """The largest rise above an earlier loss; zero or less if it only fell."""
    lowest, largest = math.inf, -math.inf
    for loss in losses:
        largest = max(largest, loss - lowest)
        lowest = min(lowest, loss)
    return largest


def rebounds(number: int, dgp: Dgp, scale: Scale) -> list[Rebound]:
    """One sample of its own."""
    scenario = Scenario(
        seed=REBOUND_SEED + number,
        dgp=dgp,
        partition=Partition.SPATIAL,
        clients=scale.reference_clients,
        scale=scale,
    )
    data = build(scenario)
    uniform, pooled = (
        observed(data, data.law, solve(data.problem, data.law, data.silos, method).trajectory.accepted)[0]
        for method in (
            Method.LOCAL_UNIFORM.algorithm(scale, Profile.A),
            Gradient(tolerance=OPTIMUM, optimizer=Newton()),
        )
    )
    return [
        Rebound(
            seed=scenario.seed,
            dgp=dgp.value,
            clients=scenario.clients,
            updates=len(uniform) - 1,
            decrease=uniform[0] - pooled[-1],
            rise=largest_rise(uniform),
            excess=uniform[-1] - pooled[-1],
        )
    ]


# A continuous fit is never exactly zero: a silo retires when its EIF mean is within its own sampling noise.
NOISE = 1.0
MAX_UPDATES = 20


@dataclass(frozen=True, kw_only=True)
class Retirement:
    """One silo of one run: when it left, and where its own estimate lies from its own direct solution."""

    seed: int
    dgp: str
    partition: str
    clients: int
    weights: str
    status: str
    silo: str
    n_rows: int
    retired_at: int | None  # tau_m; None if it never left
    endpoint_error: float  # max |Psi_m - the silo's own direct solution|
    std_error: float  # the largest of its own estimate
    chi_total: float  # sum over k of chi_k, the run's sampling coefficient in thm:personalized-convergence


def retirements(scenario: Scenario) -> list[Retirement]:
    """Every silo under both weights."""
    data = build(scenario)
    table = []
    for weights in Weighting:
        algorithm = Personalized(weights=weights, noise=NOISE, max_updates=MAX_UPDATES)
        result = solve(data.problem, data.law, data.silos, algorithm)
        taus = [np.inf if kept.retired_at is None else kept.retired_at for kept in result.silos.values()]
        sizes = [kept.n_rows for kept in result.silos.values()]
        if weights is Weighting.SIZE:
            chi = chi_total_size(taus, result.updates, len(data.rows))
        else:
            chi = chi_total_uniform(taus, sizes, result.updates)
        for name, kept in result.silos.items():
            direct = data.problem.direct(data.silos[name])
            table.append(
                Retirement(
                    seed=scenario.seed,
                    dgp=scenario.dgp.value,
                    partition=scenario.partition.value,
                    clients=scenario.clients,
                    weights=weights.value,
                    status=result.status.name.lower(),
                    silo=name,
                    n_rows=kept.n_rows,
                    retired_at=kept.retired_at,
                    endpoint_error=float(np.abs(kept.estimate.psi - direct).max()),
                    std_error=float(np.sqrt(np.diag(kept.estimate.covariance)).max()),
                    chi_total=chi,
                )
            )
    return table


Z = 1.959963984540054  # the normal quantile at 97.5%
NODES = 160  # of Gauss-Hermite, per coordinate
COVERAGE_SEED = 10_000  # apart from the figures' seeds


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
    scenario = Scenario(
        seed=COVERAGE_SEED + seed,
        dgp=dgp,
        partition=Partition.RANDOM,
        clients=scale.reference_clients,
        scale=scale,
    )
    data = build(scenario)
    result = solve(data.problem, data.law, data.silos, Coded(tolerance=scale.coded_tolerance))
    if result.psi is None or result.std_error is None:
        raise AssertionError("a coded run has an estimate")
    return [
        Coverage(
            seed=scenario.seed,
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


Row = TypeVar("Row")


@dataclass(frozen=True)
class Extra:
    """The rows of all extra experiments, each a value of its experiment's class."""

    rows: list[object] = field(default_factory=list)

    def of(self, kind: type[Row]) -> list[Row]:
        """Return the rows of one experiment."""
        return [row for row in self.rows if isinstance(row, kind)]
