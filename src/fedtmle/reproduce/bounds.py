"""Extra: bits and rounds of Algorithm 4 against its tolerance, beside the bounds of thm:communication."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fedtmle.algorithms.base import arithmetic_error
from fedtmle.algorithms.coded import Coded
from fedtmle.protocol.lattice import Lattice, build_lattice, identity, whitener, working_tolerance
from fedtmle.reproduce.scenario import Cell, Data, build
from fedtmle.runtime.result import Result
from fedtmle.solver import solve
from fedtmle.theory import communication
from fedtmle.theory.constants import first_gradient, loss_budget, recentering
from fedtmle.theory.path import follow

TOLERANCES = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)
Coordinates = Literal["raw", "whitened"]
Inner = Literal["adaptive", "step"]
COORDINATES: tuple[Coordinates, ...] = ("raw", "whitened")
INNER: tuple[Inner, ...] = ("adaptive", "step")
ROUND_BOUNDS = {"adaptive": communication.round_bound, "step": communication.one_step_round_bound}


@dataclass(frozen=True, kw_only=True)
class Cost:
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


def costs(cell: Cell, tolerances: tuple[float, ...] = TOLERANCES) -> list[Cost]:
    """Both coordinates and inner solves at every tolerance, on one cell."""
    data = build(cell)
    return [
        _cost(cell, data, tolerance, coordinates, inner)
        for coordinates in COORDINATES
        for inner in INNER
        for tolerance in tolerances
    ]


def _cost(cell: Cell, data: Data, tolerance: float, coordinates: Coordinates, inner: Inner) -> Cost:
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
    return Cost(
        seed=cell.seed,
        dgp=cell.dgp.value,
        partition=cell.partition.value,
        clients=cell.clients,
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
