"""The silo's state machine: one table of transitions, which decides.

A request that the table does not list for the silo's state is refused and changes nothing; repeating the
last admitted request returns the recorded bytes. An admitted request leads to the state that the table
gives for what came of it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from fedtmle.protocol.messages import Ask, Begin, Close, Compare, Open, Request


class State(enum.StrEnum):
    """Where a silo stands in its one session."""

    NEW = "new"
    OPENED = "opened"
    ANSWERING = "answering"
    RETIRED = "retired"
    CLOSED = "closed"
    COMPARED = "compared"
    REFUSED = "refused"


class Event(enum.StrEnum):
    """What came of an admitted request."""

    REPLIED = "replied"
    RETIRED = "retired"  # the reply was the silo's last: its own targeting is complete
    REFUSED = "refused"  # by policy, or because the reply could not be computed


@dataclass(frozen=True)
class Transition:
    """In ``state`` the silo admits ``request`` and replies with ``reply``, or refuses."""

    state: State
    request: type[Request]
    reply: str
    leads_to: Mapping[Event, State]


_ANSWERED = {
    Event.REPLIED: State.ANSWERING,
    Event.RETIRED: State.RETIRED,
    Event.REFUSED: State.REFUSED,
}

TABLE = (
    Transition(
        State.NEW,
        Open,
        "its number of rows",
        # Nothing was disclosed yet, and the owner may still approve: a refusal leaves the silo as it was.
        {Event.REPLIED: State.OPENED, Event.REFUSED: State.NEW},
    ),
    Transition(State.OPENED, Begin, "the answer of round 1", _ANSWERED),
    Transition(State.ANSWERING, Ask, "the answer of the next round", _ANSWERED),
    Transition(
        State.ANSWERING,
        Close,
        "the digest of what it heard",
        {Event.REPLIED: State.CLOSED, Event.REFUSED: State.REFUSED},
    ),
    Transition(
        State.CLOSED,
        Compare,
        "whether all heard the same",
        {Event.REPLIED: State.COMPARED, Event.REFUSED: State.REFUSED},
    ),
)

EXHAUSTED = State.REFUSED  # where too many requests out of order lead, from any state

_ADMITTED = {(t.state, t.request): t for t in TABLE}


def transition(state: State, request: Request) -> Transition | None:
    """Return the table's line for a request in a state, or None if the request is out of order."""
    return _ADMITTED.get((state, type(request)))


def diagram() -> str:
    """Return the table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.NEW}"]
    for t in TABLE:
        kind = t.request.__name__.lower()
        lines += [
            f"    {t.state} --> {state}: {'policy says no' if event is Event.REFUSED else kind}"
            for event, state in t.leads_to.items()
        ]
    ends = [state for state in State if all(t.state is not state for t in TABLE)]
    return "\n".join([*lines, *(f"    {state} --> [*]" for state in ends)]) + "\n"
