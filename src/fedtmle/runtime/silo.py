"""A silo: bytes in, bytes out. It admits first and computes second.

It follows the same flow as the server on the broadcasts it receives, so it evaluates only states that it
derived itself. Repeating the last admitted request returns the recorded bytes; anything else out of order
is refused and changes nothing (`protocol.messages`). A refusal by policy, or an answer that could not be
computed, ends the silo's part.
"""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass, field
from typing import Any

from fedtmle.errors import DataError, DecodeError, InputError, JournalError
from fedtmle.model.problem import Estimate
from fedtmle.model.types import IntArray
from fedtmle.protocol import messages
from fedtmle.protocol.codes import Uplink
from fedtmle.protocol.follower import Follower
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.messages import (
    EXHAUSTED,
    Answered,
    Ask,
    Begin,
    Close,
    Closed,
    Compare,
    Compared,
    Event,
    Open,
    Opened,
    Payload,
    Reason,
    Refused,
    State,
    transition,
)
from fedtmle.protocol.outcome import Personalised
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.query import Problem, Query
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.ledger import Progress, Records
from fedtmle.runtime.rows import LocalRows, fingerprint
from fedtmle.runtime.signing import SigningKey, all_heard_the_same, closing_statement


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


@dataclass
class _Position:
    """Where the silo stands in its session."""

    state: State = State.NEW
    session: bytes = b""
    since: datetime.datetime | None = None  # when the session was opened
    follower: Follower | None = None
    uplink: Uplink = field(default_factory=Uplink)
    heard: Any = field(default_factory=hashlib.sha256)  # of all broadcasts
    all_close: bool = True  # whether every silo of the roster is in the run to its end
    refusals: int = 0  # of requests out of order


class Silo:
    """One silo in one study: one plan, one session. ``rows`` are as `read_rows` gives."""

    def __init__(
        self, name: str, plan: Plan, rows: Any, *, index: IntArray | None = None, keeper: Keeper | None = None
    ) -> None:
        if name not in plan.silos:
            raise InputError(f"silo '{name}' is not in the plan's roster")
        self.name = str(name)  # a numpy string has no canonical form
        self.error: Exception | None = None  # why the last answer failed; stays at the silo
        self.refused_by = ""  # the key of the policy that refused; stays at the silo
        self.local: LocalOutcome | None = None
        self.disagreement = False  # whether silos received different broadcasts
        self._plan = plan
        self._keeper = keeper or Keeper()
        count = plan.program.count(rows)
        if index is not None and len(index) != count:
            raise InputError(f"index: silo '{name}' needs one pooled row number per row")
        self._rows = LocalRows(name, rows, count, index)
        policy, floor = self._keeper.policy, self._keeper.floor
        self._guard = Guard(policy, None if floor is None else floor.meter())
        self._key = self._signing_key()
        self._position = _Position()
        self._progress = Progress()
        self._records = Records(
            self.name,
            self._progress,
            self._guard,
            journal=self._keeper.journal,
            ledger=self._keeper.ledger,
            clock=self._keeper.clock,
        )
        if self._keeper.journal is not None:
            self._records.resume(fingerprint(plan.digest, name, rows), self._restore)

    def _signing_key(self) -> SigningKey | None:
        """Return the key that the roster expects this silo to sign with, if it expects one."""
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
        """Return the reply to one request; the same request again gets the same bytes."""
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
            fits = fits and message.round == self._follower.round + 1
        return None if fits else Reason.OUT_OF_ORDER

    def _stray(
        self, request: bytes, message: messages.Request | None, reason: Reason, key: str = ""
    ) -> bytes:
        self._position.refusals += 1
        beyond = self._position.refusals - self._keeper.policy.max_refusals
        if beyond > 0:
            self._position.state = EXHAUSTED
            reason, key = Reason.OUT_OF_ORDER, "max_refusals"
        reply = messages.encode(Refused(reason))
        if beyond <= 1:  # a flood must not fill the disk
            self._records.note(request, reply, message=message, decision="refused", reason=reason, key=key)
        return reply

    # Admitted: computed, recorded, then sent.

    def _admitted(self, request: bytes, message: messages.Request) -> bytes:
        time = self._keeper.clock()
        reply, event, key = self._attempt(message, time)
        reason = reply.reason if isinstance(reply, Refused) else None
        before = self._position.state
        self._move(message, event)
        if reason is not None and self._position.state is before:
            return self._stray(request, message, reason, key)
        data = messages.encode(reply)
        self._records.keep(time, request, data, message, reason, key)
        return data

    def _move(self, message: messages.Request, event: Event) -> None:
        """Go to the state that the table gives."""
        line = transition(self._position.state, message)
        if line is None:
            raise DecodeError("a request is out of order")
        self._position.state = line.leads_to[event]

    def _attempt(
        self, message: messages.Request, time: datetime.datetime
    ) -> tuple[messages.Reply, Event, str]:
        """Return the reply, or the refusal and the key of the policy that refused."""
        try:
            self._check_standing(message, time)
            return (*self._reply(message), "")
        except RefusalError as refusal:
            self.refused_by = refusal.key
            return Refused(refusal.reason), Event.REFUSED, refusal.key
        except DecodeError:
            return Refused(Reason.NOT_DERIVABLE), Event.REFUSED, ""
        except Exception as error:
            self.error = error.at(self.name) if isinstance(error, DataError) else error
            return Refused(Reason.CANNOT_ANSWER), Event.REFUSED, ""

    def _check_standing(self, message: messages.Request, time: datetime.datetime) -> None:
        """Check that the owner still allows this study at all."""
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
            self._guard.open(plan, self.n_rows, self._rows.evaluate(plan.program.smallest_part))
            self._position.since = time

    def _reply(
        self, message: messages.Request, recorded: messages.Reply | None = None
    ) -> tuple[messages.Reply, Event]:
        """Return the reply to an admitted request; ``recorded`` is the one sent before a restart."""
        position = self._position
        if isinstance(message, Open):
            position.session = self._progress.session = message.session
            return Opened(self.n_rows), Event.REPLIED
        if isinstance(message, Compare):
            heard = position.heard.digest()
            self.disagreement = not all_heard_the_same(
                self._plan, self.name, message, position.session, heard, complete=position.all_close
            )
            return Compared(not self.disagreement), Event.REPLIED
        if isinstance(message, Begin):
            self._rows.place(message.first_row)
            position.follower = Follower(self._plan, message.n)
        else:
            position.heard.update(messages.encode(message))
            self._follower.hear(message.pooled.bits())
        self._progress.round = self._follower.round
        if isinstance(message, Close):
            return self._close(), Event.REPLIED
        return self._answer(self._follower.query, recorded)

    @property
    def _follower(self) -> Follower:
        if self._position.follower is None:
            raise AssertionError("a silo follows the flow from `Begin` on")
        return self._position.follower

    def _answer(self, query: Query, recorded: messages.Reply | None) -> tuple[Answered, Event]:
        """Admit, compute, record: the same totals and code memory after a restart, without the rows."""
        uplink = self._position.uplink
        self._progress.query = query
        self._guard.admit(query, self._rows)
        if recorded is None:
            answer = answer_query(self._guard, query, self._rows)
            bits = uplink.encode(query.answer_code, answer)
            reply = Answered(self._follower.round, Payload(bits.length, bits.data))
        elif isinstance(recorded, Answered):
            reply = recorded
            answer = uplink.decode(query.answer_code, recorded.payload.bits())
        else:
            raise DecodeError("another kind of reply is recorded")
        self._progress.bits += reply.payload.length
        self._guard.charge(query, reply.payload.length)
        if self._keeper.witness is not None:
            self._keeper.witness(query, reply)
        retirement = query.retirement(answer)
        if retirement is None:
            return reply, Event.REPLIED
        gap_bound = retirement.gap_bound(self._rows)
        self._keep(retirement.problem, retirement.law, retirement.update, gap_bound)
        return reply, Event.RETIRED

    def _close(self) -> Closed:
        position, outcome = self._position, self._follower.outcome
        if outcome is None:
            raise DecodeError("the run was closed before its flow ended")
        if isinstance(outcome, Personalised):  # unfinished here, so the silo keeps the shared law
            self._keep(outcome.problem, outcome.law, None, None)
            position.all_close = False
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

    def _restore(self, message: messages.Request, reply: messages.Reply, time: str) -> None:
        """Take up a recorded request after a restart: the flow is followed again, no row is read."""
        if isinstance(reply, Refused):
            self._move(message, Event.REFUSED)
            return
        if isinstance(message, Open):
            self._position.since = datetime.datetime.fromisoformat(time)
        self._move(message, self._reply(message, reply)[1])


def answer_query(guard: Guard, query: Query, rows: LocalRows) -> Any:
    """Return the answer as it may leave the silo: examine the rows, compute, release."""
    guard.examine(query, rows)
    return guard.release(query, query.answer(rows), rows.n_rows)
