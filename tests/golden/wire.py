"""Golden runs below the public API: signatures, restarts, lying servers and stray requests."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.errors import JournalError
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle_core.journal import MemoryJournal
from fedtmle_core.signing import SigningKey
from tests.attacks.tables import table_of
from tests.narrow import targeted

NAMES = ("a", "b", "c")
SESSION = b"golden session"
SECRET = b"seed of the keys"
START = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
PROBLEM = ft.Mean(bounds=(0.0, 20.0))
ROWS = {name: np.random.default_rng([7, m]).gamma(3.0, 2.0, 40).clip(0, 20) for m, name in enumerate(NAMES)}
CODED = ft.Coded(tolerance=1e-4)


def plan_of(how: Any = CODED, *, start: float = 5.0, signed: bool = False, expires: Any = None) -> Plan:
    members = tuple(Member(name=name, key=_key(name).public if signed else b"") for name in NAMES)
    program = TargetingProgram(problem=PROBLEM, law=PROBLEM.start(start), algorithm=how)
    return Plan(program=program, roster=members, expires=expires)


def _key(name: str) -> SigningKey:
    return SigningKey(hashlib.sha256(SECRET + name.encode()).digest())


def _masked_members(*, signed: bool) -> tuple[Member, ...]:
    keys = {name: _key(name) for name in NAMES}
    return tuple(
        Member(name=name, key=key.public if signed else b"", mask_key=key.mask_key.public)
        for name, key in keys.items()
    )


def _silo(name: str, plan: Plan, **keeper: Any) -> Silo:
    rows = read_rows(PROBLEM, name, ROWS[name])
    return Silo(name, plan, rows, keeper=Keeper(**{"policy": Policy(), "clock": lambda: START, **keeper}))


def _values(finished: Finished) -> dict[str, Any]:
    """Return what a session knows at its end, as plain values."""
    outcome = targeted(finished)
    return {
        "psi": outcome.estimate.psi,
        "covariance": outcome.estimate.covariance,
        "accepted": outcome.accepted,
        "status": outcome.status.value,
        "account": finished.account.to_dict(),
        "retired_at": dict(finished.retired_at),
    }


def signed(_: Path) -> dict[str, Any]:
    """Every silo signs what it heard, with a key that the plan's roster names."""
    plan = plan_of(signed=True)
    silos = [_silo(name, plan, key=_key(name)) for name in NAMES]
    return _values(Session(plan, InProcess(silos), session=SESSION).run())


def guarded(
    _: Path,
    *,
    approves: Callable[[bytes], bool] | None = None,
    expires: datetime.date | None = None,
    days_per_look: float = 0.0,
    other_plan: bool = False,
) -> dict[str, Any]:
    """Silo b has an owner who refuses: at the opening, or when the clock has gone on for too long."""
    looks = iter(range(1000))

    def clock() -> datetime.datetime:
        return START + datetime.timedelta(days=days_per_look * next(looks))

    plan = plan_of(expires=expires)
    silos = [_silo(name, plan) for name in NAMES]
    silos[1] = _silo("b", plan_of(start=6.0) if other_plan else plan, approves=approves, clock=clock)
    return _values(Session(plan, InProcess(silos), session=SESSION).run())


class _Restarting(InProcess):
    """Silos that die after every reply and go on from their journals."""

    def __init__(self, make: Callable[[str], Silo]) -> None:
        super().__init__([make(name) for name in NAMES])
        self._make = make

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        replies = super().exchange(requests)
        self._silos = {name: self._make(name) for name in NAMES}
        return replies


def restarted(_: Path) -> dict[str, Any]:
    plan = plan_of()
    journals = {name: MemoryJournal() for name in NAMES}
    federation = _Restarting(lambda name: _silo(name, plan, journal=journals[name]))
    return _values(Session(plan, federation, session=SESSION).run())


class _Full(MemoryJournal):
    """A journal on a disk that has room for four records."""

    def append(self, payload: bytes, /) -> None:
        if len(self.records) == 4:
            raise JournalError("the disk is full")
        super().append(payload)


def unrecorded(_: Path) -> dict[str, Any]:
    """Silo b cannot record its answer, and so gives none."""
    plan = plan_of()
    silos = [_silo(name, plan, journal=_Full() if name == "b" else None) for name in NAMES]
    return _values(Session(plan, InProcess(silos), session=SESSION).run())


class _Lying(InProcess):
    """A server that changes one bit of the fourth round's broadcast on its way to some silos."""

    def __init__(self, silos: list[Silo], *, bit: int, to: str) -> None:
        super().__init__(silos)
        self._bit, self._to = bit, to

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        return super().exchange({name: self._changed(name, data) for name, data in requests.items()})

    def _changed(self, name: str, data: bytes) -> bytes:
        message = msgspec.msgpack.decode(data)
        if message["type"] != "ask" or message["round"] != 4 or name not in self._to:
            return data
        length, payload = message["pooled"]
        at = self._bit % length
        changed = bytearray(payload)
        changed[at // 8] ^= 0x80 >> at % 8
        return msgspec.msgpack.encode({**message, "pooled": [length, bytes(changed)]})


def lying(_: Path, *, bit: int, to: str, how: Any = CODED) -> dict[str, Any]:
    plan = plan_of(how)
    silos = [_silo(name, plan) for name in NAMES]
    return _values(Session(plan, _Lying(silos, bit=bit, to=to), session=SESSION).run())


def _begun(silo: Silo, plan: Plan) -> dict[str, Any]:
    """Open a session with one silo and ask it for its first answer; return the types of its replies."""
    opening = {"type": "open", "format": 1, "session": SESSION, "plan": plan.digest}
    begin = {"type": "begin", "session": SESSION, "n": 400, "first_row": 0}
    replies = [silo.step(msgspec.msgpack.encode(message)) for message in (opening, begin)]
    return {"replies": [msgspec.msgpack.decode(reply)["type"] for reply in replies]}


def masked(_: Path, *, signed: bool, colluders: int = 1) -> dict[str, Any]:
    """Silo a refuses sums under masks: too many may collude, or the counts of the others are not relayed."""
    plan = replace(plan_of(), roster=_masked_members(signed=signed))
    keys = {"key": _key("a") if signed else None, "mask_key": _key("a").mask_key}
    return _begun(_silo("a", plan, policy=Policy(colluders=colluders), **keys), plan)


def unmasked(study: ft.Study, columns: dict[str, Any], _: Path) -> dict[str, Any]:
    """The owner of silo a did not agree that digests of clusters leave without a mask."""
    plan = study_plan(study, _masked_members(signed=False))
    keeper = Keeper(policy=Policy(), clock=lambda: START, mask_key=_key("a").mask_key)
    return _begun(Silo("a", plan, table_of(study, columns), keeper=keeper), plan)


def strays(_: Path) -> dict[str, Any]:
    """Send one silo what it must refuse, what it must repeat, and in the end too many of the former."""
    plan = plan_of(ft.Gradient())
    silo = _silo("a", plan, policy=Policy(max_refusals=8))

    def send(**message: Any) -> str:
        reply = msgspec.msgpack.decode(silo.step(msgspec.msgpack.encode(message)))
        return str(reply["type"])

    opening = {"type": "open", "format": 1, "session": SESSION, "plan": plan.digest}
    begin = {"type": "begin", "session": SESSION, "n": 40, "first_row": 0}
    replies = [
        send(type="nonsense"),
        send(**begin),
        send(**{**opening, "format": 2}),
        send(**{**opening, "plan": bytes(32)}),
        send(**opening),
        send(**opening),
        send(**{**begin, "session": b"another"}),
        send(**{**begin, "n": 39}),
        send(**begin),
        send(**begin),
        send(type="ask", session=SESSION, round=3, pooled=[0, b""]),
        send(type="close", session=SESSION, round=2, pooled=[1, b"\x80"]),
        *(send(**opening) for _ in range(3)),
        send(**begin),
    ]
    return {"replies": replies, "state": silo.state.value}
