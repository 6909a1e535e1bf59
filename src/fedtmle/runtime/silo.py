"""A silo: bytes in, bytes out. It admits a request, computes the reply, examines it, and records it.

A silo follows the same flow as the server on the broadcasts that it receives, so it evaluates only states
that it derived itself. The table of `protocol.messages` decides every change of its state. Repeating the last
admitted request returns the recorded bytes; any other request out of order is refused and changes nothing. A
refusal by policy, or a reply that could not be computed, ends the silo's part.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec

from fedtmle.errors import CheckFailedError, DataError, DecodeError, InputError, JournalError
from fedtmle.protocol import messages
from fedtmle.protocol.codes import BitReader, Bits, BitWriter, Integers
from fedtmle.protocol.guard import Guard, RefusalError, declined
from fedtmle.protocol.masked import Groups, MaskedForm
from fedtmle.protocol.masks import COUNT, Masked, Masker, Packing
from fedtmle.protocol.messages import (
    EXHAUSTED,
    Answered,
    Ask,
    Begin,
    Close,
    Closed,
    Compare,
    Compared,
    Counted,
    Event,
    Open,
    Opened,
    Payload,
    Reason,
    Refused,
    SignedAnswer,
    State,
    transition,
)
from fedtmle.protocol.outcome import Personalised
from fedtmle.protocol.plan import Follower, Plan
from fedtmle.protocol.query import AbstractQuery, Answer, Local, Pooled, Query, Retirement
from fedtmle.runtime.records import Keeper, Position, Records
from fedtmle.runtime.rows import LocalOutcome, LocalRows, fingerprint, local_outcome
from fedtmle.runtime.signing import answer_statement, closing_statement
from fedtmle_core.exact import Sums
from fedtmle_core.noise import Below, discrete_gaussian
from fedtmle_core.signing import MaskKey, SigningKey, is_signed
from fedtmle_core.types import IntArray

# A silo's share of noise, drawn from the operating system's randomness, never from a seed in a plan.
#
# A silo records its reply before it sends it, and a repeated request gets the recorded bytes. So the noise of
# a round is drawn once for everyone who ever sees it. A reply that was lost before it was recorded was never
# sent, and its draw is forgotten.


def with_noise(
    query: AbstractQuery[Answer, Pooled], answer: Answer, below: Below = secrets.randbelow
) -> Answer:
    """Return the answer with this silo's share of the noise that the query asks for, if it asks for any."""
    variance = query.noise
    if variance is None:
        return answer
    if not isinstance(answer, Sums):
        raise TypeError("noise is added to sums")
    units = tuple(unit + discrete_gaussian(variance, below) for unit in answer.units)
    return Sums(units, answer.shifts)  # type: ignore[return-value]  # it is the query's kind of answer


# The two ends of a masked session: a silo masks, signs and checks; the server adds up.
#
# A silo cannot verify a pooled number by itself, and so would have to take the server's word for it. Where
# the roster has signing keys, each silo signs what it sends, the next request relays what all silos sent, and
# every silo adds it up again.

Broadcast = TypeVar("Broadcast", Bits, int)


def count_rows(payloads: Mapping[str, Bits]) -> int:
    """Return n from the masked numbers of rows of all silos, or raise `DecodeError`."""
    counts = []
    for bits in payloads.values():
        reader = BitReader(bits)
        counts.append(COUNT.read(reader))
        reader.finish()
    return COUNT.totals(counts)[0]


class MaskedLink:
    """A silo's end; ``position`` says where the silo stands in its session."""

    def __init__(
        self, plan: Plan, name: str, position: Position, *, mask_key: MaskKey, key: SigningKey | None
    ) -> None:
        self._plan = plan
        self._name = name
        self._position = position
        self._mask_key = mask_key
        self._key = key if plan.relays else None
        self._masker: tuple[bytes, Masker] | None = None  # a session's name, and its masker

    def counted(self, n_rows: int) -> Counted:
        """Return the reply to `Open`: the number of rows."""
        out = BitWriter()
        COUNT.write(self._masked(COUNT, (n_rows,)), out)
        bits = out.finish()
        return Counted(Payload(bits.length, bits.data), self._signed(bits))

    def answered(self, form: MaskedForm, answer: object, n_rows: int, *, is_void: bool = False) -> Answered:
        """Return the reply with an answer; if it ``is_void``, with noise instead of its integers."""
        bits = form.write(answer, n_rows, self._blind if is_void else self._masked)
        return Answered(self._position.round, Payload(bits.length, bits.data), self._signed(bits))

    def addends(self, form: MaskedForm, sent: Bits) -> Integers:
        """Return what this silo added to the totals in the round that it has reached, from what it sent."""
        zeros = (0,) * len(form.packing.lanes)
        mask = self._masked(form.packing, zeros, form.groups)
        return form.packing.totals([form.read(sent)[0], form.packing.negative(mask)])

    def _masked(self, packing: Packing, values: Integers, groups: Groups = ()) -> Masked:
        """Return the integers under masks; they cancel in the total over this silo's group."""
        position = self._position
        return self._session_masker().mask(
            packing,
            values,
            n=position.n,
            round=position.round,
            heard=position.heard.digest(),
            among=next((group for group in groups if self._name in group), ()),
        )

    def _blind(self, packing: Packing, values: Integers, groups: Groups) -> Masked:  # noqa: ARG002 - noise
        """Return noise that no other silo can take away, whatever the integers are."""
        position = self._position
        heard = position.heard.digest()
        return self._session_masker().blind(packing, n=position.n, round=position.round, heard=heard)

    def _session_masker(self) -> Masker:
        position, plan = self._position, self._plan
        if self._masker is None or self._masker[0] != position.session:
            keys = [(member.name, member.mask_key) for member in plan.roster]
            masker = Masker(self._mask_key, keys, self._name, plan=plan.digest, session=position.session)
            self._masker = position.session, masker
        return self._masker[1]

    def _signed(self, bits: Bits) -> bytes:
        return b"" if self._key is None else self._key.sign(self._statement(self._name, bits))

    def _statement(self, silo: str, bits: Bits) -> bytes:
        position = self._position
        heard = position.heard.digest()
        return answer_statement(self._plan, position.session, silo, position.round, heard, bits)

    def check(
        self,
        relayed: tuple[SignedAnswer, ...],
        pool: Callable[[Mapping[str, Bits]], Broadcast],
        broadcast: Broadcast,
    ) -> None:
        """Check that every silo signed its relayed answer, and that the answers add up to the broadcast.

        Call it before the broadcast is processed, while the digest of all earlier broadcasts is still the one
        that the silos signed.
        """
        roster = self._plan.roster
        if not self._plan.relays:
            return
        if len(relayed) != len(roster):
            raise RefusalError(Reason.RELAY, "relay")
        sent = {member.name: answer.payload.bits() for member, answer in zip(roster, relayed, strict=True)}
        for member, answer in zip(roster, relayed, strict=True):
            if not is_signed(self._statement(member.name, sent[member.name]), answer.signature, member.key):
                raise RefusalError(Reason.RELAY, "relay")
        if pool(sent) != broadcast:
            raise RefusalError(Reason.RELAY, "relay")


def check_standing(plan: Plan, silo: str, keeper: Keeper, today: datetime.date) -> None:
    """Raise `RefusalError` if ``silo`` may not open the plan, because of its date or its other silos.

    Under masks enough of the other silos must not be the server's own inventions: if as many of those that
    the owner vouches for collude as the policy says, one must remain.
    """
    if plan.expires is not None and today > plan.expires:
        raise RefusalError(Reason.EXPIRED, "expires")
    if not plan.is_masked or keeper.peers is None:
        return
    doubted = doubted_silos(plan, silo, keeper)
    groups = plan.look_groups.groups or (plan.silos,)  # the groups of silos whose totals are disclosed
    own = next(group for group in groups if silo in group)
    if len(set(own) - {silo} - doubted) < keeper.policy.colluders + 1:
        raise RefusalError(Reason.TOO_FEW_SILOS, "peers")


def doubted_silos(plan: Plan, silo: str, keeper: Keeper) -> frozenset[str]:
    """Return the other silos whose keys the owner of ``silo`` does not vouch for, if there is a list."""
    if keeper.peers is None:
        return frozenset()
    others = (member for member in plan.roster if member.name != silo)
    return frozenset(member.name for member in others if member.key + member.mask_key not in keeper.peers)


class Silo:
    """One silo in one session of one plan.

    ``rows`` are as `read_rows` returns them; ``index`` has their numbers in the pooled order, if they are not
    consecutive.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        rows: object,
        *,
        index: IntArray | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        if name not in plan.silos:
            raise InputError(f"silo '{name}' is not in the plan's roster: {', '.join(plan.silos)}")
        self.name = str(name)  # a numpy string has no canonical form
        self.error: Exception | None = None  # why the last reply failed; stays at the silo
        self.refused_by = ""  # the key of the policy that refused; stays at the silo
        self.advice = ""  # which columns were behind it, and what to do; stays at the silo
        self.local: LocalOutcome | None = None
        self.disagreement = False  # whether silos received different broadcasts
        self.follow: Callable[[Plan, int], Follower] = Follower  # parties of one process may share flows
        self._plan = plan  # as the owner approved it
        self._joined = plan  # the plan of the silos that take part, from `Begin` on
        self._source, self._index = rows, index
        self._keeper = keeper or Keeper()
        self._rows = self._read(plan)
        self._fitted: Local = self._rows  # the rows as the fits of a personalised run see them
        policy, limit = self._keeper.policy, self._keeper.limit
        self._guard = Guard(
            policy,
            None if limit is None else limit.meter(),
            is_masked=plan.is_masked,
            rehearses=self._keeper.rehearses,
            doubted=doubted_silos(self._keeper.rehearses or plan, self.name, self._keeper),
        )
        self._key = self._signing_key()
        self._position = Position()
        self._link = self._masked_link()
        self._records: Records | None = None
        if self._keeper.journal is not None or self._keeper.ledger is not None:
            data = fingerprint(plan.digest, name, rows)
            self._records = Records(
                self.name, self._position, self._guard, self._keeper, plan=plan.digest, data=data
            )
        if self._records is not None and self._keeper.journal is not None:
            self._records.resume(self._restore)

    def _read(self, plan: Plan) -> LocalRows:
        """Return the rows as the program of ``plan`` reads them."""
        read, index = plan.program.at(self.name, self._source), self._index
        count = plan.program.count(read)
        if index is not None and len(index) != count:
            raise InputError(
                f"index: silo '{self.name}' has {count} rows and {len(index)} row numbers; give one for each "
                "row"
            )
        return LocalRows(self.name, read, count, index)

    def _signing_key(self) -> SigningKey | None:
        """Return the key that the roster expects this silo to sign with, None if it expects none."""
        (expected,) = (member.key for member in self._plan.roster if member.name == self.name)
        key = self._keeper.key
        if expected and (key is None or key.public != expected):
            raise InputError(f"silo '{self.name}': its key is not the one in the plan's roster")
        return key if expected else None

    def _masked_link(self) -> MaskedLink | None:
        """Return this silo's end of a masked session, None if sums are open."""
        plan, key = self._plan, self._keeper.mask_key
        (expected,) = (member.mask_key for member in plan.roster if member.name == self.name)
        if not expected:
            return None
        if key is None or key.public != expected:
            raise InputError(f"silo '{self.name}': its key for masks is not the one in the plan's roster")
        return MaskedLink(plan, self.name, self._position, mask_key=key, key=self._key)

    @property
    def n_rows(self) -> int:
        """N_m."""
        return self._rows.n_rows

    @property
    def state(self) -> State:
        """Where the silo stands in its session."""
        return self._position.state

    def step(self, request: bytes) -> bytes:
        """Return the reply to one request; the same request again gets the same bytes."""
        try:
            return self._step(request)
        except JournalError as error:
            self.error = error
            return messages.encode(Refused(Reason.CANNOT_RECORD))

    def _step(self, request: bytes) -> bytes:
        last, records = self._position.last, self._records
        if last is not None and request == last[0]:
            if records is not None:
                records.note(request, last[1], decision="repeated")
            return last[1]
        if records is not None and records.broken:
            return messages.encode(Refused(Reason.CANNOT_RECORD))
        try:
            message = messages.decode_request(request)
        except DecodeError:
            return self._stray(request, None, Reason.MALFORMED)
        reason = self._out_of_order(message)
        if reason is not None:
            return self._stray(request, message, reason)
        return self._admitted(request, message)

    def _out_of_order(self, message: messages.Request) -> Reason | None:
        """Return why a request cannot be admitted, None if it can; nothing is computed for it yet."""
        position = self._position
        if transition(position.state, message) is None:
            return Reason.OUT_OF_ORDER
        if isinstance(message, Open):
            if message.format != messages.WIRE_FORMAT:
                return Reason.OTHER_FORMAT
            return None if message.plan == self._plan.digest else Reason.OTHER_PLAN
        fits = message.session == position.session
        if isinstance(message, Begin):
            first_rows = range(1 if self._plan.is_masked else message.n - self.n_rows + 1)
            fits = fits and message.first_row in first_rows and self.n_rows <= message.n
            fits = fits and self._plan.may_lack(message.absent) and self.name not in message.absent
        if isinstance(message, Begin | Ask | Close):
            fits = fits and (self._plan.relays or not message.relayed)
        if isinstance(message, Ask | Close):
            fits = fits and message.round == self._follower.round + 1
        return None if fits else Reason.OUT_OF_ORDER

    def _stray(
        self, request: bytes, message: messages.Request | None, reason: Reason, key: str = ""
    ) -> bytes:
        """Refuse a request that leaves the state as it is; too many of them exhaust the silo."""
        self._position.strays += 1
        excess = self._position.strays - self._keeper.policy.max_refusals
        if excess > 0:
            self._position.state = EXHAUSTED
            reason, key = Reason.OUT_OF_ORDER, "max_refusals"
        reply = messages.encode(Refused(reason))
        if self._records is not None and excess <= 1:  # a flood must not fill the disk
            self._records.note(request, reply, message=message, decision="refused", reason=reason, key=key)
        return reply

    def _admitted(self, request: bytes, message: messages.Request) -> bytes:
        """Compute the reply, record it, and return it."""
        time = self._keeper.clock()
        reply, event, key = self._attempt(message, time)
        reason = reply.reason if isinstance(reply, Refused) else None
        before = self._position.state
        self._move(message, event)
        if reason is not None and self._position.state is before:
            return self._stray(request, message, reason, key)
        data = messages.encode(reply)
        if self._records is not None:
            self._records.keep(time, request, data, message, reason, key, self.advice if key else "")
        self._position.last = (request, data)
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
        """Return the reply, the event for the state table, and the key of the policy if it refused."""
        try:
            self._check_standing(message, time)
            return (*self._reply(message), "")
        except RefusalError as refusal:
            self.refused_by, self.advice = refusal.key, refusal.advice
            return Refused(refusal.reason), Event.REFUSED, refusal.key
        except DecodeError:
            return Refused(Reason.NOT_DERIVABLE), Event.REFUSED, ""
        except Exception as error:
            self.error = error.at(self.name) if isinstance(error, DataError) else error
            return Refused(Reason.CANNOT_ANSWER), Event.REFUSED, ""

    def _check_standing(self, message: messages.Request, time: datetime.datetime) -> None:
        """Check that the owner still allows this study at all."""
        if isinstance(message, Close | Compare):
            return  # these requests ask no query
        keeper, plan = self._keeper, self._plan
        if keeper.approves is not None and not keeper.approves(plan.digest):
            raise RefusalError(Reason.NOT_APPROVED, "approval")
        check_standing(plan, self.name, keeper, time.date())
        age = time - (self._position.opened or time)
        if age.total_seconds() > keeper.policy.lifetime_days * 86_400:
            raise RefusalError(Reason.EXPIRED, "lifetime_days")
        if isinstance(message, Open):
            self._check_memory(plan)
            self._guard.open(plan, self.n_rows, self._rows.evaluate(plan.program.smallest_part))
            self._examine_target()
            self._position.opened = time
        if isinstance(message, Begin):
            joined = plan.without(message.absent)
            self._check_memory(joined)  # again: another study may have been answered since this one opened
        if isinstance(message, Begin) and message.absent:
            self._guard.open(joined, self.n_rows, self._rows.evaluate(joined.program.smallest_part))

    def _examine_target(self) -> None:
        """Check a target that another distribution brings, before the first answer."""
        if self._keeper.examines is None:
            return
        try:
            self._keeper.examines(self._plan)
        except CheckFailedError as error:
            self.error = error
            raise RefusalError(Reason.FAILED_TARGET, "check_problem") from None

    def _check_memory(self, plan: Plan) -> None:
        """Check that this study may follow the earlier ones."""
        memory = self._keeper.memory
        key = "" if memory is None else memory.refusal(plan)
        if key:
            raise RefusalError(Reason.POLICY, f"memory: {key}")

    def _reply(
        self, message: messages.Request, recorded: messages.Reply | None = None
    ) -> tuple[messages.Reply, Event]:
        """Return the reply to an admitted request; ``recorded`` is the one sent before a restart."""
        position = self._position
        if isinstance(message, Open):
            position.session = message.session
            return self._opened(), Event.REPLIED
        if isinstance(message, Compare):
            self.disagreement = not self._agrees(message)
            return Compared(not self.disagreement), Event.REPLIED
        if isinstance(message, Begin):
            self._begin(message)
        else:
            if self._link is not None:
                self._link.check(message.relayed, self._follower.pool_masked, message.pooled.bits())
            position.heard.update(messages.encode(message))
            self._follower.hear(message.pooled.bits())
        if isinstance(message, Close):
            return self._close(), Event.REPLIED
        return self._answer(self._follower.query, recorded)

    def _opened(self) -> Opened | Counted:
        """Return the number of rows, under masks if the plan has them, and what the owner lowered."""
        policy = self._keeper.policy
        lowered = policy.lowered if policy.reasons else ()
        if self._link is None:
            return Opened(self.n_rows, lowered)
        return msgspec.structs.replace(self._link.counted(self.n_rows), lowered=lowered)

    def _begin(self, message: Begin) -> None:
        position = self._position
        if self._link is not None:
            self._link.check(message.relayed, count_rows, message.n)
        # Everything except where this silo's rows start, which no other silo learns.
        position.heard.update(messages.encode(msgspec.structs.replace(message, first_row=0)))
        if message.absent:
            self._joined = self._plan.without(message.absent)
            self._rows = self._read(self._joined)
        self._rows.place(self._plan.first_row(self.name, message.first_row))
        if self._records is not None and self._keeper.memory is not None:
            self._records.told = self._keeper.memory.record_scope(self._joined)
        position.n = message.n
        position.follower = self.follow(self._joined, message.n)

    @property
    def _follower(self) -> Follower:
        if self._position.follower is None:
            raise AssertionError("a silo follows the flow from `Begin` on")
        return self._position.follower

    def _answer(self, query: Query, recorded: messages.Reply | None) -> tuple[Answered, Event]:
        """Return the answer to a query; a recorded one is charged again after a restart, without the rows."""
        position, guard = self._position, self._guard
        position.query = query
        guard.admit(query, self._rows)
        retirement: Retirement | None = None
        if recorded is None:
            answer = self._released(query)
            reply = self._written(query, answer)
            retirement = query.retirement(answer)
        elif isinstance(recorded, Answered):
            reply = recorded
            answer = None
            if self._link is None:
                answer = position.uplink.decode(query.answer_code, recorded.payload.bits())
                retirement = query.retirement(answer)
            elif query.retired_answer() is not None:
                sent = recorded.payload.bits()
                retirement = query.retirement_by(self._link.addends(self._follower.masked_form, sent))
        else:
            raise DecodeError("another kind of reply is recorded")
        position.bits += reply.payload.length
        without = frozenset() if self._link is not None else declined(query, answer)
        guard.charge(query, reply.payload.length, len(without))
        if self._keeper.witness is not None:
            self._keeper.witness(query, reply)
        if query.retired_answer() is not None:
            self._fitted = query.rows_of(self._rows)
        if retirement is not None and self.local is None:
            self.local = local_outcome(self._fitted, retirement.problem, retirement.law, retirement)
        return reply, Event.REPLIED

    @property
    def alone(self) -> tuple[str, ...]:
        """Columns that this silo has alone, as far as it knows; in a rehearsal, levels that everyone has."""
        return tuple(self._guard.alone)

    def _released(self, query: Query) -> object:
        """Return the answer as it may leave the silo; that of a retired silo does not depend on its rows."""
        retired = None if self.local is None else query.retired_answer()
        if retired is None:
            return self._examined(query)
        if self._link is not None:
            # The same work as before, so that the time until the reply does not disclose who retired.
            with suppress(Exception):
                self._examined(query)
        return retired

    def _examined(self, query: Query) -> object:
        """Return the answer from the rows, after the guard has examined them and it."""
        self._guard.examine(query, self._rows, self._follower.looks)
        answer = query.answer(self._rows)
        if query.noise is not None:
            answer = with_noise(query, answer)
        return self._guard.release(query, answer, self.n_rows)

    def _written(self, query: Query, answer: object) -> Answered:
        """Return an answer as it is sent: under masks, or coded as differences."""
        if self._link is not None:
            form, is_void = self._follower.masked_form, self._guard.is_void
            return self._link.answered(form, answer, self.n_rows, is_void=is_void)
        bits = self._position.uplink.encode(query.answer_code, answer)
        return Answered(self._follower.round, Payload(bits.length, bits.data))

    def _close(self) -> Closed:
        """Return the digest of the broadcasts that this silo heard, signed if the roster has its key."""
        position, outcome = self._position, self._follower.outcome
        if outcome is None:
            raise DecodeError("the run was closed before its flow ended")
        if isinstance(outcome, Personalised) and self.local is None:  # it did not retire: the shared law
            self.local = local_outcome(self._fitted, outcome.problem, outcome.law)
        digest = position.heard.digest()
        if self._key is None:
            return Closed(digest, b"")
        statement = closing_statement(self._joined, position.session, self.name, digest)
        return Closed(digest, self._key.sign(statement))

    def _agrees(self, message: Compare) -> bool:
        """Return whether the silos that take part heard what this one heard, and signed so."""
        plan, position = self._joined, self._position
        heard = position.heard.digest()
        closings = {closing.silo: closing for closing in message.closings}
        if set(closings) != set(plan.silos) or len(closings) != len(message.closings):
            return False
        return all(closing.digest == heard for closing in message.closings) and all(
            is_signed(
                closing_statement(plan, position.session, member.name, heard),
                closings[member.name].signature,
                member.key,
            )
            for member in plan.roster
            if member.key
        )

    def _restore(self, message: messages.Request, reply: messages.Reply, time: str) -> None:
        """Follow a recorded request after a restart; no row is read."""
        if isinstance(reply, Refused):
            self._move(message, Event.REFUSED)
            return
        if isinstance(message, Open):
            self._position.opened = datetime.datetime.fromisoformat(time)
        self._move(message, self._reply(message, reply)[1])
