"""A session, the server's side of one run; the federations that carry its bytes; its account of them.

A session exchanges bytes with the silos through the one method of a `Federation`; it sees no row and no
clock. It books every bit that crossed a link, by phase, by silo and by round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import msgspec

from fedtmle.errors import FedTMLEError, InputError, JournalError, ProtocolError, RefusedError
from fedtmle.lowered import LoweredLimit
from fedtmle.protocol import messages
from fedtmle.protocol.codes import AbstractCode, Bits, Uplink, encode
from fedtmle.protocol.masked import check_maskable
from fedtmle.protocol.messages import (
    Answered,
    Ask,
    Begin,
    Close,
    Closed,
    Compare,
    Compared,
    Counted,
    Open,
    Opened,
    Payload,
    Refused,
    SignedAnswer,
    SignedDigest,
)
from fedtmle.protocol.outcome import Outcome, Personalised
from fedtmle.protocol.plan import Follower, Paths, Plan
from fedtmle.protocol.policy import checked_limit
from fedtmle.protocol.query import VOID, Phase, Query
from fedtmle.runtime.ledger import Exchange, Transcript
from fedtmle.runtime.silo import Silo, count_rows
from fedtmle_core.exact import Sums
from fedtmle_core.journal import Journal

Shares = Mapping[Phase, int]  # the bits of one payload by phase


@dataclass(frozen=True, kw_only=True)
class RoundBits:
    """Payload bits of one round by silo: its answer up, the broadcast down.

    A round that several queries share counts for the phase of the first; their bits are those of their own.
    """

    phase: Phase
    up: Mapping[str, int]
    down: Mapping[str, int]
    up_shares: Mapping[str, Shares]
    down_shares: Shares


@dataclass
class Account:
    """Rounds, payload bits and wire bytes of a run.

    Payload bits are the codes themselves; wire bytes add padding and envelopes.
    """

    rounds: Counter[Phase] = field(default_factory=Counter)
    bits_up: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    bits_down: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    bytes_up: Counter[str] = field(default_factory=Counter)
    bytes_down: Counter[str] = field(default_factory=Counter)
    by_round: list[RoundBits] = field(default_factory=list)

    def book(self, bits: RoundBits) -> None:
        """Add one round."""
        self.rounds[bits.phase] += 1
        self.by_round.append(bits)
        for silo, shares in bits.up_shares.items():
            self.bits_up.update({(phase, silo): count for phase, count in shares.items()})
        for silo in bits.down:
            self.bits_down.update({(phase, silo): count for phase, count in bits.down_shares.items()})

    def bits(self, *phases: Phase) -> int:
        """Return the payload bits over all links in the given phases."""
        return sum(
            count
            for book in (self.bits_up, self.bits_down)
            for (phase, _), count in book.items()
            if phase in phases
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain data: rounds by phase, bits by silo and phase, bytes by silo, bits by round.

        "by_round" has the phases as (phase, number of rounds) in their order, the bits that each silo sent in
        rounds 1, 2, ..., and the length of each round's broadcast.
        """

        def by_silo(book: Counter[tuple[Phase, str]]) -> dict[str, dict[str, int]]:
            table: dict[str, dict[str, int]] = {}
            for (phase, silo), count in book.items():
                table.setdefault(silo, {})[phase.value] = count
            return table

        up: dict[str, list[int]] = {}
        for bits in self.by_round:
            for silo, count in bits.up.items():
                up.setdefault(silo, []).append(count)
        runs = groupby(self.by_round, key=lambda bits: bits.phase)
        return {
            "rounds": {phase.value: count for phase, count in self.rounds.items()},
            "bits_up": by_silo(self.bits_up),
            "bits_down": by_silo(self.bits_down),
            "bytes_up": dict(self.bytes_up),
            "bytes_down": dict(self.bytes_down),
            "by_round": {
                "phases": [[phase.value, len(list(run))] for phase, run in runs],
                "up": up,
                "down": [max(bits.down.values(), default=0) for bits in self.by_round],
            },
        }


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """The progress callback's argument after each round; all of it is public."""

    round: int
    phase: Phase
    silos: int
    bits: int  # payload bits so far, all links
    up: Mapping[str, int] = field(default_factory=dict)  # payload bits of this round, by silo
    down: Mapping[str, int] = field(default_factory=dict)
    retired: tuple[str, ...] = ()  # the silos that retired in this round, if sums are open
    gradient_norm: float | None = None  # norm for the pooled loss at the round's point, if disclosed
    tolerance: float | None = None  # once it is settled
    absent: Mapping[str, str] = field(default_factory=dict)  # the silos that the run goes on without, and why


Progress = Callable[[RoundReport], None]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished session, as the server knows it."""

    outcome: Outcome
    account: Account
    transcript: Transcript
    n: int  # rows of all silos
    sizes: Mapping[str, int | None]  # rows of each silo that took part; None under masks
    absent: Mapping[str, str]  # the silos of the roster that did not, with the reason
    lowered: Mapping[str, Sequence[LoweredLimit]]  # the limits that owners made laxer, by silo
    retired_at: Mapping[str, int | None]  # when each silo retired in an open personalised run
    closing: Sums | None  # pooled sums of the closing query


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


ABSENT = "it was absent when the study opened"
TARGETED = (Phase.CALIBRATION, Phase.TARGETING, Phase.CLOSING)


class Session:
    """Runs one plan over one federation.

    The federation has the silos of the plan's roster. If the plan goes on without silos that refuse or are
    absent, some may lack; ``absent`` says why, by silo.
    """

    def __init__(
        self,
        plan: Plan,
        federation: Federation,
        *,
        session: bytes = b"",
        progress: Progress | None = None,
        absent: Mapping[str, str] | None = None,
        follow: Callable[[Plan, int], Follower] = Follower,
    ) -> None:
        present = tuple(federation.silos)
        lacking = [silo for silo in plan.silos if silo not in present]
        if present != tuple(silo for silo in plan.silos if silo in present) or not plan.may_lack(lacking):
            raise InputError(
                f"silos: the plan's roster is {', '.join(plan.silos)}, in this order; the federation has "
                f"{', '.join(federation.silos)}"
            )
        self._absent = {silo: (absent or {}).get(silo, ABSENT) for silo in lacking}
        self._plan = plan
        self._federation = federation
        self._progress = progress
        self._follow = follow
        self._account = Account()
        self._session = session or plan.digest[:16]
        self._transcript = Transcript(self._session)
        self._active = list(present)
        self._uplinks = {silo: Uplink() for silo in self._active}
        self._retired: dict[str, int] = {}
        self._sent: dict[str, int] = {}  # payload bits of this round's answers
        self._shares: dict[str, Shares] = {}  # the same by phase
        self._lowered: dict[str, Sequence[LoweredLimit]] = {}
        self._relayed: tuple[SignedAnswer, ...] = ()  # the last masked answers, in the order of the roster
        self._tolerance: float | None = None  # once it is settled
        self._targeted: list[tuple[Query, object]] = []  # the rounds in which a law was moved or closed
        self._may_use = True  # whether the pooled values may be used

    def run(self) -> Finished:
        """Run the plan from the first message to the last; an error of the rounds says how far it got."""
        n, sizes, requests = self._open()
        try:
            return self._run(n, sizes, requests)
        except FedTMLEError as error:
            from fedtmle.runtime.result import how_far

            if self._may_use:
                error.reached = how_far(self._targeted, [bits.phase for bits in self._account.by_round])
            raise

    def _run(self, n: int, sizes: Mapping[str, int], requests: dict[str, bytes]) -> Finished:
        follower = self._follow(self._plan.without(list(self._absent)), n)
        closing: Sums | None = None
        while True:
            query, number = follower.query, follower.round
            if self._plan.is_masked:
                check_maskable(follower.masked_form)
            payloads = self._collect(number, requests)
            before = set(self._retired)
            broadcast = self._pool(follower, payloads, sizes)
            pooled = follower.hear(broadcast)
            if pooled is not VOID:
                closing = _closing(query, pooled) or closing
            if pooled is not VOID and any(member.phase in TARGETED for member in query.members):
                self._targeted.append((query, pooled))
            self._book(query, number, pooled, broadcast, [s for s in self._retired if s not in before])
            if follower.outcome is not None:
                self._close(number + 1, broadcast)
                return Finished(
                    outcome=follower.outcome,
                    account=self._account,
                    transcript=self._transcript,
                    n=n,
                    sizes={silo: sizes.get(silo) for silo in self._plan.silos if silo not in self._absent},
                    absent=self._absent,
                    lowered=self._lowered,
                    retired_at=self._retirements(follower.outcome),
                    closing=closing,
                )
            ask = messages.encode(Ask(self._session, number + 1, _payload(broadcast), self._relayed))
            requests = dict.fromkeys(self._active, ask)

    def _open(self) -> tuple[int, dict[str, int], dict[str, bytes]]:
        """Return n, the numbers of rows that the silos stated, and the requests of the first round.

        A plan that goes on leaves out the silos that refuse.
        """
        opening = messages.encode(Open(messages.WIRE_FORMAT, self._session, self._plan.digest))
        replies = self._replies(dict.fromkeys(self._active, opening))
        while refused := {s: r.reason.value for s, r in replies.items() if isinstance(r, Refused)}:
            self._leave_out(refused)
            # Those that opened return the same bytes again, and a journal has them without a refusal.
            replies = self._replies(dict.fromkeys(self._active, opening))
        self._lowered = {silo: limits for silo, reply in replies.items() if (limits := _lowered(silo, reply))}
        if self._plan.is_masked:
            return self._count(replies)
        sizes = {}
        for silo, reply in replies.items():
            if not isinstance(reply, Opened) or reply.n_rows < 1:
                raise ProtocolError(f"silo '{silo}' did not say how many rows it has")
            sizes[silo] = reply.n_rows
        first, requests = 0, {}
        n = sum(sizes.values())
        for silo, size in sizes.items():
            requests[silo] = messages.encode(Begin(self._session, n, first, absent=tuple(self._absent)))
            first += size
        return n, sizes, requests

    def _leave_out(self, refused: Mapping[str, str]) -> None:
        """Note the silos that refuse to open; raise if the plan does not go on without them."""
        absent = {**self._absent, **refused}
        self._absent = {silo: absent[silo] for silo in self._plan.silos if silo in absent}
        if not self._plan.may_lack(list(self._absent)):
            raise RefusedError(*next(iter(refused.items())))
        self._active = [silo for silo in self._active if silo not in refused]
        self._uplinks = {silo: self._uplinks[silo] for silo in self._active}

    def _count(self, replies: Mapping[str, messages.Reply]) -> tuple[int, dict[str, int], dict[str, bytes]]:
        """Add up the masked numbers of rows."""
        payloads = {}
        for silo, reply in replies.items():
            if not isinstance(reply, Counted):
                raise ProtocolError(f"silo '{silo}' did not say under masks how many rows it has")
            payloads[silo] = reply.payload.bits()
            self._relay(reply)
        n = count_rows(payloads)
        begin = messages.encode(Begin(self._session, n, 0, self._relayed))
        return n, {}, dict.fromkeys(self._active, begin)

    def _relay(self, reply: Counted | Answered) -> None:
        if self._plan.relays:
            self._relayed = (*self._relayed, SignedAnswer(reply.payload, reply.signature))

    def _collect(self, number: int, requests: Mapping[str, bytes]) -> dict[str, Bits]:
        """Return what each silo sent in a round."""
        payloads = {}
        replies = self._exchange(requests)
        self._relayed = ()
        for silo, reply in replies.items():
            if not isinstance(reply, Answered) or reply.round != number:
                raise ProtocolError(f"silo '{silo}' did not answer round {number}")
            payloads[silo] = reply.payload.bits()
            self._relay(reply)
        self._sent = {silo: bits.length for silo, bits in payloads.items()}
        return payloads

    def _pool(self, follower: Follower, payloads: Mapping[str, Bits], sizes: Mapping[str, int]) -> Bits:
        """Return the broadcast, and note how many bits each silo sent for which phase."""
        query = follower.query
        if self._plan.is_masked:
            self._shares = {silo: follower.masked_form.shares(bits) for silo, bits in payloads.items()}
            return follower.pool_masked(payloads)
        answers: dict[str, Any] = {}
        self._shares = {}
        for silo, bits in payloads.items():
            uplink = self._uplinks[silo]
            before = dict(uplink.memory)
            answers[silo] = uplink.decode(query.answer_code, bits)
            codes = [member.answer_code.after(before) for member in query.members]
            self._shares[silo] = _shares(query, codes, answers[silo], bits.length)
        broadcast = follower.pool(answers, {silo: sizes[silo] for silo in answers})
        self._retire(query, answers)
        return broadcast

    def _retire(self, query: Query, answers: Mapping[str, object]) -> None:
        for silo, answer in answers.items():
            retirement = query.retirement(answer)
            if retirement is not None and silo not in self._retired:
                self._retired[silo] = retirement.update

    def _retirements(self, outcome: Outcome) -> dict[str, int | None]:
        """Return tau_m of each silo of an open personalised run; under masks nobody but the silo knows."""
        if not isinstance(outcome, Personalised) or self._plan.is_masked:
            return {}
        return {silo: self._retired.get(silo) for silo in self._uplinks}

    def _book(
        self, query: Query, number: int, pooled: object, broadcast: Bits, retired: Sequence[str]
    ) -> None:
        down = dict.fromkeys(self._active, broadcast.length)
        codes, is_void = [member.pooled_code for member in query.members], pooled is VOID
        self._account.book(
            RoundBits(
                phase=query.phase,
                up=self._sent,
                down=down,
                up_shares=self._shares,
                down_shares={} if is_void else _shares(query, codes, pooled, broadcast.length),
            )
        )
        self._tolerance = self._tolerance if query.tolerance is None else query.tolerance
        if self._progress is not None:
            self._progress(
                RoundReport(
                    round=number,
                    phase=query.phase,
                    silos=len(self._active),
                    bits=self._account.bits(*Phase),
                    up=self._sent,
                    down=down,
                    retired=tuple(retired),
                    gradient_norm=None if is_void else query.residual(pooled),
                    tolerance=self._tolerance,
                    absent=self._absent,
                )
            )

    def _close(self, number: int, broadcast: Bits) -> None:
        closing = messages.encode(Close(self._session, number, _payload(broadcast), self._relayed))
        replies = self._exchange(dict.fromkeys(self._active, closing))
        closings = tuple(
            SignedDigest(silo, reply.digest, reply.signature)
            for silo, reply in replies.items()
            if isinstance(reply, Closed)
        )
        compare = messages.encode(Compare(self._session, closings))
        verdicts = self._exchange(dict.fromkeys(self._active, compare)).values()
        agree = all(isinstance(verdict, Compared) and verdict.agree for verdict in verdicts)
        if not agree or len(closings) != len(self._active):
            self._may_use = False
            raise ProtocolError("silos received different broadcasts; the run's result must not be used")

    def _exchange(self, requests: Mapping[str, bytes]) -> dict[str, messages.Reply]:
        """Return the reply of each silo; a refusal ends the run."""
        replies = self._replies(requests)
        for silo, reply in replies.items():
            if isinstance(reply, Refused):
                raise RefusedError(silo, reply.reason.value)
        return replies

    def _replies(self, requests: Mapping[str, bytes]) -> dict[str, messages.Reply]:
        if not requests:
            return {}
        raw = self._federation.exchange(requests)
        if set(raw) != set(requests):
            raise ProtocolError("the federation did not return one reply for each silo asked")
        self._transcript.exchanges.append(Exchange(dict(requests), dict(raw)))
        replies: dict[str, messages.Reply] = {}
        for silo, request in requests.items():
            self._account.bytes_down[silo] += len(request)
            self._account.bytes_up[silo] += len(raw[silo])
            replies[silo] = messages.decode_reply(raw[silo])
        return replies


def _lowered(silo: str, reply: messages.Reply) -> Sequence[LoweredLimit]:
    """Return the limits that the owner of a silo made laxer; the words are the silo's own."""
    limits = reply.lowered if isinstance(reply, Opened | Counted) else ()
    try:
        return [checked_limit(limit) for limit in limits]
    except InputError:
        raise ProtocolError(f"silo '{silo}' states a limit that is none of its policy's") from None


def _payload(bits: Bits) -> Payload:
    return Payload(bits.length, bits.data)


def _shares(query: Query, codes: Sequence[AbstractCode[Any]], payload: object, length: int) -> Shares:
    """Return the bits of a payload by the phase of the query that they belong to."""
    if len({member.phase for member in query.members}) == 1:
        return {query.phase: length}
    shares: Counter[Phase] = Counter()
    for member, code, part in zip(query.members, codes, query.split(payload), strict=True):
        shares[member.phase] += encode(code, part).length
    shares[query.phase] += length - shares.total()
    return shares


def _closing(query: Query, pooled: object) -> Sums | None:
    """Return the pooled closing sums, if the query asked for them."""
    for member, part in zip(query.members, query.split(pooled), strict=True):
        if member.phase is Phase.CLOSING and isinstance(part, Sums):
            return part
    return None


def run_embedded(
    plan: Plan,
    silos: Sequence[Silo],
    *,
    threads: int = 1,
    progress: Progress | None = None,
    absent: Mapping[str, str] | None = None,
) -> Finished:
    """Run a plan over silos in this process; a silo that cannot answer raises its own typed error.

    ``absent`` says why silos of the plan's roster are not among them, if the plan goes on without some.
    """
    paths = Paths()
    for silo in silos:
        silo.follow = paths.follow
    federation = InProcess(silos, threads=threads)
    try:
        return Session(plan, federation, progress=progress, absent=absent, follow=paths.follow).run()
    except RefusedError as refused:
        for silo in silos:
            if silo.name == refused.silo and silo.error is not None:
                if isinstance(silo.error, FedTMLEError):
                    silo.error.reached = refused.reached
                raise silo.error from None
        raise


def opened_silos(journal: Journal) -> tuple[str, ...] | None:
    """Return the silos that opened the run which a server's journal records; None if none did yet."""
    if len(journal.records) < 2:
        return None
    return tuple(_exchange_of(journal.records[1]).requests)


def _exchange_of(record: bytes) -> Exchange:
    try:
        return msgspec.msgpack.decode(record, type=Exchange)
    except (msgspec.MsgspecError, RecursionError):
        raise JournalError("the server's journal has a record that is no exchange") from None


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
        self._recorded = [_exchange_of(data) for data in journal.records[:0:-1]]

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
