"""A silo's keeper and its records: the journal, to resume after a crash, and the ledger, for its owner.

The journal is written first. After a restart the silo replays its journal, and adds to the ledger the
last line if a crash prevented that.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from fedtmle.errors import FedTMLEError, JournalError
from fedtmle.privacy.audit import DisclosureLimit
from fedtmle.protocol import messages
from fedtmle.protocol.codes import Uplink
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.messages import Answered, Ask, Begin, Open, Reason, Refused, State
from fedtmle.protocol.plan import Follower, Plan
from fedtmle.protocol.policy import UNGUARDED, Policy, lowered_limit
from fedtmle.protocol.query import Query
from fedtmle.runtime.ledger import Entry, Ledger, StudyScope, text
from fedtmle_core.journal import Journal
from fedtmle_core.signing import MaskKey, SigningKey

# The keeper of a silo: its owner's policy, disclosure limit, approval, key, journal and ledger.

utc_now = functools.partial(datetime.datetime.now, datetime.UTC)


class Memory(Protocol):
    """What a silo remembers of earlier studies (`studies.memory`)."""

    def refusal(self, plan: Plan, /) -> str:
        """Return the key of the policy that forbids this study after the earlier ones, or an empty string."""
        ...

    def record_scope(self, plan: Plan, /) -> StudyScope:
        """Store which rows the silo has now; return the scope of a study with this plan, for the ledger."""
        ...


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """How a silo's owner guards and records its answers. Without any of it, the rows are unguarded.

    ``examines`` raises `CheckFailedError` if the plan's target does not keep what its interface promises.
    ``limit`` is the uncertainty that must remain about named attributes. ``approves`` returns whether the
    owner has approved the plan with this digest, and has not revoked it. ``peers`` are the public keys
    (`SigningKey.public_keys`) of the silos that the owner vouches for; None trusts every roster that the
    owner approves. ``memory`` compares a study with the earlier ones. ``witness`` is called with every query
    and the answer that leaves. ``rehearses`` is the plan of the study that is rehearsed on one silo's rows.
    """

    policy: Policy = UNGUARDED
    limit: DisclosureLimit | None = None
    examines: Callable[[Plan], None] | None = None
    approves: Callable[[bytes], bool] | None = None
    key: SigningKey | None = None
    mask_key: MaskKey | None = None
    peers: frozenset[bytes] | None = None
    journal: Journal | None = None
    ledger: Ledger | None = None
    memory: Memory | None = None
    witness: Callable[[Query, Answered], None] | None = None
    clock: Callable[[], datetime.datetime] = utc_now
    rehearses: Plan | None = None

    def close(self) -> None:
        """Close the journal and the ledger."""
        for record in (self.journal, self.ledger):
            if record is not None:
                record.close()


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One admitted request and its reply, as the journal holds them."""

    time: str
    request: bytes
    reply: bytes


@dataclass
class Position:
    """Where a silo stands in its one session."""

    state: State = State.NEW
    session: bytes = b""
    n: int = 0  # rows of all silos, once they are known
    opened: datetime.datetime | None = None
    follower: Follower | None = None
    query: Query | None = None  # the last one derived
    uplink: Uplink = field(default_factory=Uplink)
    heard: hashlib._Hash = field(default_factory=hashlib.sha256)  # digest of all broadcasts
    bits: int = 0  # bits of all answers
    last: tuple[bytes, bytes] | None = None  # the last admitted request and its reply
    strays: int = 0  # requests that were refused without a change of state

    @property
    def round(self) -> int:
        """The round that the silo has reached, 0 before the first."""
        return 0 if self.follower is None else self.follower.round


class Records:
    """Write what a silo admits into its journal and ledger, and compare the two at a restart.

    ``position`` and ``guard`` are the silo's: each line of the ledger has the totals so far, the ``plan`` and
    ``data``, the digest of plan and rows.
    """

    def __init__(
        self, name: str, position: Position, guard: Guard, keeper: Keeper, *, plan: bytes, data: bytes
    ) -> None:
        self._plan, self._data = plan.hex(), data
        self.told: StudyScope | None = None  # the study's scope, once it is known who takes part
        self.broken = False  # the silo's state is ahead of its journal; only a restart repairs that
        self._name = name
        self._position = position
        self._guard = guard
        self._journal: Journal | None = keeper.journal
        self._ledger: Ledger | None = keeper.ledger
        self._clock = keeper.clock

    def keep(
        self,
        time: datetime.datetime,
        request: bytes,
        reply: bytes,
        message: messages.Request,
        reason: Reason | None,
        key: str,
        advice: str = "",
    ) -> None:
        """Record an admitted request in both files; only then may the reply leave."""
        self.broken = True  # until both are written
        when = time.isoformat()
        if self._journal is not None:
            self._journal.append(msgspec.msgpack.encode(Record(when, request, reply)))
        decision = "answered" if reason is None else "refused"
        self.note(
            request,
            reply,
            message=message,
            decision=decision,
            reason=reason,
            key=key,
            advice=advice,
            time=when,
        )
        self.broken = False

    def note(
        self,
        request: bytes,
        reply: bytes,
        *,
        message: messages.Request | None = None,
        decision: str,
        reason: Reason | None = None,
        key: str = "",
        advice: str = "",
        time: str = "",
        recovered: bool = False,
    ) -> None:
        """Add a line to the ledger; ``time`` is when it happened, now if empty."""
        ledger, position, query = self._ledger, self._position, self._position.query
        if ledger is None:
            return
        has_query = decision == "answered" and isinstance(message, Begin | Ask)
        ledger.add(
            Entry(
                time=time or self._clock().isoformat(),
                session=position.session.hex(),
                request=type(message).__name__.lower() if message is not None else decision,
                round=position.round,
                query=type(query).__name__ if has_query else "",
                phase=query.phase.value if has_query and query is not None else "",
                decision=decision,
                reason="" if reason is None else reason.name.lower(),
                key=key,
                asked=_noted(request, decision),
                replied=reply,
                queries=self._guard.queries,
                functionals=self._guard.functionals,
                bits=position.bits,
                recovered=recovered,
                plan=self._plan,
                data=self._data.hex(),
                explanation=self._explained(message, decision, query) or advice,
                told=self.told if has_query and isinstance(message, Begin) else None,
            )
        )

    def _explained(self, message: messages.Request | None, decision: str, query: Query | None) -> str:
        """Return in words what was answered: a query, or the opening with the limits that were lowered.

        The guard may have a remark on the query.
        """
        if decision != "answered":
            return ""
        if isinstance(message, Open):
            return "; ".join(map(lowered_limit, self._guard.policy.lowered))
        if not isinstance(message, Begin | Ask) or query is None:
            return ""
        return ". ".join(filter(None, (query.explanation, self._guard.remark)))

    def resume(self, follow: Callable[[messages.Request, messages.Reply, str], None]) -> None:
        """Resume from the journal: ``follow`` takes the silo through each request, its reply and its time.

        The journal's first record is the digest of plan, silo and rows.
        """
        journal, ledger, identity = self._journal, self._ledger, self._data
        if journal is None:
            return
        if not journal.records:
            if ledger is not None and ledger.has_answered(self._plan):
                raise JournalError(
                    f"silo '{self._name}': the journal of this plan is gone, and the ledger holds answers; "
                    "restore it from a backup, or reject the plan"
                )
            journal.append(identity)
            return
        if journal.records[0] != identity:
            raise JournalError(
                f"silo '{self._name}': the data, or the plan, changed since this run began; restore them, or "
                "start the study again"
            )
        in_ledger: dict[tuple[str, str], str] | None = None
        for data in journal.records[1:]:
            try:
                record = msgspec.msgpack.decode(data, type=Record)
                message = messages.decode_request(record.request)
                reply = messages.decode_reply(record.reply)
                follow(message, reply, record.time)
            except (msgspec.MsgspecError, ValueError, FedTMLEError, RefusalError):
                raise JournalError(f"silo '{self._name}': the journal does not follow the plan") from None
            self._position.last = (record.request, record.reply)
            if ledger is not None:
                if in_ledger is None:
                    in_ledger = ledger.decisions(self._position.session.hex())
                self._reconcile(in_ledger, record, message, reply)
        if "answered" in (in_ledger or {}).values():
            raise JournalError(
                f"silo '{self._name}': the journal has lost answers that the ledger holds; was it restored "
                "from a backup?"
            )

    def _reconcile(
        self,
        in_ledger: dict[tuple[str, str], str],
        record: Record,
        message: messages.Request,
        reply: messages.Reply,
    ) -> None:
        """Add the journal's record to the ledger if a crash came between the two."""
        reason = reply.reason if isinstance(reply, Refused) else None
        decision = "answered" if reason is None else "refused"
        if in_ledger.pop((text(_noted(record.request, decision)), text(record.reply)), None) is None:
            self.note(
                record.request,
                record.reply,
                message=message,
                decision=decision,
                reason=reason,
                time=record.time,
                recovered=True,
            )


def _noted(request: bytes, decision: str) -> bytes:
    """Return what the ledger holds of a request: those that were not answered must not fill the disk."""
    return request if decision == "answered" else request[: messages.LARGEST_NOTED]
