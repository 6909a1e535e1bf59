"""The one loop of a run: derive the query, hear what was pooled, go on.

The server, every silo, a replay and an audit each hold a `Follower` of the same plan. Given the same
broadcasts they hold the same query at every round, so no query is ever sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fedtmle.errors import DecodeError
from fedtmle.protocol.codes import Bits, decode, encode
from fedtmle.protocol.outcome import Outcome
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.query import Flow, Local, Query

Result = TypeVar("Result")


class Follower:
    """A plan's flow over n pooled rows, at the round that it has reached."""

    def __init__(self, plan: Plan, n: int) -> None:
        self._flow = plan.program.flow(n)
        self._query: Query | None = next(self._flow)
        self._outcome: Outcome | None = None
        self.round = 1

    @property
    def query(self) -> Query:
        """The query of this round."""
        if self._query is None:
            raise DecodeError("the run has ended, yet an answer is expected")
        return self._query

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None while it goes on."""
        return self._outcome

    def pool(self, answers: Mapping[str, object], sizes: Mapping[str, int]) -> Bits:
        """Return this round's broadcast: the server's part."""
        return encode(self.query.pooled_code, self.query.pool(answers, sizes))

    def hear(self, broadcast: Bits) -> object:
        """Go on to the next round; return what was pooled in this one.

        The server too goes on from what it sent, decoded as the silos decode it.
        """
        pooled = decode(self.query.pooled_code, broadcast)
        self.round += 1
        try:
            self._query = self._flow.send(pooled)
        except StopIteration as stop:
            self._query, self._outcome = None, stop.value
        return pooled


def follow_alone(flow: Flow[Result], local: Local) -> Result:
    """Return the result of a flow whose only party is one silo: nothing is sent."""
    pooled: object = None
    while True:
        try:
            query = flow.send(pooled)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # mypy does not follow a generator's result
        pooled = query.pool({local.name: query.answer(local)}, {local.name: local.n_rows})
