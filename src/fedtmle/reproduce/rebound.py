"""Extra: the pooled loss under uniform weights and spatial partition, over many samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedtmle.algorithms.gradient import Gradient
from fedtmle.algorithms.optimizers import Newton
from fedtmle.reproduce.measure import observed
from fedtmle.reproduce.scenario import Cell, Dgp, Method, Partition, Scale, build
from fedtmle.solver import solve

FIRST_SEED = 20_000  # apart from the figures' seeds and from those of coverage
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
    cell = Cell(
        seed=FIRST_SEED + number,
        dgp=dgp,
        partition=Partition.SPATIAL,
        clients=scale.reference_clients,
        scale=scale,
    )
    data = build(cell)
    uniform, pooled = (
        observed(data, data.law, solve(data.problem, data.law, data.silos, method).trajectory.accepted)[0]
        for method in (
            Method.LOCAL_UNIFORM.algorithm(scale),
            Gradient(tolerance=OPTIMUM, optimizer=Newton()),
        )
    )
    return [
        Rebound(
            seed=cell.seed,
            dgp=dgp.value,
            clients=cell.clients,
            updates=len(uniform) - 1,
            decrease=uniform[0] - pooled[-1],
            rise=largest_rise(uniform),
            excess=uniform[-1] - pooled[-1],
        )
    ]
