"""One call: a problem, an initial law, silos and an algorithm, all in this process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm, TargetingProgram
from fedtmle.errors import InputError
from fedtmle.model.types import IntArray
from fedtmle.protocol.outcome import Described, Targeted
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import Problem
from fedtmle.runtime.certificate import certify
from fedtmle.runtime.result import Result, trajectory
from fedtmle.runtime.result import observe as observe_run
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import Finished, Progress, run_embedded
from fedtmle.runtime.silo import LocalOutcome, Silo


def solve(
    problem: Problem,
    law: Any,
    silos: Mapping[str, object],
    algorithm: AbstractAlgorithm,
    *,
    threads: int = 1,
    progress: Progress | None = None,
    observe: bool = False,
    index: Mapping[str, IntArray] | None = None,
) -> Result:
    """Runs ``algorithm`` over ``silos`` (name -> rows) from the initial ``law``.

    ``threads`` lets silos answer side by side; ``progress`` is called after every round;
    ``observe`` adds pooled losses to the trajectory, and to the certificate every bound that needs
    the rows, by reading them outside the protocol;
    ``index`` numbers each silo's rows in the pooled order (it matters to SGD batches alone).
    """
    rows = _read(problem, silos, algorithm, index)
    if algorithm.pools_rows:
        rows = {"pooled": _pool(problem, rows)}
    program = TargetingProgram(problem=problem, law=law, algorithm=algorithm)
    plan = Plan(program=program, roster=roster(list(rows)))
    parties = [Silo(name, plan, table, index=at) for name, (table, at) in rows.items()]
    finished = run_embedded(plan, parties, threads=threads, progress=progress)
    return complete(
        plan,
        finished,
        law=law,
        algorithm=algorithm,
        local=local_outcomes(parties),
        rows={name: table for name, (table, _) in rows.items()} if observe else None,
        pooled=_pool(problem, rows)[0] if observe else None,
    )


def local_outcomes(silos: Sequence[Silo]) -> dict[str, LocalOutcome]:
    """Return what silos in this process kept for themselves, in a personalised run."""
    return {silo.name: silo.local for silo in silos if silo.local is not None}


def check_silo_weights(algorithm: AbstractAlgorithm, silos: Collection[str]) -> None:
    """Refuse weights that the user gave for other silos than those of the run."""
    weights = algorithm.silo_weights
    if weights is not None and set(weights) != set(silos):
        raise InputError("weights: expected one weight for each silo, by its name")


def complete(
    plan: Plan,
    finished: Finished,
    *,
    law: Any,
    algorithm: AbstractAlgorithm,
    local: Mapping[str, LocalOutcome],
    rows: Mapping[str, Any] | None = None,
    pooled: Any = None,
) -> Result:
    """Return the result of a finished session whose targeting by ``algorithm`` began at ``law``.

    ``pooled`` are all rows and ``rows`` those of each silo, if the run is to be observed; the certificate
    of a run then has the bounds that need them.
    """
    outcome = finished.outcome
    if isinstance(outcome, Described):
        raise TypeError("a run that only describes has no result")
    observed = None if pooled is None else observe_run(law, pooled, outcome)
    loss = None if observed is None else observed.loss
    targeted = outcome if isinstance(outcome, Targeted) else None
    return Result(
        names=outcome.problem.names,
        psi=None if targeted is None else targeted.estimate.psi,
        covariance=None if targeted is None else targeted.estimate.covariance,
        residual=None if targeted is None else targeted.residual,
        residual_kind="each silo's own" if targeted is None else targeted.residual_kind,
        status=outcome.status,
        law=outcome.law,
        n=sum(finished.sizes.values()),
        sizes=finished.sizes,
        steps=outcome.steps,
        updates=outcome.updates,
        trajectory=trajectory(outcome, observed),
        certificate=certify(plan, law, algorithm, finished, rows=rows, loss=loss),
        account=finished.account,
        transcript=finished.transcript,
        retired_at=finished.retired_at,
        silos=dict(local),
    )


NumberedRows = tuple[Any, IntArray | None]


def _read(
    problem: Problem,
    silos: Mapping[str, object],
    algorithm: AbstractAlgorithm,
    index: Mapping[str, IntArray] | None,
) -> dict[str, NumberedRows]:
    """Every silo's rows, validated before the first round."""
    if not silos:
        raise InputError("silos: expected a mapping of at least one name to rows")
    if index is not None and set(index) != set(silos):
        raise InputError("index: expected the same names as silos")
    check_silo_weights(algorithm, silos)
    return {
        name: (read_rows(problem, name, rows), None if index is None else np.asarray(index[name]))
        for name, rows in silos.items()
    }


def _pool(problem: Problem, rows: Mapping[str, NumberedRows]) -> NumberedRows:
    """All rows in one place, in the order of the silos, with their pooled numbers if they have any."""
    numbers = [at for _, at in rows.values() if at is not None]
    return problem.concatenate([own for own, _ in rows.values()]), np.concatenate(
        numbers
    ) if numbers else None
