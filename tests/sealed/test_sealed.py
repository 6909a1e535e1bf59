"""A sealed run gives the open run's result, and the server is a relay that goes on after a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

import fedtmle as ft
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.errors import JournalError, ProtocolError, RefusedError
from fedtmle.estimation.flow import Flow, ask, name, run_open
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.planned import plan_of
from fedtmle.estimation.study import effect_flow
from fedtmle.sealed.relay import Published, Relay, Replies, Requests
from fedtmle.sealed.session import (
    NoOffice,
    Party,
    Shared,
    consortium_of,
    identities_of,
    program,
    run_sealed,
)
from fedtmle_core import messages
from fedtmle_core.around import Hospital
from fedtmle_core.blocks import Moments
from fedtmle_core.court import Court
from fedtmle_core.dictionary import Dictionary, Numeric
from fedtmle_core.evaluate import Workspace
from fedtmle_core.journal import FileJournal, MemoryJournal
from fedtmle_core.leaves import Number
from fedtmle_core.messages import Answered, Ask, Closed, Code, Finished, Refused
from fedtmle_core.plan import Model, Plan
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, product
from tests.estimation.over_questions import sheets_of

NAMES = ("east", "north", "south", "west")
X = Number("x", 0)
DICTIONARY = Dictionary((Numeric(name="x", low=0.0, high=1.0),))


@pytest.fixture(autouse=True)
def _publish_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results here are no documents of the package: they go out as they are."""
    monkeypatch.setattr(Court, "publish", lambda _self, exact: exact)


def plan(names: tuple[str, ...] = NAMES) -> Plan:
    return Plan(
        dictionary=DICTIONARY,
        models=(Model(columns=(ONE, X)),),
        members=consortium_of(names).members,
        study=b"study",
        author="author",
        people=1000,
    )


def sheet(name: str) -> Sheet:
    return Sheet.read(DICTIONARY, {"x": np.random.default_rng(list(name.encode())).uniform(0.1, 1.0, 40)}, {})


def flow() -> Flow[list[float]]:
    """Ask for n and a mean, name a square, and ask for it."""
    ((n, x),) = yield from ask(Moments.of((ONE, X)))
    yield from name(product(X, X))
    ((square,),) = yield from ask(Moments.of((product(X, X),)))
    return [n, x, square]


def encode(result: list[float]) -> bytes:
    return json.dumps(result).encode()


@dataclass
class Site:
    """A hospital with a journal, which may be begun anew."""

    name: str
    journal: MemoryJournal

    def __post_init__(self) -> None:
        hospital = Hospital(
            name=self.name,
            identity=identities_of(NAMES)[self.name],
            consortium=consortium_of(NAMES),
            office=NoOffice(),
            journal=self.journal,
        )
        followed = Shared(program(flow(), plan(), encode))
        self.party: Party[list[float]] = Party(hospital, plan(), Workspace(sheet(self.name)), followed)


def sites() -> dict[str, Site]:
    return {each: Site(each, MemoryJournal()) for each in NAMES}


def relay(**changed: object) -> Relay:
    given: dict[str, object] = {"names": NAMES, "plan": plan().digest, "run": bytes(16)}
    return Relay(**given | changed)  # type: ignore[arg-type]


def carrying(
    parties: dict[str, Site],
    meddle: Callable[[str, bytes, bytes], bytes | None] = lambda _name, _request, reply: reply,
) -> Callable[[Requests], Replies]:
    """Return the exchange of these hospitals; ``meddle`` may change or drop a reply."""

    def exchange(requests: Requests) -> Replies:
        found = {}
        for each, request in requests.items():
            reply = meddle(each, request, parties[each].party.step(request))
            if reply is not None:
                found[each] = reply
        return found

    return exchange


def test_a_sealed_flow_has_the_result_of_the_open_one() -> None:
    sheets = {each: sheet(each) for each in NAMES}
    opened = run_open(flow(), list(sheets.values()), plan())
    sealed = run_sealed(flow(), sheets, plan(), encode)
    assert sealed.result == opened.result
    assert sealed.published.document == encode(opened.result)
    assert (sealed.published.absent, sealed.published.withheld) == ((), ())
    sealed.published.check(consortium_of(NAMES))
    assert sealed.account.rounds == opened.rounds + 4  # two for each judgement
    assert set(sealed.account.up.values()) == set(sealed.account.down.values())
    assert sealed.account.bits < 8 * sealed.account.bytes


def test_bytes_in_one_process_are_those_of_parties_with_their_own_flows() -> None:
    seen: list[tuple[bytes, bytes]] = []

    def watch(_name: str, request: bytes, reply: bytes) -> bytes:
        seen.append((request, reply))
        return reply

    published = relay().run(carrying(sites(), watch))
    assert published == run_sealed(flow(), {each: sheet(each) for each in NAMES}, plan(), encode).published
    assert len(seen) == 4 * (3 + 6 + 1)


def test_the_demonstration_sealed() -> None:
    """Its missingness model has few columns, because few infants were lost to follow-up."""
    study = replace(IHDP, diagnostics=False, missingness_model=ft.GLM("treat + bw + nnhealth"))
    declared, silos = Declared(study), ihdp_silos()
    sheets = dict(zip(silos, sheets_of(declared, silos), strict=True))
    names = tuple(sorted(silos))
    of = plan_of(declared, consortium_of(names).members, study=b"", author="test")
    opened = run_open(effect_flow(declared, hospitals=8), list(sheets.values()), of)
    sealed = run_sealed(
        effect_flow(declared, hospitals=8), sheets, of, lambda found: repr(found.estimate.psi).encode()
    )
    np.testing.assert_array_equal(sealed.result.estimate.psi, opened.result.estimate.psi)
    assert sealed.account.rounds <= 18
    assert sealed.account.bits <= 800_000


class LostError(Exception):
    """A crash in a test."""


@pytest.mark.parametrize("crash", range(10))
def test_a_relay_goes_on_after_a_crash_at_any_exchange(crash: int, tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal", sync=False)
    parties, count = sites(), 0
    inner = carrying(parties)

    def exchange(requests: Requests) -> Replies:
        nonlocal count
        count += 1
        replies = inner(requests)
        if count == crash + 1:
            raise LostError  # the replies are lost
        return replies

    with pytest.raises(LostError):
        relay(journal=journal).run(exchange)
    journal.close()
    for site in parties.values():
        site.__post_init__()  # the hospitals crash as well
    journal = FileJournal(tmp_path / "journal", sync=False)
    assert relay(journal=journal).run(exchange) == relay().run(carrying(sites()))
    assert count == 10 + 1  # nothing but the lost exchange came twice
    journal.close()


def test_a_journal_of_another_run_is_refused() -> None:
    journal = MemoryJournal()
    relay(journal=journal).run(carrying(sites()))
    with pytest.raises(JournalError, match="another run"):
        relay(journal=journal, run=b"1" * 16)


def test_a_hospital_that_does_not_open_is_left_out() -> None:
    def drop(each: str, _request: bytes, reply: bytes) -> bytes | None:
        return None if each == "east" else reply

    published = relay().run(carrying(sites(), drop))
    assert published.absent == ("east",)
    assert json.loads(published.document)[0] == 120
    published.check(consortium_of(NAMES))


def test_too_few_hospitals() -> None:
    def drop(each: str, _request: bytes, reply: bytes) -> bytes | None:
        return None if each in ("east", "west") else reply

    with pytest.raises(ProtocolError, match="fewer hospitals"):
        relay().run(carrying(sites(), drop))


def test_a_run_does_not_go_on_without_a_hospital() -> None:
    def drop(each: str, request: bytes, reply: bytes) -> bytes | None:
        late = isinstance(messages.decode_request(request), Ask)
        return None if each == "east" and late else reply

    with pytest.raises(ProtocolError, match="cannot go on without east"):
        relay().run(carrying(sites(), drop))


def test_the_code_that_explains_the_others_is_reported() -> None:
    codes = {"east": Code.ORDER, "north": Code.PLAN, "south": Code.PEOPLE, "west": Code.SEAL}

    def refuse(each: str, request: bytes, reply: bytes) -> bytes:
        if isinstance(messages.decode_request(request), Ask):
            return messages.encode(Refused(codes[each]))
        return reply

    with pytest.raises(RefusedError, match=r"south.*too few people"):
        relay().run(carrying(sites(), refuse))


def test_a_withheld_signature_is_named() -> None:
    def withhold(each: str, _request: bytes, reply: bytes) -> bytes | None:
        decoded = messages.decode_reply(reply)
        if (each == "east" and isinstance(decoded, Finished)) or (
            each == "south" and isinstance(decoded, Closed)
        ):
            return None
        return reply

    published = relay().run(carrying(sites(), withhold))
    assert published.withheld == ("east", "south")
    assert published.names == ("north", "south", "west")
    assert tuple(published.signatures) == ("north", "west")
    published.check(consortium_of(NAMES))


def test_a_result_that_nobody_sends() -> None:
    def withhold(_each: str, _request: bytes, reply: bytes) -> bytes | None:
        decoded = messages.decode_reply(reply)
        return messages.encode(Closed(decoded.signature, b"")) if isinstance(decoded, Closed) else reply

    with pytest.raises(ProtocolError, match="no hospital has sent"):
        relay().run(carrying(sites(), withhold))


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: replace(whole, document=whole.document + b" "),
        lambda whole: replace(whole, run=b"1" * 16),
        lambda whole: replace(whole, plan=bytes(32)),
        lambda whole: replace(whole, names=whole.names[1:]),
        lambda whole: replace(whole, signatures=whole.signatures | {"east": whole.signatures["west"]}),
        lambda whole: replace(whole, signatures=whole.signatures | {"other": whole.signatures["west"]}),
    ],
)
def test_signatures_are_of_this_result(change: Callable[[Published], Published]) -> None:
    whole = relay().run(carrying(sites()))
    with pytest.raises(ProtocolError, match="was not signed"):
        change(whole).check(consortium_of(NAMES))


def test_a_first_hospital_that_sends_no_copies() -> None:
    def cut(_each: str, _request: bytes, reply: bytes) -> bytes:
        decoded = messages.decode_reply(reply)
        if isinstance(decoded, messages.Settled):
            return messages.encode(msgspec.structs.replace(decoded, copies=()))
        return reply

    with pytest.raises(ProtocolError, match="'east' has not sent"):
        relay().run(carrying(sites(), cut))


def test_rounds_that_differ_end_the_run() -> None:
    def ahead(each: str, _request: bytes, reply: bytes) -> bytes:
        decoded = messages.decode_reply(reply)
        if each == "east" and isinstance(decoded, Answered):
            return messages.encode(msgspec.structs.replace(decoded, round=7))
        return reply

    with pytest.raises(ProtocolError):
        relay().run(carrying(sites(), ahead))


def test_parties_of_one_process_read_the_same() -> None:
    shared = Shared(program(flow(), plan(), encode))
    shared.asks(0, ())
    shared.asks(1, (1, 2))
    assert shared.asks(1, (1, 2)) == shared.asks(1, (1, 2))
    with pytest.raises(ProtocolError, match="different totals"):
        shared.asks(1, (1, 3))
    with pytest.raises(ProtocolError, match="before its program"):
        _ = shared.result
