"""Where a silo stands in its session."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass, field
from typing import Any

from fedtmle.algorithms.outcome import Flow, Query
from fedtmle.protocol.query import Link
from fedtmle.protocol.state import State


@dataclass
class Position:
    """The silo's flow, the query it last answered, its code memory and what it has heard and told."""

    state: State = State.NEW
    session: bytes = b""
    since: datetime.datetime | None = None  # when the session was opened
    round: int = 0
    flow: Flow | None = None
    query: Query | None = None
    link: Link = field(default_factory=Link)
    heard: Any = field(default_factory=hashlib.sha256)
    all_close: bool = True  # whether every silo of the roster is in the run to its end
    bits: int = 0
    strays: int = 0
