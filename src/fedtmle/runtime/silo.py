"""A silo: bytes in, bytes out. It admits first and computes second.

It runs the same flow as the server on the broadcasts it receives, so it evaluates only states
that it derived itself. Repeating the last admitted request returns the recorded bytes; anything
else out of order is refused and changes nothing (`protocol.state`). A refusal by policy, or an
answer that could not be computed, ends the silo's part.
"""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fedtmle.algorithms.outcome import Flow, Outcome, Query
from fedtmle.errors import DataError, DecodeError, FedTMLEError, InputError, JournalError
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
from fedtmle.protocol.query import Link, Problem
from fedtmle.protocol.state import State, transition
from fedtmle.runtime.fingerprint import fingerprint
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.ledger import Entry, text
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.signing import SigningKey, is_signed


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


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One admitted request and its reply, as the journal holds them."""

    time: str
    request: bytes
    reply: bytes


@dataclass
class _Progress:
    """The silo's position: its flow, the query it last answered, and its code memory."""

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
        self._key = self._signing_key()
        self._progress = _Progress()
        self._last: tuple[bytes, bytes] | None = None
        self._broken = False  # the state ran ahead of the journal: only a restart mends that
        if self._keeper.journal is not None:
            self._resume(fingerprint(plan.digest, name, rows))

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
        return self._progress.state

    def step(self, request: bytes) -> bytes:
        """The reply to one request; the same request again gives the same bytes."""
        try:
            return self._step(request)
        except JournalError as error:
            self.error = error
            return messages.encode(Refused(Reason.CANNOT_RECORD))

    def _step(self, request: bytes) -> bytes:
        if self._last is not None and request == self._last[0]:
            self._note(request, self._last[1], decision="repeated")
            return self._last[1]
        if self._broken:
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
        progress = self._progress
        if transition(progress.state, message) is None:
            return Reason.OUT_OF_ORDER
        if isinstance(message, Open):
            if message.format != messages.WIRE_FORMAT:
                return Reason.OTHER_FORMAT
            return None if message.plan == self._plan.digest else Reason.OTHER_PLAN
        fits = message.session == progress.session
        if isinstance(message, Begin):
            fits = fits and message.first_row >= 0 and message.first_row + self.n_rows <= message.n
        elif isinstance(message, Ask | Close):
            fits = fits and message.round == progress.round + 1
        return None if fits else Reason.OUT_OF_ORDER

    def _stray(
        self, request: bytes, message: messages.Request | None, reason: Reason, key: str = ""
    ) -> bytes:
        self._progress.strays += 1
        beyond = self._progress.strays - self._keeper.policy.max_refusals
        if beyond > 0:
            self._progress.state = State.REFUSED
            reason, key = Reason.OUT_OF_ORDER, "max_refusals"
        reply = messages.encode(Refused(reason))
        if beyond <= 1:  # a flood must not fill the disk
            self._note(request, reply, message=message, decision="refused", reason=reason, key=key)
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
            if self._progress.state is State.NEW:  # nothing was said yet: the owner may still approve
                return self._stray(request, message, reason, key)
            reply = Refused(reason)
            self._progress.state = State.REFUSED
        data = messages.encode(reply)
        self._broken = True  # until both records are written
        if self._keeper.journal is not None:
            self._keeper.journal.append(msgspec.msgpack.encode(Record(time.isoformat(), request, data)))
        self._note(
            request,
            data,
            message=message,
            decision="answered" if reason is None else "refused",
            reason=reason,
            key=key,
        )
        self._broken = False
        self._last = (request, data)
        return data

    def _standing(self, message: messages.Request, time: datetime.datetime) -> None:
        """Whether the owner still allows this study at all."""
        if isinstance(message, Close | Compare):
            return  # these ask nothing
        keeper, plan = self._keeper, self._plan
        if keeper.approves is not None and not keeper.approves(plan.digest):
            raise RefusalError(Reason.NOT_APPROVED, "approval")
        age = time - (self._progress.since or time)
        expired = plan.expires is not None and time.date() > plan.expires
        if expired or age.total_seconds() > keeper.policy.lifetime_days * 86_400:
            raise RefusalError(Reason.EXPIRED, "expires" if expired else "lifetime_days")
        if isinstance(message, Open):
            self._guard.open(plan, self.n_rows, self._rows.evaluate(plan.subject.smallest_part))
            self._progress.since = time

    def _reply(self, message: messages.Request, recorded: messages.Reply | None = None) -> messages.Reply:
        """The reply to an admitted request; ``recorded`` is what was said before a restart."""
        progress = self._progress
        if isinstance(message, Open):
            progress.session = message.session
            progress.state = State.OPENED
            return Opened(self.n_rows)
        if isinstance(message, Compare):
            progress.state = State.COMPARED
            self.disagreement = not self._all_heard_the_same(message)
            return Compared(not self.disagreement)
        if isinstance(message, Begin):
            self._rows.place(message.first_row)
            progress.flow = self._plan.algorithm.flow(self._plan.subject, self._plan.law, message.n)
            progress.round = 1
            progress.state = State.ANSWERING
            return self._answer(next(progress.flow), recorded)
        return self._advance(message, recorded)

    def _advance(self, message: Ask | Close, recorded: messages.Reply | None) -> messages.Reply:
        """The next query follows from the broadcast: it is derived here, never received."""
        progress = self._progress
        if progress.flow is None or progress.query is None:
            raise AssertionError("a silo that is answering has a flow and a query")
        progress.heard.update(messages.encode(message))
        reader = BitReader(message.pooled.bits())
        pooled = progress.query.read_pooled(reader)
        reader.finish()
        progress.round = message.round
        try:
            query = progress.flow.send(pooled)
        except StopIteration as stop:
            return self._close(message, stop.value)
        if isinstance(message, Close):
            raise DecodeError("the run was closed before its flow ended")
        return self._answer(query, recorded)

    def _answer(self, query: Query, recorded: messages.Reply | None) -> Answered:
        progress = self._progress
        progress.query = query
        self._guard.admit(query)
        self._guard.follow(query, self._rows)
        if recorded is None:
            self._guard.examine(query, self._rows)
            answer = query.answer(self._rows)
            self._guard.examine_answer(query, answer, self.n_rows)
            out = BitWriter()
            query.write_answer(answer, out, progress.link)
            bits = out.finish()
            reply = Answered(progress.round, Payload(bits.length, bits.data))
        elif isinstance(recorded, Answered):  # the code memory goes on from what was said
            reply = recorded
            answer = query.read_answer(BitReader(recorded.payload.bits()), progress.link)
        else:
            raise DecodeError("another kind of reply is recorded")
        progress.bits += reply.payload.length
        self._guard.charge(query, reply.payload.length)
        if self._keeper.witness is not None:
            self._keeper.witness(query, reply)
        if query.retires(answer) and isinstance(query, FitQuery):
            self._keep(query.problem, query.law, query.update, query.gap_bound(self._rows))
            progress.state = State.RETIRED
        return reply

    def _close(self, message: Ask | Close, outcome: Outcome) -> Closed:
        progress = self._progress
        if isinstance(message, Ask):
            raise DecodeError("the flow ended, yet an answer was asked")
        if outcome.estimate is None:  # Personalized: unfinished, so it keeps the shared law
            self._keep(outcome.problem or self._plan.subject, outcome.law, None, None)
            progress.all_close = False
        progress.state = State.CLOSED
        digest = progress.heard.digest()
        signed = closing_statement(self._plan, progress.session, self.name, digest)
        return Closed(digest, b"" if self._key is None else self._key.sign(signed))

    def _all_heard_the_same(self, message: Compare) -> bool:
        """Whether the roster's silos signed what this one heard."""
        progress = self._progress
        own = progress.heard.digest()
        closings = {closing.silo: closing for closing in message.closings}
        expected = set(self._plan.silos) if progress.all_close else set(self._plan.silos) & set(closings)
        if set(closings) != expected or len(closings) != len(message.closings) or self.name not in closings:
            return False
        for member in self._plan.roster:
            closing = closings.get(member.name)
            if closing is None:
                continue
            said = closing_statement(self._plan, progress.session, member.name, own)
            if closing.digest != own or (member.key and not is_signed(said, closing.signature, member.key)):
                return False
        return True

    def _keep(self, problem: Problem, law: Any, retired_at: int | None, gap_bound: float | None) -> None:
        self.local = LocalOutcome(
            law=law,
            retired_at=retired_at,
            estimate=self._rows.estimate(problem, law),
            n_rows=self.n_rows,
            gap_bound=gap_bound,
        )

    # Records.

    def _note(
        self,
        request: bytes,
        reply: bytes,
        *,
        message: messages.Request | None = None,
        decision: str,
        reason: Reason | None = None,
        key: str = "",
        recovered: str = "",
    ) -> None:
        """A line of the ledger; ``recovered`` is when it happened, if that was before a crash."""
        ledger, progress, query = self._keeper.ledger, self._progress, self._progress.query
        if ledger is None:
            return
        asks = decision == "answered" and isinstance(message, Begin | Ask)
        ledger.add(
            Entry(
                time=recovered or self._keeper.clock().isoformat(),
                session=progress.session.hex(),
                request=type(message).__name__.lower() if message is not None else decision,
                round=progress.round,
                query=type(query).__name__ if asks else "",
                phase=query.phase.value if asks and query is not None else "",
                decision=decision,
                reason="" if reason is None else reason.name.lower(),
                key=key,
                asked=text(request if decision == "answered" else request[: messages.LARGEST_NOTED]),
                replied=text(reply),
                queries=self._guard.queries,
                functionals=self._guard.functionals,
                bits=progress.bits,
                recovered=bool(recovered),
            )
        )

    def _resume(self, identity: bytes) -> None:
        """Go on from the journal: the flow is run again on what was heard, no row is read for it."""
        journal = self._keeper.journal
        if journal is None:
            return
        if not journal.records:
            journal.append(identity)
            return
        if journal.records[0] != identity:
            raise JournalError(f"silo '{self.name}': the journal is of another plan or of other data")
        told: dict[tuple[str, str], str] | None = None
        for data in journal.records[1:]:
            try:
                record = msgspec.msgpack.decode(data, type=Record)
                message = messages.decode_request(record.request)
                reply = messages.decode_reply(record.reply)
                if isinstance(reply, Refused):
                    self._progress.state = State.REFUSED
                else:
                    if isinstance(message, Open):
                        self._progress.since = datetime.datetime.fromisoformat(record.time)
                    self._reply(message, reply)
            except (msgspec.MsgspecError, ValueError, FedTMLEError, RefusalError):
                raise JournalError(f"silo '{self.name}': the journal does not follow the plan") from None
            self._last = (record.request, record.reply)
            if self._keeper.ledger is not None:
                if told is None:
                    told = self._keeper.ledger.told(self._progress.session.hex())
                self._reconcile(told, record, message, reply)
        if "answered" in (told or {}).values():
            raise JournalError(f"silo '{self.name}': the ledger knows of answers that the journal has lost")

    def _reconcile(
        self,
        told: dict[tuple[str, str], str],
        record: Record,
        message: messages.Request,
        reply: messages.Reply,
    ) -> None:
        """The journal is written first, so a crash may have kept its last record from the ledger."""
        noted = text(record.request[: messages.LARGEST_NOTED]), text(record.reply)
        if told.pop(noted, None) is None:
            refusal = reply.reason if isinstance(reply, Refused) else None
            self._note(
                record.request,
                record.reply,
                message=message,
                decision="answered" if refusal is None else "refused",
                reason=refusal,
                recovered=record.time,
            )


def closing_statement(plan: Plan, session: bytes, silo: str, digest: bytes) -> bytes:
    """What a silo signs at the close: that it heard this digest, in this session of this plan."""
    return msgspec.msgpack.encode(("fedtmle close", plan.digest, session, silo, digest))
