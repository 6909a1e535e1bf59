"""A silo's own part of a transcript, replayed at the silo: which queries it answered, and what it said."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fedtmle.algorithms.outcome import Flow, Query
from fedtmle.errors import DecodeError, InputError, ProtocolError
from fedtmle.model.types import IntArray
from fedtmle.privacy.answers import Answered as AnsweredQuery
from fedtmle.protocol import messages
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.messages import Answered, Ask, Begin, Close
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import Link
from fedtmle.runtime.embedded import run_embedded
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.silo import Silo
from fedtmle.runtime.transcript import Transcript

OWN = "self"  # the silo's name in a transcript that `transcript.of_ledger` made


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The queries in order, the silo's answers, and its rows as queries see them."""

    answered: tuple[AnsweredQuery, ...]
    local: LocalRows
    n: int  # rows over all silos


@dataclass
class _State:
    flow: Flow | None = None
    query: Query | None = None
    n: int = 0
    link: Link = field(default_factory=Link)
    own_link: Link = field(default_factory=Link)
    found: list[AnsweredQuery] = field(default_factory=list)


def replay(
    plan: Plan,
    rows: Any,
    transcript: Transcript,
    silo: str,
    *,
    index: IntArray | None = None,
    policy: Policy | None = None,
) -> Replayed:
    """Derives each query from the recorded broadcasts, as the silo did, and computes its answer again.

    Refuses rows, or a study, that do not give the recorded answers. The plan's digest is not compared: keys
    and dates in it change no answer.
    """
    local = LocalRows(silo, rows, plan.subject.count(rows), index, policy)
    try:
        state = _follow(plan, transcript, silo, local)
    except ProtocolError:
        raise InputError("transcript: it does not follow from this study as it stands") from None
    return Replayed(answered=tuple(state.found), local=local, n=state.n)


def overhear(plan: Plan, transcript: Transcript, silo: str) -> tuple[AnsweredQuery, ...]:
    """What the server has of one silo: the queries and its answers, from the transcript alone."""
    return tuple(_follow(plan, transcript, silo, None).found)


def rehearse(plan: Plan, rows: Any, silo: str, *, policy: Policy | None = None) -> Replayed:
    """The queries that the plan would ask if this silo were the only one: its own run, nothing sent."""
    alone = replace(plan, roster=roster([silo]))
    keeper = Keeper() if policy is None else Keeper(policy=policy)
    finished = run_embedded(alone, [Silo(silo, alone, rows, keeper=keeper)], threads=1, progress=None)
    return replay(alone, rows, finished.transcript, silo, policy=policy)


def _follow(plan: Plan, transcript: Transcript, silo: str, local: LocalRows | None) -> _State:
    state = _State()
    # A transcript made of a silo's own ledger has no name for it but "self".
    named = any(silo in exchange.requests for exchange in transcript.exchanges)
    key = silo if named else OWN
    seen = [exchange for exchange in transcript.exchanges if key in exchange.requests]
    if not seen:
        raise InputError(f"transcript: it holds no message to silo '{silo}'")
    for exchange in seen:
        request = messages.decode_request(exchange.requests[key])
        reply = messages.decode_reply(exchange.replies[key])
        if isinstance(request, Begin):
            if local is not None:
                local.place(request.first_row)
            state.n = request.n
            state.flow = plan.algorithm.flow(plan.subject, plan.law, request.n)
            state.query = next(state.flow)
        elif isinstance(request, Ask | Close):
            if not _advance(state, request):
                break
        else:
            continue
        if isinstance(reply, Answered):
            _check(state, reply, local)
    return state


def _advance(state: _State, request: Ask | Close) -> bool:
    """The next query; False where the flow has ended."""
    if state.flow is None or state.query is None:
        raise DecodeError("transcript: a round comes before the first")
    reader = BitReader(request.pooled.bits())
    pooled = state.query.read_pooled(reader)
    reader.finish()
    try:
        state.query = state.flow.send(pooled)
    except StopIteration:
        return False
    return True


def _check(state: _State, reply: Answered, local: LocalRows | None) -> None:
    query = state.query
    if query is None:
        raise DecodeError("transcript: an answer comes before its question")
    reader = BitReader(reply.payload.bits())
    answer = query.read_answer(reader, state.link)
    reader.finish()
    if local is not None:
        out = BitWriter()
        query.write_answer(query.answer(local), out, state.own_link)
        if out.finish() != reply.payload.bits():
            raise InputError(f"silo '{local.name}': its rows are not those that gave the recorded answers")
    state.found.append(AnsweredQuery(query=query, answer=answer))
