"""The codes of S.2.1: golden codewords both ways, lengths, Kraft, and garbage."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.errors import DecodeError
from fedtmle.protocol.codes import (
    BitReader,
    Bits,
    BitWriter,
    Differences,
    decode,
    encode,
    fixed_width,
    gamma_length,
    read_count,
    read_floats,
    unzigzag,
    write_floats,
    zigzag,
)
from tests.damage import damaged_bits
from tests.premise import Premise

# a -> iota(a) -> floor(log2 iota) zeros, then iota in binary.
GOLDEN = {0: "1", -1: "010", 1: "011", -2: "00100", 2: "00101", -3: "00110", 3: "00111", -4: "0001000"}


def text(bits: Bits) -> str:
    return "".join(f"{byte:08b}" for byte in bits.data)[: bits.length]


def written(values: list[int]) -> Bits:
    out = BitWriter()
    out.gamma(values)
    return out.finish()


@pytest.mark.parametrize(("value", "codeword"), GOLDEN.items())
def test_golden_codewords(value: int, codeword: str) -> None:
    bits = written([value])
    assert text(bits) == codeword
    assert gamma_length(value) == len(codeword)
    reader = BitReader(bits)
    assert reader.gamma(1) == (value,)
    reader.finish()


@given(st.lists(st.integers(-(2**200), 2**200), max_size=20))
def test_gamma_round_trip_and_length(values: list[int]) -> None:
    bits = written(values)
    assert bits.length == sum(map(gamma_length, values))
    # eq. (proof-code-length): |enc(v)| <= 3d + 2 sum log2(1 + |v_j|)
    assert bits.length <= 3 * len(values) + 2 * sum(math.log2(1 + abs(v)) for v in values) + 1e-9
    reader = BitReader(bits)
    assert reader.gamma(len(values)) == tuple(values)
    reader.finish()


@given(st.integers())
def test_zigzag_is_a_bijection_onto_the_positive_integers(a: int) -> None:
    assert zigzag(a) >= 1
    assert unzigzag(zigzag(a)) == a


def test_kraft_sum_is_one() -> None:
    """eq. (proof-integer-kraft): blocks [2^j, 2^{j+1}) have mass 2^-(j+1)."""
    mass = sum((Fraction(1, 2 ** gamma_length(unzigzag(v))) for v in range(1, 2**10)), Fraction(0))
    assert mass == 1 - Fraction(1, 2**10)


@given(st.lists(st.integers(1, 2**90), min_size=1, max_size=8), st.data())
def test_fixed_round_trip(reaches: list[int], data: st.DataObject) -> None:
    values = [data.draw(st.integers(-reach, reach)) for reach in reaches]
    out = BitWriter()
    out.fixed(values, reaches)
    bits = out.finish()
    # b = ceil(log2(2J + 1))
    assert bits.length == sum(
        math.ceil(math.log2(2 * r + 1)) if r < 2**40 else fixed_width(r) for r in reaches
    )
    reader = BitReader(bits)
    assert reader.fixed(reaches) == tuple(values)
    reader.finish()


decodes = Premise("the bits are decoded", at_least=0.08)


@decodes
@given(st.lists(st.integers(-(2**20), 2**20), max_size=6), st.data())
def test_garbage_raises_only_decode_error(values: list[int], data: st.DataObject) -> None:
    """Any bit string either decodes canonically or raises the one documented error."""
    bits = data.draw(damaged_bits(written(values)))
    try:
        reader = BitReader(bits)
        again = reader.gamma(len(values))
        reader.finish()
    except DecodeError:
        decodes.holds(False)
        return
    decodes.holds(True)
    assert written(list(again)) == bits


@given(st.binary(max_size=60), st.integers(-3, 500), st.integers(0, 12))
def test_a_length_that_is_not_that_of_the_bytes_is_refused(data: bytes, length: int, count: int) -> None:
    if (length + 7) // 8 == len(data):
        length += 8
    with pytest.raises(DecodeError, match="length"):
        BitReader(Bits(length, data)).gamma(count)


@pytest.mark.parametrize(
    "bits",
    [Bits(9, b"\x80"), Bits(1, b"\xff"), Bits(4, b"\x00"), Bits(3, b""), Bits(-1, b"")],
    ids=["short", "padding", "endless zeros", "missing", "negative"],
)
def test_malformed_bit_strings(bits: Bits) -> None:
    with pytest.raises(DecodeError):
        BitReader(bits).gamma(1)


@pytest.mark.parametrize("reach", [1, 2, 3, 4, 5, 7, 8, 31, 32, 33])
def test_a_fixed_width_integer_is_within_its_range(reach: int) -> None:
    width = fixed_width(reach)
    for code in range(1 << width):
        out = BitWriter()
        out.uint(code, width)
        reader = BitReader(out.finish())
        if code <= 2 * reach:
            assert reader.fixed((reach,)) == (code - reach,)
        else:
            with pytest.raises(DecodeError, match="out of its range"):
                reader.fixed((reach,))


@pytest.mark.parametrize("length", range(18))
def test_nothing_is_read_past_the_end(length: int) -> None:
    bits = Bits(length, bytes((length + 7) // 8))
    assert BitReader(bits).uint(length) == 0
    for more in (1, 7, 8, 9):
        with pytest.raises(DecodeError, match="ends inside"):
            BitReader(bits).uint(length + more)


@pytest.mark.parametrize(("count", "is_read"), [(-1, False), (1, False), (2, True), (5, True), (6, False)])
def test_a_count_is_within_its_range(count: int, is_read: bool) -> None:
    reader = BitReader(written([count]))
    if is_read:
        assert read_count(reader, 5, least=2) == count
    else:
        with pytest.raises(DecodeError, match="count"):
            read_count(reader, 5, least=2)


@pytest.mark.parametrize("value", [0.0, -0.0, 5e-324, -1.7e308, math.inf, -math.inf, math.nan])
def test_numbers_are_finite(value: float) -> None:
    out = BitWriter()
    write_floats(np.array([1.5, value]), out)
    reader = BitReader(out.finish())
    if math.isfinite(value):
        assert read_floats(reader, 2).tobytes() == np.array([1.5, value]).tobytes()
    else:
        with pytest.raises(DecodeError, match="finite"):
            read_floats(reader, 2)


@pytest.mark.parametrize("width", [None, 100])
def test_differences_are_from_the_last_payload(width: int | None) -> None:
    first = Differences(dim=3, width=width)
    second = first.after(first.memory((7, -8, 0)))
    assert decode(first, encode(first, (7, -8, 0))) == (7, -8, 0)
    assert decode(second, encode(second, (9, -8, -1))) == (9, -8, -1)
    if width is None:
        assert encode(second, (9, -8, -1)) == written([2, 0, -1])


def test_trailing_bits_are_not_canonical() -> None:
    reader = BitReader(written([5, 7]))
    reader.gamma(1)
    with pytest.raises(DecodeError, match="goes on"):
        reader.finish()


def test_a_value_that_does_not_fit_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        BitWriter().uint(4, 2)


def test_fixed_width_out_of_range_is_refused() -> None:
    out = BitWriter()
    out.uint(7, 3)  # J = 2 needs 3 bits and uses 0..4
    with pytest.raises(DecodeError, match="range"):
        BitReader(out.finish()).fixed((2,))
