"""The server of a sealed run: it carries bytes, adds up what it cannot read, and keeps a journal of both.

    open -> settle -> keys -> (sum -> sum -> ...) -> close

It knows the hospitals' names and the digest of the plan. It derives no question, and cannot tell which round
a run is in, nor a refusal from an answer. `Relay.run` needs one function that takes requests to hospitals and
returns the replies that came back; a relay that begins with a journal goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias, TypeVar, final

import msgspec

from fedtmle.errors import JournalError, ProtocolError, RefusedError
from fedtmle_core import messages
from fedtmle_core.journal import Journal, MemoryJournal
from fedtmle_core.masks import add
from fedtmle_core.messages import (
    FORMAT,
    Answered,
    Ask,
    Close,
    Closed,
    Code,
    Commitment,
    Finished,
    Keys,
    Open,
    Opened,
    Refused,
    Reply,
    Request,
    Settle,
    Settled,
    result_statement,
)
from fedtmle_core.seal import Consortium, encoded, is_signed

Requests: TypeAlias = Mapping[str, bytes]  # by hospital
Replies: TypeAlias = Mapping[str, bytes]  # by hospital; one that is absent, or withholds its reply, has none
Exchange: TypeAlias = Callable[[Requests], Replies]
R = TypeVar("R", bound=Reply)

# Which code is reported if hospitals refuse for different reasons: the one that explains the others.
ORDER_OF_CODES = (Code.PEOPLE, Code.FAILED, Code.SEAL, Code.PLAN, Code.ORDER, Code.MALFORMED)


@final
@dataclass(frozen=True, kw_only=True)
class Published:
    """What everybody may read of a run: the document, and who has signed it.

    ``absent`` hospitals did not open the run. ``withheld`` ones took part, but did not sign the result.
    """

    document: bytes
    plan: bytes
    run: bytes
    names: tuple[str, ...]
    signatures: Mapping[str, bytes]
    absent: tuple[str, ...]
    withheld: tuple[str, ...]

    def check(self, consortium: Consortium) -> None:
        """Raise `ProtocolError` unless every signature is that of its hospital in the consortium's list."""
        statement = encoded(*result_statement(self.plan, self.run, self.names, self.document))
        for name, signature in self.signatures.items():
            member = consortium.named(name) if name in self.names else None
            if member is None or not is_signed(statement, signature, member.signing):
                raise ProtocolError(f"the result was not signed by hospital '{name}'")


Flow: TypeAlias = Generator[Mapping[str, Request], Mapping[str, Reply], Published]


@final
class Relay:
    """One run of a plan among the hospitals that open it; ``least`` is the fewest that may take part."""

    def __init__(
        self,
        names: Sequence[str],
        plan: bytes,
        run: bytes,
        *,
        least: int = 3,
        journal: Journal | None = None,
    ) -> None:
        self._names, self._plan, self._run, self._least = tuple(sorted(names)), plan, run, least
        self._journal = journal or MemoryJournal()
        identity = encoded("relay", self._names, plan, run, least)
        if not self._journal.records:
            self._journal.append(identity)
        if self._journal.records[0] != identity:
            raise JournalError("this journal is that of another run")

    def run(self, exchange: Exchange) -> Published:
        """Return what is published, or raise `RefusedError` with the code by which the run ended."""
        flow = self._flow()
        known = iter(self._journal.records[1:])
        try:
            requests = next(flow)
            while True:
                record = next(known, None)
                if record is None:
                    asked = {name: messages.encode(request) for name, request in requests.items()}
                    came = exchange(asked)
                    replies = {name: came[name] for name in asked if name in came}
                    self._journal.append(msgspec.msgpack.encode(replies))
                else:
                    replies = msgspec.msgpack.decode(record, type=dict[str, bytes])
                requests = flow.send({name: messages.decode_reply(data) for name, data in replies.items()})
        except StopIteration as stop:
            published: Published = stop.value
            return published

    def _flow(self) -> Flow:
        replies = yield dict.fromkeys(self._names, Open(FORMAT, self._run, self._plan))
        opened = _kind(replies, Opened)
        names = tuple(name for name in self._names if name in opened)
        if len(names) < max(self._least, 1):
            _end(replies, "fewer hospitals have opened the run than its plan asks for")
        openings = tuple(opened[name].opening for name in names)
        replies = yield dict.fromkeys(names, Settle(self._run, openings))
        settled = _all(names, replies, Settled)
        copies = (None, *settled[names[0]].copies)
        if len(copies) != len(names):
            raise ProtocolError(f"hospital '{names[0]}' has not sent one group key for each other one")
        replies = yield {name: Keys(self._run, copy) for name, copy in zip(names, copies, strict=True)}
        while not (finished := _kind(replies, Finished)):
            answered = _all(names, replies, Answered)
            rounds = {reply.round for reply in answered.values()}
            if len(rounds) > 1:
                raise ProtocolError("the hospitals are in different rounds")
            summed = add(answered[name].sealed for name in names)
            replies = yield dict.fromkeys(names, Ask(self._run, min(rounds), summed))
        given = tuple(Commitment(name, finished[name].commitment) for name in names if name in finished)
        replies = yield dict.fromkeys(finished, Close(self._run, given))
        closed = _kind(replies, Closed)
        documents = [reply.document for reply in closed.values() if reply.document]
        if not documents:
            _end(replies, "no hospital has sent the result")
        return Published(
            document=documents[0],
            plan=self._plan,
            run=self._run,
            names=tuple(commitment.name for commitment in given),
            signatures={name: reply.signature for name, reply in closed.items()},
            absent=tuple(name for name in self._names if name not in names),
            withheld=tuple(name for name in names if name not in closed),
        )


def _kind(replies: Mapping[str, Reply], kind: type[R]) -> dict[str, R]:
    """Return the replies of one kind."""
    return {name: reply for name, reply in replies.items() if isinstance(reply, kind)}


def _all(names: Sequence[str], replies: Mapping[str, Reply], kind: type[R]) -> dict[str, R]:
    """Return the replies, which have to be of one kind and from everybody."""
    found = _kind(replies, kind)
    if len(found) < len(names):
        lost = ", ".join(name for name in names if name not in found)
        _end(replies, f"the run cannot go on without {lost}")
    return found


def _end(replies: Mapping[str, Reply], why: str) -> NoReturn:
    """Raise `RefusedError` with the code that explains the others, or `ProtocolError`."""
    refused = _kind(replies, Refused)
    for code in ORDER_OF_CODES:
        for name, reply in refused.items():
            if reply.code is code:
                raise RefusedError(name, code.value)
    raise ProtocolError(why)
