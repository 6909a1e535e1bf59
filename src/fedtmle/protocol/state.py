"""The silo's state machine: a transition table as data.

A request that the table does not list for the silo's state is refused and changes nothing;
repeating the last admitted request returns the recorded bytes.
"""

from __future__ import annotations

import enum
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


@dataclass(frozen=True)
class Transition:
    """In ``state``, ``request`` is admitted; it may lead to any of ``leads_to``."""

    state: State
    request: type[Request]
    says: str
    leads_to: tuple[State, ...]


TABLE = (
    Transition(State.NEW, Open, "its number of rows", (State.OPENED,)),
    Transition(State.OPENED, Begin, "the answer of round 1", (State.ANSWERING, State.RETIRED, State.REFUSED)),
    Transition(
        State.ANSWERING, Ask, "the answer of the next round", (State.ANSWERING, State.RETIRED, State.REFUSED)
    ),
    Transition(State.ANSWERING, Close, "the digest of what it heard", (State.CLOSED, State.REFUSED)),
    Transition(State.CLOSED, Compare, "whether all heard the same", (State.COMPARED,)),
)

_ADMITTED = {(t.state, t.request): t for t in TABLE}


def transition(state: State, request: Request) -> Transition | None:
    """The table's line for a request in a state, or None: the request is out of order."""
    return _ADMITTED.get((state, type(request)))


def diagram() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.NEW}"]
    for t in TABLE:
        kind = t.request.__name__.lower()
        lines += [
            f"    {t.state} --> {state}: {kind if state is not State.REFUSED else 'policy says no'}"
            for state in t.leads_to
        ]
    ends = [state for state in State if all(t.state is not state for t in TABLE)]
    return "\n".join([*lines, *(f"    {state} --> [*]" for state in ends)]) + "\n"
