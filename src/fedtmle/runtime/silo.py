"""A silo: bytes in, bytes out. It admits first and computes second.

It runs the same flow as the server on the broadcasts it receives, so it evaluates only states
that it derived itself. Repeating the last admitted request returns the recorded bytes; anything
else out of order is refused and changes nothing (`protocol.state`). A refusal by policy, or an
answer that could not be computed, ends the silo's part.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from fedtmle.algorithms.outcome import Outcome, Query
from fedtmle.errors import DataError, DecodeError, InputError, JournalError
from fedtmle.model.problem import Estimate
from fedtmle.model.types import IntArray
from fedtmle.protocol import messages
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.fits import FitQuery
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.messages import (
    Answered,
    Ask,
    Begin,
    Close,
    Closed,
    Compare,
    Compared,
    Open,
    Opened,
    Payload,
    Reason,
    Refused,
)
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.query import Problem
from fedtmle.protocol.state import State, transition
from fedtmle.runtime.closing import all_heard_the_same, closing_statement
from fedtmle.runtime.fingerprint import fingerprint
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.position import Position
from fedtmle.runtime.records import Records
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.signing import SigningKey


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


class Silo:
    """One silo in one study: one plan, one session. ``rows`` are as `read_rows` gives."""

    def __init__(
        self, name: str, plan: Plan, rows: Any, *, index: IntArray | None = None, keeper: Keeper | None = None
    ) -> None:
        if name not in plan.silos:
            raise InputError(f"silo '{name}' is not in the plan's roster")
        self.name = str(name)  # a numpy string has no canonical form
        self.error: Exception | None = None  # why the last answer failed; stays at the silo
        self.refused_by = ""  # the key of the policy that said no; stays at the silo
        self.local: LocalOutcome | None = None
        self.disagreement = False  # whether silos were told different things
        self._plan = plan
        self._keeper = keeper or Keeper()
        count = plan.subject.count(rows)
        if index is not None and len(index) != count:
            raise InputError(f"index: silo '{name}' needs one pooled row number per row")
        self._rows = LocalRows(name, rows, count, index, self._keeper.policy)
        self._guard = Guard(self._keeper.policy)
        self._meter = None if self._keeper.floor is None else self._keeper.floor.meter()
        self._key = self._signing_key()
        self._position = Position()
        self._records = Records(self.name, self._keeper, self._position, self._guard)
        if self._keeper.journal is not None:
            self._records.resume(fingerprint(plan.digest, name, rows), self._follow)

    def _signing_key(self) -> SigningKey | None:
        """The key that the roster expects this silo to sign with, if it expects one."""
        (expected,) = (member.key for member in self._plan.roster if member.name == self.name)
        key = self._keeper.key
        if expected and (key is None or key.public != expected):
            raise InputError(f"silo '{self.name}': the plan's roster has another key for it")
        return key if expected else None

    @property
    def n_rows(self) -> int:
        return self._rows.n_rows

    @property
    def state(self) -> State:
        return self._position.state

    def step(self, request: bytes) -> bytes:
        """The reply to one request; the same request again gives the same bytes."""
        try:
            return self._step(request)
        except JournalError as error:
            self.error = error
            return messages.encode(Refused(Reason.CANNOT_RECORD))

    def _step(self, request: bytes) -> bytes:
        last = self._records.last
        if last is not None and request == last[0]:
            self._records.note(request, last[1], decision="repeated")
            return last[1]
        if self._records.broken:
            return messages.encode(Refused(Reason.CANNOT_RECORD))
        try:
            message = messages.decode_request(request)
        except DecodeError:
            return self._stray(request, None, Reason.MALFORMED)
        reason = self._out_of_order(message)
        if reason is not None:
            return self._stray(request, message, reason)
        return self._admitted(request, message)

    # Order: nothing is computed here, and a request that does not fit changes nothing.

    def _out_of_order(self, message: messages.Request) -> Reason | None:
        position = self._position
        if transition(position.state, message) is None:
            return Reason.OUT_OF_ORDER
        if isinstance(message, Open):
            if message.format != messages.WIRE_FORMAT:
                return Reason.OTHER_FORMAT
            return None if message.plan == self._plan.digest else Reason.OTHER_PLAN
        fits = message.session == position.session
        if isinstance(message, Begin):
            fits = fits and message.first_row >= 0 and message.first_row + self.n_rows <= message.n
        elif isinstance(message, Ask | Close):
            fits = fits and message.round == position.round + 1
        return None if fits else Reason.OUT_OF_ORDER

    def _stray(
        self, request: bytes, message: messages.Request | None, reason: Reason, key: str = ""
    ) -> bytes:
        self._position.strays += 1
        beyond = self._position.strays - self._keeper.policy.max_refusals
        if beyond > 0:
            self._position.state = State.REFUSED
            reason, key = Reason.OUT_OF_ORDER, "max_refusals"
        reply = messages.encode(Refused(reason))
        if beyond <= 1:  # a flood must not fill the disk
            self._records.note(request, reply, message=message, decision="refused", reason=reason, key=key)
        return reply

    # Admitted: computed, journalled, then told.

    def _admitted(self, request: bytes, message: messages.Request) -> bytes:
        key, reason = "", None
        time = self._keeper.clock()
        try:
            self._standing(message, time)
            reply = self._reply(message)
        except RefusalError as refusal:
            reason, key = refusal.reason, refusal.key
            self.refused_by = key
        except DecodeError:
            reason = Reason.NOT_DERIVABLE
        except Exception as error:
            self.error = error.at(self.name) if isinstance(error, DataError) else error
            reason = Reason.CANNOT_ANSWER
        if reason is not None:
            if self._position.state is State.NEW:  # nothing was said yet: the owner may still approve
                return self._stray(request, message, reason, key)
            reply = Refused(reason)
            self._position.state = State.REFUSED
        data = messages.encode(reply)
        self._records.keep(time, request, data, message, reason, key)
        return data

    def _standing(self, message: messages.Request, time: datetime.datetime) -> None:
        """Whether the owner still allows this study at all."""
        if isinstance(message, Close | Compare):
            return  # these ask nothing
        keeper, plan = self._keeper, self._plan
        if keeper.approves is not None and not keeper.approves(plan.digest):
            raise RefusalError(Reason.NOT_APPROVED, "approval")
        age = time - (self._position.since or time)
        expired = plan.expires is not None and time.date() > plan.expires
        if expired or age.total_seconds() > keeper.policy.lifetime_days * 86_400:
            raise RefusalError(Reason.EXPIRED, "expires" if expired else "lifetime_days")
        if isinstance(message, Open):
            self._guard.open(plan, self.n_rows, self._rows.evaluate(plan.subject.smallest_part))
            self._position.since = time

    def _reply(self, message: messages.Request, recorded: messages.Reply | None = None) -> messages.Reply:
        """The reply to an admitted request; ``recorded`` is what was said before a restart."""
        position = self._position
        if isinstance(message, Open):
            position.session = message.session
            position.state = State.OPENED
            return Opened(self.n_rows)
        if isinstance(message, Compare):
            position.state = State.COMPARED
            self.disagreement = not all_heard_the_same(self._plan, self.name, position, message)
            return Compared(not self.disagreement)
        if isinstance(message, Begin):
            self._rows.place(message.first_row)
            position.flow = self._plan.algorithm.flow(self._plan.subject, self._plan.law, message.n)
            position.round = 1
            position.state = State.ANSWERING
            return self._answer(next(position.flow), recorded)
        return self._advance(message, recorded)

    def _advance(self, message: Ask | Close, recorded: messages.Reply | None) -> messages.Reply:
        """The next query follows from the broadcast: it is derived here, never received."""
        position = self._position
        if position.flow is None or position.query is None:
            raise AssertionError("a silo that is answering has a flow and a query")
        position.heard.update(messages.encode(message))
        reader = BitReader(message.pooled.bits())
        pooled = position.query.read_pooled(reader)
        reader.finish()
        position.round = message.round
        try:
            query = position.flow.send(pooled)
        except StopIteration as stop:
            return self._close(message, stop.value)
        if isinstance(message, Close):
            raise DecodeError("the run was closed before its flow ended")
        return self._answer(query, recorded)

    def _answer(self, query: Query, recorded: messages.Reply | None) -> Answered:
        position = self._position
        position.query = query
        self._guard.admit(query, self._rows)
        self._admit_disclosure(query)
        if recorded is None:
            self._guard.examine(query, self._rows)
            answer = query.answer(self._rows)
            self._guard.examine_answer(query, answer, self.n_rows)
            out = BitWriter()
            query.write_answer(answer, out, position.link)
            bits = out.finish()
            reply = Answered(position.round, Payload(bits.length, bits.data))
        elif isinstance(recorded, Answered):  # the code memory goes on from what was said
            reply = recorded
            answer = query.read_answer(BitReader(recorded.payload.bits()), position.link)
        else:
            raise DecodeError("another kind of reply is recorded")
        position.bits += reply.payload.length
        self._guard.charge(query, reply.payload.length)
        if self._keeper.witness is not None:
            self._keeper.witness(query, reply)
        if query.retires(answer) and isinstance(query, FitQuery):
            self._keep(query.problem, query.law, query.update, query.gap_bound(self._rows))
            position.state = State.RETIRED
        return reply

    def _admit_disclosure(self, query: Query) -> None:
        """Judged at a public centre, so that a refusal tells nothing of the rows; after a restart again."""
        crossed = None if self._meter is None else self._meter.admit(query)
        if crossed is not None:
            raise RefusalError(Reason.DISCLOSURE, f"disclosure: {crossed}")

    def _close(self, message: Ask | Close, outcome: Outcome) -> Closed:
        position = self._position
        if isinstance(message, Ask):
            raise DecodeError("the flow ended, yet an answer was asked")
        if outcome.estimate is None:  # Personalized: unfinished, so it keeps the shared law
            self._keep(outcome.problem or self._plan.subject, outcome.law, None, None)
            position.all_close = False
        position.state = State.CLOSED
        digest = position.heard.digest()
        signed = closing_statement(self._plan, position.session, self.name, digest)
        return Closed(digest, b"" if self._key is None else self._key.sign(signed))

    def _keep(self, problem: Problem, law: Any, retired_at: int | None, gap_bound: float | None) -> None:
        self.local = LocalOutcome(
            law=law,
            retired_at=retired_at,
            estimate=self._rows.estimate(problem, law),
            n_rows=self.n_rows,
            gap_bound=gap_bound,
        )

    def _follow(self, message: messages.Request, reply: messages.Reply, time: str) -> None:
        """A recorded request, after a restart: the flow is run again on what was heard, no row is read."""
        if isinstance(reply, Refused):
            self._position.state = State.REFUSED
            return
        if isinstance(message, Open):
            self._position.since = datetime.datetime.fromisoformat(time)
        self._reply(message, reply)
