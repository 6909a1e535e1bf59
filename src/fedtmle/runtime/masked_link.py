"""The two ends of a masked session: a silo masks, signs and checks; the server adds up.

A silo cannot verify a pooled number by itself, and so would have to take the server's word for it. Where the
roster has signing keys, each silo signs what it sends, the next request relays what all silos sent, and every
silo adds it up again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from fedtmle.protocol.codes import BitReader, Bits, BitWriter, Integers
from fedtmle.protocol.guard import RefusalError
from fedtmle.protocol.masked import Groups, MaskedForm
from fedtmle.protocol.masks import COUNT, Masked, Masker, MaskKey, Packing
from fedtmle.protocol.messages import Answered, Counted, Payload, Reason, SignedAnswer
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.records import Position
from fedtmle.runtime.signing import SigningKey, answer_statement, is_signed

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

    def answered(self, form: MaskedForm, answer: object, n_rows: int) -> Answered:
        """Return the reply with an answer."""
        bits = form.write(answer, n_rows, self._masked)
        return Answered(self._position.round, Payload(bits.length, bits.data), self._signed(bits))

    def addends(self, form: MaskedForm, sent: Bits) -> Integers:
        """Return what this silo added to the totals in the round that it has reached, from what it sent."""
        zeros = (0,) * len(form.packing.lanes)
        mask = self._masked(form.packing, zeros, form.groups)
        return form.packing.totals([form.read(sent)[0], form.packing.negative(mask)])

    def _masked(self, packing: Packing, values: Integers, groups: Groups = ()) -> Masked:
        """Return the integers under masks; they cancel in the total over this silo's group."""
        position, plan = self._position, self._plan
        if self._masker is None or self._masker[0] != position.session:
            keys = [(member.name, member.mask_key) for member in plan.roster]
            masker = Masker(self._mask_key, keys, self._name, plan=plan.digest, session=position.session)
            self._masker = position.session, masker
        return self._masker[1].mask(
            packing,
            values,
            n=position.n,
            round=position.round,
            heard=position.heard.digest(),
            among=next((group for group in groups if self._name in group), ()),
        )

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
