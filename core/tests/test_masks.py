"""Totals come out of a sum of packed integers; whatever was changed on the way does not."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle_core.errors import DecodeError
from fedtmle_core.masks import FACTOR_BITS, Factors, Frame, Packing, Word, add, keystream, width
from fedtmle_core.plan import Lane

KEY = bytes(range(32))
REACHES = st.lists(st.sampled_from([0, 1, 2, 255, 256, 2**40, 2**61 - 1, 2**90]), max_size=7)


@st.composite
def parted(draw: st.DrawFn) -> tuple[tuple[Lane, ...], list[int], list[list[int]]]:
    """Lanes, a total within each bound, and parts of it for three hospitals, which may exceed the bound."""
    lanes = tuple(Lane(reach) for reach in draw(REACHES))
    ends = [draw(st.sampled_from([-lane.reach, 0, lane.reach])) for lane in lanes]
    totals = [
        draw(st.integers(-lane.reach, lane.reach)) if draw(st.booleans()) else end
        for lane, end in zip(lanes, ends, strict=True)
    ]
    parts = [[draw(st.integers(-(2**100), 2**100)) for _ in lanes] for _ in range(2)]
    rest = [total - sum(given) for total, *given in zip(totals, *parts, strict=True)]
    return lanes, totals, [*parts, rest]


@given(parted())
@settings(max_examples=300, deadline=None)
def test_totals_come_out_of_a_sum(case: tuple[tuple[Lane, ...], list[int], list[list[int]]]) -> None:
    lanes, totals, parts = case
    frame, factors = Frame(lanes, 3), Factors.of(KEY, len(lanes))
    total = sum(frame.pack(part, factors) for part in parts) % frame.modulus
    assert frame.verdict(total, factors) is None
    assert frame.unpack(total, factors) == tuple(totals)


def test_a_width_is_the_least() -> None:
    assert [width(Lane(reach)) for reach in (0, 1, 2, 3, 4, 127, 128)] == [0, 2, 3, 3, 4, 8, 9]
    packing = Packing((Lane(1), Lane(0), Lane(3)))
    assert packing.join((1, 0, -2)) == 1 - 2 * 4
    assert packing.split(1 - 8, 5) == (1, 0, -2)
    assert Packing(()).join(()) == 0
    assert Packing(()).split(0, 0) == ()


def test_size_is_a_function_of_bounds() -> None:
    # 3 words of 65 bits take 67, lanes of reach 1 and 127 take 2 and 8, a check of reach 128 * 2^64 takes 73.
    assert Frame((Lane(1), Lane(127)), 3).size == (67 + 2 + 8 + 73 + 7) // 8


@pytest.mark.parametrize("values", [(2, 0), (-2, 0), (0, 4), (0, -4), (2, 4)])
def test_a_total_beyond_its_bound_is_refused(values: tuple[int, int]) -> None:
    frame, factors = Frame((Lane(1), Lane(3)), 3), Factors.of(KEY, 2)
    with pytest.raises(DecodeError, match="do not cancel"):
        frame.unpack(frame.pack(values, factors), factors)


def read(frame: Frame, total: int, factors: Factors) -> tuple[int, ...]:
    assert frame.verdict(total, factors) is None
    return frame.unpack(total, factors)


def test_every_changed_bit_is_noticed() -> None:
    lanes = (Lane(1000), Lane(2**70), Lane(0), Lane(5))
    frame, factors = Frame(lanes, 3), Factors.of(KEY, 4)
    total = frame.pack((-1000, 2**69, 0, 5), factors)
    for bit in range(8 * frame.size):
        for change in (1 << bit, -(1 << bit)):
            changed = (total + change) % frame.modulus
            with pytest.raises(DecodeError):
                read(frame, changed, factors)


def test_tampering_passes_as_seldom_as_stated() -> None:
    """With factors of b bits instead of 64, the best change of one lane passes with probability 2^-b."""
    draws, passed, shifted = random.Random(1), 0, 0  # noqa: S311
    bits, tries = 5, 20_000
    lanes = (Lane(1000), Lane(1000))
    frame = Frame(lanes, 3)
    front = frame._front
    place = front + sum(map(width, lanes))  # of the check
    for _ in range(tries):
        factors = Factors.of(draws.randbytes(32), 2, bits)
        total = frame.pack((7, -7), factors)
        # Add 1 to the first lane, and a guess of its factor to the check: nothing better can be done.
        changed = total + (1 << front) + (draws.randrange(1 << bits) << place)
        try:
            assert frame.unpack(changed, factors) == (8, -7)
            passed += 1
        except DecodeError:
            shifted += 1
    assert passed + shifted == tries
    expected = tries * 2**-bits
    assert abs(passed - expected) < 5 * expected**0.5


def test_a_multiple_of_a_prime_does_not_pass() -> None:
    """A check modulo 2^31 - 1, as the package had before, does not see a multiple of it in a lane."""
    lanes = (Lane(2**50),)
    frame, factors = Frame(lanes, 3), Factors.of(KEY, 1)
    total = frame.pack((5,), factors)
    for prime in (2**31 - 1, 2**61 - 1):
        with pytest.raises(DecodeError):
            frame.unpack(total + (prime << frame._front), factors)


@pytest.mark.parametrize("counts", list(itertools.product(range(3), repeat=3)))
def test_a_verdict_is_read_under_noise(counts: tuple[int, int, int]) -> None:
    draws = random.Random(sum(counts))  # noqa: S311
    frame, factors = Frame((Lane(100), Lane(7)), 6), Factors.of(KEY, 2)
    words = [word for word, count in zip(Word, counts, strict=True) for _ in range(count)]
    refusals = [frame.refuse(word, factors, draws.randbytes(frame.size)) for word in words]
    answers = [frame.pack((9, -1), factors)] * (6 - len(words))
    total = sum(refusals + answers) % frame.modulus
    assert frame.verdict(total, factors) == (words[0] if words else None)
    if words:
        with pytest.raises(DecodeError):
            frame.unpack(total, factors)


def test_a_verdict_that_nobody_gave_is_refused() -> None:
    frame, factors = Frame((Lane(1),), 3), Factors.of(KEY, 1)
    a, b, c = factors.words
    assert min(factors.words) >= 1 << FACTOR_BITS
    for front in (1, a + 1, a - 1, 4 * a, 4 * b, 4 * c, 2 * a + 2 * b, 2 * a + b + c):
        with pytest.raises(DecodeError):
            frame.verdict(front, factors)
    assert [frame.verdict(3 * word, factors) for word in (a, b, c)] == list(Word)


def test_the_server_adds_byte_strings() -> None:
    assert add([b"\xff\x00", b"\x02\x00"]) == b"\x01\x01"
    assert add([b"\xff\xff", b"\x02\x00"]) == b"\x01\x00"
    for messages in ([], [b"a", b"ab"]):
        with pytest.raises(DecodeError, match="different lengths"):
            add(messages)


def test_the_key_stream_is_that_of_rfc_8439() -> None:
    """RFC 8439, A.1: test vectors 1 (a key of zeros) and 2 (its second block)."""
    stream = keystream(bytes(32), 128)
    assert stream[:16].hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    assert stream[64:80].hex() == "9f07e7be5551387a98ba977c732d080d"
