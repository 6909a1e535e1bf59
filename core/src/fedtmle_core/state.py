"""The table of states: which request a core hears when, and what it may say then.

Nothing else decides the order of a run. What the table does not list is refused and changes nothing. A
request is heard in one step and answered in another, because the next question comes from the hospital's
program in between: a core that crashes there has said nothing yet, and hears the request again.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

from fedtmle_core.messages import (
    Answered,
    Ask,
    Close,
    Closed,
    Finished,
    Keys,
    Open,
    Opened,
    Refused,
    Reply,
    Request,
    Settle,
    Settled,
)


class State(enum.StrEnum):
    """Where a core stands in its one run."""

    NEW = "new"
    OPENING = "has heard of the run"
    OPENED = "opened"
    SETTLING = "has heard the roster"
    SETTLED = "settled"
    ASKED = "has read totals"
    ANSWERED = "answered"
    FINISHED = "has a result"
    CLOSING = "has heard the other results"
    CLOSED = "closed"
    ENDED = "ended with a refusal"


Message: TypeAlias = Request | Reply

TABLE: dict[tuple[State, type[Message]], State] = {
    (State.NEW, Open): State.OPENING,
    (State.OPENING, Opened): State.OPENED,
    (State.OPENED, Settle): State.SETTLING,
    (State.SETTLING, Settled): State.SETTLED,
    (State.SETTLED, Keys): State.ASKED,
    (State.ASKED, Answered): State.ANSWERED,
    (State.ASKED, Finished): State.FINISHED,
    (State.ASKED, Refused): State.ENDED,
    (State.ANSWERED, Ask): State.ASKED,
    (State.FINISHED, Close): State.CLOSING,
    (State.CLOSING, Closed): State.CLOSED,
    (State.CLOSING, Refused): State.ENDED,
}


def after(state: State, message: Message) -> State | None:
    """Return the state that a message leads to, None if it is out of order."""
    return TABLE.get((state, type(message)))
