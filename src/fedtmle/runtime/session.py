"""A session: the server's side of one run. Flow <-> bytes; it sees no row and no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedtmle.algorithms.outcome import Outcome, Query
from fedtmle.errors import InputError, ProtocolError, RefusedError
from fedtmle.protocol import messages
from fedtmle.protocol.bits import BitReader, Bits, BitWriter
from fedtmle.protocol.fits import FitQuery
from fedtmle.protocol.messages import (
    Answered,
    Ask,
    Begin,
    Close,
    Closed,
    Closing,
    Compare,
    Compared,
    Open,
    Opened,
    Payload,
    Refused,
)
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.query import Link, Phase
from fedtmle.runtime.account import Account, RoundBits
from fedtmle.runtime.federation import Federation
from fedtmle.runtime.learned import Learned
from fedtmle.runtime.transcript import Exchange, Transcript


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """What the progress callback hears after each round; all of it is public."""

    round: int
    phase: Phase
    silos: int
    bits: int  # payload bits so far, all links
    up: Mapping[str, int] = field(default_factory=dict)  # payload bits of this round, by silo
    down: Mapping[str, int] = field(default_factory=dict)
    retired: tuple[str, ...] = ()  # the silos that left in this round
    gradient_norm: float | None = None  # of the pooled loss where the round asked, if it tells
    tolerance: float | None = None  # once it is settled


Progress = Callable[[RoundReport], None]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a session knows at its end."""

    outcome: Outcome
    account: Account
    transcript: Transcript
    sizes: Mapping[str, int]
    retired_at: Mapping[str, int | None]  # of a personalised run: the update at which each silo left
    closing: Mapping[str, Any]  # each silo's closing answer: what the server saw of it alone


class Session:
    """Runs one algorithm over one federation."""

    def __init__(
        self, plan: Plan, federation: Federation, *, session: bytes = b"", progress: Progress | None = None
    ) -> None:
        if tuple(federation.silos) != plan.silos:
            raise InputError("silos: the federation's are not those of the plan's roster, in its order")
        self._plan = plan
        self._federation = federation
        self._progress = progress
        self._learned = Learned(plan.subject, plan.algorithm) if progress is not None else None
        self._account = Account()
        self._session = session or plan.digest[:16]
        self._transcript = Transcript(self._session)
        self._active = list(plan.silos)
        self._links = {silo: Link() for silo in self._active}
        self._retired: dict[str, int] = {}
        self._sent: dict[str, int] = {}  # payload bits of this round's answers
        self._closing: dict[str, Any] = {}
        self._round = 0

    def run(self) -> Finished:
        """The whole run, from the first greeting to the last broadcast."""
        sizes = self._open()
        n = sum(sizes.values())
        flow = self._plan.algorithm.flow(self._plan.subject, self._plan.law, n)
        query = next(flow)
        requests = self._begin(sizes, n)
        while True:
            self._round += 1
            answers = self._collect(query, requests)
            silos = list(answers)
            pooled = query.pool(answers, {silo: sizes[silo] for silo in silos})
            broadcast = self._broadcast(query, pooled)
            self._retire(query, answers)
            self._book(query, pooled, broadcast, silos)
            if query.phase is Phase.CLOSING:
                self._closing = answers
            try:
                # The server goes on from what it sent, decoded as the silos decode it.
                query = flow.send(query.read_pooled(BitReader(broadcast)))
            except StopIteration as stop:
                self._close(broadcast)
                return Finished(
                    outcome=stop.value,
                    account=self._account,
                    transcript=self._transcript,
                    sizes=sizes,
                    retired_at=self._left(stop.value),
                    closing=self._closing,
                )
            ask = messages.encode(Ask(self._session, self._round + 1, _payload(broadcast)))
            requests = dict.fromkeys(self._active, ask)

    def _open(self) -> dict[str, int]:
        opening = messages.encode(Open(messages.WIRE_FORMAT, self._session, self._plan.digest))
        replies = self._exchange(dict.fromkeys(self._active, opening))
        sizes = {}
        for silo, reply in replies.items():
            if not isinstance(reply, Opened) or reply.n_rows < 1:
                raise ProtocolError(f"silo '{silo}' did not say how many rows it has")
            sizes[silo] = reply.n_rows
        return sizes

    def _begin(self, sizes: Mapping[str, int], n: int) -> dict[str, bytes]:
        first, requests = 0, {}
        for silo, size in sizes.items():
            requests[silo] = messages.encode(Begin(self._session, n, first))
            first += size
        return requests

    def _collect(self, query: Query, requests: Mapping[str, bytes]) -> dict[str, Any]:
        answers = {}
        self._sent = {}
        for silo, reply in self._exchange(requests).items():
            if not isinstance(reply, Answered) or reply.round != self._round:
                raise ProtocolError(f"silo '{silo}' did not answer round {self._round}")
            reader = BitReader(reply.payload.bits())
            answers[silo] = query.read_answer(reader, self._links[silo])
            reader.finish()
            self._sent[silo] = reply.payload.length
        return answers

    def _broadcast(self, query: Query, pooled: Any) -> Bits:
        out = BitWriter()
        query.write_pooled(pooled, out)
        return out.finish()

    def _retire(self, query: Query, answers: Mapping[str, Any]) -> None:
        for silo, answer in answers.items():
            if query.retires(answer) and isinstance(query, FitQuery):
                self._retired[silo] = query.update
                self._active.remove(silo)

    def _left(self, outcome: Outcome) -> dict[str, int | None]:
        """tau_m of each silo, as each knows its own; only a personalised run ends without an estimate."""
        return {} if outcome.estimate is not None else {silo: self._retired.get(silo) for silo in self._links}

    def _book(self, query: Query, pooled: Any, broadcast: Bits, asked: Sequence[str]) -> None:
        down = dict.fromkeys(self._active, broadcast.length)
        self._account.book(RoundBits(phase=query.phase, up=self._sent, down=down))
        if self._progress is not None and self._learned is not None:
            norm = self._learned.hear(query, pooled)
            self._progress(
                RoundReport(
                    round=self._round,
                    phase=query.phase,
                    silos=len(self._active),
                    bits=self._account.bits(*Phase),
                    up=self._sent,
                    down=down,
                    retired=tuple(silo for silo in asked if silo not in down),
                    gradient_norm=norm,
                    tolerance=self._learned.tolerance,
                )
            )

    def _close(self, broadcast: Bits) -> None:
        closing = messages.encode(Close(self._session, self._round + 1, _payload(broadcast)))
        replies = self._exchange(dict.fromkeys(self._active, closing))
        closings = tuple(
            Closing(silo, reply.digest, reply.signature)
            for silo, reply in replies.items()
            if isinstance(reply, Closed)
        )
        compare = messages.encode(Compare(self._session, closings))
        verdicts = self._exchange(dict.fromkeys(self._active, compare)).values()
        agree = all(isinstance(verdict, Compared) and verdict.agree for verdict in verdicts)
        if not agree or len(closings) != len(self._active):
            raise ProtocolError("silos received different broadcasts; the run's result must not be used")

    def _exchange(self, requests: Mapping[str, bytes]) -> dict[str, messages.Reply]:
        if not requests:
            return {}
        raw = self._federation.exchange(requests)
        if set(raw) != set(requests):
            raise ProtocolError("the federation did not bring one reply per silo")
        self._transcript.exchanges.append(Exchange(dict(requests), dict(raw)))
        replies: dict[str, messages.Reply] = {}
        for silo, request in requests.items():
            self._account.bytes_down[silo] += len(request)
            self._account.bytes_up[silo] += len(raw[silo])
            reply = messages.decode_reply(raw[silo])
            if isinstance(reply, Refused):
                raise RefusedError(silo, reply.reason.value)
            replies[silo] = reply
        return replies


def _payload(bits: Bits) -> Payload:
    return Payload(bits.length, bits.data)
