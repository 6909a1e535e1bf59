"""Attacks by the choice of rows that a sum is over."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan
from fedtmle_core.exact import Sums
from tests.attacks.base import AbstractAttack, Victim

PROBLEM = ft.Mean(bounds=(0.0, 20.0))
START = 10.0
Y = np.random.default_rng(7).uniform(0, 20, size=60)


class AbstractBatchAttack(AbstractAttack):
    """On the mean of 60 outcomes: a batch's sum is that of y - 10 at eps = 0."""

    reason = Reason.BATCHES
    sgd: ft.StochasticGradientDescent

    def plan(self) -> Plan:
        algorithm = ft.Gradient(tolerance=1e-9, optimizer=self.sgd)
        return Plan(
            program=TargetingProgram(problem=PROBLEM, law=PROBLEM.start(START), algorithm=algorithm),
            roster=self.members,
        )

    def rows(self) -> np.ndarray:
        return Y

    def zero(self, sums: Sums) -> Sums:
        """A pooled gradient of zero keeps eps where it is, so that batches can be compared."""
        return Sums((0,) * len(sums.units), sums.shifts)

    def large(self, sums: Sums) -> Sums:
        """A pooled gradient far from zero, so that the run goes on."""
        return Sums((1 << 40,) * len(sums.units), sums.shifts)


class SingleRecordBatch(AbstractBatchAttack):
    """Claims that so many rows are pooled that a batch holds just one of the silo's."""

    yields = "one record's outcome, exactly"
    keys = ("min_batch", "min_support", "min_people")
    sgd = ft.StochasticGradientDescent(batch=30, step=0.01, steps=3, seed=1)

    def run(self, victim: Victim) -> tuple[int, float]:
        server = self.connect(victim)
        n_rows, n = server.open(), 3000
        batch = self.sgd.draw(n, 0, 0)
        for first in range(n - n_rows):
            own = batch[(batch >= first) & (batch < first + n_rows)] - first
            if len(own) == 1:
                break
        answer = server.begin(n, first)
        (total,) = server.tell(self.large(answer)).values()
        return int(own[0]), START + float(total)

    def works(self, learned: tuple[int, float]) -> bool:
        at, value = learned
        return abs(value - Y[at]) < 1e-9


class LeaveOneOutBatch(AbstractBatchAttack):
    """Asks for all rows, then for a batch of all but one, and subtracts (n - 1 differencing)."""

    yields = "one record's outcome, exactly"
    keys = ("min_batch",)
    sgd = ft.StochasticGradientDescent(batch=len(Y) - 1, step=0.01, steps=3, batches="fresh")

    def run(self, victim: Victim) -> tuple[int, float]:
        server = self.connect(victim)
        n = server.open()
        whole = server.begin(n)
        rest = server.tell(self.large(whole))
        (missing,) = set(range(n)) - set(self.sgd.draw(n, 0, 0).tolist())
        return missing, START + float(whole.values()[0] - rest.values()[0])

    def works(self, learned: tuple[int, float]) -> bool:
        at, value = learned
        return abs(value - Y[at]) < 1e-9


class FreshBatches(AbstractBatchAttack):
    """Has fresh batches drawn while eps stands still, and solves the linear equations."""

    yields = "every record's outcome, to 1e-6"
    keys = ("min_batch",)
    sgd = ft.StochasticGradientDescent(batch=30, step=0.01, steps=90, batches="fresh")

    def run(self, victim: Victim) -> np.ndarray:
        server = self.connect(victim)
        n = server.open()
        answer = server.tell(self.large(server.begin(n)))
        drawn = np.zeros((80, n))
        totals = np.zeros(80)
        for t in range(80):
            drawn[t, self.sgd.draw(n, 0, t)] = 1.0
            totals[t] = answer.values()[0]
            answer = server.tell(self.zero(answer))
        return START + np.linalg.lstsq(drawn, totals, rcond=None)[0]

    def works(self, learned: Any) -> bool:
        return bool(np.abs(learned - Y).max() < 1e-6)


class BatchesAcrossACrash(AbstractBatchAttack):
    """Makes the silo crash between two fresh batches, so that it may forget which rows it has told of."""

    yields = "the sum over the rows by which the two batches differ, exactly"
    keys = ("min_batch",)
    sgd = FreshBatches.sgd

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        first = server.tell(self.large(server.begin(server.open())))
        victim.restart()
        second = server.tell(self.zero(first))
        return float(first.values()[0] - second.values()[0])

    def works(self, learned: float) -> bool:
        first, second = (Y[self.sgd.draw(len(Y), 0, t)] for t in (0, 1))
        return abs(learned - (first.sum() - second.sum())) < 1e-9

    def open_keeper(self) -> Any:
        return self.keeper(self.without(*self.keys))  # a silo that forgets everything cannot go on


ATTACKS: tuple[AbstractAttack, ...] = (
    SingleRecordBatch(),
    LeaveOneOutBatch(),
    FreshBatches(),
    BatchesAcrossACrash(),
)
