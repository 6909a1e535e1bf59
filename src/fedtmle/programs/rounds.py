"""Flows that share their rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from fedtmle.errors import FedTMLEError
from fedtmle.protocol.query import Flow, JointQuery, Law, MomentsQuery, Phase, Query

Result = TypeVar("Result")
Rider = TypeVar("Rider")


def ask(query: Query) -> Flow[Any]:
    """Return what one query pools, as a flow."""
    return (yield query)


def together(flows: Sequence[Flow[Result]]) -> Flow[list[Result]]:
    """Return the results of flows that run side by side: each round carries one query of each flow."""
    results: dict[int, Result] = {}
    waiting: dict[int, Query] = {}
    replies: dict[int, object] = dict.fromkeys(range(len(flows)))  # a fresh flow is started by sending None
    while True:
        for k, reply in replies.items():
            try:
                waiting[k] = flows[k].send(reply)
            except StopIteration as stop:
                results[k] = stop.value
        if not waiting:
            return [results[k] for k in range(len(flows))]
        if len(waiting) == 1:
            ((k, query),) = waiting.items()
            replies = {k: (yield query)}
        else:
            pooled = yield JointQuery(tuple(waiting.values()))
            replies = dict(zip(waiting, pooled, strict=True))
        waiting = {}


def both(first: Flow[Result], second: Flow[Rider]) -> Flow[tuple[Result, Rider]]:
    """Return the results of two flows that run side by side, as `together` does for flows of one type."""
    flows: list[Flow[Result | Rider]] = [first, second]
    one, other = yield from together(flows)
    return cast("Result", one), cast("Rider", other)


def attempted(flow: Flow[Result]) -> Flow[Result | FedTMLEError]:
    """Return the flow's result, or the error that ended it: the same at all parties, from pooled numbers."""
    try:
        return (yield from flow)
    except FedTMLEError as error:
        return error


def with_closing(
    flow: Flow[Result], rider: Callable[[Law], Flow[Rider]]
) -> Flow[tuple[Result, Rider | None]]:
    """Return a flow's result, and that of another flow whose first query rides along with the closing sums.

    ``rider`` gives the other flow, at the law of the closing sums. If closing sums are asked more than once,
    the last of these flows counts.
    """
    riding: Flow[Rider] | None = None
    own: Rider | None = None
    pooled: object = None
    reply: object = None
    while True:
        try:
            query = flow.send(pooled)
        except StopIteration as stop:
            result: Result = stop.value
            break
        closing = [
            member
            for member in query.members
            if isinstance(member, MomentsQuery) and member.phase is Phase.CLOSING
        ]
        if not closing:
            pooled = yield query
            continue
        riding = rider(closing[-1].law)
        try:
            first = next(riding)
        except StopIteration as stop:
            riding, own = None, stop.value
            pooled = yield query
        else:
            pooled, reply = yield JointQuery((query, first))
    if riding is not None:
        while True:
            try:
                query = riding.send(reply)
            except StopIteration as stop:
                own = stop.value
                break
            reply = yield query
    return result, own
