"""One call: a problem, an initial law, silos and an algorithm, all in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.local import LocalAverage
from fedtmle.errors import InputError
from fedtmle.model.types import IntArray
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.query import Problem
from fedtmle.runtime.certificate import RunCertificate, certify
from fedtmle.runtime.embedded import run_embedded
from fedtmle.runtime.observe import Observation
from fedtmle.runtime.observe import observe as observe_run
from fedtmle.runtime.result import Result, trajectory
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import Finished, Progress
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
    plan = Plan(subject=problem, law=law, algorithm=algorithm, roster=roster(list(rows)))
    parties = [Silo(name, plan, own, index=at) for name, (own, at) in rows.items()]
    finished = run_embedded(plan, parties, threads=threads, progress=progress)
    observed = observe_run(problem, law, _pool(problem, rows)[0], finished.outcome) if observe else None
    certificate = certify(
        problem,
        law,
        algorithm,
        finished,
        rows={name: own for name, (own, _) in rows.items()} if observe else None,
        loss=observed.loss if observed else None,
    )
    kept = {silo.name: silo.local for silo in parties if silo.local is not None}
    return assemble(problem, finished, observed, certificate, kept)


def assemble(
    problem: Problem,
    finished: Finished,
    observed: Observation | None,
    certificate: RunCertificate | None,
    local: Mapping[str, LocalOutcome],
) -> Result:
    """The result of a finished session."""
    outcome = finished.outcome
    return Result(
        names=problem.names,
        psi=None if outcome.estimate is None else outcome.estimate.psi,
        covariance=None if outcome.estimate is None else outcome.estimate.covariance,
        residual=outcome.residual,
        residual_kind=outcome.residual_kind,
        status=outcome.status,
        law=outcome.law,
        n=sum(finished.sizes.values()),
        sizes=finished.sizes,
        steps=outcome.steps,
        updates=outcome.updates,
        trajectory=trajectory(outcome, observed),
        certificate=certificate,
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
    weights = algorithm.weights if isinstance(algorithm, LocalAverage) else None
    if isinstance(weights, Mapping) and set(weights) != set(silos):
        raise InputError("weights: expected one weight for each silo, by its name")
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
