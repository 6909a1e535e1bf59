"""Masked answers: how a silo writes one, and how the answers of all silos are pooled.

A round's query may have several members. Those that are pooled by addition share one packing of lanes. The
others follow it as they are, if the silo's owner consents (`AbstractQuery.open_consent`).

Totals over a group of silos (`AbstractQuery.disclosed_groups`) consist only of what its silos sent, so that a
silo of another group cannot alter them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import TypeAlias, final

from fedtmle.errors import InputError
from fedtmle.protocol.codes import BitReader, Bits, BitWriter, Integers, Parts, encode
from fedtmle.protocol.masks import CHECK_BITS, Lane, Masked, Packing
from fedtmle.protocol.query import Phase, Query

Groups: TypeAlias = tuple[tuple[str, ...], ...]


@final
@dataclass(frozen=True)
class MaskedForm:
    """How the answers to one query are written under masks; ``lanes`` has None for what is not masked."""

    query: Query

    @cached_property
    def members(self) -> tuple[tuple[Query, tuple[Lane, ...] | None], ...]:
        """Each member with its lanes, which are computed once."""
        return tuple((member, member.lanes) for member in self.query.members)

    @cached_property
    def packing(self) -> Packing:
        """The lanes of all members that are pooled by addition."""
        return Packing(tuple(lane for _, lanes in self.members for lane in lanes or ()))

    @property
    def apart(self) -> tuple[Query, ...]:
        """The members whose answers are not sums, and so leave without a mask."""
        return tuple(member for member, lanes in self.members if lanes is None)

    @property
    def groups(self) -> Groups:
        """The groups of silos whose totals are disclosed; () for the totals of all silos."""
        return self.query.disclosed_groups

    def write(self, answer: object, n_rows: int, mask: Callable[[Packing, Integers, Groups], Masked]) -> Bits:
        """Return a silo's answer as bits: the masked lanes, the check, and the parts without a mask."""
        out = BitWriter()
        addends: list[int] = []
        apart: list[tuple[Query, object]] = []
        for (member, lanes), part in zip(self.members, self.query.split(answer), strict=True):
            if lanes is None:
                apart.append((member, part))
            else:
                addends += member.addends(part, n_rows)
        self.packing.write(mask(self.packing, tuple(addends), self.groups), out)
        for member, part in apart:
            member.answer_code.write(part, out)
        return out.finish()

    def read(self, bits: Bits) -> tuple[Masked, Parts]:
        """Return the masked lanes of one answer, and each of its parts that is not masked."""
        reader = BitReader(bits)
        masked = self.packing.read(reader)
        parts = tuple(member.answer_code.read(reader) for member in self.apart)
        reader.finish()
        return masked, parts

    def pool(self, payloads: Mapping[str, Bits]) -> object:
        """Return the broadcast from all silos' payloads; raise `DecodeError` if the masks do not cancel."""
        received = {silo: self.read(bits) for silo, bits in payloads.items()}
        sent = {silo: masked for silo, (masked, _) in received.items()}
        if self.groups:
            by_group = (self.packing.totals([sent[silo] for silo in group]) for group in self.groups)
            return self.query.pool_totals(tuple(chain.from_iterable(by_group)))
        totals = iter(self.packing.totals(list(sent.values())))
        number = 0
        pooled: list[object] = []
        for member, lanes in self.members:
            if lanes is not None:
                pooled.append(member.pool_totals(tuple(islice(totals, len(lanes)))))
            else:
                answers = {silo: parts[number] for silo, (_, parts) in received.items()}
                pooled.append(member.pool(answers, {}))
                number += 1
        return self.query.joined(tuple(pooled))

    def shares(self, bits: Bits) -> Counter[Phase]:
        """Return the bits of a masked answer by the phase of the member that they belong to."""
        apart = iter(self.read(bits)[1])
        shares: Counter[Phase] = Counter({self.query.phase: CHECK_BITS})
        for member, lanes in self.members:
            shares[member.phase] += (
                encode(member.answer_code, next(apart)).length
                if lanes is None
                else sum(lane.width for lane in lanes)
            )
        return shares


def open_members(query: Query) -> tuple[Query, ...]:
    """Return the members whose answers are not sums, and so leave without a mask."""
    return MaskedForm(query).apart


def check_maskable(form: MaskedForm) -> None:
    """Raise `InputError` if a member can neither be masked nor sent without a mask."""
    for member in form.apart:
        if member.open_consent is None:
            raise InputError(
                f"aggregation: masked sums do not provide {member.explanation}; choose other settings of the "
                "algorithm (docs/masks.md lists those that work), or ask for aggregation = 'open'"
            )
