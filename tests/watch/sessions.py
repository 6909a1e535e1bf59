"""A small session in which one silo keeps a ledger."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol.plan import Plan, roster
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.runtime.silo import Silo


def run_with_ledger(path: Path) -> Finished:
    """The mean of two silos; silo "a" writes its ledger to ``path``."""
    rng = np.random.default_rng(1)
    problem = ft.Mean(bounds=(0.0, 10.0))
    rows = {name: problem.read(rng.uniform(2, 8, size=50)) for name in ("a", "b")}
    plan = Plan(
        program=TargetingProgram(problem=problem, law=problem.start(5.0), algorithm=ft.Coded()),
        roster=roster(list(rows)),
    )
    ledger = Ledger(path, sync=False)
    try:
        keeping = Silo("a", plan, rows["a"], keeper=Keeper(ledger=ledger))
        return Session(plan, InProcess([keeping, Silo("b", plan, rows["b"])])).run()
    finally:
        ledger.close()
