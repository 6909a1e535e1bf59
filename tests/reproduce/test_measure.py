"""The simulated clock, what a run records, and that records do not depend on the clock."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.solver import solve
from fedtmle_paper.reproduce.checks import dispersion
from fedtmle_paper.reproduce.measure import digest, observed
from fedtmle_paper.reproduce.scenario import Dgp, Partition, Scale, Scenario, build
from fedtmle_paper.reproduce.timing import LedgerProblem, TimedFederation, WorkLedger

from .conftest import TINY

CELL = Scenario(seed=4, dgp=Dgp.CURVED, partition=Partition.SPATIAL, clients=3, scale=TINY)


def test_cells_of_a_seed_share_their_rows_and_start() -> None:
    other = Scenario(seed=4, dgp=Dgp.CURVED, partition=Partition.RANDOM, clients=2, scale=TINY)
    a, b = build(CELL), build(other)
    assert (a.rows == b.rows).all()
    assert a.law == b.law
    assert [len(rows) for rows in a.silos.values()] == [48, 109, 243]  # 1 : 5^(1/2) : 5
    assert np.array_equal(
        np.sort(np.concatenate(list(a.silos.values())), axis=0), np.sort(a.rows, axis=0)
    )  # every row once


class _Counted:
    """A silo whose step takes a known time."""

    def __init__(self, name: str, takes: float, clock: list[float]) -> None:
        self.name, self._takes, self._clock = name, takes, clock

    def step(self, request: bytes) -> bytes:
        self._clock[0] += self._takes
        return request


def test_a_round_is_its_slowest_silo_and_the_server_after_it() -> None:
    clock = [0.0]
    silos = [_Counted("a", 1.0, clock), _Counted("b", 3.0, clock)]
    federation = TimedFederation(silos, clock=lambda: clock[0])  # type: ignore[arg-type]
    for _ in range(4):  # a greeting, two rounds, a farewell
        federation.exchange({"a": b"", "b": b""})
        clock[0] += 0.5  # the server
    assert [(r.slowest, r.silos, r.server) for r in federation.rounds()] == [(3.0, 4.0, 0.5)] * 2


def test_remembered_work_is_charged_to_whoever_asks() -> None:
    clock = [0.0]
    ledger = WorkLedger(lambda: clock[0])

    def work() -> str:
        clock[0] += 2.0
        return "done"

    assert [ledger.get("key", work) for _ in range(3)] == ["done"] * 3
    assert clock[0] == 2.0
    assert ledger.now() == 6.0


def test_a_ledger_changes_no_bit_of_a_run() -> None:
    data = build(CELL)
    problem = LedgerProblem(inner=data.problem, ledger=WorkLedger())
    for algorithm in (ft.Gradient(tolerance=1e-3), ft.LocalAverage(max_updates=2)):
        with_ledger, plain = (solve(p, data.law, data.silos, algorithm) for p in (problem, data.problem))
        assert with_ledger.trajectory.accepted == plain.trajectory.accepted
        assert (with_ledger.psi == plain.psi).all()


def test_observed_losses_agree_with_the_runtimes_own() -> None:
    data = build(CELL)
    result = solve(data.problem, data.law, data.silos, ft.LocalAverage(max_updates=3), observe=True)
    loss, residual = observed(data, data.law, result.trajectory.accepted)
    assert loss == pytest.approx(result.trajectory.loss, abs=1e-12)
    assert residual == pytest.approx(result.trajectory.residual, abs=1e-12)


def test_a_digest_sees_the_last_bit() -> None:
    assert digest([(1.0, 0.0)]) == digest([[1.0, 0.0]])
    assert digest([(1.0, 0.0)]) != digest([(np.nextafter(1.0, 2.0), 0.0)])
    assert digest([(0.0,)]) != digest([(-0.0,)])


def test_spatial_silos_differ_more_than_random_ones() -> None:
    big = Scale(n=4_000, pilot=200, reference_clients=5)
    spatial, random = (
        dispersion(Scenario(seed=1, dgp=Dgp.GAUSSIAN, partition=partition, clients=5, scale=big))
        for partition in (Partition.SPATIAL, Partition.RANDOM)
    )
    assert spatial[0] > random[0]
    assert spatial[1] > random[1]
