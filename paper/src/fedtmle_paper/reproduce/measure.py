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
from pathlib import Path
from typing import Any, Generic, TypeVar, final, get_type_hints

import msgspec
import numpy as np

from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import Phase
from fedtmle.runtime.session import Session
from fedtmle.runtime.silo import Silo
from fedtmle_core import parallel
from fedtmle_core.types import Part
from fedtmle_paper.density.law import KEPT_LAWS, DensityLaw
from fedtmle_paper.density.quadrature import Memo
from fedtmle_paper.reproduce.scenario import Data, Dgp, Method, Partition, Profile, Scale, Scenario, build
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
    profile: Profile
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


def measure(scenario: Scenario, data: Data, method: Method, profile: Profile = Profile.A) -> Measured:
    """Runs the method on the scenario's silos."""
    # A memory of its own: another run on the same path must not find its quadratures done.
    law = dataclasses.replace(data.law, moved=Memo(KEPT_LAWS))
    algorithm = method.algorithm(scenario.scale, profile)
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
        profile=profile,
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
    """Every method under every profile on one scenario's data."""
    data = build(scenario)
    return [measure(scenario, data, method, profile) for profile in Profile for method in profile.methods]


def prepare() -> None:
    """One thread per worker, whose CPU time is then all there is; compiled before anything is timed."""
    parallel.set_threads(1)
    run_scenario(Scenario(seed=0, dgp=Dgp.GAUSSIAN, partition=Partition.RANDOM, clients=2, scale=WARM_UP))


def shared(
    run: Callable[[Task], Answer], tasks: Sequence[Task], workers: int, cache: Path | None = None
) -> Iterator[Answer]:
    """``run`` over ``tasks`` in their order, by so many processes; one works in this process.

    Answers are kept in the folder ``cache`` and read from there again, so that an interrupted campaign goes
    on where it stopped. The caller empties the folder when the code has changed.
    """
    kept = Kept(run, cache)
    missing = [task for task in tasks if kept.read(task) is None]
    fresh = _alone(kept, missing) if workers == 1 else _in_parallel(kept, missing, workers)
    for task in tasks:
        answer = kept.read(task) if task not in missing else next(fresh)
        if answer is None:
            raise AssertionError("an answer that was kept is gone")
        yield answer


@final
@dataclass(frozen=True)
class Kept(Generic[Task, Answer]):
    """A function whose answers are kept as JSON files, one per task; no folder keeps none."""

    run: Callable[[Task], Answer]
    cache: Path | None

    def __call__(self, task: Task) -> Answer:
        answer = self.run(task)
        if self.cache is not None:
            self.cache.mkdir(parents=True, exist_ok=True)
            path = self._path(self.cache, task)
            path.with_suffix(".part").write_bytes(msgspec.json.encode(answer))
            path.with_suffix(".part").replace(path)
        return answer

    def read(self, task: Task) -> Answer | None:
        path = None if self.cache is None else self._path(self.cache, task)
        if path is None or not path.exists():
            return None
        answer: Answer = msgspec.json.decode(path.read_bytes(), type=_answer_type(self.run, task))
        return answer

    def _path(self, cache: Path, task: Task) -> Path:
        what = getattr(task, "run", self.run).__qualname__, getattr(task, "arguments", task)
        name = hashlib.sha256(repr(what).encode()).hexdigest()[:24]
        return cache / f"{name}.json"


def _answer_type(run: Callable[..., object], task: object) -> Any:
    """What a function returns, by its annotation; of an experiment, what its own function returns."""
    return get_type_hints(getattr(task, "run", run))["return"]


def _alone(run: Callable[[Task], Answer], tasks: Sequence[Task]) -> Iterator[Answer]:
    if tasks:
        before = parallel.threads()
        prepare()
        try:
            yield from map(run, tasks)
        finally:
            parallel.set_threads(before)


def _in_parallel(run: Callable[[Task], Answer], tasks: Sequence[Task], workers: int) -> Iterator[Answer]:
    if tasks:
        spawn = multiprocessing.get_context("spawn")  # numba's threads do not survive a fork
        with ProcessPoolExecutor(workers, mp_context=spawn, initializer=prepare) as pool:
            yield from pool.map(run, tasks)
