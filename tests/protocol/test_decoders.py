"""Any byte string decodes canonically or raises the one documented error; its length bounds the cost."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import DecodeError, JournalError
from fedtmle.protocol import messages
from fedtmle.protocol.bits import BitReader, Bits, BitWriter
from fedtmle.protocol.lattice import LARGEST_EXPONENT, LARGEST_MANTISSA, Lattice
from fedtmle.protocol.messages import Answered, Ask, Payload
from fedtmle.protocol.tables import LevelsQuery
from fedtmle.runtime.journal import MAGIC, scan
from tests.decoders import Decoder, decoders, queries

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
    from fedtmle.protocol import coded, fits, learners, sums, tables
    from fedtmle.protocol.query import AbstractQuery

    kinds = {
        name
        for module in (coded, fits, learners, sums, tables)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, AbstractQuery) and not name.startswith("Abstract")
    }
    assert kinds == {name.split()[0] for name in queries()}
    assert {"request", "reply", "transcript", "journal", "ledger", "gamma", "trees", "GLM"} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_read_as_they_were_written(name: str) -> None:
    decoder = decoders()[name]
    read = [holds(decoder, example) for example in decoder.examples if example[1:]]
    assert all(read)
    assert read or "answer" in name


def mutated(example: bytes) -> st.SearchStrategy[bytes]:
    """The example with some bytes changed, put in or left out."""
    at = st.integers(0, len(example))
    change = st.tuples(at, st.integers(0, 3), st.binary(max_size=3))

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        data = example
        for start, removed, put in changes:
            data = data[:start] + put + data[start + removed :]
        return data

    return st.lists(change, max_size=3).map(apply)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_any_bytes_decode_canonically_or_raise_the_one_error(name: str, data: st.DataObject) -> None:
    decoder = decoders()[name]
    garbage = st.binary(max_size=120)
    holds(decoder, data.draw(st.one_of(garbage, *map(mutated, decoder.examples))))


exponents = st.integers(-LARGEST_EXPONENT - 1, LARGEST_EXPONENT + 1)
numbers = st.tuples(exponents, st.integers(-LARGEST_MANTISSA, LARGEST_MANTISSA))


@given(numbers, exponents, st.lists(numbers, min_size=6, max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_lattice_at_the_ends_of_a_double_is_decoded_or_refused(
    beta: tuple[int, int], h: int, lower: list[tuple[int, int]]
) -> None:
    """Its inverse may overflow or underflow; then it is refused, and the search for its norm ends."""
    out = BitWriter()
    for k, (exponent, mantissa) in enumerate((beta, *lower)):
        out.gamma((exponent,))
        out.fixed((mantissa,), (LARGEST_MANTISSA,))
        if k == 0:
            out.gamma((h,))
    _lattice(out.finish())


extremes = st.tuples(st.sampled_from([-1000, -999, -500, 0, 500, 999, 1000]), st.sampled_from([1, 255]))


@given(st.lists(extremes, min_size=6, max_size=6))
@settings(max_examples=200, deadline=None)
def test_extreme_but_canonical_lattices(entries: list[tuple[int, int]]) -> None:
    out = BitWriter()
    out.gamma((0,))
    out.fixed((1,), (LARGEST_MANTISSA,))
    out.gamma((-4,))
    for exponent, mantissa in entries:
        out.gamma((exponent,))
        out.fixed((mantissa,), (LARGEST_MANTISSA,))
    _lattice(out.finish())


def _lattice(bits: Bits) -> None:
    try:
        reader = BitReader(bits)
        lattice = Lattice.read(reader, dim=3, delta=Fraction(1, 8), C=None)
        reader.finish()
    except DecodeError:
        return
    again = BitWriter()
    lattice.write(again, public_C=False)
    assert again.finish() == bits


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


def test_many_levels_of_a_long_message_are_read_in_place() -> None:
    """4,096 labels before sixteen megabytes of nothing: no label costs a copy of what follows it."""
    out = BitWriter()
    out.gamma((4096,))
    for level in range(4096):
        label = f"{level:04}".encode()
        out.gamma((len(label),))
        out.uint(int.from_bytes(label, "big"), 8 * len(label))
    short = out.finish()
    padded = Bits(8 * (len(short.data) + messages.MAX_BYTES), short.data + bytes(messages.MAX_BYTES))
    query = LevelsQuery(factors=("a",))
    tracemalloc.start()
    query.read_pooled(BitReader(padded))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < CHEAP


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
