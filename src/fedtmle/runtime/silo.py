"""A silo: bytes in, bytes out. It admits first and computes second.

It runs the same flow as the server on the broadcasts it receives, so it evaluates only states
that it derived itself. Repeating the last request returns the recorded bytes; anything else
out of order is refused.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.outcome import Flow, Outcome, Query
from fedtmle.errors import DataError, DecodeError, FedTMLEError, InputError
from fedtmle.model.exact import Sums
from fedtmle.model.problem import Estimate
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.model.types import IntArray
from fedtmle.protocol import messages
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.fits import FitQuery
from fedtmle.protocol.messages import (
    Answered,
    Ask,
    Begin,
    Close,
    Closed,
    Open,
    Opened,
    Payload,
    Reason,
    Refused,
)
from fedtmle.protocol.plan import plan_digest
from fedtmle.protocol.query import Link, Model, Problem


@dataclass(frozen=True, kw_only=True)
class LocalOutcome:
    """What a silo keeps for itself in a personalised run: its law, when it retired, its own estimate.

    ``gap_bound`` bounds the local targeting gap that a lattice retirement may leave.
    """

    law: Any
    retired_at: int | None
    estimate: Estimate
    n_rows: int
    gap_bound: float | None


def read_rows(problem: Problem, name: str, rows: object) -> Any:
    """Validated rows; an error names the silo."""
    try:
        return problem.read(rows)
    except DataError as error:
        raise error.at(name) from None


@dataclass(frozen=True)
class _PerLaw:
    """What a silo computes once per model and law."""

    model: Model
    law: Any
    submodel: AbstractSubmodel
    normaliser: AbstractNormaliser


class LocalRows:
    """A silo's rows behind the questions that a query may ask of them (`protocol.query.Local`)."""

    def __init__(self, name: str, rows: Any, n_rows: int, index: IntArray | None) -> None:
        self.name = name
        self.n_rows = n_rows
        self._rows = rows
        self._index = index
        self._cached: _PerLaw | None = None

    def place(self, first_row: int) -> None:
        """Where the rows stand in the pooled order, unless their owner numbered them."""
        if self._index is None:
            self._index = np.arange(first_row, first_row + self.n_rows)

    def submodel(self, model: Model, law: Any) -> AbstractSubmodel:
        return self._at(model, law).submodel

    def normaliser(self, model: Model, law: Any) -> AbstractNormaliser:
        return self._at(model, law).normaliser

    def moments(self, problem: Problem, law: Any) -> Sums:
        return problem.moments(law, self._rows)

    def estimate(self, problem: Problem, law: Any) -> Estimate:
        return problem.finish(law, self.moments(problem, law), self.n_rows)

    def evaluate(self, function: Callable[[Any], Any]) -> Any:
        self._cached = None  # what the last model needed is not needed now
        return function(self._rows)

    def batch(self, pooled: IntArray) -> IntArray:
        if self._index is None:
            raise AssertionError("rows are placed before the first query")
        order = np.argsort(self._index, kind="stable")
        mine = self._index[order]
        at = np.searchsorted(mine, pooled)
        found = mine[np.minimum(at, len(mine) - 1)] == pooled
        return np.asarray(order[at[found]], dtype=np.int64)

    def _at(self, model: Model, law: Any) -> _PerLaw:
        """Per-law work is done once: the same law object is asked many times in a row."""
        cached = self._cached
        if cached is None or cached.law is not law or cached.model is not model:
            self._cached = cached = None  # the old one goes before the new one is built
            cached = _PerLaw(model, law, model.submodel(law, self._rows), model.normaliser(law))
            self._cached = cached
        return cached


class _Stage(enum.Enum):
    NEW = enum.auto()
    OPENED = enum.auto()
    ANSWERING = enum.auto()
    RETIRED = enum.auto()
    CLOSED = enum.auto()


@dataclass
class _Progress:
    """The silo's position: its flow, the query it last answered, and its code memory."""

    session: bytes = b""
    round: int = 0
    flow: Flow | None = None
    query: Query | None = None
    link: Link = field(default_factory=Link)
    heard: Any = field(default_factory=hashlib.sha256)


class Silo:
    """One silo in one study: approves one plan, answers one session. ``rows`` are as `read_rows` gives."""

    def __init__(
        self,
        name: str,
        problem: Any,  # what the algorithm's flow is about: a problem, or a whole study
        law: Any,
        rows: Any,
        algorithm: AbstractAlgorithm,
        *,
        index: IntArray | None = None,
    ) -> None:
        self.name = name
        self.error: FedTMLEError | None = None  # why the last answer failed; stays at the silo
        self.local: LocalOutcome | None = None
        self._problem, self._law, self._algorithm = problem, law, algorithm
        if index is not None and len(index) != problem.count(rows):
            raise InputError(f"index: silo '{name}' needs one pooled row number per row")
        self._rows = LocalRows(name, rows, problem.count(rows), index)
        self._plan = plan_digest(problem, law, algorithm)
        self._stage = _Stage.NEW
        self._progress = _Progress()
        self._last: tuple[bytes, bytes] | None = None

    @property
    def n_rows(self) -> int:
        return self._rows.n_rows

    def step(self, request: bytes) -> bytes:
        """The reply to one request; the same request again gives the same bytes."""
        if self._last is not None and request == self._last[0]:
            return self._last[1]
        reply = messages.encode(self._reply(request))
        self._last = (request, reply)
        return reply

    def _reply(self, data: bytes) -> messages.Reply:
        try:
            request = messages.decode_request(data)
        except DecodeError:
            return Refused(Reason.MALFORMED)
        refusal = self._refusal(request)
        if refusal is not None:
            return Refused(refusal)
        try:
            return self._admitted(request)
        except DecodeError:
            return Refused(Reason.NOT_DERIVABLE)
        except FedTMLEError as error:
            self.error = error.at(self.name) if isinstance(error, DataError) else error
            return Refused(Reason.CANNOT_ANSWER)

    def _refusal(self, request: messages.Request) -> Reason | None:
        """Why this request may not be answered now, or None: nothing is computed here."""
        progress = self._progress
        if isinstance(request, Open):
            if self._stage is not _Stage.NEW:
                return Reason.OUT_OF_ORDER
            if request.format != messages.WIRE_FORMAT:
                return Reason.OTHER_FORMAT
            return None if request.plan == self._plan else Reason.OTHER_PLAN
        if request.session != progress.session or self._stage is _Stage.NEW:
            return Reason.OUT_OF_ORDER
        if isinstance(request, Begin):
            fits = request.first_row >= 0 and request.first_row + self.n_rows <= request.n
            return None if self._stage is _Stage.OPENED and fits else Reason.OUT_OF_ORDER
        expected = request.round == progress.round + 1
        return None if self._stage is _Stage.ANSWERING and expected else Reason.OUT_OF_ORDER

    def _admitted(self, request: messages.Request) -> messages.Reply:
        progress = self._progress
        if isinstance(request, Open):
            progress.session = request.session
            self._stage = _Stage.OPENED
            return Opened(self.n_rows)
        if isinstance(request, Begin):
            self._rows.place(request.first_row)
            progress.flow = self._algorithm.flow(self._problem, self._law, request.n)
            progress.round = 1
            self._stage = _Stage.ANSWERING
            return self._answer(next(progress.flow))
        if progress.flow is None or progress.query is None:
            raise AssertionError("a silo that is answering has a flow and a query")
        progress.heard.update(messages.encode(request))
        reader = BitReader(request.pooled.bits())
        pooled = progress.query.read_pooled(reader)
        reader.finish()
        progress.round = request.round
        try:
            query = progress.flow.send(pooled)
        except StopIteration as stop:
            return self._close(request, stop.value)
        if isinstance(request, Close):
            raise DecodeError("the run was closed before its flow ended")
        return self._answer(query)

    def _answer(self, query: Query) -> Answered:
        progress = self._progress
        progress.query = query
        answer = query.answer(self._rows)
        out = BitWriter()
        query.write_answer(answer, out, progress.link)
        if query.retires(answer) and isinstance(query, FitQuery):
            self._keep(query.problem, query.law, query.update, query.gap_bound(self._rows))
            self._stage = _Stage.RETIRED
        bits = out.finish()
        return Answered(progress.round, Payload(bits.length, bits.data))

    def _close(self, request: Ask | Close, outcome: Outcome) -> Closed:
        if isinstance(request, Ask):
            raise DecodeError("the flow ended, yet an answer was asked")
        if outcome.estimate is None:  # Personalized: unfinished, so it keeps the shared law
            self._keep(outcome.problem or self._problem, outcome.law, None, None)
        self._stage = _Stage.CLOSED
        return Closed(self._progress.heard.digest())

    def _keep(self, problem: Problem, law: Any, retired_at: int | None, gap_bound: float | None) -> None:
        self.local = LocalOutcome(
            law=law,
            retired_at=retired_at,
            estimate=self._rows.estimate(problem, law),
            n_rows=self.n_rows,
            gap_bound=gap_bound,
        )
