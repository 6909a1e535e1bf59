"""The ledger: what a silo's owner reads. Every request, decision, reply and running total.

One line of JSON per event; each carries the hash of the line before it, so that a line cannot be
changed, dropped or put in later without showing. It stays at the silo: it names the key of the
policy behind a refusal, which the server is not told.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedtmle.errors import FedTMLEError, JournalError
from fedtmle.protocol import messages
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.messages import Ask, Begin, Reason, Refused
from fedtmle.protocol.query import Query
from fedtmle.runtime.journal import Held, Journal

START = "0" * 64
_SHA256 = hashlib.sha256()  # to copy takes less time than to begin


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One event, before it is chained."""

    time: str
    session: str
    request: str  # what was asked: open, begin, ask, close, compare, or not a message
    round: int
    query: str = ""  # what the silo derived from it
    phase: str = ""
    decision: str = "answered"  # answered, repeated, refused
    reason: str = ""  # told to the server
    key: str = ""  # of the policy; not told
    asked: bytes = b""  # the request, or its beginning if it was not answered; in the file base64
    replied: bytes = b""
    queries: int = 0  # running totals of the session
    functionals: int = 0
    bits: int = 0
    recovered: bool = False  # the journal held it, this line was lost in a crash and added at the restart


class Ledger:
    """An append-only, hash-chained file, one for all studies of a silo."""

    def __init__(self, path: str | Path, *, sync: bool = True) -> None:
        self.path = Path(path)
        self._sync = sync
        self.count, self._head, self._end = 0, START, 0
        with contextlib.ExitStack() as unless_ready:
            try:
                self._file = unless_ready.enter_context(open(self.path, "a+b", buffering=0))
                os.chmod(self.path, 0o600)
                with Held(self._file):
                    self._catch_up()
            except OSError:
                raise JournalError(f"{self.path}: the ledger cannot be opened for writing") from None
            unless_ready.pop_all()  # open as long as the object

    def add(self, entry: Entry) -> None:
        try:
            with Held(self._file):
                self._catch_up()  # another study of this silo may have added lines
                data, head = _chained(msgspec.json.encode(entry), self.count + 1, self._head)
                self._write(data + b"\n")
        except OSError:
            raise JournalError(f"{self.path}: the line could not be written; is the disk full?") from None
        self.count, self._head = self.count + 1, head

    def _catch_up(self) -> None:
        """Reads on from where this object stands, and cuts off what a crash or a full disk tore."""
        size = self._file.seek(0, os.SEEK_END)
        if size == self._end:
            return
        if size < self._end:
            raise JournalError(f"{self.path}: the ledger was cut short after line {self.count} was written")
        self._file.seek(self._end)
        start, data = self._end, self._file.read()
        for line, end in _lines(data, self.path, self.count, self._head):
            self.count, self._head, self._end = line["line"], line["hash"], start + end
        if self._end < size:
            self._file.truncate(self._end)

    def _write(self, data: bytes) -> None:
        try:
            if self._file.write(data) != len(data):
                raise OSError
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise
        self._end += len(data)

    def told(self, session: str) -> dict[tuple[str, str], str]:
        """What was admitted in a session: (request, reply) -> the decision."""
        with Held(self._file):
            return {
                (line["asked"], line["replied"]): line["decision"]
                for line in read(self.path)
                if line["session"] == session and line["decision"] != "repeated"
            }

    def close(self) -> None:
        self._file.close()


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a ledger, each checked against its hash and the line before it."""
    data, read_to = Path(path).read_bytes(), 0
    for line, end in _lines(data, path):
        yield line
        read_to = end
    if read_to < len(data):
        raise JournalError(f"{path}: the last line has no end; opening the ledger to add to it cuts it off")


def _lines(
    data: bytes, path: str | Path, count: int = 0, head: str = START
) -> Iterator[tuple[dict[str, Any], int]]:
    """Whole lines after line ``count`` with their end in ``data``; stops at a line without an end."""
    at, number = 0, count + 1
    while (stop := data.find(b"\n", at) + 1) > 0:
        line = _line(data[at : stop - 1], number, head)
        if line is None:
            raise JournalError(f"{path}, line {number}: the ledger was changed here, or before it")
        yield line, stop
        head, at, number = line["hash"], stop, number + 1
    if _line(data[at:-1], number, head) is not None:  # a line that was whole: its end was changed, not torn
        raise JournalError(f"{path}, line {number}: the ledger was changed here, or before it")


def _line(data: bytes, number: int, head: str) -> dict[str, Any] | None:
    """The line, if these bytes are the one form of the line that follows."""
    try:
        line = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    bare = {key: value for key, value in line.items() if key not in ("line", "previous", "hash")}
    return line if _chained(msgspec.json.encode(bare), number, head)[0] == data else None


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def text(data: bytes) -> str:
    """Bytes as they stand in a ledger."""
    return base64.b64encode(data).decode("ascii")


def _chained(bare: bytes, number: int, previous: str) -> tuple[bytes, str]:
    """A line of the file, and its hash: of the line without it, which stands at the end.

    ``bare`` is the entry's JSON; its number comes before it, the hash of the line before after it.
    """
    body = b'{"line":%d,%b,"previous":"%b"}' % (number, bare[1:-1], previous.encode())
    state = _SHA256.copy()
    state.update(body)
    digest = state.hexdigest()
    return b'%b,"hash":"%b"}' % (body[:-1], digest.encode()), digest


# A silo's records: the journal, for going on after a crash, and the ledger, for its owner.


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

    def __init__(
        self,
        name: str,
        progress: Progress,
        guard: Guard,
        *,
        journal: Journal | None,
        ledger: Ledger | None,
        clock: Callable[[], datetime.datetime],
    ) -> None:
        self.last: tuple[bytes, bytes] | None = None  # the last admitted request and its reply
        self.broken = False  # the state ran ahead of the journal: only a restart mends that
        self._name = name
        self._progress = progress
        self._guard = guard
        self._journal = journal
        self._ledger = ledger
        self._clock = clock

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
        if self._journal is not None:
            self._journal.append(msgspec.msgpack.encode(Record(when, request, reply)))
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
        ledger, progress, query = self._ledger, self._progress, self._progress.query
        if ledger is None:
            return
        asks = decision == "answered" and isinstance(message, Begin | Ask)
        ledger.add(
            Entry(
                time=time or self._clock().isoformat(),
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
        journal, ledger = self._journal, self._ledger
        if journal is None:
            return
        if not journal.records:
            journal.append(identity)
            return
        if journal.records[0] != identity:
            raise JournalError(
                f"silo '{self._name}': the data, or the plan, changed since this run began; restore them, or "
                "start the study again"
            )
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
