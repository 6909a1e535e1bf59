"""Batches drawn anew: what their sums tell together, and the policy that bounds it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.errors import RefusedError
from fedtmle.model.leverage import PersonRows
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.subjects import FreshBatches
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from tests.attacks import batches as attacks
from tests.attacks.base import Victim
from tests.attacks.settings import RefusedBySiloError
from tests.premise import Premise

OPEN = dataclasses.replace(Policy(), fresh_batches=True)
MEAN = ft.Mean(bounds=(0.0, 20.0))


class Told:
    """Gradients t_i as they are."""

    def __init__(self, rows: np.ndarray, pieces: int = 2) -> None:
        self.parts = np.array_split(rows, pieces, axis=1)

    def disclosed_rows(self, eps: np.ndarray) -> Any:  # noqa: ARG002
        return map(PersonRows, self.parts)


def test_the_leverage_of_batches_is_that_of_all_combinations_of_their_sums() -> None:
    """Against the hat matrix of the equations that a server would solve, one column per told number."""
    rng = np.random.default_rng(3)
    close = Premise("a leverage below one", at_least=0.5)
    with close:
        for _ in range(20):
            n, d, k = int(rng.integers(30, 60)), int(rng.integers(1, 3)), int(rng.integers(1, 8))
            t = rng.normal(size=(d, n))
            fresh, columns = FreshBatches(n), [t]
            for _ in range(k):
                batch = rng.integers(0, n, size=n // 2)  # with repetitions
                fresh.add(batch)
                fresh.add(batch[::-1])  # the same again
                columns.append(t * np.bincount(batch, minlength=n))
            told = np.concatenate(columns).T
            hat = told @ np.linalg.pinv(told)
            found = fresh.largest_leverage(Told(t), np.zeros(d), 0.0)  # type: ignore[arg-type]
            assert found == pytest.approx(float(np.diag(hat).max()), rel=1e-9)
            close.holds(found < 0.95)


def fresh(steps: int, *, batch: int = 100, replace: bool = False) -> ft.Gradient:
    sgd = ft.StochasticGradientDescent(batch=batch, step=0.5, steps=steps, batches="fresh", replace=replace)
    return ft.Gradient(tolerance=1e-6, optimizer=sgd, max_updates=2)


def guarded(algorithm: ft.Gradient, policy: Policy, sizes: tuple[int, ...] = (120, 160)) -> Any:
    rng = np.random.default_rng(5)
    names = [f"s{m}" for m in range(len(sizes))]
    rows = {name: rng.uniform(0, 20, size=size) for name, size in zip(names, sizes, strict=True)}
    program = TargetingProgram(problem=MEAN, law=MEAN.start(10.0), algorithm=algorithm)
    plan = Plan(program=program, roster=roster(names))
    silos = [Silo(name, plan, MEAN.read(rows[name]), keeper=Keeper(policy=policy)) for name in names]
    return Session(plan, InProcess(silos)).run(), rows


@pytest.mark.parametrize("replace", [False, True])
def test_an_honest_run_on_fresh_batches_is_answered_and_is_the_unguarded_one(replace: bool) -> None:
    algorithm = fresh(8, replace=replace)
    finished, rows = guarded(algorithm, OPEN)
    unguarded = ft.solve(MEAN, MEAN.start(10.0), rows, algorithm)
    assert finished.outcome.accepted == unguarded.trajectory.accepted
    assert len(finished.outcome.accepted) == 2  # sixteen batches


def test_only_an_owner_who_consents_answers_them() -> None:
    with pytest.raises(RefusedError):
        guarded(fresh(8), Policy())
    policy, mistakes = Policy.parse({"fresh_batches": True})
    assert policy.fresh_batches
    assert not mistakes


def test_a_run_of_too_many_batches_is_refused_before_records_are_told() -> None:
    """Of N_m = 40 outcomes at most 40/1.2 different sums can be told; the rule stops no later than that."""
    with pytest.raises(RefusedError):
        guarded(fresh(40, batch=60), OPEN, sizes=(40, 60))
    guarded(fresh(2, batch=60), OPEN, sizes=(40, 60))


@pytest.mark.parametrize(
    "attack", [attacks.FreshBatches(), attacks.LeaveOneOutBatch()], ids=lambda each: type(each).__name__
)
def test_attacks_by_overlapping_batches_are_refused_by_the_rule_of_people(attack: Any) -> None:
    def victim(policy: Policy) -> Victim:
        rows = attacks.PROBLEM.read(attack.rows())
        return Victim(lambda: Silo("a", attack.plan(), rows, keeper=Keeper(policy=policy)))

    with pytest.raises(RefusedBySiloError) as refused:
        attack.run(victim(OPEN))
    assert refused.value.reason is Reason.POLICY
    laxer = dataclasses.replace(OPEN, min_people=0.0)
    assert attack.works(attack.run(victim(laxer)))  # no other limit stops it


def test_a_batch_needs_enough_different_rows() -> None:
    rows = np.repeat(np.arange(19), 2)
    with pytest.raises(RefusalError, match="min_batch"):
        Guard(OPEN)._follow_batch(rows, 200)
    Guard(OPEN)._follow_batch(np.append(rows, 19), 200)
