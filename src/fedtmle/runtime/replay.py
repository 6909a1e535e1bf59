"""Follow a recorded run again: the answers that the server received, or one silo's queries and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fedtmle.errors import DecodeError, InputError, ProtocolError
from fedtmle.model.types import IntArray
from fedtmle.protocol import messages
from fedtmle.protocol.codes import Uplink
from fedtmle.protocol.guard import declined, left_out, suppressed
from fedtmle.protocol.masks import MaskKey
from fedtmle.protocol.messages import Answered, Ask, Begin, Close, Open
from fedtmle.protocol.plan import Follower, Plan
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.query import AnsweredQuery, Local, Query
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.masked_link import MaskedLink
from fedtmle.runtime.records import Position
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.session import run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.runtime.transcript import SELF, Transcript

_OTHER_ROWS = "silo '{}': its rows do not give the recorded answers"


@dataclass(frozen=True, kw_only=True)
class HeardRound:
    """One round at the server: the query, the decoded answers, and what was pooled.

    Under masks there are no answers of single silos.
    """

    query: Query
    answers: Mapping[str, Any]
    pooled: Any


def heard_rounds(plan: Plan, transcript: Transcript, sizes: Mapping[str, int | None]) -> Iterator[HeardRound]:
    """Follow a finished run again from its transcript, as the server did; the plan's silos are ``sizes``."""
    uplinks = {silo: Uplink() for silo in sizes}
    follower = Follower(plan, _pooled_rows(transcript))
    for exchange in transcript.exchanges:
        replies = {silo: messages.decode_reply(reply) for silo, reply in exchange.replies.items()}
        payloads = {s: reply.payload.bits() for s, reply in replies.items() if isinstance(reply, Answered)}
        if not payloads:  # the greeting, or the close
            continue
        query = follower.query
        if plan.is_masked:
            pooled = follower.hear(follower.pool_masked(payloads))
            yield HeardRound(query=query, answers={}, pooled=pooled)
            continue
        answers = {silo: uplinks[silo].decode(query.answer_code, bits) for silo, bits in payloads.items()}
        pooled = follower.hear(follower.pool(answers, {silo: sizes[silo] or 0 for silo in answers}))
        yield HeardRound(query=query, answers=answers, pooled=pooled)


def _pooled_rows(transcript: Transcript) -> int:
    """Return n, as the request of the first round says it."""
    requests = (messages.decode_request(data) for e in transcript.exchanges for data in e.requests.values())
    n = next((request.n for request in requests if isinstance(request, Begin)), None)
    if n is None:
        raise DecodeError("transcript: it has no first round")
    return n


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The queries in order, the silo's answers, and its rows as queries see them."""

    answered: tuple[AnsweredQuery, ...]
    local: LocalRows
    n: int  # rows over all silos


def replay(
    plan: Plan,
    rows: object,
    transcript: Transcript,
    silo: str,
    *,
    index: IntArray | None = None,
    policy: Policy | None = None,
    mask_key: MaskKey | None = None,
) -> Replayed:
    """Derive each query from the recorded broadcasts, as the silo did, and compute its answer again.

    Rows, or a study, that do not give the recorded answers are refused. The plan's digest is not compared:
    keys and dates in it change no answer. Masked answers are compared with the silo's ``mask_key`` only.
    """
    try:
        plan = _joined(plan, transcript, silo)
        read = plan.program.at(silo, rows)
        local = LocalRows(silo, read, plan.program.count(read), index)
        masks = _Masks(plan, silo, mask_key)
        answered, n = _follow(plan, transcript, silo, local, policy or UNGUARDED, masks)
    except ProtocolError:
        raise InputError("transcript: it does not follow from this study; was the study changed?") from None
    return Replayed(answered=answered, local=local, n=n)


def overhear(plan: Plan, transcript: Transcript, silo: str) -> tuple[AnsweredQuery, ...]:
    """Return the queries and one silo's answers, read from the transcript alone, as the server can."""
    joined = _joined(plan, transcript, silo)
    return _follow(joined, transcript, silo, None, UNGUARDED, _Masks(joined, silo))[0]


def _joined(plan: Plan, transcript: Transcript, silo: str) -> Plan:
    """Return the plan of the silos that took part in the recorded run."""
    absent = [request.absent for request, _ in _exchanges(transcript, silo) if isinstance(request, Begin)]
    if not absent or not plan.may_lack(absent[0]):
        return plan
    return plan.without(absent[0])


def rehearse(plan: Plan, rows: object, silo: str, *, policy: Policy | None = None) -> Replayed:
    """Return the queries that the plan would ask if this silo were the only one; nothing is sent."""
    alone = plan.alone(silo)
    keeper = Keeper() if policy is None else Keeper(policy=policy)
    finished = run_embedded(alone, [Silo(silo, alone, rows, keeper=keeper)])
    return replay(alone, rows, finished.transcript, silo, policy=policy)


class _Masks:
    """The masks of a recorded session, made again with the silo's key; without it, nothing is compared."""

    def __init__(self, plan: Plan, silo: str, mask_key: MaskKey | None = None) -> None:
        self._plan, self._position = plan, Position()
        self._link: MaskedLink | None = None
        if mask_key is not None and plan.is_masked:
            self._link = MaskedLink(plan, silo, self._position, mask_key=mask_key, key=None)

    def hear(self, request: messages.Request) -> None:
        """Hear a request as the silo did."""
        position = self._position
        if isinstance(request, Open):
            position.session = request.session
            if self._link is not None and request.plan != self._plan.digest:
                raise InputError("transcript: it is of another plan, so that its masks cannot be made again")
        elif isinstance(request, Begin):
            position.n = request.n
            position.heard.update(messages.encode(msgspec.structs.replace(request, first_row=0)))
        elif isinstance(request, Ask | Close):
            position.heard.update(messages.encode(request))

    def compare(self, follower: Follower, answer: object, local: LocalRows, reply: Answered) -> None:
        """Raise unless ``answer`` under its masks is what was sent; noise cannot be drawn again."""
        self._position.follower = follower
        if self._link is not None and follower.query.noise is None:
            again = self._link.answered(follower.masked_form, answer, local.n_rows)
            if again.payload != reply.payload:
                raise InputError(_OTHER_ROWS.format(local.name))


def _follow(
    plan: Plan,
    transcript: Transcript,
    silo: str,
    local: LocalRows | None,
    policy: Policy,
    masks: _Masks,
) -> tuple[tuple[AnsweredQuery, ...], int]:
    """Return one silo's answers, and n; if ``local`` rows are given, the answers must be theirs.

    Masked answers are computed from the rows again, and compared if the silo's ``masks`` can be made. Without
    rows there are none: nobody else can read them.
    """
    follower: Follower | None = None
    n, answered, answers = 0, [], _Answers(plan, local, policy, masks)
    for request, reply in _exchanges(transcript, silo):
        masks.hear(request)
        if isinstance(request, Begin):
            if local is not None:
                local.place(plan.first_row(silo, request.first_row))
            n, follower = request.n, Follower(plan, request.n)
        elif isinstance(request, Ask | Close):
            if follower is None:
                raise DecodeError("transcript: a round comes before the first")
            follower.hear(request.pooled.bits())
            if follower.outcome is not None:
                break
        if isinstance(reply, Answered):
            if follower is None:
                raise DecodeError("transcript: an answer comes before its question")
            answered += answers.read(follower, reply)
    return tuple(answered), n


class _Answers:
    """Reads the answers of one silo in their order, and compares them with its rows."""

    def __init__(self, plan: Plan, local: LocalRows | None, policy: Policy, masks: _Masks) -> None:
        self._is_masked = plan.is_masked
        self._local, self._policy, self._masks = local, policy, masks
        self._uplink, self._has_retired = Uplink(), False

    def read(self, follower: Follower, reply: Answered) -> list[AnsweredQuery]:
        """Return the answer of a round; none if nobody can read it.

        There is none of a silo that has retired either: it is the same for all rows, and discloses nothing.
        """
        query = follower.query
        retired = query.retired_answer() if self._has_retired else None
        if not self._is_masked:
            answer = self._open(query, retired, reply)
        elif self._local is None:
            return []
        else:
            answer = _released(query, self._local, self._policy) if retired is None else retired
            self._masks.compare(follower, answer, self._local, reply)
        self._has_retired = self._has_retired or query.retirement(answer) is not None
        return [AnsweredQuery(query=query, answer=answer)] if retired is None else []

    def _open(self, query: Query, retired: object | None, reply: Answered) -> object:
        bits, before = reply.payload.bits(), replace(self._uplink)
        answer = self._uplink.decode(query.answer_code, bits)  # first: another study's cannot be decoded
        if self._local is not None:
            rest = declined(query, answer)
            again = _released(query, self._local, self._policy, rest) if retired is None else retired
            if before.encode(query.answer_code, again) != bits:
                raise InputError(_OTHER_ROWS.format(self._local.name))
        return answer


def _released(query: Query, local: Local, policy: Policy, declined: frozenset[int] = frozenset()) -> object:
    """Return the answer to a query as it leaves a silo under ``policy``, without the members ``declined``."""
    return suppressed(query, query.answer(local), policy, left_out(query, local, policy) | declined)


def _exchanges(transcript: Transcript, silo: str) -> Iterator[tuple[messages.Request, messages.Reply]]:
    # A transcript made from a silo's own ledger has no name for it.
    key = silo if any(silo in exchange.requests for exchange in transcript.exchanges) else SELF
    exchanges = [exchange for exchange in transcript.exchanges if key in exchange.requests]
    if not exchanges:
        raise InputError(f"transcript: it holds no message to silo '{silo}'")
    for exchange in exchanges:
        yield messages.decode_request(exchange.requests[key]), messages.decode_reply(exchange.replies[key])
