"""Answers under masks: how a silo writes one, and how what all silos wrote is pooled.

A round's query may have several members. Those that are pooled by addition share one packing of lanes. The
others follow it as they are, if the silo's owner consents (`AbstractQuery.open_consent`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice

from fedtmle.errors import InputError
from fedtmle.protocol.codes import BitReader, Bits, BitWriter, Integers, Parts, encode
from fedtmle.protocol.masks import CHECK_BITS, Masked, Packing
from fedtmle.protocol.query import AbstractQuery, Answer, Phase, Pooled, Query


def packing_of(query: Query) -> Packing:
    """Return the lanes of all members that are pooled by addition."""
    return Packing(tuple(lane for member in query.members for lane in member.lanes or ()))


def open_members(query: Query) -> tuple[Query, ...]:
    """Return the members whose answers are not sums, and so leave without a mask."""
    return tuple(member for member in query.members if member.lanes is None)


def check_maskable(query: Query) -> None:
    """Raise `InputError` if a member can neither be masked nor sent without a mask."""
    for member in open_members(query):
        if member.open_consent is None:
            raise InputError(
                f"aggregation: masked sums do not provide {member.explanation}; choose other settings of the "
                "algorithm (docs/masks.md lists those that work), or ask for aggregation = 'open'"
            )


def write_masked(
    query: AbstractQuery[Answer, Pooled],
    answer: Answer,
    n_rows: int,
    mask: Callable[[Packing, Integers], Masked],
) -> Bits:
    """Return a silo's answer as bits: the masked lanes, the check, and what is not masked."""
    out = BitWriter()
    addends: list[int] = []
    apart: list[tuple[Query, object]] = []
    for member, part in zip(query.members, query.split(answer), strict=True):
        if member.lanes is None:
            apart.append((member, part))
        else:
            addends += member.addends(part, n_rows)
    packing = packing_of(query)
    packing.write(mask(packing, tuple(addends)), out)
    for member, part in apart:
        member.answer_code.write(part, out)
    return out.finish()


def read_masked(query: Query, bits: Bits) -> tuple[Masked, Parts]:
    """Return the masked lanes of one answer, and each of its parts that is not masked."""
    reader = BitReader(bits)
    masked = packing_of(query).read(reader)
    parts = tuple(member.answer_code.read(reader) for member in open_members(query))
    reader.finish()
    return masked, parts


def pool_masked(query: AbstractQuery[Answer, Pooled], payloads: Mapping[str, Bits]) -> Pooled:
    """Return what is broadcast, from what every silo of the roster sent; `DecodeError` if masks remain."""
    received = {silo: read_masked(query, bits) for silo, bits in payloads.items()}
    totals = iter(packing_of(query).totals([masked for masked, _ in received.values()]))
    number = 0
    pooled: list[object] = []
    for member in query.members:
        if member.lanes is not None:
            pooled.append(member.pool_totals(tuple(islice(totals, len(member.lanes)))))
        else:
            pooled.append(member.pool({silo: parts[number] for silo, (_, parts) in received.items()}, {}))
            number += 1
    return query.joined(tuple(pooled))


def masked_shares(query: Query, bits: Bits) -> Counter[Phase]:
    """Return the bits of a masked answer by the phase of the member that they belong to."""
    _, parts = read_masked(query, bits)
    apart = iter(parts)
    shares: Counter[Phase] = Counter({query.phase: CHECK_BITS})
    for member in query.members:
        lanes = member.lanes
        shares[member.phase] += (
            encode(member.answer_code, next(apart)).length
            if lanes is None
            else sum(lane.width for lane in lanes)
        )
    return shares
