"""A silo's records: the journal, for going on after a crash, and the ledger, for its owner."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fedtmle.errors import FedTMLEError, JournalError
from fedtmle.protocol import messages
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.messages import Ask, Begin, Reason, Refused
from fedtmle.protocol.query import Query
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.ledger import Entry, text


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One admitted request and its reply, as the journal holds them."""

    time: str
    request: bytes
    reply: bytes


@dataclass
class Progress:
    """How far a silo's session has come, for the lines of its ledger."""

    session: bytes = b""
    round: int = 0
    query: Query | None = None  # the last one answered
    bits: int = 0  # of all answers


class Records:
    """Writes what a silo admits into both, and holds the one against the other at a restart.

    ``progress`` and ``guard`` are the silo's own: each line of the ledger has the totals so far.
    """

    def __init__(self, name: str, keeper: Keeper, progress: Progress, guard: Guard) -> None:
        self.last: tuple[bytes, bytes] | None = None  # the last admitted request and its reply
        self.broken = False  # the state ran ahead of the journal: only a restart mends that
        self._name = name
        self._keeper = keeper
        self._progress = progress
        self._guard = guard

    def keep(
        self,
        time: datetime.datetime,
        request: bytes,
        reply: bytes,
        message: messages.Request,
        reason: Reason | None,
        key: str,
    ) -> None:
        """An admitted request: journalled, then noted; only then may the reply be told."""
        self.broken = True  # until both records are written
        when = time.isoformat()
        if self._keeper.journal is not None:
            self._keeper.journal.append(msgspec.msgpack.encode(Record(when, request, reply)))
        decision = "answered" if reason is None else "refused"
        self.note(request, reply, message=message, decision=decision, reason=reason, key=key, time=when)
        self.broken = False
        self.last = (request, reply)

    def note(
        self,
        request: bytes,
        reply: bytes,
        *,
        message: messages.Request | None = None,
        decision: str,
        reason: Reason | None = None,
        key: str = "",
        time: str = "",
        recovered: bool = False,
    ) -> None:
        """A line of the ledger; ``time`` is when it happened, if not now."""
        ledger, progress, query = self._keeper.ledger, self._progress, self._progress.query
        if ledger is None:
            return
        asks = decision == "answered" and isinstance(message, Begin | Ask)
        ledger.add(
            Entry(
                time=time or self._keeper.clock().isoformat(),
                session=progress.session.hex(),
                request=type(message).__name__.lower() if message is not None else decision,
                round=progress.round,
                query=type(query).__name__ if asks else "",
                phase=query.phase.value if asks and query is not None else "",
                decision=decision,
                reason="" if reason is None else reason.name.lower(),
                key=key,
                asked=_noted(request, decision),
                replied=reply,
                queries=self._guard.queries,
                functionals=self._guard.functionals,
                bits=progress.bits,
                recovered=recovered,
            )
        )

    def resume(
        self, identity: bytes, follow: Callable[[messages.Request, messages.Reply, str], None]
    ) -> None:
        """Go on from the journal: ``follow`` takes the silo through each request, its reply and its time."""
        journal, ledger = self._keeper.journal, self._keeper.ledger
        if journal is None:
            return
        if not journal.records:
            journal.append(identity)
            return
        if journal.records[0] != identity:
            raise JournalError(f"silo '{self._name}': the journal is of another plan or of other data")
        told: dict[tuple[str, str], str] | None = None
        for data in journal.records[1:]:
            try:
                record = msgspec.msgpack.decode(data, type=Record)
                message = messages.decode_request(record.request)
                reply = messages.decode_reply(record.reply)
                follow(message, reply, record.time)
            except (msgspec.MsgspecError, ValueError, FedTMLEError, RefusalError):
                raise JournalError(f"silo '{self._name}': the journal does not follow the plan") from None
            self.last = (record.request, record.reply)
            if ledger is not None:
                if told is None:
                    told = ledger.told(self._progress.session.hex())
                self._reconcile(told, record, message, reply)
        if "answered" in (told or {}).values():
            raise JournalError(f"silo '{self._name}': the ledger knows of answers that the journal has lost")

    def _reconcile(
        self,
        told: dict[tuple[str, str], str],
        record: Record,
        message: messages.Request,
        reply: messages.Reply,
    ) -> None:
        """The journal is written first, so a crash may have kept its last record from the ledger."""
        refusal = reply.reason if isinstance(reply, Refused) else None
        decision = "answered" if refusal is None else "refused"
        if told.pop((text(_noted(record.request, decision)), text(record.reply)), None) is None:
            self.note(
                record.request,
                record.reply,
                message=message,
                decision=decision,
                reason=refusal,
                time=record.time,
                recovered=True,
            )


def _noted(request: bytes, decision: str) -> bytes:
    """As much of a request as the ledger keeps: all that was answered; the others must not fill the disk."""
    return request if decision == "answered" else request[: messages.LARGEST_NOTED]
