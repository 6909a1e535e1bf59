"""The follower: every party that hears the same broadcasts stands at the same round of the same queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.errors import DecodeError, FitError
from fedtmle.protocol.codes import Bits
from fedtmle.protocol.messages import Ask, Begin, decode_request
from fedtmle.protocol.outcome import Outcome, Targeted
from fedtmle.protocol.plan import AbstractProgram, Follower, Paths, Plan, roster
from fedtmle.protocol.query import Flow, Query
from fedtmle.runtime.rows import LocalRows, read_rows
from fedtmle.runtime.session import run_embedded
from tests.queries import silos_of
from tests.runtime.faults import CASES

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


def broadcasts(rows: np.ndarray) -> list[Bits]:
    """Return what is broadcast in a run over these rows."""
    local = LocalRows("a", read_rows(PROBLEM, "a", rows), len(rows))
    local.place(0)
    follower, heard = Follower(PLAN, len(rows)), []
    while follower.outcome is None:
        heard.append(follower.pool({"a": follower.query.answer(local)}, {"a": len(rows)}))
        follower.hear(heard[-1])
    return heard


def test_parties_that_share_a_flow_derive_each_round_once() -> None:
    paths, derived = Paths(), []
    together = [paths.follow(PLAN, len(Y)) for _ in range(3)]
    for broadcast in broadcasts(Y):
        derived.append({id(follower.query) for follower in together})
        pooled = [follower.hear(broadcast) for follower in together]
        assert all(each is pooled[0] for each in pooled)
    assert all(len(queries) == 1 for queries in derived)
    assert len({id(follower.outcome) for follower in together}) == 1


@pytest.mark.parametrize("same", [1, 2])
def test_a_party_that_is_told_something_else_follows_it_alone(same: int) -> None:
    """After ``same`` equal rounds the second party hears the broadcasts of a run over other rows."""
    honest = broadcasts(Y)
    other = honest[:same] + broadcasts(10.0 - Y)[same:]
    assert other[same] != honest[same]
    paths = Paths()
    first, second = paths.follow(PLAN, len(Y)), paths.follow(PLAN, len(Y))
    alone = Follower(PLAN, len(Y))
    for one, two in list(zip(honest, other, strict=False))[: same + 2]:
        first.hear(one)
        assert repr(second.hear(two)) == repr(alone.hear(two))
        assert second.round == alone.round == first.round
        assert second.query.pooled_code == alone.query.pooled_code
    assert first.query is not second.query


def test_parties_of_another_number_of_rows_share_nothing() -> None:
    paths = Paths()
    assert paths.follow(PLAN, 50).query is not paths.follow(PLAN, 60).query
    assert paths.follow(PLAN, 50).query is paths.follow(PLAN, 50).query
    assert paths.follow(replace(PLAN, colluders=2), 50).query is not paths.follow(PLAN, 50).query


def test_a_party_that_begins_later_begins_with_the_first_round() -> None:
    """Its flow is one of its own: the others have gone on."""
    paths, heard = Paths(), broadcasts(Y)
    first = paths.follow(PLAN, len(Y))
    first.hear(heard[0])
    late = paths.follow(PLAN, len(Y))
    assert late.round == 1
    assert type(late.query) is type(Follower(PLAN, len(Y)).query)
    assert repr(late.hear(heard[0])) == repr(Follower(PLAN, len(Y)).hear(heard[0]))
    assert late.round == first.round == 2


@final
@dataclass(frozen=True, kw_only=True)
class Failing(AbstractProgram[np.ndarray]):
    """A program whose flow ends with an error after its first round."""

    first: Query

    def flow(self, n: int) -> Flow[Outcome]:  # noqa: ARG002 - as every flow
        yield self.first
        raise FitError("separation", "a response is perfectly predicted")

    def count(self, rows: np.ndarray) -> int:
        return len(rows)

    def smallest_part(self, rows: np.ndarray) -> int:
        return len(rows)


def test_a_flow_that_fails_does_so_for_every_party() -> None:
    plan = replace(PLAN, program=Failing(first=Follower(PLAN, len(Y)).query))
    paths, heard = Paths(), broadcasts(Y)[0]
    together = [paths.follow(plan, len(Y)) for _ in range(3)]
    for follower in together:
        with pytest.raises(FitError, match="perfectly predicted"):
            follower.hear(heard)


def test_a_party_that_is_behind_does_not_see_the_looks_of_the_next_round() -> None:
    """The looks of a masked session belong to a round: a silo judges its answer by those of its own."""
    plan, rows = CASES["study, relayed"]()
    transcript = run_embedded(plan, silos_of(plan, rows)).transcript
    requests = [decode_request(next(iter(e.requests.values()))) for e in transcript.exchanges]
    (n,) = {request.n for request in requests if isinstance(request, Begin)}
    heard = [request.pooled.bits() for request in requests if isinstance(request, Ask)]
    paths = Paths()
    first, behind = paths.follow(plan, n), paths.follow(plan, n)
    for number, broadcast in enumerate(heard[:6], start=1):
        assert behind.looks is first.looks or number > 1
        first.hear(broadcast)
        assert behind.looks is not first.looks
        behind.hear(broadcast)
        assert behind.round == first.round == number + 1
        assert behind.query.pooled_code == first.query.pooled_code
