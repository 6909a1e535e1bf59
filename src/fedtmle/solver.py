"""Run an algorithm over silos in this process: `solve`, and the core that it shares with `run`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from fedtmle.algorithms.base import UNMASKABLE, AbstractAlgorithm, TargetingProgram
from fedtmle.defects import called
from fedtmle.errors import InputError
from fedtmle.model.problem import AbstractProblem, PoolableRows
from fedtmle.protocol.outcome import Described, Personalised, Targeted
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.query import Problem
from fedtmle.runtime.certificate import certify
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.result import Result, Trajectory
from fedtmle.runtime.rows import LocalOutcome, read_rows
from fedtmle.runtime.session import Finished, Progress, run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle_core.signing import MaskKey
from fedtmle_core.types import IntArray, Part

Aggregation = Literal["open", "masked"]
POOLED = "pooled"  # the only silo of an algorithm that pools the rows
Rows = TypeVar("Rows")


def solve(
    problem: Problem,
    law: object,
    silos: Mapping[str, object],
    algorithm: AbstractAlgorithm,
    *,
    threads: int = 1,
    progress: Progress | None = None,
    observe: bool = False,
    populations: bool = False,
    index: Mapping[str, IntArray] | None = None,
    aggregation: Aggregation = "open",
) -> Result:
    """Run an algorithm on a target over silos in this process, and return the result.

    Parameters
    ----------
    problem
        The target.
    law
        The initial law, such as ``problem.start(...)``.
    silos
        The rows of each silo, by name.
    algorithm
        The algorithm.
    threads
        The number of silos that answer at the same time.
    progress
        Called after every round.
    observe
        Whether to read the rows outside the protocol, to add pooled losses to the trajectory and to the
        certificate every bound that needs the rows.
    populations
        Whether to ask first, in two small rounds, if the silos' rows look like draws from one population.
        The rows must be independent.
    index
        Each silo's row numbers in the pooled order, on which only stochastic batches depend.
    aggregation
        "masked" lets the silos send sums under pairwise masks, as in a deployed run, with keys that follow
        from their names.

    Returns
    -------
    Result
        The estimate, how exactly it was computed, and its cost.

    Raises
    ------
    InputError
        An argument is wrong.
    DataError
        A silo's rows cannot be used.
    PrecisionError
        The tolerance is finer than the sums can certify.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> result = ft.solve(problem, problem.start(5.0), {"a": [1.0, 2.0], "b": [6.0]}, ft.Gradient())
    >>> round(float(result.psi[0]), 6)
    3.0
    """
    if not isinstance(problem, AbstractProblem):
        raise InputError(f"problem: expected a target, such as ft.Mean(), not {called(problem)}")
    if not isinstance(algorithm, AbstractAlgorithm):
        raise InputError(f"algorithm: expected an algorithm, such as ft.Coded(), not {called(algorithm)}")
    check_silos(silos, algorithm)
    check_aggregation(aggregation, algorithm)
    _check_law(problem, law)
    if index is not None and set(index) != set(silos):
        raise InputError(f"index: expected row numbers for {_listed(silos)}, got {_listed(index)}")
    completed = run_in_process(
        lambda members: Plan(
            program=TargetingProgram(
                problem=problem, law=law, algorithm=algorithm, compares_populations=populations
            ),
            roster=members,
        ),
        {name: read_rows(problem, name, rows) for name, rows in silos.items()},
        algorithm=algorithm,
        pool=partial(_pooled, problem),
        index=index,
        threads=threads,
        progress=progress,
        observe=observe,
        is_masked=aggregation == "masked",
    )
    return completed.result(law=law, algorithm=algorithm)


def _pooled(problem: Problem, rows: Mapping[str, Rows]) -> Rows:
    """Return the rows of all silos as one."""
    if not isinstance(problem, PoolableRows):
        raise InputError(
            f"problem: algorithm Central and observe need pooled rows, and {type(problem).__name__} cannot "
            "pool them; give it the base PoolableRows"
        )
    pooled: Rows = problem.concatenate(list(rows.values()))
    return pooled


def check_aggregation(aggregation: object, algorithm: AbstractAlgorithm) -> None:
    """Raise `InputError` unless ``aggregation`` says how answers are added, and the algorithm allows it."""
    if aggregation not in ("open", "masked"):
        raise InputError(f"aggregation: expected 'open' or 'masked', not {aggregation!r}")
    if aggregation == "masked" and not (algorithm.adds_integers or algorithm.pools_rows):
        raise InputError(f"aggregation: {UNMASKABLE}")


def embedded_keys(silos: Iterable[str]) -> dict[str, MaskKey]:
    """Return the keys for masks of silos in this process, which follow from their names.

    All rows are in one process, so that there is nothing to hide. The masks are there to give the messages of
    a deployed run, and the same ones every time.
    """
    return {
        str(name): MaskKey(hashlib.sha256(b"fedtmle embedded silo " + str(name).encode()).digest())
        for name in silos
    }


def check_silos(silos: object, algorithm: AbstractAlgorithm) -> None:
    """Check that ``silos`` is a mapping of at least one name, and that given weights name the same silos."""
    if not silos or not isinstance(silos, Mapping):
        raise InputError("silos: expected a mapping of at least one name to data, such as {'north': frame}")
    weights = algorithm.silo_weights
    if weights is not None and set(weights) != set(silos):
        raise InputError(
            f"weights: expected one weight for each silo ({_listed(silos)}), got those of {_listed(weights)}"
        )


def _check_law(problem: Problem, law: object) -> None:
    """Raise `InputError` if the problem cannot read the law: it is of another target, or no law at all."""
    try:
        problem.path(law)
        problem.row_bound(law)
    except (AttributeError, TypeError) as error:
        raise InputError(
            f"law: {type(problem).__name__} expects a law of its own, such as problem.start(...), not "
            f"{called(law)}"
        ) from error


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(map(repr, names)) or "none"


@dataclass(frozen=True, kw_only=True)
class CompletedRun:
    """A finished session of a plan, with the local outcomes and rows that this process has.

    ``local`` holds the outcomes of a personalised run that silos in this process keep for themselves.
    ``rows`` by silo and ``pooled`` rows are there if the run is to be observed.
    """

    plan: Plan
    finished: Finished
    local: Mapping[str, LocalOutcome] = field(default_factory=dict)
    rows: Mapping[str, object] | None = None
    pooled: object = None

    def result(self, *, law: object, algorithm: AbstractAlgorithm) -> Result:
        """Return the result of a run whose targeting by ``algorithm`` began at ``law``."""
        finished, outcome = self.finished, self.finished.outcome
        if isinstance(outcome, Described):
            raise TypeError("a run that only describes has no result")
        targeted = outcome if isinstance(outcome, Targeted) else None
        pooled = self.pooled
        path = _trajectory(outcome) if pooled is None else _observed_trajectory(law, pooled, outcome)
        return Result(
            names=outcome.problem.names,
            psi=None if targeted is None else targeted.estimate.psi,
            covariance=None if targeted is None else targeted.estimate.covariance,
            residual=None if targeted is None else targeted.residual,
            residual_kind="each silo's own" if targeted is None else targeted.residual_kind,
            status=outcome.status,
            law=outcome.law,
            n=finished.n,
            sizes=finished.sizes,
            steps=outcome.steps,
            updates=outcome.updates,
            trajectory=path,
            certificate=certify(
                self.plan.without(list(finished.absent)),
                law,
                algorithm,
                finished,
                rows=self.rows,
                loss=path.loss,
            ),
            account=finished.account,
            transcript=finished.transcript,
            retired_at=finished.retired_at,
            silos=dict(self.local),
            active=() if isinstance(outcome, Targeted) else outcome.active,
            populations=outcome.populations,
        )


def _trajectory(outcome: Targeted | Personalised) -> Trajectory:
    """Return a run's trajectory as its parties know it."""
    learned = {point.update: point.gradient_norm for point in outcome.trajectory if point.at_origin}
    return Trajectory(
        points=outcome.trajectory,
        accepted=outcome.accepted,
        residual=tuple(learned.get(k) for k in range(outcome.updates + 1)),
    )


def _observed_trajectory(law: object, rows: object, outcome: Targeted | Personalised) -> Trajectory:
    """Return a run's trajectory from its initial ``law``, with losses and residuals on the pooled ``rows``.

    This is for the study of algorithms where the rows are at hand. It is outside the protocol: a deployed
    run cannot do it, and no account counts it.
    """
    problem = outcome.problem
    n = problem.count(rows)
    origin = np.zeros(problem.dim)
    loss: list[float] = []
    residual: list[float] = []
    loss_by_round: list[float] = []
    for k in range(outcome.updates + 1):
        submodel, normaliser = problem.submodel(law, rows), problem.normaliser(law)
        loss.append(float(np.mean(problem.losses(law, rows))))
        score = submodel.sums(origin, Part.GRADIENT).values(n) + normaliser.gradient(origin)
        residual.append(math.sqrt(math.fsum(score * score)))
        for point in (point for point in outcome.trajectory if point.update == k):
            eps = np.array(point.eps)
            change = float(submodel.sums(eps, Part.LOSS).values(n)[0])
            loss_by_round.append(loss[k] + change + normaliser.value(eps))
        if k < outcome.updates:
            law = problem.move(law, np.array(outcome.accepted[k]))
    return Trajectory(
        points=outcome.trajectory,
        accepted=outcome.accepted,
        residual=tuple(residual),
        loss=tuple(loss),
        loss_by_round=tuple(loss_by_round),
    )


def run_in_process(
    plan_for: Callable[[tuple[Member, ...]], Plan],
    rows: Mapping[str, Rows],
    *,
    algorithm: AbstractAlgorithm,
    pool: Callable[[Mapping[str, Rows]], Rows],
    keeper: Callable[[Plan, str], Keeper | None] = lambda _plan, _name: None,
    index: Mapping[str, IntArray] | None = None,
    threads: int = 1,
    progress: Progress | None = None,
    observe: bool = False,
    is_masked: bool = False,
    silos: Sequence[str] | None = None,
    absent: Mapping[str, str] | None = None,
) -> CompletedRun:
    """Run a plan over the validated ``rows`` of each silo: the core of `solve` and `run`.

    ``plan_for`` returns the plan of a roster. ``pool`` returns all rows in one place: the only silo of an
    algorithm that pools the rows, and what ``observe`` reads. ``keeper`` returns the keeper of a silo in a
    plan, by its name; a silo without one is unguarded. ``silos`` is the roster, by default the silos that
    have ``rows``; ``absent`` says why the others have none.
    """
    pooled = pool(rows) if algorithm.pools_rows or observe else None
    if algorithm.pools_rows and pooled is not None:
        if index is not None:
            index = {POOLED: np.concatenate([index[name] for name in rows])}
        rows = {POOLED: pooled}
        silos = None
    names = tuple(map(str, rows if silos is None else silos))
    keys = embedded_keys(names) if is_masked and not algorithm.pools_rows else {}
    plan = plan_for(tuple(Member(name=name, mask_key=keys[name].public if keys else b"") for name in names))
    parties = [
        Silo(
            name,
            plan,
            table,
            index=None if index is None else np.asarray(index[name]),
            keeper=replace(keeper(plan, name) or Keeper(), mask_key=keys.get(str(name))),
        )
        for name, table in rows.items()
    ]
    finished = run_embedded(plan, parties, threads=threads, progress=progress, absent=absent)
    return CompletedRun(
        plan=plan,
        finished=finished,
        local={silo.name: silo.local for silo in parties if silo.local is not None},
        rows={name: rows[name] for name in finished.sizes} if observe else None,
        pooled=pooled if observe else None,
    )
