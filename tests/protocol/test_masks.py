"""Masks cancel in the totals, and only there; whatever is out of step is noticed."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import DecodeError, InputError
from fedtmle.protocol.codes import BitReader, BitWriter
from fedtmle.protocol.masks import PRIME, Lane, Masked, Masker, Packing
from fedtmle_core.signing import MaskKey

AT: dict[str, Any] = {"n": 12, "round": 3, "heard": b"heard"}


def keys_of(count: int) -> list[MaskKey]:
    return [MaskKey(hashlib.sha256(b"key %d" % m).digest()) for m in range(count)]


def maskers(count: int, plan: bytes = b"plan", session: bytes = b"session") -> list[Masker]:
    keys = keys_of(count)
    roster = [(f"silo {m}", key.public) for m, key in enumerate(keys)]
    return [Masker(key, roster, roster[m][0], plan=plan, session=session) for m, key in enumerate(keys)]


THREE = maskers(3)


@st.composite
def totals(draw: st.DrawFn) -> tuple[Packing, list[int], list[list[int]]]:
    """A packing, a total within each bound, and parts of it for three silos, which may exceed the bound."""
    lanes = draw(
        st.lists(
            st.builds(Lane, st.integers(0, 1 << draw(st.sampled_from([0, 1, 8, 61, 130]))), st.integers()),
            max_size=6,
        )
    )
    found = [draw(st.integers(lane.centre - lane.reach, lane.centre + lane.reach)) for lane in lanes]
    parts = [[draw(st.integers()) for _ in lanes] for _ in range(2)]
    rest = [total - sum(given) for total, *given in zip(found, *parts, strict=True)]
    return Packing(tuple(lanes)), found, [*parts, rest]


@given(totals())
@settings(max_examples=200, deadline=None)
def test_masks_cancel_in_the_totals(case: tuple[Packing, list[int], list[list[int]]]) -> None:
    packing, found, parts = case
    sent = [masker.mask(packing, own, **AT) for masker, own in zip(THREE, parts, strict=True)]
    assert packing.totals(sent) == tuple(found)
    for masked in sent:
        out = BitWriter()
        packing.write(masked, out)
        assert packing.read(BitReader(out.finish())) == masked


@given(st.lists(st.integers(0, 70), min_size=1, max_size=8), st.data())
def test_lanes_are_added_and_negated_apart(widths: list[int], data: st.DataObject) -> None:
    """The sum of packed integers against lane by lane arithmetic."""
    packing = Packing(tuple(Lane((1 << width) - 1 >> 1) for width in widths))
    one, other = ([data.draw(st.integers()) for _ in widths] for _ in range(2))
    added = packing.pack([a + b for a, b in zip(one, other, strict=True)])
    assert packing.add(packing.pack(one), packing.pack(other)) == added
    assert packing.negative(packing.pack(one)) == packing.pack([-a for a in one])


def test_the_width_is_the_least_that_tells_totals_apart() -> None:
    for reach in range(200):
        lane = Lane(reach, centre=17)
        residues = [total % (1 << lane.width) for total in range(17 - reach, 18 + reach)]
        assert len(set(residues)) == 2 * reach + 1
        assert 1 << lane.width < 2 * (2 * reach + 1)
        assert [lane.total(residue, lane.width) for residue in residues] == list(
            range(17 - reach, 18 + reach)
        )


def test_known_answer_vectors() -> None:
    """Every primitive once more, from the standards' own descriptions, and the bytes that come out."""
    keys = keys_of(3)
    roster = [(f"silo {m}", key.public) for m, key in enumerate(keys)]
    packing = Packing((Lane(100), Lane(1 << 40, centre=-5), Lane(0)))
    values = (7, -9, 0)

    def digest(*parts: object) -> bytes:
        return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()

    def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:  # RFC 5869, one block
        return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\x01", "sha256")

    total = packing.pack(values)
    for other, sign in ((0, -1), (2, 1)):  # of silo 1
        first, second = sorted((1, other))
        secret = keys[1].shared(keys[other].public)
        info = msgspec.msgpack.encode((roster[first], roster[second]))
        pair = hkdf(secret, digest("fedtmle masks", b"plan", b"session"), info)
        subkey = hmac.digest(pair, digest("fedtmle round", 12, 3, b"heard"), "sha256")
        stream = chacha20(subkey, (packing.bits + 7) // 8 + 16)
        size = (packing.bits + 7) // 8
        lanes = int.from_bytes(stream[:size], "big") >> (8 * size - packing.bits)
        mask = Masked(lanes, int.from_bytes(stream[size:], "big") % PRIME)
        total = packing.add(total, mask if sign > 0 else packing.negative(mask))
    assert THREE[1].mask(packing, values, **AT) == total
    assert (total.packed, total.check) == (126149634317697, 905689964)


def test_masks_among_a_group_cancel_there_and_nowhere_else() -> None:
    """The silos of one group get its totals; what another silo sends cannot be added to them."""
    packing, group = Packing((Lane(100), Lane(1 << 40))), ("silo 0", "silo 2", "silo 3")
    six = maskers(6)
    sent = [six[m].mask(packing, (m, -m), **AT, among=group) for m in (0, 2, 3)]
    assert packing.totals(sent) == (5, -5)
    others = [six[m].mask(packing, (90, 90), **AT, among=("silo 1", "silo 4", "silo 5")) for m in (1, 4, 5)]
    for other in others:
        with pytest.raises(DecodeError):
            packing.totals([*sent, other])


def chacha20(key: bytes, size: int) -> bytes:
    """The key stream of RFC 8439, section 2.3, with block counter and nonce zero, in plain integers."""

    def rotated(value: int, by: int) -> int:
        return (value << by | value >> (32 - by)) & 0xFFFFFFFF

    def quarter(x: list[int], a: int, b: int, c: int, d: int) -> None:
        for p, q, r, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[p] = (x[p] + x[q]) & 0xFFFFFFFF
            x[r] = rotated(x[r] ^ x[p], by)

    stream = b""
    for counter in itertools.count():
        words = b"expand 32-byte k" + key + counter.to_bytes(4, "little") + bytes(12)
        start = [int.from_bytes(words[k : k + 4], "little") for k in range(0, 64, 4)]
        x = list(start)
        for _ in range(10):
            for k in range(4):
                quarter(x, k, 4 + k, 8 + k, 12 + k)
            for k in range(4):
                quarter(x, k, 4 + (k + 1) % 4, 8 + (k + 2) % 4, 12 + (k + 3) % 4)
        stream += b"".join(
            ((a + b) & 0xFFFFFFFF).to_bytes(4, "little") for a, b in zip(x, start, strict=True)
        )
        if len(stream) >= size:
            return stream[:size]
    raise AssertionError


def test_chacha20_is_that_of_the_standard() -> None:
    """RFC 8439, A.1, test vector 1."""
    assert chacha20(bytes(32), 16).hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_x25519_is_that_of_the_standard() -> None:
    """RFC 7748, section 5.2: one iteration from the base point."""
    nine = b"\x09" + bytes(31)
    known = "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert MaskKey(nine).shared(nine).hex() == MaskKey(nine).public.hex() == known


OTHERS: dict[str, dict[str, Any]] = {
    "another plan": {"plan": b"other"},
    "another session": {"session": b"other"},
    "another n": {"n": 13},
    "another round": {"round": 4},
    "told something else": {"heard": b"other"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_silo_out_of_step_turns_the_totals_into_noise(name: str) -> None:
    """Not one of 200 rounds passes, and the residues are those of no round in step."""
    change = OTHERS[name]
    keyed = {key: value for key, value in change.items() if key in ("plan", "session")}
    other = maskers(3, **keyed)[2]
    packing = Packing((Lane(1 << 20),) * 3)
    seen = set()
    for number in range(200):
        at = {**AT, "n": 1000 + number}
        changed = {**at, **{key: value for key, value in change.items() if key not in keyed}}
        sent = [THREE[0].mask(packing, (1, 2, 3), **at), THREE[1].mask(packing, (0, 0, 0), **at)]
        sent.append(other.mask(packing, (0, 0, 0), **changed))
        with pytest.raises(DecodeError, match="do not cancel"):
            packing.totals(sent)
        seen.add(packing.add(packing.add(sent[0], sent[1]), sent[2]).packed)
    assert len(seen) == 200


def test_one_bit_less_of_width_wraps_and_is_caught() -> None:
    rng = random.Random(4)  # noqa: S311 - a test
    for _ in range(300):
        lanes = [Lane(rng.randint(4, 1 << rng.choice([3, 8, 31, 62, 90]))) for _ in range(rng.randint(1, 5))]
        found = [rng.choice([-1, 1]) * rng.randint(lane.reach // 2 + 1, lane.reach) for lane in lanes]
        at = rng.randrange(len(lanes))
        short = [replace(lane, reach=lane.reach // 2) if j == at else lane for j, lane in enumerate(lanes)]
        assert short[at].width == lanes[at].width - 1
        for packing, is_caught in ((Packing(tuple(lanes)), False), (Packing(tuple(short)), True)):
            sent = [THREE[0].mask(packing, found, **AT)]
            sent += [masker.mask(packing, [0] * len(lanes), **AT) for masker in THREE[1:]]
            if is_caught:
                with pytest.raises(DecodeError, match="bound"):
                    packing.totals(sent)
            else:
                assert packing.totals(sent) == tuple(found)


def test_a_key_that_is_none_is_refused() -> None:
    roster = [("a", keys_of(1)[0].public), ("b", bytes(32)), ("c", keys_of(3)[2].public)]
    with pytest.raises(InputError, match="silo 'b'"):
        Masker(keys_of(1)[0], roster, "a", plan=b"", session=b"")


def test_a_check_out_of_range_is_refused() -> None:
    out, packing = BitWriter(), Packing((Lane(3),))
    out.uint(5, 3)
    out.uint(PRIME, 31)
    with pytest.raises(DecodeError, match="check"):
        packing.read(BitReader(out.finish()))


def _chi_squared(counts: Sequence[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize("values", [(0,) * 16, (1,) * 16, tuple(range(16))])
def test_masked_messages_are_uniform(values: tuple[int, ...]) -> None:
    """Bytes, single bits, pairs of lanes and pairs of rounds; each bound has probability below 1e-6."""
    packing = Packing((Lane(127),) * 16)  # sixteen bytes
    sent = [
        THREE[1].mask(packing, values, n=5, round=number, heard=b"x").packed.to_bytes(16, "big")
        for number in range(4000)
    ]
    every = b"".join(sent)
    # Chi squared with 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert _chi_squared([every.count(value) for value in range(256)]) < 255 + 6 * 22.6
    ones = [sum(message[k // 8] >> k % 8 & 1 for message in sent) for k in range(128)]
    assert max(abs(count - 2000) for count in ones) < 6 * 31.6
    for shift in (1, 5, 15):  # lanes against one another
        joint = [0] * 256
        for message in sent:
            for k in range(16 - shift):
                joint[(message[k] ^ message[k + shift])] += 1
        assert _chi_squared(joint) < 255 + 6 * 22.6
    between = [0] * 256  # rounds against one another
    for before, after in itertools.pairwise(sent):
        for a, b in zip(before, after, strict=True):
            between[(a - b) % 256] += 1
    assert _chi_squared(between) < 255 + 6 * 22.6


def test_the_check_is_uniform() -> None:
    packing = Packing(())
    checks = [THREE[0].mask(packing, (), n=5, round=number, heard=b"x").check for number in range(4000)]
    counts = [0] * 64
    for check in checks:
        counts[check * 64 // PRIME] += 1
    assert _chi_squared(counts) < 63 + 6 * 11.3
