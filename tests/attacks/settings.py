"""The three settings of an attack: open sums, masked sums, masked sums with a lying server and an accomplice.

In each the server is corrupted, and silo a is attacked. Under masks there are six silos, so that they look at
the rows of all. The others answer honestly, or c, of the same group in looks, is the server's accomplice: it
gave away its keys, adds to every total what the server wants, and says in looks that all its people have all
that is asked about. The roster has signing keys, so that every silo adds up what all have signed.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import add, mul
from typing import Any

from fedtmle.errors import DecodeError
from fedtmle.protocol import messages
from fedtmle.protocol.coded import Rounded
from fedtmle.protocol.codes import BitReader, BitWriter, Uplink, encode
from fedtmle.protocol.masked import AbstractLook, Groups, LookQuery, MaskedForm, PooledGram, ShownQuery
from fedtmle.protocol.masks import COUNT, Packing
from fedtmle.protocol.messages import (
    Answered,
    Ask,
    Begin,
    Counted,
    Open,
    Opened,
    Payload,
    Reason,
    Refused,
    SignedAnswer,
)
from fedtmle.protocol.plan import Follower, Member, Plan, roster
from fedtmle.runtime.signing import answer_statement
from fedtmle_core.exact import Sums
from fedtmle_core.signing import SigningKey
from fedtmle_core.types import upper_pairs

SESSION = b"session"
NAMES = tuple("abcdef")
ACCOMPLICE = "c"
KEYS = {name: SigningKey(hashlib.sha256(name.encode()).digest()) for name in NAMES}
Step = Callable[[bytes], bytes]


class Setting(enum.Enum):
    """Who adds up, and who lies."""

    OPEN = "open"
    MASKED = "masked"
    COLLUDING = "masked, lying server and one silo"

    @property
    def members(self) -> tuple[Member, ...]:
        """The roster of a study in this setting."""
        return roster(["a", "b"]) if self is Setting.OPEN else masked_members(signed=True)

    @property
    def others(self) -> tuple[str, ...]:
        """The silos beside the attacked one that the server has to meet."""
        return () if self is Setting.OPEN else NAMES[1:]


def masked_members(*, signed: bool, names: Sequence[str] = NAMES) -> tuple[Member, ...]:
    return tuple(
        Member(name=name, key=KEYS[name].public if signed else b"", mask_key=KEYS[name].mask_key.public)
        for name in names
    )


class RefusedBySiloError(Exception):
    """The silo said no."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(reason.value)


class Server:
    """Runs the plan's flow as a silo does, to know what is asked, but broadcasts whatever it likes."""

    def __init__(self, plan: Plan, step: Step, session: bytes = SESSION) -> None:
        self.plan = plan
        self.session = session
        self._step = step
        self._uplink = Uplink()
        self._follower: Follower | None = None
        self._n = 0
        self.round = 0
        self.looks: list[list[PooledGram]] = []  # what the true totals of looks say

    @property
    def query(self) -> Any:
        """What the silo is asked now."""
        assert self._follower is not None
        return self._follower.query

    def send(self, message: messages.Request) -> messages.Reply:
        reply = messages.decode_reply(self._step(messages.encode(message)))
        if isinstance(reply, Refused):
            raise RefusedBySiloError(reply.reason)
        return reply

    def open(self) -> int:
        """N_m."""
        reply = self.send(Open(messages.WIRE_FORMAT, self.session, self.plan.digest))
        assert isinstance(reply, Opened)
        return reply.n_rows

    def begin(self, n: int, first_row: int = 0, absent: tuple[str, ...] = ()) -> Any:
        """The answer of round 1, for a pooled n of the server's choice, and silos that it says are absent."""
        self._follower, self._n = Follower(self.plan, n), n
        self.round = 1
        return self.read(self.send(Begin(self.session, n, first_row, absent=absent)))

    def broadcast(self, pooled: Any) -> Payload:
        """What the server says was pooled in this round, as bits."""
        bits = encode(self.query.pooled_code, pooled)
        return Payload(bits.length, bits.data)

    def tell(self, pooled: Any) -> Any:
        """Broadcasts ``pooled``, true or not; the answer to the query that follows from it."""
        return self.tell_bits(self.broadcast(pooled))

    def go_on(self, answer: Any) -> Any:
        """Pools the answer as if all others had nothing; the next answer."""
        assert self._follower is not None
        return self.tell(self.query.pool({"a": answer}, {"a": self._n}))

    def tell_bits(self, payload: Payload) -> Any:
        """The same, with a payload of the server's own making."""
        assert self._follower is not None
        reply = self.send(Ask(self.session, self.round + 1, payload))
        self.round += 1
        self._follower.hear(payload.bits())
        return self.read(reply)

    def read(self, reply: messages.Reply) -> Any:
        """The answer in a reply to the query of this round."""
        assert isinstance(reply, Answered)
        return self._uplink.decode(self.query.answer_code, reply.payload.bits())


class MaskedServer(Server):
    """A server of masked silos: what it reads are totals, and what it tells is checked by every silo.

    ``others`` are the silos beside the attacked one. With ``lies`` silo c is an accomplice, who changes what
    it adds until the totals are those that the server tells, and signs that.
    """

    def __init__(
        self, plan: Plan, step: Step, others: Mapping[str, Step], session: bytes = SESSION, *, lies: bool
    ) -> None:
        super().__init__(plan, step, session)
        self._steps = {"a": step, **others}
        self._lies = lies
        self._heard = hashlib.sha256()
        self._sent: dict[str, SignedAnswer] = {}
        self._totals: tuple[int, ...] = ()
        self._packing = COUNT
        self._groups: Groups = (NAMES,)
        self._apart: tuple[Any, ...] = ()

    def _ask(self, message: messages.Request) -> None:
        """Send a request to every silo and keep what it sends."""
        for name, step in self._steps.items():
            reply = messages.decode_reply(step(messages.encode(message)))
            if isinstance(reply, Refused):
                raise RefusedBySiloError(reply.reason)
            assert isinstance(reply, Counted | Answered)
            self._sent[name] = SignedAnswer(reply.payload, reply.signature)

    def _add(self, packing: Packing, groups: Groups = (NAMES,)) -> None:
        self._packing, self._groups = packing, groups
        sent = {name: packing.read(BitReader(each.payload.bits())) for name, each in self._sent.items()}
        totals = (packing.totals([sent[name] for name in group]) for group in groups)
        self._totals = tuple(chain.from_iterable(totals))

    def _change(self, wanted: tuple[int, ...]) -> None:
        """Let the accomplice add what makes the totals those that are wanted."""
        if not self._lies or wanted == self._totals:
            return
        packing, reader = self._packing, BitReader(self._sent[ACCOMPLICE].payload.bits())
        changes = [a - b for a, b in zip(wanted, self._totals, strict=True)]
        first = next(k for k, group in enumerate(self._groups) if ACCOMPLICE in group) * len(packing.lanes)
        more = packing.pack(changes[first : first + len(packing.lanes)])
        out = BitWriter()
        packing.write(packing.add(packing.read(reader), more), out)
        for query in MaskedForm(self.query).apart if self._follower else ():
            query.answer_code.write(query.answer_code.read(reader), out)
        bits = out.finish()
        statement = answer_statement(
            self.plan, self.session, ACCOMPLICE, self.round, self._heard.digest(), bits
        )
        payload = Payload(bits.length, bits.data)
        self._sent[ACCOMPLICE] = SignedAnswer(payload, KEYS[ACCOMPLICE].sign(statement))

    @property
    def _relayed(self) -> tuple[SignedAnswer, ...]:
        return tuple(self._sent[name] for name in NAMES)

    def open(self) -> int:
        """The number of rows of all silos."""
        self._ask(Open(messages.WIRE_FORMAT, self.session, self.plan.digest))
        self._add(COUNT)
        return self._totals[0]

    def begin(self, n: int, first_row: int = 0, absent: tuple[str, ...] = ()) -> Any:
        self._change((n,))
        request = Begin(self.session, n, first_row, self._relayed, absent)
        self._ask(request)
        self._follower, self.round = Follower(self.plan, n), 1
        self._heard.update(messages.encode(Begin(self.session, n, 0, request.relayed)))
        return self._answer()

    def _answer(self) -> Any:
        """What the totals of this round are, as it would be broadcast; a look is told at once."""
        form = MaskedForm(self.query)
        _, self._apart = form.read(self._sent["a"].payload.bits())
        try:
            self._add(form.packing, form.groups or (NAMES,))
        except DecodeError:  # some silo may not disclose its part yet: there is a look, if it may say so
            if self._follower is None or not self._follower.masked_form.may_be_void:
                raise
            return self.tell_bits(Payload(0, b""))
        if not isinstance(self.query, AbstractLook):
            return self._pooled()
        if isinstance(self.query, LookQuery):
            self.looks.append(self.query.grams(self._totals))
        if isinstance(self.query, ShownQuery):
            return self.tell(self._totals)  # whoever hides a part refuses if all are said to disclose it
        people = [lane.reach // len(NAMES) * self._lies for lane in form.packing.lanes]
        more = map(mul, people * len(self._groups), self._claims())
        return self.tell(tuple(map(add, self._totals, more)))

    def _claims(self) -> Iterator[bool]:
        """Of each number of a look, whether it is a count or a square to which the accomplice adds people."""
        for group in self.query.disclosed_groups:
            if isinstance(self.query, LookQuery):
                for each in self.query.asked:
                    yield from (j == k and ACCOMPLICE in group for j, k in upper_pairs(each.dim))
            else:
                yield from [ACCOMPLICE in group] * len(self.query.lanes or ())

    def _pooled(self) -> Any:
        """What the totals are as a broadcast; of what is not masked, what the attacked silo said."""
        if self.query.disclosed_groups:
            return self.query.pool_totals(self._totals)
        rest, apart = iter(self._totals), iter(self._apart)
        parts = [
            next(apart) if m.lanes is None else m.pool_totals(tuple(islice(rest, len(m.lanes))))
            for m in self.query.members
        ]
        return self.query.joined(tuple(parts))

    def go_on(self, answer: Any) -> Any:
        return self.tell(answer)

    def tell(self, pooled: Any) -> Any:
        parts = zip(self.query.members, self.query.split(pooled), strict=True)
        wanted = [_totals_of(member, part) for member, part in parts]
        if pooled != self._pooled() and None not in wanted:
            self._change(tuple(z for each in wanted for z in each or ()))
        return super().tell(pooled)

    def tell_bits(self, payload: Payload) -> Any:
        assert self._follower is not None
        request = Ask(self.session, self.round + 1, payload, self._relayed)
        self._ask(request)
        self._heard.update(messages.encode(request))
        self.round += 1
        self._follower.hear(payload.bits())
        return self._answer()

    def read(self, reply: messages.Reply) -> Any:
        """Under masks a single reply is noise."""
        assert isinstance(reply, Answered)
        return MaskedForm(self.query).pool({"a": reply.payload.bits()})


def _totals_of(query: Any, pooled: Any) -> tuple[int, ...] | None:
    """Totals that would be pooled to this, if that can be said."""
    match pooled:
        case Sums():
            return pooled.units
        case Rounded():
            return tuple(query.n * q for q in pooled.q)
        case tuple() if isinstance(query, AbstractLook):
            return pooled
        case _:
            return None
