"""Any byte string decodes canonically or raises the one documented error; its length bounds the cost."""

from __future__ import annotations

import contextlib
import tracemalloc
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import DecodeError, JournalError, NumericalError
from fedtmle.protocol import messages
from fedtmle.protocol.codes import BitReader, Bits, BitWriter
from fedtmle.protocol.lattice import (
    CHECK_BITS,
    LARGEST_EXPONENT,
    LARGEST_MANTISSA,
    Lattice,
    build_lattice,
)
from fedtmle.protocol.messages import Answered, Ask, Payload
from fedtmle_core.journal import MAGIC, scan
from tests.damage import damaged
from tests.decoders import Decoder, decoders
from tests.premise import Premise
from tests.queries import examples, without_example

NAMES = tuple(decoders())


def holds(decoder: Decoder, data: bytes) -> bool:
    """Whether the bytes are decoded; they are to be the same again."""
    try:
        again = decoder.again(data)
    except decoder.error:
        return False
    assert again == data
    return True


def test_every_kind_of_query_and_every_file_is_fuzzed() -> None:
    assert without_example() == set()
    for example in examples():
        assert {f"{example.name}: answer", f"{example.name}: pooled"} <= set(NAMES)
    assert {"request", "reply", "transcript", "journal", "ledger", "gamma", "trees", "GLM"} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_read_as_they_were_written(name: str) -> None:
    decoder = decoders()[name]
    assert decoder.examples
    assert all(holds(decoder, example) for example in decoder.examples)


decodes = Premise("the bytes are decoded", at_least=0.02)  # behind a digest few others are


@decodes
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_bytes_decode_canonically_or_raise_the_one_error(name: str, data: st.DataObject) -> None:
    decoder = decoders()[name]
    example = data.draw(st.sampled_from(decoder.examples))
    decodes.holds(holds(decoder, data.draw(damaged(example, keep=1))))


Number = tuple[int, int]  # an exponent and a mantissa


def lattice_bits(beta: Number, lower: list[Number]) -> tuple[Bits, Lattice | None]:
    """Return a lattice of three coordinates as bits, and the lattice, None if no party can build it."""
    out = BitWriter()
    for exponent, mantissa in (beta, *lower):
        out.gamma((exponent,))
        out.fixed((mantissa,), (LARGEST_MANTISSA,))
    values = iter([mantissa * Fraction(2) ** exponent for exponent, mantissa in lower])
    C = tuple(tuple(next(values) if j <= i else Fraction(0) for j in range(3)) for i in range(3))
    lattice = None
    if beta[1] > 0 and all(C[i][i] > 0 for i in range(3)):
        with contextlib.suppress(NumericalError):
            lattice = build_lattice(delta=DELTA, beta=beta[1] * Fraction(2) ** beta[0], C=C)
    out.uint(lattice.digest() if lattice else 0, CHECK_BITS)
    return out.finish(), lattice


def read_lattice(bits: Bits) -> Lattice | None:
    try:
        reader = BitReader(bits)
        lattice = Lattice.read(reader, dim=3, delta=DELTA, C=None)
        reader.finish()
    except DecodeError:
        return None
    return lattice


def is_canonical(number: Number) -> bool:
    exponent, mantissa = number
    return abs(exponent) <= LARGEST_EXPONENT and (mantissa % 2 == 1 or number == (0, 0))


DELTA = Fraction(1, 8)
POSITIVE = (0, 2, 5)  # C's diagonal in its lower triangle
extremes = st.sampled_from([-1000, -999, -500, 0, 500, 999, 1000])
odd = st.integers(0, LARGEST_MANTISSA // 2 - 1).map(lambda k: 2 * k + 1)


@st.composite
def canonical_lattices(draw: st.DrawFn) -> tuple[Number, list[Number]]:
    """Numbers in their shortest form, their exponents together anywhere in the range of a double."""
    near = st.integers(-30, 30)
    middle = draw(extremes if draw(st.integers(0, 4)) == 0 else st.integers(-450, 450))
    exponents = [max(-1000, min(1000, middle + draw(near))) for _ in range(6)]
    signs = [1 if k in POSITIVE else draw(st.sampled_from([-1, 1])) for k in range(6)]
    lower = [(e, sign * draw(odd)) for e, sign in zip(exponents, signs, strict=True)]
    return (draw(extremes), draw(odd)), lower


is_decoded = Premise("the lattice is decoded", at_least=0.4)


@is_decoded
@given(canonical_lattices())
@settings(max_examples=300, deadline=None)
def test_extreme_but_canonical_lattices(numbers: tuple[Number, list[Number]]) -> None:
    """A lattice that a party can build is decoded, at the ends of a double too; any other is refused."""
    bits, lattice = lattice_bits(*numbers)
    assert read_lattice(bits) == lattice
    if is_decoded.holds(lattice is not None):
        assert lattice is not None
        again = BitWriter()
        lattice.write(again, public_C=False)
        assert again.finish() == bits


is_refused = Premise("a number is not in its canonical form", at_least=0.2)
one_number = st.tuples(st.integers(-1001, 1001), st.integers(-LARGEST_MANTISSA, LARGEST_MANTISSA))


@is_refused
@given(canonical_lattices(), st.integers(0, 6), one_number)
@settings(max_examples=200, deadline=None)
def test_a_lattice_with_one_number_that_is_not_canonical_is_refused(
    numbers: tuple[Number, list[Number]], at: int, other: Number
) -> None:
    """Its inverse may overflow or underflow; then it is refused, and the search for its norm ends."""
    beta, lower = numbers
    changed = [beta, *lower]
    changed[at] = other
    bits, lattice = lattice_bits(changed[0], changed[1:])
    read = read_lattice(bits)
    if is_refused.holds(not is_canonical(other)):
        assert read is None
    else:
        assert read == lattice


# Cost. What is declared costs nothing; what is sent is paid for once.

DECLARED = 1 << 60
CHEAP = 4 << 20  # bytes: far more than any of these is long


@pytest.mark.parametrize(
    "data",
    [
        messages.encode(Answered(1, Payload(DECLARED, b""))),
        messages.encode(Ask(b"s", 2, Payload(DECLARED, b"\x00"))),
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 things
        b"\xdf\xff\xff\xff\xff" + b"\xc0" * 9,  # a map
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\xdb\xff\xff\xff\xff",  # 4 GB of text
        b"\x81" * 50_000,
        b"\x91" * 50_000,
        MAGIC + b"\xff\xff\xff\xff" + bytes(4),
        bytes([0]) + bytes(40_000),  # a run of 320,000 zeros
    ],
    ids=["bits", "ask", "array", "map", "bytes", "text", "maps", "arrays", "record", "zeros"],
)
def test_what_is_only_declared_is_not_allocated(data: bytes) -> None:
    tracemalloc.start()
    try:
        for decoder in decoders().values():
            holds(decoder, data)
        for decode in (messages.decode_request, messages.decode_reply):
            try:
                decode(data)
            except DecodeError:
                continue
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < CHEAP


def test_a_declared_length_is_compared_before_anything_is_read() -> None:
    for bits in (Bits(DECLARED, b""), Bits(DECLARED, bytes(100)), Bits(-8, b"")):
        with pytest.raises(DecodeError, match="length"):
            BitReader(bits)


def test_a_run_of_zeros_ends_at_the_longest_codeword() -> None:
    with pytest.raises(DecodeError, match="longer than"):
        BitReader(Bits(8 << 20, bytes(1 << 20))).gamma(1)


def test_reading_many_codewords_takes_time_in_proportion() -> None:
    """Steps are counted, not seconds: bytes that are looked at, by a reader that counts them."""

    class Counting(BitReader):
        looked = 0

        def _peek(self, start: int, stop: int) -> int:
            Counting.looked += stop - start + 16
            return super()._peek(start, stop)

    for count in (1_000, 4_000):
        out = BitWriter()
        out.gamma(range(count))
        bits = out.finish()
        Counting.looked = 0
        Counting(bits).gamma(count)
        assert Counting.looked < 12 * bits.length


def test_a_deeply_nested_ledger_line_or_record_is_refused() -> None:
    deep = b"[" * 100_000 + b"\n"
    with pytest.raises(JournalError):
        decoders()["ledger"].again(deep)
    with pytest.raises(DecodeError):
        decoders()["transcript"].again(b"\x92\xc4\x00" + b"\x91" * 100_000)
    with pytest.raises(JournalError, match="not a journal"):
        list(scan(b"\x00" * 30, "x"))


def test_a_transcript_has_one_form() -> None:
    (plain,) = decoders()["transcript"].examples
    session, exchanges = msgspec.msgpack.decode(plain)
    other = msgspec.msgpack.encode((session, [dict(reversed(exchange.items())) for exchange in exchanges]))
    assert other != plain
    assert not holds(decoders()["transcript"], other)
