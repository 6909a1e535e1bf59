"""A silo admits first: order, repeats, plans and garbage."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedtmle as ft
from fedtmle.algorithms.base import AbstractAlgorithm, TargetingProgram
from fedtmle.errors import ContributionError, ProtocolError, RefusedError
from fedtmle.protocol import messages
from fedtmle.protocol.codes import decode
from fedtmle.protocol.guard import Guard, disclosed_numbers
from fedtmle.protocol.messages import (
    Answered,
    Ask,
    Begin,
    Close,
    Compare,
    Event,
    Open,
    Opened,
    Payload,
    Reason,
    Refused,
    State,
)
from fedtmle.protocol.plan import Follower, Plan, roster
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.query import Problem, Query
from fedtmle.runtime.ledger import Ledger, read
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import InProcess, Session, run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.two_arm import TwoArm, TwoArmRows
from tests.cases import targets
from tests.damage import damaged
from tests.premise import Premise
from tests.protocol.test_messages import drawn
from tests.queries import RUNS
from tests.replay import Replay

ALGORITHM = ft.Coded(tolerance=1e-5)


def new_silo() -> Silo:
    case = targets()["two arms"]
    rows = read_rows(case.problem, "a", case.take(np.arange(50)))
    return Silo("a", the_plan(), rows)


def the_plan() -> Plan:
    case = targets()["two arms"]
    return Plan(
        program=TargetingProgram(problem=case.problem, law=case.law, algorithm=ALGORITHM),
        roster=roster(["a"]),
    )


def plan() -> bytes:
    return the_plan().digest


def plan_digest(problem: Problem, law: object, algorithm: AbstractAlgorithm) -> bytes:
    return Plan(
        program=TargetingProgram(problem=problem, law=law, algorithm=algorithm), roster=roster(["a"])
    ).digest


def ask(silo: Silo, request: messages.Request) -> messages.Reply:
    return messages.decode_reply(silo.step(messages.encode(request)))


def test_the_first_two_steps() -> None:
    silo = new_silo()
    assert ask(silo, Open(1, b"s", plan())) == Opened(50)
    assert isinstance(ask(silo, Begin(b"s", 50, 0)), Answered)


def test_repeating_the_last_request_returns_the_recorded_bytes() -> None:
    silo = new_silo()
    ask(silo, Open(1, b"s", plan()))
    begin = messages.encode(Begin(b"s", 50, 0))
    assert silo.step(begin) == silo.step(begin)
    other = messages.encode(Begin(b"s", 60, 0))
    assert messages.decode_reply(silo.step(other)) == Refused(Reason.OUT_OF_ORDER)


BY_KIND: dict[type[messages.Request], messages.Request] = {
    Open: Open(1, b"s", b"x"),
    Begin: Begin(b"s", 50, 0),
    Ask: Ask(b"s", 2, Payload(0, b"")),
    Close: Close(b"s", 2, Payload(0, b"")),
    Compare: Compare(b"s", ()),
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("kind", get_args(messages.Request))
def test_a_request_that_the_table_does_not_list_is_refused_and_changes_nothing(
    state: State, kind: type[messages.Request]
) -> None:
    if (state, kind) in messages._ADMITTED:
        return
    silo = new_silo()
    ask(silo, Open(1, b"s", plan()))
    silo._position.state = state
    assert ask(silo, BY_KIND[kind]) == Refused(Reason.OUT_OF_ORDER)
    assert silo.state is state


@pytest.mark.parametrize("state", State)
def test_the_table_alone_decides_where_a_request_leads(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    line = messages._ADMITTED[State.NEW, Open]
    changed = replace(line, leads_to={Event.REPLIED: state, Event.REFUSED: state})
    monkeypatch.setitem(messages._ADMITTED, (State.NEW, Open), changed)
    silo = new_silo()
    ask(silo, Open(1, b"s", plan()))
    assert silo.state is state


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Begin(b"s", 50, 0), Reason.OUT_OF_ORDER),
        (Ask(b"", 1, Payload(0, b"")), Reason.OUT_OF_ORDER),
        (Close(b"s", 2, Payload(0, b"")), Reason.OUT_OF_ORDER),
        (Open(2, b"s", b"x"), Reason.OTHER_FORMAT),
        (Open(1, b"s", b"x"), Reason.OTHER_PLAN),
    ],
)
def test_a_new_silo_admits_only_its_own_plan(request_: messages.Request, reason: Reason) -> None:
    assert ask(new_silo(), request_) == Refused(reason)


@pytest.mark.parametrize(
    "request_",
    [
        Begin(b"t", 50, 0),
        Begin(b"s", 49, 0),
        Begin(b"s", 50, 1),
        Begin(b"s", 50, -1),
        Ask(b"s", 1, Payload(0, b"")),
    ],
    ids=["other session", "n too small", "rows beyond n", "negative", "round before begin"],
)
def test_an_opened_silo_admits_only_a_fitting_begin(request_: messages.Request) -> None:
    silo = new_silo()
    ask(silo, Open(1, b"s", plan()))
    assert ask(silo, request_) == Refused(Reason.OUT_OF_ORDER)


def test_skipped_rounds_and_false_broadcasts_are_refused() -> None:
    silo = new_silo()
    ask(silo, Open(1, b"s", plan()))
    ask(silo, Begin(b"s", 50, 0))
    assert ask(silo, Ask(b"s", 3, Payload(0, b""))) == Refused(Reason.OUT_OF_ORDER)
    assert ask(silo, Ask(b"s", 2, Payload(3, b"\xe0"))) == Refused(Reason.NOT_DERIVABLE)


def test_a_refusal_ends_the_session() -> None:
    silo = new_silo()
    ask(silo, Open(1, b"s", plan()))
    ask(silo, Begin(b"s", 50, 0))
    assert ask(silo, Ask(b"s", 2, Payload(3, b"\xe0"))) == Refused(Reason.NOT_DERIVABLE)
    assert silo.state is State.REFUSED
    for number in (2, 3):
        assert ask(silo, Ask(b"s", number, Payload(0, b""))) == Refused(Reason.OUT_OF_ORDER)


def test_a_close_before_the_end_is_refused() -> None:
    silo, server = new_silo(), Follower(the_plan(), 50)
    ask(silo, Open(1, b"s", plan()))
    answered = ask(silo, Begin(b"s", 50, 0))
    assert isinstance(answered, Answered)
    answer = decode(server.query.answer_code, answered.payload.bits())
    pooled = server.pool({"a": answer}, {"a": 50})
    close = Close(b"s", 2, Payload(pooled.length, pooled.data))
    assert ask(silo, close) == Refused(Reason.NOT_DERIVABLE)


def test_an_answer_of_unknown_size_is_charged_by_its_bits() -> None:
    plan, tables = RUNS["pilot's trees"]()
    asked: list[tuple[Query, int]] = []
    keeper = Keeper(witness=lambda query, reply: asked.append((query, reply.payload.length)))
    silos = [
        Silo(name, plan, table, keeper=keeper if name == "s1" else Keeper()) for name, table in tables.items()
    ]
    run_embedded(plan, silos)
    guard = Guard(UNGUARDED)
    unknown = 0
    for query, bits in asked:
        before = guard.functionals
        guard.charge(query, bits)
        if 0 in [member.functionals for member in query.members]:  # trees: their number is unknown before
            assert guard.functionals - before == math.ceil(bits / 64) > 0
            unknown += 1
        else:
            assert guard.functionals == before  # charged when it was admitted
    assert unknown > 0


def test_a_silo_charges_answers_of_unknown_size_and_refuses_them_beyond_its_limit(tmp_path: Path) -> None:
    plan, tables = RUNS["pilot's trees"]()
    asked: list[tuple[Query, int]] = []

    def run(policy: Policy, ledger: Ledger | None) -> None:
        keeper = Keeper(
            policy=policy,
            ledger=ledger,
            witness=lambda query, reply: asked.append((query, reply.payload.length)),
        )
        parties = {name: Keeper() for name in tables} | {"s1": keeper}
        run_embedded(plan, [Silo(name, plan, table, keeper=parties[name]) for name, table in tables.items()])

    with closing(Ledger(tmp_path / "ledger.jsonl", sync=False)) as ledger:
        run(UNGUARDED, ledger)
    declared = sum(query.functionals for query, _ in asked)
    told = sum(disclosed_numbers(query, bits) for query, bits in asked)
    assert told > declared
    totals = [line["functionals"] for line in read(tmp_path / "ledger.jsonl")]
    assert totals[-1] == told
    last, bits = asked[-1]
    admitted = told - disclosed_numbers(last, bits) + last.functionals  # when the last query is admitted
    assert admitted > declared
    run(replace(UNGUARDED, max_functionals=admitted), None)
    with pytest.raises(RefusedError, match="no more numbers"):
        run(replace(UNGUARDED, max_functionals=admitted - 1), None)


is_request = Premise("the bytes are a request", at_least=0.2)
REQUESTS = st.sampled_from(typing.get_args(messages.Request)).flatmap(drawn)


@is_request
@given(st.one_of(st.binary(max_size=80), REQUESTS.map(messages.encode).flatmap(damaged)))
@settings(max_examples=200, deadline=None)
def test_garbage_is_refused_and_changes_nothing(data: bytes) -> None:
    silo = new_silo()
    reply = messages.decode_reply(silo.step(data))
    assert isinstance(reply, Refused)
    is_request.holds(reply.reason is not Reason.MALFORMED)
    assert ask(silo, Open(1, b"s", plan())) == Opened(50)


def test_any_change_of_the_plan_changes_its_digest() -> None:
    case = targets()["two arms"]
    other_law = case.problem.move(case.law, np.array([1e-9, 0.0]))
    digests = {
        plan(),
        plan_digest(case.problem, case.law, ft.Coded(tolerance=1e-6)),
        plan_digest(case.problem, case.law, ft.Coded(tolerance=1e-5, smoothness=ft.Certified())),
        plan_digest(case.problem, other_law, ALGORITHM),
        plan_digest(TwoArm(outcome_bounds=(-10.0, 10.5), weight_ceiling=64.0), case.law, ALGORITHM),
    }
    assert len(digests) == 5


def test_a_density_law_is_in_the_plan_by_its_pilot() -> None:
    problem = OptimalTransport()
    rng = np.random.default_rng(0)
    pilot = rng.normal(size=(50, 2))
    moved = pilot.copy()
    moved[0, 0] = np.nextafter(moved[0, 0], 9.0)
    one, same, other = (
        plan_digest(problem, problem.start(p), ALGORITHM) for p in (pilot, pilot.copy(), moved)
    )
    assert one == same != other


def test_a_silo_that_cannot_answer_says_so_without_a_value_and_keeps_its_reason() -> None:
    problem = TwoArm(outcome_bounds=(0.0, 1.0), weight_ceiling=2.5)
    honest = {"outcome": [0.2, 0.8], "treatment": [1, 0], "Q1": [0.5, 0.5], "Q0": [0.5, 0.5], "g": [0.5, 0.5]}
    rows = read_rows(problem, "a", honest)
    assert isinstance(rows, TwoArmRows)
    rows.inverse_g[0, 0] = 77.125  # a row beyond the declared bound, behind the validation's back
    algorithm = ft.Gradient()
    plan = Plan(
        program=TargetingProgram(problem=problem, law=problem.start(), algorithm=algorithm),
        roster=roster(["a"]),
    )
    silo = Silo("a", plan, rows)
    with pytest.raises(RefusedError) as refused:
        Session(plan, InProcess([silo])).run()
    assert "77.125" not in str(refused.value)
    assert isinstance(silo.error, ContributionError)
    assert "silo 'a'" in str(silo.error)
    assert "77.125" not in str(silo.error)


def test_replay_refuses_another_plan() -> None:
    case = targets()["mean"]
    silos = case.silos(case.split(2))
    result = ft.solve(case.problem, case.law, silos, ft.Gradient(tolerance=1e-6))
    with pytest.raises(ProtocolError, match="transcript"):
        Session(
            Plan(
                program=TargetingProgram(
                    problem=case.problem, law=case.law, algorithm=ft.Gradient(tolerance=1e-7)
                ),
                roster=roster(list(silos)),
            ),
            Replay(result.transcript),
        ).run()


def test_transcript_survives_the_disk(tmp_path: Path) -> None:
    case = targets()["mean"]
    result = ft.solve(case.problem, case.law, case.silos(case.split(2)), ft.Gradient())
    result.transcript.save(tmp_path / "run.transcript")
    loaded = ft.Transcript.load(tmp_path / "run.transcript")
    assert loaded == result.transcript
    (tmp_path / "junk").write_bytes(b"\x01junk")
    with pytest.raises(ProtocolError, match="not a transcript"):
        ft.Transcript.load(tmp_path / "junk")


def test_different_broadcasts_are_noticed_at_the_close() -> None:
    """A federation that tells one silo something else: the digests differ."""
    case = targets()["mean"]
    algorithm = ft.Gradient(tolerance=1e-6)
    silos = case.silos(case.split(2))
    plan = Plan(
        program=TargetingProgram(problem=case.problem, law=case.law, algorithm=algorithm),
        roster=roster(list(silos)),
    )
    parties = [Silo(name, plan, read_rows(case.problem, name, rows)) for name, rows in silos.items()]

    class Lying(InProcess):
        def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
            forged = dict(requests)
            message = messages.decode_request(forged["silo 1"])
            if isinstance(message, Close):
                data = bytearray(message.pooled.data)
                data[-1] ^= 1 << (-message.pooled.length % 8)  # the last bit of the pooled moments
                forged["silo 1"] = messages.encode(
                    Close(message.session, message.round, Payload(message.pooled.length, bytes(data)))
                )
            return super().exchange(forged)

    with pytest.raises(ProtocolError, match="different broadcasts"):
        Session(plan, Lying(parties)).run()
