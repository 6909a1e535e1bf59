"""Run one method on one scenario: time the protocol, then compute losses and residuals outside it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import multiprocessing
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fedtmle.algorithms.base import TargetingProgram
from fedtmle.model import parallel
from fedtmle.model.density.law import KEPT_LAWS, DensityLaw
from fedtmle.model.density.quadrature import Memo
from fedtmle.model.types import Part
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import Phase
from fedtmle.runtime.session import Session
from fedtmle.runtime.silo import Silo
from fedtmle_paper.reproduce.scenario import Data, Dgp, Method, Partition, Scale, Scenario, build
from fedtmle_paper.reproduce.timing import LedgerProblem, RoundTime, TimedFederation, WorkLedger


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A completed shared density p^k: when its last eps was known and its law rebuilt."""

    update: int
    rounds: int  # all queries until then: gradients, step selection, EIF checks, calibration
    compute: float  # seconds until then, without latency
    loss: float  # P_n L(p^k)
    residual: float  # r^k

    def elapsed(self, latency: float) -> float:
        return self.compute + self.rounds * latency


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run: what was measured and where it ended."""

    scenario: Scenario
    method: Method
    status: str
    converged: bool
    rounds: int
    updates: int
    bits: int
    endpoint_error: float  # max over coordinates of |Psi(p^K) - the direct pooled solution|
    std_error: float  # the largest of Psi's coordinates: what an endpoint error is to be held against
    digest: str  # of the accepted fluctuations, bit by bit
    checkpoints: tuple[Checkpoint, ...]
    times: tuple[RoundTime, ...]

    def at_time(self, elapsed: float, latency: float) -> Checkpoint:
        """The last shared density completed within ``elapsed`` seconds."""
        return [c for c in self.checkpoints if c.elapsed(latency) <= elapsed][-1]

    def at_round(self, rounds: int) -> Checkpoint:
        """The last shared density completed within so many rounds."""
        return [c for c in self.checkpoints if c.rounds <= rounds][-1]


def measure(scenario: Scenario, data: Data, method: Method) -> Measured:
    """Runs the method on the scenario's silos."""
    # A memory of its own: another run on the same path must not find its quadratures done.
    law = dataclasses.replace(data.law, moved=Memo(KEPT_LAWS))
    algorithm = method.algorithm(scenario.scale)
    ledger = WorkLedger()
    problem = LedgerProblem(inner=data.problem, ledger=ledger)
    plan = Plan(
        program=TargetingProgram(problem=problem, law=law, algorithm=algorithm),
        roster=roster(list(data.silos)),
    )
    silos = [Silo(name, plan, problem.read(rows)) for name, rows in data.silos.items()]
    federation = TimedFederation(silos, clock=ledger.now)
    finished = Session(plan, federation).run()
    outcome = finished.outcome
    if not isinstance(outcome, Targeted):
        raise AssertionError("every method of section 5 has a pooled estimate")
    estimate = outcome.estimate
    rounds = finished.account.rounds
    calibration = rounds[Phase.CALIBRATION]
    asked = calibration + rounds[Phase.TARGETING]  # the closing round is no part of targeting
    times = federation.rounds()[:asked]
    loss, residual = observed(data, law, outcome.accepted)
    return Measured(
        scenario=scenario,
        method=method,
        status=outcome.status.name.lower(),
        converged=outcome.status.is_converged,
        rounds=asked,
        updates=outcome.updates,
        bits=finished.account.bits(Phase.CALIBRATION, Phase.TARGETING),
        endpoint_error=float(np.abs(estimate.psi - data.problem.direct(data.rows)).max()),
        std_error=float(np.sqrt(np.diag(estimate.covariance)).max()),
        digest=digest(outcome.accepted),
        checkpoints=_checkpoints(outcome, loss, residual, times, calibration),
        times=times,
    )


def observed(
    data: Data, law: DensityLaw, accepted: Sequence[Sequence[float]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """P_n L(p^k) and r^k for k = 0..K on the pooled rows: `runtime.result` without its K kernel densities.

    l_{k+1}(0) = l_k(eps^k), so the loss is followed by its exact changes.
    """
    problem, rows = data.problem, data.problem.read(data.rows)
    n, origin = len(data.rows), np.zeros(data.problem.dim)
    loss, residual = [data.start_loss], []
    for eps in [*map(np.array, accepted), None]:
        submodel, normaliser = problem.submodel(law, rows), problem.normaliser(law)
        score = submodel.sums(origin, Part.GRADIENT).values(n) + normaliser.gradient(origin)
        residual.append(math.sqrt(math.fsum(score * score)))
        if eps is not None:
            change = float(submodel.sums(eps, Part.LOSS).values(n)[0])
            loss.append(loss[-1] + change + normaliser.value(eps) - normaliser.value(origin))
            law = problem.move(law, eps)
    return tuple(loss), tuple(residual)


def digest(accepted: Sequence[Sequence[float]]) -> str:
    """A name for a trajectory: equal exactly when every bit of every accepted eps is."""
    packed = b"".join(struct.pack(f">{len(eps)}d", *eps) for eps in accepted)
    return hashlib.sha256(packed).hexdigest()[:16]


def _checkpoints(
    outcome: Targeted,
    loss: Sequence[float],
    residual: Sequence[float],
    times: Sequence[RoundTime],
    calibration: int,
) -> tuple[Checkpoint, ...]:
    spent = np.concatenate([[0.0], np.cumsum([round_.compute for round_ in times])])
    # p^k is there when the round before its own first query has been pooled; p^0 before any round.
    done = {point.update: calibration + point.round - 1 for point in outcome.trajectory if point.at_origin}
    done[0] = 0
    return tuple(
        Checkpoint(
            update=k, rounds=done[k], compute=float(spent[done[k]]), loss=loss[k], residual=residual[k]
        )
        for k in range(outcome.updates + 1)
    )


WARM_UP = Scale(n=60, pilot=40, tolerance=0.1, coded_tolerance=0.3)
Task = TypeVar("Task")
Answer = TypeVar("Answer")


def scenarios(seeds: Sequence[int], clients: Sequence[int], scale: Scale) -> list[Scenario]:
    """Every distribution, partition and number of clients, the long scenarios first."""
    return [
        Scenario(seed=seed, dgp=dgp, partition=partition, clients=M, scale=scale)
        for seed in seeds
        for M in sorted(clients, reverse=True)
        for dgp in Dgp
        for partition in Partition
    ]


def run_scenario(scenario: Scenario) -> list[Measured]:
    """Every method on one scenario's data."""
    data = build(scenario)
    return [measure(scenario, data, method) for method in Method]


def prepare() -> None:
    """One thread per worker, whose CPU time is then all there is; compiled before anything is timed."""
    parallel.set_threads(1)
    run_scenario(Scenario(seed=0, dgp=Dgp.GAUSSIAN, partition=Partition.RANDOM, clients=2, scale=WARM_UP))


def shared(run: Callable[[Task], Answer], tasks: Sequence[Task], workers: int) -> Iterator[Answer]:
    """``run`` over ``tasks`` in their order, by so many processes; one works in this process."""
    if workers == 1:
        before = parallel.threads()
        prepare()
        try:
            yield from map(run, tasks)
        finally:
            parallel.set_threads(before)
        return
    spawn = multiprocessing.get_context("spawn")  # numba's threads do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=prepare) as pool:
        yield from pool.map(run, tasks)
