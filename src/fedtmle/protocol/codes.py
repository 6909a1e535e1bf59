"""How answers and broadcasts are written as bits.

`BitWriter` and `BitReader` know signed Elias-gamma codewords (S.2.1) and fixed-width integers. A code
(`AbstractCode`) is a value with two inverse methods on top of them. Every decoder raises `DecodeError` on
bits that its encoder could not have written, so that each payload has one form.

Only the bits written here are counted; padding to whole bytes and the envelope around them
(`protocol.messages`) are accounted separately.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, islice
from operator import add
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle_core.exact import Sums, nearest
from fedtmle_core.types import Array

LONGEST_RUN = 1 << 12  # zeros before a codeword's value; C g/h has at most some 2,100 bits
MOST_SILOS = 4096
TARGETING = "targeting"  # the stream of Algorithm 4's rounded gradients
_WORD = 64
_AHEAD = 512  # bits that are read at a time: many codewords

Value = TypeVar("Value")
Integers: TypeAlias = tuple[int, ...]
Parts: TypeAlias = tuple[object, ...]  # payloads of several queries in one round


class Remembered(NamedTuple):
    """The last integers of one stream of messages, in units of 2^exponent."""

    values: Integers
    exponent: int = 0

    def rescaled(self, exponent: int) -> Integers:
        """Return the values in units of 2^exponent, rounded half to even if these are larger."""
        return tuple(nearest(value, exponent - self.exponent) for value in self.values)


Memory: TypeAlias = Mapping[str, Remembered]  # by stream: the values that differences on a link refer to


@dataclass(frozen=True, slots=True)
class Bits:
    """A bit string: ``length`` bits, most significant first, zero-padded to whole bytes."""

    length: int
    data: bytes


def zigzag(a: int) -> int:
    """Return iota(a) of S.2.1, the bijection from the integers to the positive integers."""
    return 2 * a + 1 if a >= 0 else -2 * a


def unzigzag(v: int) -> int:
    """Return the integer whose iota is v."""
    return (v - 1) // 2 if v % 2 else -(v // 2)


def gamma_length(a: int) -> int:
    """Return the length of a's codeword, |enc(a)| = 2 floor(log2 iota(a)) + 1 bits."""
    return 2 * zigzag(a).bit_length() - 1


def fixed_width(largest: int) -> int:
    """Return the bits of an offset-binary integer in [-largest, largest]."""
    return (2 * largest).bit_length()


GOLOMB_ORDER_BITS = 5
ELIAS_DELTA = (1 << GOLOMB_ORDER_BITS) - 1  # instead of an order: the integers are of very different sizes
DECLINED = ELIAS_DELTA - 1  # instead of an order: no integers follow (`Declinable`)


def golomb_length(values: Iterable[int], order: int) -> int:
    """Return the bits of integers in the code of an order (`BitWriter.golomb`), without the order itself."""
    return _golomb_length([zigzag(a) - 1 for a in values], order)


def _golomb_length(rests: Sequence[int], order: int) -> int:
    """Return `golomb_length`, given iota(a) - 1 of each integer a."""
    if order == ELIAS_DELTA:
        widths = [(rest + 1).bit_length() for rest in rests]
        return sum([2 * width.bit_length() + width for width in widths]) - 2 * len(rests)
    return 2 * sum([((rest >> order) + 1).bit_length() for rest in rests]) + (order - 1) * len(rests)


def golomb_order(values: Sequence[int]) -> int:
    """Return the order, near the logarithm of the mean size, or `ELIAS_DELTA`: whichever code is shorter."""
    return _golomb_order(tuple(values))


@lru_cache(maxsize=512)  # each party that reads a message checks the order that its writer chose
def _golomb_order(values: tuple[int, ...]) -> int:
    rests = [2 * a if a >= 0 else -2 * a - 1 for a in values]  # iota(a) - 1
    centre = min((sum(rests) // max(len(rests), 1)).bit_length(), DECLINED - 1)
    orders: list[int] = [*range(max(centre - 2, 0), centre + 1), ELIAS_DELTA]
    return min(orders, key=lambda order: _golomb_length(rests, order))


class BitWriter:
    """Appends codewords to a growing bit string."""

    def __init__(self) -> None:
        self._value = 0
        self._length = 0

    def uint(self, value: int, width: int) -> None:
        """Append ``value`` as ``width`` plain bits."""
        if not 0 <= value < 1 << width:
            raise ValueError(f"{value.bit_length()}-bit value does not fit {width} bits")
        self._value = self._value << width | value
        self._length += width

    def gamma(self, values: Iterable[int]) -> None:
        """Append signed Elias-gamma codewords, one per value."""
        for a in values:
            # floor(log2 v) zeros, then v in binary: as a number of 2 floor(log2 v) + 1 bits it is v itself.
            self.uint(zigzag(a), gamma_length(a))

    def golomb(self, values: Sequence[int]) -> None:
        """Append integers in the exponential Golomb code whose order k makes them shortest: k, then each.

        With v = iota(a) - 1 the codeword of a is the gamma codeword of v // 2^k + 1, then v mod 2^k in k
        bits. If Elias's delta code is shorter, k is `ELIAS_DELTA` and the codeword of a is the gamma codeword
        of the number of binary digits of iota(a), then these digits without the first.
        """
        order = golomb_order(values)
        self.uint(order, GOLOMB_ORDER_BITS)
        word, length = 0, 0  # appending one by one would copy all earlier bits each time
        for a in values:
            if order == ELIAS_DELTA:
                v = zigzag(a)
                digits = v.bit_length()
                v += digits - 1 << digits - 1  # the digits but the first, after their number
                width = 2 * digits.bit_length() + digits - 2
            else:
                v = zigzag(a) - 1 + (1 << order)  # (v // 2^k + 1) 2^k + v mod 2^k
                width = 2 * v.bit_length() - 1 - order
            word, length = word << width | v, length + width
        self.uint(word, length)

    def fixed(self, values: Sequence[int], largest: Sequence[int]) -> None:
        """Append offset-binary integers, value j in [-largest[j], largest[j]]."""
        for value, reach in zip(values, largest, strict=True):
            self.uint(value + reach, fixed_width(reach))

    def finish(self) -> Bits:
        padding = -self._length % 8
        return Bits(self._length, (self._value << padding).to_bytes((self._length + 7) // 8, "big"))


class BitReader:
    """Reads what `BitWriter` wrote; anything else is a `DecodeError`.

    It works in place: time and memory depend on the bits read, not on the length of the bit string.
    """

    def __init__(self, bits: Bits) -> None:
        if bits.length < 0 or len(bits.data) != (bits.length + 7) // 8:
            raise DecodeError("a bit string's length does not match its bytes")
        self._data = bits.data
        self._at = 0
        self._end = 8 * len(bits.data)
        if self._peek(bits.length, self._end):
            raise DecodeError("a bit string's padding is not zero")
        self._end = bits.length

    def uint(self, width: int) -> int:
        if width > self._end - self._at:
            raise DecodeError("a bit string ends inside a codeword")
        start, self._at = self._at, self._at + width
        return self._peek(start, self._at)

    def is_next(self, value: int, width: int) -> bool:
        """Return whether the next ``width`` bits are ``value``, without consuming them."""
        stop = self._at + width
        return stop <= self._end and self._peek(self._at, stop) == value

    def _peek(self, start: int, stop: int) -> int:
        whole = int.from_bytes(self._data[start // 8 : (stop + 7) // 8], "big")
        return whole >> -stop % 8 & (1 << (stop - start)) - 1

    def gamma(self, count: int) -> tuple[int, ...]:
        """Read ``count`` signed Elias-gamma codewords."""
        return tuple(self._gamma() for _ in range(count))

    def _gamma(self) -> int:
        return unzigzag(self.uint(2 * self._zeros() + 1))

    def _zeros(self) -> int:
        """Return how many zeros come before the next one."""
        for start in range(self._at, self._at + LONGEST_RUN, _WORD):
            stop = min(start + _WORD, self._end)
            if start >= stop:
                raise DecodeError("a bit string ends inside a codeword")
            if word := self._peek(start, stop):
                return stop - self._at - word.bit_length()
        raise DecodeError("a codeword is longer than that of any number of this protocol")

    def golomb(self, count: int) -> tuple[int, ...]:
        """Read ``count`` integers that `BitWriter.golomb` wrote; refuse any order but the shortest."""
        order = self.uint(GOLOMB_ORDER_BITS)
        if order == ELIAS_DELTA:
            values = [self._delta() for _ in range(count)]
        else:
            values = []
            while len(values) < count:
                values += self._golomb_ahead(order, count - len(values)) or [self._golomb(order)]
        if order != golomb_order(values):
            raise DecodeError("integers are not in their shortest Golomb code")
        return tuple(values)

    def _golomb(self, order: int) -> int:
        return unzigzag((self.uint(2 * self._zeros() + 1) - 1 << order | self.uint(order)) + 1)

    def _golomb_ahead(self, order: int, most: int) -> list[int]:
        """Read at most ``most`` codewords of an order, as far as they lie within the next few words."""
        left = min(_AHEAD, self._end - self._at)
        rest = self._peek(self._at, self._at + left)
        values: list[int] = []
        while len(values) < most:
            length = 2 * (left - rest.bit_length()) + 1 + order
            if length > left:
                break
            left -= length
            v = (rest >> left) - (1 << order)  # iota(a) - 1, as `BitWriter.golomb` writes it
            rest &= (1 << left) - 1
            values.append(-(v // 2) - 1 if v % 2 else v // 2)
            self._at += length
        return values

    def _delta(self) -> int:
        width = self.uint(2 * self._zeros() + 1)
        if width > LONGEST_RUN:
            raise DecodeError("a codeword is longer than that of any number of this protocol")
        return unzigzag(1 << width - 1 | self.uint(width - 1))

    def fixed(self, largest: Sequence[int]) -> tuple[int, ...]:
        """Read one offset-binary integer per bound."""
        values = []
        for reach in largest:
            value = self.uint(fixed_width(reach)) - reach
            if value > reach:
                raise DecodeError("a fixed-width integer is out of its range")
            values.append(value)
        return tuple(values)

    def finish(self) -> None:
        """Check that all bits have been read: a longer message is not canonical."""
        if self._at < self._end:
            raise DecodeError("a bit string goes on after its last codeword")


class AbstractCode(ABC, Generic[Value]):
    """A bijection between values and bit strings."""

    @property
    @abstractmethod
    def numbers(self) -> int:
        """How many numbers a payload holds; 0 if unknown until the value exists."""

    @abstractmethod
    def write(self, value: Value, out: BitWriter) -> None:
        """Append the value's bits to ``out``."""

    @abstractmethod
    def read(self, bits: BitReader) -> Value:
        """Read one value, or raise `DecodeError`."""

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams whose last payload the code remembers."""
        return ()

    def renamed(self, suffix: str) -> AbstractCode[Value]:
        """Return the code with ``suffix`` after the names of its streams."""
        return self

    def after(self, memory: Memory) -> AbstractCode[Value]:
        """Return the code of the next payload on a link whose earlier ones left ``memory``."""
        return self

    def memory(self, value: Value) -> Memory:
        """Return the part of this payload that both ends of a link remember, by stream."""
        return {}


def encode(code: AbstractCode[Value], value: Value) -> Bits:
    """Return the value as a bit string of its own."""
    out = BitWriter()
    code.write(value, out)
    return out.finish()


def decode(code: AbstractCode[Value], bits: Bits) -> Value:
    """Return the value that ``bits`` encode; nothing may follow it."""
    reader = BitReader(bits)
    value = code.read(reader)
    reader.finish()
    return value


@dataclass
class Uplink:
    """One end of a silo's uplink: it codes answers, and keeps the memory that differences refer to.

    The silo and the server hold one each; the memory survives re-centring.
    """

    memory: Memory = field(default_factory=dict)

    def encode(self, code: AbstractCode[Value], answer: Value) -> Bits:
        """Return an answer as bits, and remember it."""
        bits = encode(code.after(self.memory), answer)
        self.memory = {**self.memory, **code.memory(answer)}
        return bits

    def decode(self, code: AbstractCode[Value], bits: Bits) -> Value:
        """Return the answer that ``bits`` encode, and remember it."""
        answer = decode(code.after(self.memory), bits)
        self.memory = {**self.memory, **code.memory(answer)}
        return answer


@final
@dataclass(frozen=True)
class FixedSums(AbstractCode[Sums]):
    """Exact sums on a public grid, each at the fixed width that its bound allows."""

    shifts: tuple[int, ...]
    largest: tuple[int, ...]  # in grid units

    @property
    def numbers(self) -> int:
        return len(self.shifts)

    def write(self, value: Sums, out: BitWriter) -> None:
        out.fixed(value.units, self.largest)

    def read(self, bits: BitReader) -> Sums:
        return Sums(bits.fixed(self.largest), self.shifts)


@final
@dataclass(frozen=True)
class SimilarSums(AbstractCode[Sums]):
    """Sums on a public grid, each as its difference from an earlier one, in a Golomb code.

    Sum j is likely near sum like[j] < j; like[j] = j if no earlier one is near it.
    """

    shifts: tuple[int, ...]
    largest: tuple[int, ...]  # in grid units
    like: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return len(self.shifts)

    def write(self, value: Sums, out: BitWriter) -> None:
        out.golomb([unit - self._forecast(j, value.units) for j, unit in enumerate(value.units)])

    def read(self, bits: BitReader) -> Sums:
        units: list[int] = []
        for j, step in enumerate(bits.golomb(self.numbers)):
            units.append(self._forecast(j, units) + step)
        if any(abs(unit) > most for unit, most in zip(units, self.largest, strict=True)):
            raise DecodeError("a sum is out of its range")
        return Sums(tuple(units), self.shifts)

    def _forecast(self, j: int, units: Sequence[int]) -> int:
        before = self.like[j]
        return 0 if before == j else nearest(units[before], self.shifts[before] - self.shifts[j])


@final
@dataclass(frozen=True, kw_only=True)
class Triangle(AbstractCode[Integers]):
    """The upper triangle of a matrix of means of products, on a public grid, in a Golomb code by rows.

    If the first column is constant, the first row has the means of the others, and their products
    forecast the rest: entry (j, k) is sent as its difference from m_0j m_0k / m_00.
    """

    dim: int

    @property
    def numbers(self) -> int:
        return self.dim * (self.dim + 1) // 2

    def write(self, value: Integers, out: BitWriter) -> None:
        rest, first = iter(value), value[: self.dim]
        for j in range(self.dim):
            row = list(islice(rest, self.dim - j))
            out.golomb([entry - forecast for entry, forecast in zip(row, _products(first, j), strict=True)])

    def read(self, bits: BitReader) -> Integers:
        first = bits.golomb(self.dim) if self.dim else ()
        rows = [first]
        for j in range(1, self.dim):
            rows.append(tuple(map(add, _products(first, j), bits.golomb(self.dim - j))))
        return tuple(chain.from_iterable(rows))


def _products(first: Integers, j: int) -> Integers:
    """Return m_0j m_0k / m_00 for k >= j, rounded down; zeros for j = 0, and if m_00 is not positive."""
    if j == 0 or first[0] <= 0:
        return (0,) * (len(first) - j)
    return tuple(first[j] * mean // first[0] for mean in first[j:])


@final
@dataclass(frozen=True, kw_only=True)
class Differences(AbstractCode[tuple[int, ...]]):
    """Integers as differences from the last payload, in signed Elias-gamma codewords (S.2.1).

    With a ``width`` J they are absolute values in [-J, J] at fixed width instead.
    """

    dim: int
    width: int | None
    previous: Integers | None = None
    stream: str = TARGETING

    @property
    def numbers(self) -> int:
        return self.dim

    def after(self, memory: Memory) -> Differences:
        last = memory.get(self.stream)
        if last is None or len(last.values) != self.dim:
            return self
        return replace(self, previous=last.values)

    @property
    def streams(self) -> tuple[str, ...]:
        return (self.stream,)

    def renamed(self, suffix: str) -> Differences:
        return replace(self, stream=self.stream + suffix)

    def memory(self, value: tuple[int, ...]) -> Memory:
        return {self.stream: Remembered(value)}

    def write(self, value: tuple[int, ...], out: BitWriter) -> None:
        if self.width is not None:
            if any(abs(entry) > self.width for entry in value):
                raise OverflowError("fixed_width: a rounded gradient exceeds the declared range")
            out.fixed(value, (self.width,) * self.dim)
        else:
            out.gamma(entry - before for entry, before in zip(value, self._origin, strict=True))

    def read(self, bits: BitReader) -> tuple[int, ...]:
        if self.width is not None:
            return bits.fixed((self.width,) * self.dim)
        return tuple(before + step for before, step in zip(self._origin, bits.gamma(self.dim), strict=True))

    @property
    def _origin(self) -> Integers:
        return self.previous or (0,) * self.dim


@final
@dataclass(frozen=True, kw_only=True)
class Golomb(AbstractCode[Integers]):
    """Integers without public bounds in an exponential Golomb code, whose order is chosen for them.

    With a ``stream`` they are differences from the last payload of that stream. It may have had another grid:
    ``exponent`` says that the integers count multiples of 2^exponent. Each of the ``blocks``, given by their
    sizes, has an order of its own.
    """

    blocks: tuple[int, ...]
    stream: str | None = None
    exponent: int = 0
    previous: Integers | None = None

    @property
    def numbers(self) -> int:
        return sum(self.blocks)

    def after(self, memory: Memory) -> Golomb:
        last = None if self.stream is None else memory.get(self.stream)
        if last is None or len(last.values) != self.numbers:
            return self
        return replace(self, previous=last.rescaled(self.exponent))

    @property
    def streams(self) -> tuple[str, ...]:
        return () if self.stream is None else (self.stream,)

    def renamed(self, suffix: str) -> Golomb:
        return self if self.stream is None else replace(self, stream=self.stream + suffix)

    def memory(self, value: Integers) -> Memory:
        return {} if self.stream is None else {self.stream: Remembered(value, self.exponent)}

    def write(self, value: Integers, out: BitWriter) -> None:
        steps = iter([entry - before for entry, before in zip(value, self._origin, strict=True)])
        for size in self.blocks:
            out.golomb(list(islice(steps, size)))

    def read(self, bits: BitReader) -> Integers:
        steps = chain.from_iterable([bits.golomb(size) for size in self.blocks])
        return tuple(map(add, self._origin, steps))

    @property
    def _origin(self) -> Integers:
        return self.previous or (0,) * self.numbers


@final
@dataclass(frozen=True)
class Declinable(AbstractCode[Integers | None]):
    """Integers in a code that begins with the order of a Golomb code, or None if the silo declined.

    None is written in the place of the order (`DECLINED`), so that integers cost no extra bit. It is not
    remembered.
    """

    code: AbstractCode[Integers]
    may_decline: bool

    @property
    def numbers(self) -> int:
        return self.code.numbers

    def write(self, value: Integers | None, out: BitWriter) -> None:
        if value is None:
            out.uint(DECLINED, GOLOMB_ORDER_BITS)
        else:
            self.code.write(value, out)

    def read(self, bits: BitReader) -> Integers | None:
        if self.may_decline and bits.is_next(DECLINED, GOLOMB_ORDER_BITS):
            bits.uint(GOLOMB_ORDER_BITS)
            return None
        return self.code.read(bits)

    @property
    def streams(self) -> tuple[str, ...]:
        return self.code.streams

    def renamed(self, suffix: str) -> Declinable:
        return replace(self, code=self.code.renamed(suffix))

    def after(self, memory: Memory) -> Declinable:
        return replace(self, code=self.code.after(memory))

    def memory(self, value: Integers | None) -> Memory:
        return {} if value is None else self.code.memory(value)


@final
@dataclass(frozen=True)
class Joined(AbstractCode[Parts]):
    """Payloads one after the other. Several codes of one stream each keep their own memory."""

    codes: tuple[AbstractCode[Any], ...]

    @property
    def numbers(self) -> int:
        return sum(code.numbers for code in self.codes)

    def write(self, value: Parts, out: BitWriter) -> None:
        for code, part in zip(self.codes, value, strict=True):
            code.write(part, out)

    def read(self, bits: BitReader) -> Parts:
        return tuple(code.read(bits) for code in self.codes)

    @cached_property
    def streams(self) -> tuple[str, ...]:
        return tuple(stream for code in self._apart for stream in code.streams)

    def renamed(self, suffix: str) -> Joined:
        return Joined(tuple(code.renamed(suffix) for code in self.codes))

    @cached_property
    def _apart(self) -> tuple[AbstractCode[Any], ...]:
        """The codes with streams of their own."""
        taken: set[str] = set()
        apart: list[AbstractCode[Any]] = []
        for number, code in enumerate(self.codes):
            apart.append(code.renamed(f" #{number}") if taken.intersection(code.streams) else code)
            taken.update(apart[-1].streams)
        return tuple(apart)

    def after(self, memory: Memory) -> Joined:
        return Joined(tuple(code.after(memory) for code in self._apart))

    def memory(self, value: Parts) -> Memory:
        parts = zip(self._apart, value, strict=True)
        return {stream: last for code, part in parts for stream, last in code.memory(part).items()}


@final
@dataclass(frozen=True)
class Nothing(AbstractCode[None]):
    """No bits: the only information is that an answer was given."""

    numbers: int = 0

    def write(self, value: None, out: BitWriter) -> None:
        pass

    def read(self, bits: BitReader) -> None:
        pass


def write_floats(values: Array, out: BitWriter) -> None:
    """Append doubles, 64 bits each."""
    for value in values:
        out.uint(int.from_bytes(struct.pack(">d", value), "big"), 64)


def read_floats(bits: BitReader, count: int) -> Array:
    """Read finite doubles, shape (count,)."""
    values = [struct.unpack(">d", bits.uint(64).to_bytes(8, "big"))[0] for _ in range(count)]
    if not all(map(math.isfinite, values)):
        raise DecodeError("a number is not finite")
    return np.array(values)


def write_bytes(data: bytes, out: BitWriter) -> None:
    """Append a length and that many bytes, as one number: appending one by one copies all earlier ones."""
    out.gamma((len(data),))
    out.uint(int.from_bytes(data, "big"), 8 * len(data))


def read_bytes(bits: BitReader, most: int) -> bytes:
    """Read what `write_bytes` wrote; at most ``most`` bytes."""
    length = read_count(bits, most)
    return bits.uint(8 * length).to_bytes(length, "big")


def read_count(bits: BitReader, most: int, least: int = 0) -> int:
    """Read a count in [least, most]."""
    (count,) = bits.gamma(1)
    if not least <= count <= most:
        raise DecodeError("a count is out of its range")
    return count
