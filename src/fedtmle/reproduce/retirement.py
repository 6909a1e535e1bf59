"""Extra: when silos retire in FedTMLE-LR, uniform against sample-size weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtmle.algorithms.personalized import Personalized
from fedtmle.protocol.fits import Weighting
from fedtmle.reproduce.scenario import Cell, build
from fedtmle.solver import solve
from fedtmle.theory.personalized import chi_total_size, chi_total_uniform

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


def retirements(cell: Cell) -> list[Retirement]:
    """Every silo under both weights."""
    data = build(cell)
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
                    seed=cell.seed,
                    dgp=cell.dgp.value,
                    partition=cell.partition.value,
                    clients=cell.clients,
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
