"""The follower: every party that hears the same broadcasts stands at the same round of the same queries."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.errors import DecodeError
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import Follower, Plan, roster
from fedtmle.runtime.rows import LocalRows, read_rows

PROBLEM = ft.Mean(bounds=(0.0, 10.0))
Y = np.random.default_rng(5).uniform(0, 10, 50)
PLAN = Plan(
    program=TargetingProgram(problem=PROBLEM, law=PROBLEM.start(4.0), algorithm=ft.Coded(tolerance=1e-4)),
    roster=roster(["a"]),
)


def test_followers_that_hear_the_same_stand_at_the_same_round() -> None:
    local = LocalRows("a", read_rows(PROBLEM, "a", Y), len(Y))
    local.place(0)
    server, silo = Follower(PLAN, len(Y)), Follower(PLAN, len(Y))
    number = 1
    while server.outcome is None:
        assert server.round == silo.round == number
        assert type(server.query) is type(silo.query)
        broadcast = server.pool({"a": silo.query.answer(local)}, {"a": len(Y)})
        server.hear(broadcast)
        silo.hear(broadcast)
        number += 1
    assert number > 3
    assert isinstance(server.outcome, Targeted)
    assert isinstance(silo.outcome, Targeted)
    assert server.outcome.estimate.psi == silo.outcome.estimate.psi == pytest.approx(Y.mean(), abs=1e-4)


def test_a_follower_has_no_query_after_the_end() -> None:
    local = LocalRows("a", read_rows(PROBLEM, "a", Y), len(Y))
    local.place(0)
    follower = Follower(PLAN, len(Y))
    while follower.outcome is None:
        follower.hear(follower.pool({"a": follower.query.answer(local)}, {"a": len(Y)}))
    with pytest.raises(DecodeError, match="the run has ended"):
        _ = follower.query
