"""Federations: one verb, `exchange`, that carries bytes to silos and brings bytes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from fedtmle.errors import JournalError, ProtocolError
from fedtmle.protocol import messages
from fedtmle.protocol.messages import Refused
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.journal import Journal
from fedtmle.runtime.silo import Silo
from fedtmle.runtime.transcript import Exchange, Transcript


class Federation(Protocol):
    """Carries one synchronous round."""

    @property
    def silos(self) -> Sequence[str]: ...

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]: ...


class InProcess:
    """All silos in this process; ``threads`` > 1 lets them answer side by side."""

    def __init__(self, silos: Sequence[Silo], *, threads: int = 1) -> None:
        self._silos = {silo.name: silo for silo in silos}
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    @property
    def silos(self) -> Sequence[str]:
        return tuple(self._silos)

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        run = map if self._pool is None else self._pool.map
        replies = run(lambda item: self._silos[item[0]].step(item[1]), requests.items())
        return dict(zip(requests, replies, strict=True))


class Replay:
    """Answers from a recorded transcript; any other request is an error."""

    def __init__(self, transcript: Transcript) -> None:
        self._exchanges = list(transcript.exchanges)
        self._silos = tuple(self._exchanges[0].requests) if self._exchanges else ()

    @property
    def silos(self) -> Sequence[str]:
        return self._silos

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        recorded = self._exchanges.pop(0) if self._exchanges else Exchange({}, {})
        if dict(requests) != recorded.requests:
            raise ProtocolError(
                "the run asks something that the transcript does not hold; was the plan changed?"
            )
        return recorded.replies


class Journalled:
    """Writes every completed exchange before the session goes on, and resumes from what was written.

    Over a journal that holds exchanges, a new session is first given those, as long as it asks what
    was asked then, and goes on live after the last. A crash may have cut off the exchange after it:
    its requests are sent again, and silos that had answered return the recorded bytes. So are those of
    an exchange in which a silo refused: its owner may have approved since, or made room on a disk.
    """

    def __init__(self, federation: Federation, journal: Journal, *, plan: Plan, session: bytes = b"") -> None:
        self._federation = federation
        self._journal = journal
        identity = msgspec.msgpack.encode(("fedtmle session", plan.digest, session or plan.digest[:16]))
        if not journal.records:
            journal.append(identity)
        if journal.records[0] != identity:
            raise JournalError("the server's journal is of another plan or session")
        try:
            self._recorded = [msgspec.msgpack.decode(data, type=Exchange) for data in journal.records[:0:-1]]
        except (msgspec.MsgspecError, RecursionError):
            raise JournalError("the server's journal holds something else than exchanges") from None

    @property
    def silos(self) -> Sequence[str]:
        return self._federation.silos

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        if self._recorded:
            recorded = self._recorded.pop()
            if dict(requests) != recorded.requests:
                raise JournalError("the run asks something else than the server's journal holds")
            return recorded.replies
        replies = dict(self._federation.exchange(requests))
        if not any(isinstance(messages.decode_reply(reply), Refused) for reply in replies.values()):
            exchange = Exchange(dict(requests), replies)
            self._journal.append(msgspec.msgpack.encode(exchange, order="deterministic"))
        return replies
