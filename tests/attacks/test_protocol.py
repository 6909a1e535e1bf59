"""What the list of attacks cannot hold: several silos, every field of a plan, every cut of a message."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.errors import ProtocolError
from fedtmle.protocol import messages
from fedtmle.protocol import plan as plan_module
from fedtmle.protocol.guard import Guard
from fedtmle.protocol.messages import (
    Ask,
    Begin,
    Close,
    Closed,
    Compare,
    Open,
    Opened,
    Payload,
    Reason,
    Refused,
    SignedDigest,
)
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.query import Local, Query
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle_core.exact import Sums
from fedtmle_core.journal import MemoryJournal
from fedtmle_core.signing import SigningKey
from tests.attacks.batches import PROBLEM, BatchesAcrossACrash
from tests.attacks.protocol import OversizedCodeword
from tests.attacks.settings import RefusedBySiloError, Server

NAMES = ("a", "b", "c")
KEYS = {name: SigningKey(name.encode() * 32) for name in NAMES}
Y = {name: np.random.default_rng(m).uniform(0, 20, size=30 + m) for m, name in enumerate(NAMES)}


PROGRAM = TargetingProgram(problem=PROBLEM, law=PROBLEM.start(10.0), algorithm=ft.Gradient(tolerance=1e-6))


def signed_plan(**changes: Any) -> Plan:
    plan = Plan(
        program=PROGRAM,
        roster=tuple(Member(name=name, key=KEYS[name].public) for name in NAMES),
        expires=datetime.date(2030, 1, 1),
    )
    return dataclasses.replace(plan, **changes)


def silos(plan: Plan) -> list[Silo]:
    return [
        Silo(name, plan, read_rows(PROBLEM, name, Y[name]), keeper=Keeper(key=KEYS[name]))
        for name in plan.silos
    ]


class Tampering(InProcess):
    """A server that changes what one silo, or every silo, is sent."""

    def __init__(
        self, parties: list[Silo], change: Callable[[str, messages.Request], messages.Request]
    ) -> None:
        super().__init__(parties)
        self._change = change

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        changed = {
            silo: messages.encode(self._change(silo, messages.decode_request(request)))
            for silo, request in requests.items()
        }
        return super().exchange(changed)


def flipped(payload: Payload) -> Payload:
    """The same payload with its last bit turned: still canonical, one grid unit away."""
    data = bytearray(payload.data)
    data[-1] ^= 1 << (-payload.length % 8)
    return Payload(payload.length, bytes(data))


def lie_to_c(silo: str, message: messages.Request) -> messages.Request:
    if silo == "c" and isinstance(message, Ask | Close):
        return changed_message(message, pooled=flipped(message.pooled))
    return message


def changed_message(message: Any, **changes: Any) -> Any:
    return type(message)(**{**{f: getattr(message, f) for f in message.__struct_fields__}, **changes})


# Inconsistent broadcasts.


def test_every_silo_reports_that_one_of_them_heard_something_else() -> None:
    parties = silos(signed_plan())
    with pytest.raises(ProtocolError, match="different broadcasts"):
        Session(signed_plan(), Tampering(parties, lie_to_c)).run()
    assert [silo.disagreement for silo in parties] == [True, True, True]


def test_an_honest_server_is_not_accused() -> None:
    parties = silos(signed_plan())
    Session(signed_plan(), Tampering(parties, lambda _, message: message)).run()
    assert [silo.disagreement for silo in parties] == [False, False, False]


def test_the_digest_at_the_close_is_of_every_broadcast_and_of_the_number_of_rows() -> None:
    """A silo that was told another n than the others would sign another digest, whatever it heard later."""
    transcript = Session(signed_plan(), InProcess(silos(signed_plan()))).run().transcript
    heard, stated = hashlib.sha256(), set()
    for exchange in transcript.exchanges:
        request = messages.decode_request(exchange.requests["c"])
        if isinstance(request, Begin):
            assert request.first_row > 0  # which the other silos are not told
            heard.update(messages.encode(Begin(request.session, sum(map(len, Y.values())), 0)))
        elif isinstance(request, Ask | Close):
            heard.update(exchange.requests["c"])
        replies = map(messages.decode_reply, exchange.replies.values())
        stated |= {reply.digest for reply in replies if isinstance(reply, Closed)}
    assert stated == {heard.digest()}


def claim_agreement(own: Mapping[str, SignedDigest]) -> Callable[[str, Compare], Compare]:
    """A server that hands each silo closings with that silo's own digest in everyone's name."""

    def change(silo: str, message: Compare) -> Compare:
        digest = own[silo].digest
        return Compare(
            message.session,
            tuple(
                c if c.silo == silo else SignedDigest(c.silo, digest, c.signature) for c in message.closings
            ),
        )

    return change


def omit_c(silo: str, message: Compare) -> Compare:
    return Compare(message.session, tuple(c for c in message.closings if c.silo in ("a", "b", silo)))


def sign_as_another(_: str, message: Compare) -> Compare:
    """The server has a key of its own, and signs for c with it."""
    forged = SigningKey(b"z" * 32)
    return Compare(
        message.session,
        tuple(
            SignedDigest(c.silo, c.digest, forged.sign(c.digest)) if c.silo == "c" else c
            for c in message.closings
        ),
    )


@pytest.mark.parametrize("cover", ["claim", "omit", "sign", "repeat"])
def test_a_lying_server_cannot_cover_up_by_forging_or_omitting_closings(cover: str) -> None:
    parties = silos(signed_plan())
    closings: dict[str, SignedDigest] = {}

    def change(silo: str, message: messages.Request) -> messages.Request:
        if isinstance(message, Compare):
            closings.update({closing.silo: closing for closing in message.closings})
            hide = {
                "claim": claim_agreement(closings),
                "omit": omit_c,
                "sign": sign_as_another,
                "repeat": lambda _, m: Compare(m.session, (*m.closings[:2], m.closings[0])),
            }[cover]
            return hide(silo, message)
        return lie_to_c(silo, message)

    with pytest.raises(ProtocolError):
        Session(signed_plan(), Tampering(parties, change)).run()
    assert [silo.disagreement for silo in parties] == [True, True, True]


def test_without_signatures_the_cover_up_works() -> None:
    """The check that stops it is the signature: unsigned closings can be claimed in anyone's name."""
    plan = signed_plan(roster=tuple(Member(name=name) for name in NAMES))
    parties = [Silo(name, plan, read_rows(PROBLEM, name, Y[name])) for name in NAMES]
    closings: dict[str, SignedDigest] = {}

    def change(silo: str, message: messages.Request) -> messages.Request:
        if isinstance(message, Compare):
            closings.update({closing.silo: closing for closing in message.closings})
            return claim_agreement(closings)(silo, message)
        return lie_to_c(silo, message)

    Session(plan, Tampering(parties, change)).run()
    assert [silo.disagreement for silo in parties] == [False, False, False]


# Roster differencing: the pooled sums with and without a silo differ by that silo's.


def first_pooled(parties: Mapping[str, Callable[[bytes], bytes]], session: bytes) -> float:
    """What an onlooker sees pooled in the first round, over the silos that are asked."""
    servers = {name: Server(signed_plan(), step, session) for name, step in parties.items()}
    sizes = {name: server.open() for name, server in servers.items()}
    return sum(
        float(s.begin(sum(sizes.values())).values()[0]) + 10 * sizes[name] for name, s in servers.items()
    )


@pytest.mark.parametrize("guarded", [True, False])
def test_a_second_run_without_one_silo_is_refused(guarded: bool) -> None:
    plan = signed_plan()
    journals = {name: MemoryJournal() for name in NAMES}

    def started(name: str) -> Silo:
        journal = journals[name] if guarded else None
        keeper = Keeper(key=KEYS[name], journal=journal)
        return Silo(name, plan, read_rows(PROBLEM, name, Y[name]), keeper=keeper)

    everyone = first_pooled({name: started(name).step for name in NAMES}, b"first")
    again = {name: started(name).step for name in ("a", "b")}  # the same silos, started again
    if guarded:
        with pytest.raises(RefusedBySiloError) as refused:
            first_pooled(again, b"second")
        assert refused.value.reason is Reason.OUT_OF_ORDER
    else:
        assert everyone - first_pooled(again, b"second") == pytest.approx(Y["c"].sum(), abs=1e-9)


def test_a_silo_that_was_left_out_is_missed_at_the_close() -> None:
    parties = silos(signed_plan())[:2]
    plan = signed_plan(roster=signed_plan().roster[:2])

    class Subset(Session):
        """A server that asks only some silos of the roster that the others were shown."""

    session = Subset(plan, InProcess(parties))
    session._plan = signed_plan()
    with pytest.raises(ProtocolError, match="different broadcasts"):
        session.run()
    assert [silo.disagreement for silo in parties] == [True, True]


# Tampered plans.

TAMPERED: dict[str, dict[str, Any]] = {
    "problem": {"program": dataclasses.replace(PROGRAM, problem=ft.Mean(bounds=(0.0, 20.5)))},
    "law": {"program": dataclasses.replace(PROGRAM, law=PROBLEM.start(10.000001))},
    "algorithm": {"program": dataclasses.replace(PROGRAM, algorithm=ft.Gradient(tolerance=1e-7))},
    "seed": {
        "program": dataclasses.replace(
            PROGRAM,
            algorithm=ft.Gradient(
                tolerance=1e-6, optimizer=ft.StochasticGradientDescent(batch=30, step=0.1, seed=1)
            ),
        )
    },
    "roster": {"roster": signed_plan().roster[:2]},
    "key": {"roster": (*signed_plan().roster[:2], Member(name="c", key=KEYS["a"].public))},
    "expires": {"expires": datetime.date(2031, 1, 1)},
}


@pytest.mark.parametrize("field", TAMPERED)
def test_a_plan_changed_in_any_field_is_neither_approved_nor_opened(field: str) -> None:
    approved = signed_plan().digest
    tampered = signed_plan(**TAMPERED[field])
    rows = read_rows(PROBLEM, "a", Y["a"])
    keeper = Keeper(key=KEYS["a"], approves=lambda digest: digest == approved)
    request = messages.encode(Open(messages.WIRE_FORMAT, b"s", tampered.digest))
    changed, own = Silo("a", tampered, rows, keeper=keeper), Silo("a", signed_plan(), rows, keeper=keeper)
    assert messages.decode_reply(changed.step(request)) == Refused(Reason.NOT_APPROVED)
    assert messages.decode_reply(own.step(request)) == Refused(Reason.OTHER_PLAN)
    unguarded = Silo("a", tampered, rows, keeper=Keeper(key=KEYS["a"]))
    assert messages.decode_reply(unguarded.step(request)) == Opened(len(Y["a"]))


@pytest.mark.parametrize(("name", "value"), [("__version__", "0.0.0"), ("WIRE_FORMAT", 2)])
def test_another_version_or_format_is_another_plan(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signed_plan().digest
    monkeypatch.setattr(plan_module, name, value)
    assert signed_plan().digest != before


# Malformed and truncated messages.


def answering() -> tuple[Silo, Server]:
    silo = silos(signed_plan())[0]
    server = Server(signed_plan(), silo.step)
    server.begin(server.open())
    return silo, server


def test_no_cut_or_changed_byte_of_a_request_is_taken_for_another() -> None:
    """Every prefix, every byte flipped: refused, or (the pooled number itself changed) answered once."""
    _, server = answering()
    whole = messages.encode(Ask(server.session, 2, server.broadcast(Sums((1 << 40,), server.query.shifts))))
    for cut in range(len(whole)):
        silo, _ = answering()
        assert isinstance(messages.decode_reply(silo.step(whole[:cut])), Refused)
        assert silo.state.value == "answering"  # nothing changed
    payload = len(whole) - len(messages.decode_request(whole).pooled.data)  # type: ignore[union-attr]
    for at in range(payload):
        silo, _ = answering()
        changed = bytearray(whole)
        changed[at] ^= 0x01
        assert isinstance(messages.decode_reply(silo.step(bytes(changed))), Refused)


@pytest.mark.parametrize(
    "other", [Begin(b"session", 93, 0), Open(1, b"session", b""), Close(b"session", 9, Payload(0, b""))]
)
def test_nothing_else_is_next(other: messages.Request) -> None:
    silo, _ = answering()
    assert messages.decode_reply(silo.step(messages.encode(other))) == Refused(Reason.OUT_OF_ORDER)


def test_an_allowed_codeword_does_not_reach_what_an_oversized_one_does() -> None:
    attack = OversizedCodeword()
    attack.oversized = False
    assert not attack.works(attack.run(attack.victim(attack.open_keeper())))


def test_a_guard_that_forgets_its_batches_in_a_crash_would_let_them_be_differenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attack = BatchesAcrossACrash()
    follow = Guard._follow_batch

    def examine(
        guard: Guard, query: Query, local: Local, _looks: object
    ) -> None:  # only where an answer is computed
        for batch in (point.batch for point in query.evaluations() if point.batch is not None):
            follow(guard, local.batch(batch), local.n_rows)

    monkeypatch.setattr(Guard, "examine", examine)
    monkeypatch.setattr(Guard, "_follow_batch", lambda *_: None)
    assert attack.works(attack.run(attack.victim(attack.keeper(attack.guarded()))))


def test_the_digest_at_the_close_is_signed_by_the_silo_alone() -> None:
    parties = silos(signed_plan())
    seen: list[Closed] = []

    class Watching(InProcess):
        def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
            replies = super().exchange(requests)
            seen.extend(r for r in map(messages.decode_reply, replies.values()) if isinstance(r, Closed))
            return replies

    Session(signed_plan(), Watching(parties)).run()
    assert len({closed.digest for closed in seen}) == 1
    assert len({closed.signature for closed in seen}) == 3
