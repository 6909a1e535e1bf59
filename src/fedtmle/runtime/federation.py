"""Federations: one method, `exchange`, that carries bytes to the silos and returns their replies."""

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
    """Carry one synchronous round."""

    @property
    def silos(self) -> Sequence[str]:
        """The silos' names, in the order of the plan's roster."""
        ...

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        """Return the reply of each silo to its request."""
        ...


class InProcess:
    """All silos in this process, of which ``threads`` answer at the same time."""

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
    """Return the replies of a recorded transcript; any other request is an error."""

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
                "the run sends a request that is not in the transcript; was the plan changed?"
            )
        return recorded.replies


class Journalled:
    """Write every completed exchange to a journal before the session goes on, and resume from the journal.

    A new session over a journal that holds exchanges first receives those, as long as it sends the same
    requests, and goes on live after the last. The exchange that a crash cut off is sent again, and silos that
    had answered return the recorded bytes. An exchange in which a silo refused is sent again too: its owner
    may have approved the plan since, or made room on a disk.
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
            raise JournalError("the server's journal has a record that is no exchange") from None

    @property
    def silos(self) -> Sequence[str]:
        return self._federation.silos

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        if self._recorded:
            recorded = self._recorded.pop()
            if dict(requests) != recorded.requests:
                raise JournalError("the run sends another request than the one in the server's journal")
            return recorded.replies
        replies = dict(self._federation.exchange(requests))
        if not any(isinstance(messages.decode_reply(reply), Refused) for reply in replies.values()):
            exchange = Exchange(dict(requests), replies)
            self._journal.append(msgspec.msgpack.encode(exchange, order="deterministic"))
        return replies
