"""A silo's own part of a transcript, replayed at the silo: which queries it answered, and what it said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.outcome import Flow, Query
from fedtmle.errors import DecodeError, InputError
from fedtmle.model.types import IntArray
from fedtmle.privacy.answers import Answered as AnsweredQuery
from fedtmle.protocol import messages
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.messages import Answered, Ask, Begin, Close, Open
from fedtmle.protocol.plan import plan_digest
from fedtmle.protocol.query import Link
from fedtmle.runtime.embedded import run_embedded
from fedtmle.runtime.silo import LocalRows, Silo
from fedtmle.runtime.transcript import Transcript


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
    problem: Any,
    law: Any,
    algorithm: AbstractAlgorithm,
    rows: Any,
    transcript: Transcript,
    silo: str,
    *,
    index: IntArray | None = None,
) -> Replayed:
    """Derives each query from the recorded broadcasts, as the silo did, and computes its answer again.

    Refuses a transcript of another plan, and rows that are not those that gave the recorded answers.
    """
    local = LocalRows(silo, rows, problem.count(rows), index)
    state = _follow(problem, law, algorithm, transcript, silo, local)
    return Replayed(answered=tuple(state.found), local=local, n=state.n)


def overhear(
    problem: Any, law: Any, algorithm: AbstractAlgorithm, transcript: Transcript, silo: str
) -> tuple[AnsweredQuery, ...]:
    """What the server has of one silo: the queries and its answers, from the transcript alone."""
    return tuple(_follow(problem, law, algorithm, transcript, silo, None).found)


def _follow(
    problem: Any,
    law: Any,
    algorithm: AbstractAlgorithm,
    transcript: Transcript,
    silo: str,
    local: LocalRows | None,
) -> _State:
    state = _State()
    plan = plan_digest(problem, law, algorithm)
    seen = [exchange for exchange in transcript.exchanges if silo in exchange.requests]
    if not seen:
        raise InputError(f"transcript: it holds no message to silo '{silo}'")
    for exchange in seen:
        request = messages.decode_request(exchange.requests[silo])
        reply = messages.decode_reply(exchange.replies[silo])
        if isinstance(request, Open):
            if request.plan != plan:
                raise InputError("transcript: it belongs to another study, or to another version of this one")
            continue
        if isinstance(request, Begin):
            if local is not None:
                local.place(request.first_row)
            state.n = request.n
            state.flow = algorithm.flow(problem, law, request.n)
            state.query = next(state.flow)
        elif not _advance(state, request):
            break
        if isinstance(reply, Answered):
            _check(state, reply, local)
    return state


def rehearse(problem: Any, law: Any, algorithm: AbstractAlgorithm, rows: Any, silo: str) -> Replayed:
    """The queries that the plan would ask if this silo were the only one: its own run, nothing sent."""
    party = Silo(silo, problem, law, rows, algorithm)
    finished = run_embedded(problem, law, algorithm, [party], threads=1, progress=None)
    return replay(problem, law, algorithm, rows, finished.transcript, silo)


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
