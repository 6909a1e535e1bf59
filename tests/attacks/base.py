"""A corrupted server that speaks to one silo in bytes, and what an attack by it is."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtmle.protocol import messages
from fedtmle.protocol.codes import Uplink, encode
from fedtmle.protocol.guard import Policy
from fedtmle.protocol.messages import Answered, Ask, Begin, Open, Opened, Payload, Reason, Refused
from fedtmle.protocol.plan import Follower, Plan
from fedtmle.runtime.journal import MemoryJournal
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.silo import Silo

SESSION = b"session"
START = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)


class RefusedBySiloError(Exception):
    """The silo said no."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(reason.value)


class Victim:
    """A silo as a server meets it: bytes in, bytes out, and it can be made to crash."""

    def __init__(self, make: Callable[[], Silo]) -> None:
        self._make = make
        self._silo = make()

    def step(self, request: bytes) -> bytes:
        return self._silo.step(request)

    def restart(self) -> None:
        """The process dies and is started again, with whatever it keeps on disk."""
        self._silo = self._make()


class Server:
    """Runs the plan's flow as a silo does, to know what is asked, but broadcasts whatever it likes."""

    def __init__(self, plan: Plan, step: Callable[[bytes], bytes], session: bytes = SESSION) -> None:
        self.plan = plan
        self.session = session
        self._step = step
        self._uplink = Uplink()
        self._follower: Follower | None = None
        self.round = 0

    @property
    def query(self) -> Any:
        """What the silo is asked now."""
        assert self._follower is not None
        return self._follower.query

    def send(self, message: messages.Request) -> messages.Reply:
        reply = messages.decode_reply(self._step(messages.encode(message)))
        if isinstance(reply, Refused):
            raise RefusedBySiloError(reply.reason)
        return reply

    def open(self) -> int:
        """N_m."""
        reply = self.send(Open(messages.WIRE_FORMAT, self.session, self.plan.digest))
        assert isinstance(reply, Opened)
        return reply.n_rows

    def begin(self, n: int, first_row: int = 0) -> Any:
        """The answer of round 1, for a pooled n of the server's choice."""
        self._follower = Follower(self.plan, n)
        self.round = 1
        return self.read(self.send(Begin(self.session, n, first_row)))

    def broadcast(self, pooled: Any) -> Payload:
        """What the server says was pooled in this round, as bits."""
        bits = encode(self.query.pooled_code, pooled)
        return Payload(bits.length, bits.data)

    def tell(self, pooled: Any) -> Any:
        """Broadcasts ``pooled``, true or not; the answer to the query that follows from it."""
        return self.tell_bits(self.broadcast(pooled))

    def tell_bits(self, payload: Payload) -> Any:
        """The same, with a payload of the server's own making."""
        assert self._follower is not None
        reply = self.send(Ask(self.session, self.round + 1, payload))
        self.round += 1
        self._follower.hear(payload.bits())
        return self.read(reply)

    def read(self, reply: messages.Reply) -> Any:
        """The answer in a reply to the query of this round."""
        assert isinstance(reply, Answered)
        return self._uplink.decode(self.query.answer_code, reply.payload.bits())


class AbstractAttack(ABC):
    """One attack: its docstring's first sentence is what the server does, ``yields`` what it gets.

    ``keys`` are the keys of the policy, each of which stops it alone; where there are none, a check
    of the protocol does, which `disarm` takes away. ``strict`` is a policy stricter than the default,
    where that makes the attack short or the default leaves the key open.
    """

    yields: str
    reason: Reason
    keys: tuple[str, ...] = ()
    check: str = ""  # what stops it where that is no key
    strict: dict[str, Any] = {}  # noqa: RUF012 - read only

    @abstractmethod
    def plan(self) -> Plan: ...

    @abstractmethod
    def rows(self) -> Any:
        """The victim's rows, as the plan's subject reads them."""

    @abstractmethod
    def run(self, victim: Victim) -> Any:
        """What was learned, by `Victim.step` alone."""

    @abstractmethod
    def works(self, learned: Any) -> bool:
        """Whether that is so."""

    def disarm(self, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: B027 - most need none
        """Take away the check of the protocol that stops the attack."""

    def guarded(self) -> Policy:
        return replace(Policy(), allow_targets=None, **self.strict)

    def without(self, *keys: str) -> Policy:
        """The guarded policy with some keys off."""
        off = Policy.unguarded()
        return replace(self.guarded(), **{key: getattr(off, key) for key in keys})

    def keeper(self, policy: Policy, ledger: Path | None = None) -> Keeper:
        return Keeper(
            policy=policy,
            journal=MemoryJournal(),
            ledger=None if ledger is None else Ledger(ledger, sync=False),
            clock=self.clock,
        )

    def open_keeper(self) -> Keeper:
        """A silo that nobody guards."""
        return Keeper(clock=self.clock)

    def disarmed_keeper(self) -> Keeper:
        """A guarded silo but for what `disarm` took away."""
        return self.keeper(self.guarded())

    def clock(self) -> datetime.datetime:
        return START

    def victim(self, keeper: Keeper) -> Victim:
        plan, rows = self.plan(), self.rows()
        return Victim(lambda: Silo("a", plan, rows, keeper=keeper))
