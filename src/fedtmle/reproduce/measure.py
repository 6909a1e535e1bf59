"""One method on one cell: the protocol is timed, then its trajectory is observed outside it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtmle.algorithms.outcome import Outcome
from fedtmle.model.density.law import KEPT_LAWS
from fedtmle.model.density.memo import Memo
from fedtmle.model.types import Part
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import Phase
from fedtmle.reproduce.clock import RoundTime, TimedFederation
from fedtmle.reproduce.publicwork import Ledger, LedgerProblem
from fedtmle.reproduce.scenario import Cell, Data, Method
from fedtmle.runtime.session import Session
from fedtmle.runtime.silo import Silo


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

    cell: Cell
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


def measure(cell: Cell, data: Data, method: Method) -> Measured:
    """Runs the method on the cell's silos."""
    # A memory of its own: another run on the same path must not find its quadratures done.
    law = dataclasses.replace(data.law, moved=Memo(KEPT_LAWS))
    algorithm = method.algorithm(cell.scale)
    ledger = Ledger()
    problem = LedgerProblem(inner=data.problem, ledger=ledger)
    plan = Plan(subject=problem, law=law, algorithm=algorithm, roster=roster(list(data.silos)))
    silos = [Silo(name, plan, problem.read(rows)) for name, rows in data.silos.items()]
    federation = TimedFederation(silos, clock=ledger.now)
    finished = Session(plan, federation).run()
    outcome, estimate = finished.outcome, finished.outcome.estimate
    if estimate is None:
        raise AssertionError("every method of section 5 has a pooled estimate")
    rounds = finished.account.rounds
    calibration = rounds[Phase.CALIBRATION]
    asked = calibration + rounds[Phase.TARGETING]  # the closing round is no part of targeting
    times = federation.rounds()[:asked]
    loss, residual = observed(data, law, outcome.accepted)
    return Measured(
        cell=cell,
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
    data: Data, law: Any, accepted: Sequence[Sequence[float]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """P_n L(p^k) and r^k for k = 0..K on the pooled rows: `runtime.observe` without its K kernel densities.

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
    outcome: Outcome,
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
