"""Distinctive values in the rows, every error path that can be provoked, and no word of them outside."""

from __future__ import annotations

import base64
import logging
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import RefusedError
from fedtmle.protocol import messages
from fedtmle.protocol.codes import BitWriter
from fedtmle.protocol.guard import Guard
from fedtmle.protocol.messages import Answered, Open, Reason, Refused
from fedtmle.protocol.plan import roster
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import AbstractQuery
from fedtmle.runtime.ledger import Ledger, read
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from tests.attacks.settings import RefusedBySiloError
from tests.attacks.tables import table_of
from tests.attacks.test_attacks import ATTACKS
from tests.data_layer.test_canary import told
from tests.declare import declare
from tests.kinds import concrete_names
from tests.queries import RUNS, examples, silos_of

NUMBER = 7.130952718281
WORD = "k4n4r1e"
STUDY = ft.Study(
    target=ft.ATE(outcome="y", treatment="a"),
    outcome_model=ft.Pilot(ft.GLM("a + w"), at="a"),
    treatment_model=ft.GLM("w + C(site)"),
    algorithm=ft.Gradient(tolerance=1e-6, optimizer=ft.Newton()),
    variables=declare(y=(0, 10), a="binary", w=(-1, 1), site=["north", "south", WORD]),
)


def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    n = 60
    y, w = rng.uniform(1, 9, n), rng.uniform(-1, 1, n)
    y[5], w[6] = NUMBER, NUMBER / 10
    site = np.array(["north", "south", WORD])[np.arange(n) % 3]
    return {"y": y, "w": w, "a": np.arange(n) // 3 % 2, "site": site}


def traces(*numbers: float) -> list[bytes]:
    """Every form in which a value could be written down."""
    forms = [WORD.encode()]
    for x in numbers:
        forms += [repr(x).encode(), f"{x:.6g}".encode(), f"{x:.4f}".encode(), x.hex().encode()]
        forms += [struct.pack("<d", x), struct.pack(">d", x), struct.pack(">f", x)]
    return forms


def leaving(silo: Silo, replies: list[bytes], ledger: Path) -> Iterator[bytes]:
    """All that leaves the silo or is written beside it, but for the sums that were asked for."""
    for reply in replies:
        message = messages.decode_reply(reply)
        if not isinstance(message, Answered):
            yield reply
    for line in read(ledger):
        asked, replied = base64.b64decode(line["asked"]), base64.b64decode(line["replied"])
        yield repr({key: value for key, value in line.items() if key not in ("asked", "replied")}).encode()
        yield asked
        if not isinstance(messages.decode_reply(replied), Answered):
            yield replied
    yield repr(silo).encode()


class Watched(InProcess):
    def __init__(self, silos: list[Silo]) -> None:
        super().__init__(silos)
        self.replies: list[bytes] = []

    def exchange(self, requests: Any, /) -> Any:
        replies = super().exchange(requests)
        self.replies += [reply for silo, reply in replies.items() if silo == "a"]
        return replies


def loud(*_: Any, **__: Any) -> None:
    """What a careless library says when it fails."""
    raise ValueError(f"could not convert {NUMBER!r} of {WORD} ({NUMBER:.6g})")


PLACES: dict[str, tuple[type, str]] = {
    "submodel": (LocalRows, "submodel"),
    "evaluation": (LocalRows, "evaluate"),
    "guard, before": (Guard, "examine"),
    "guard, after": (Guard, "release"),
    "encoder": (BitWriter, "fixed"),
    "label encoder": (BitWriter, "gamma"),
}


@pytest.mark.parametrize("name", sorted(concrete_names(AbstractQuery)))
def test_an_unexpected_error_in_any_query_tells_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = next(example for example in examples() if example.kind.__name__ == name)
    plan, tables = RUNS[asked.run]()
    for how in ("answer", "answer_by"):  # by itself, and from sums that are taken for several at once
        monkeypatch.setattr(asked.kind, how, loud)
    silos = silos_of(plan, tables)
    federation = Watched(silos)
    with pytest.raises(RefusedError) as caught:
        Session(plan, federation).run()
    failed = [silo for silo in silos if silo.error is not None]
    assert failed
    assert all(WORD in str(silo.error) for silo in failed)  # the owner can see why
    outside = "\n".join([*told(caught.value), *map(repr, silos)]).encode()
    assert not [form for form in traces(NUMBER) if form in outside]


ON_THE_SERVER_TOO = {"encoder", "label encoder"}  # its own copy of the encoder fails first


@pytest.mark.parametrize("place", PLACES)
def test_an_unexpected_error_at_the_silo_tells_nothing(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, logger="numba")  # at DEBUG it tells how it compiles
    plan = study_plan(STUDY, roster(["a", "b"]))
    other = Silo("b", plan, table_of(STUDY, rows()))
    with closing(Keeper(policy=Policy(), ledger=Ledger(tmp_path / "ledger", sync=False))) as keeper:
        silo = Silo("a", plan, table_of(STUDY, rows()), keeper=keeper)
        federation = Watched([silo, other])
        monkeypatch.setattr(*PLACES[place], loud)
        with pytest.raises((RefusedError, ValueError)) as caught:
            Session(plan, federation).run()
        last = messages.decode_reply(federation.replies[-1]) if federation.replies else None
        if place not in ON_THE_SERVER_TOO:
            assert isinstance(caught.value, RefusedError)
            assert last == Refused(Reason.CANNOT_ANSWER)
            text = "\n".join(told(caught.value)).encode()
            assert not [form for form in traces(NUMBER) if form in text]
        assert WORD in str(silo.error)  # the owner can see why
        found = b"\n".join([*leaving(silo, federation.replies, tmp_path / "ledger")])
    said = capfd.readouterr()
    found += (said.out + said.err + caplog.text).encode()
    assert not [form for form in traces(NUMBER, NUMBER / 10) if form in found]


def test_a_whole_study_writes_down_no_record(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, logger="numba")  # at DEBUG it tells how it compiles
    plan = study_plan(STUDY, roster(["a", "b"]))
    with closing(Keeper(policy=Policy(), ledger=Ledger(tmp_path / "ledger", sync=False))) as keeper:
        silo = Silo("a", plan, table_of(STUDY, rows()), keeper=keeper)
        federation = Watched([silo, Silo("b", plan, table_of(STUDY, rows()))])
        Session(plan, federation).run()
        own = b"\n".join(leaving(silo, federation.replies, tmp_path / "ledger"))
        # The broadcasts hold the label, which twenty rows have and the study asked for; no number.
        payloads = b"\n".join(federation.replies)
    said = capfd.readouterr()
    assert said.out + said.err + caplog.text == ""
    numbers = traces(NUMBER, NUMBER / 10)[1:]
    assert not [form for form in numbers if form in own + payloads]


@pytest.mark.parametrize("name", ATTACKS)
def test_no_refusal_of_an_attack_tells_a_value(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal is one of the few sentences of `Reason`, and the ledger's line names a key at most."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, logger="numba")  # at DEBUG it tells how it compiles
    attack = ATTACKS[name]
    replies: list[bytes] = []
    with closing(attack.keeper(attack.guarded(), tmp_path / "ledger")) as keeper:
        victim = attack.victim(keeper)
        step = victim.step
        victim.step = lambda request: replies.append(step(request)) or replies[-1]  # type: ignore[method-assign,func-returns-value]
        with pytest.raises(RefusedBySiloError):
            attack.run(victim)
    said = capfd.readouterr()
    assert said.out + said.err + caplog.text == ""
    known = {messages.encode(Refused(reason)) for reason in Reason}
    refusals = [reply for reply in replies if isinstance(messages.decode_reply(reply), Refused)]
    assert refusals
    assert set(refusals) <= known
    # The last is ExactMean's attribute, by the name that the silo's owner gave it.
    keys = {key.name for key in fields(Policy)} | {"", "approval", "expires", "relay", "disclosure: mean"}
    words = {reason.name.lower() for reason in Reason} | {""}
    for line in read(tmp_path / "ledger"):
        assert line["key"] in keys
        assert line["reason"] in words


def test_a_stray_request_is_not_told_why() -> None:
    silo = Silo("a", study_plan(STUDY, roster(["a", "b"])), table_of(STUDY, rows()))
    reply = silo.step(messages.encode(Open(1, WORD.encode(), b"x")))
    assert WORD.encode() not in reply
