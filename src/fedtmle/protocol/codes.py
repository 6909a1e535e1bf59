"""Payload codes: how an answer, or what was pooled, is written as bits.

A code is a value with two inverse methods. Every decoder raises `DecodeError` on bits that its encoder
could not have written, so that each payload has one form.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import numpy as np

from fedtmle.errors import DecodeError
from fedtmle.model.exact import Sums
from fedtmle.model.types import Array
from fedtmle.protocol.bits import BitReader, Bits, BitWriter

MOST_SILOS = 4096

Value = TypeVar("Value")
Memory = tuple[int, ...]


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

    def after(self, memory: Memory | None) -> AbstractCode[Value]:  # noqa: ARG002 - for codes with a memory
        """Return the code of the next payload on a link whose last one left ``memory``."""
        return self

    def memory(self, value: Value) -> Memory | None:  # noqa: ARG002 - for codes with a memory
        """Return what both ends of a link remember of this payload, or None."""
        return None


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

    memory: Memory | None = None

    def encode(self, code: AbstractCode[Value], answer: Value) -> Bits:
        """Return an answer as bits, and remember it."""
        bits = encode(code.after(self.memory), answer)
        self._remember(code, answer)
        return bits

    def decode(self, code: AbstractCode[Value], bits: Bits) -> Value:
        """Return the answer that ``bits`` encode, and remember it."""
        answer = decode(code.after(self.memory), bits)
        self._remember(code, answer)
        return answer

    def _remember(self, code: AbstractCode[Value], answer: Value) -> None:
        kept = code.memory(answer)
        if kept is not None:
            self.memory = kept


@final
@dataclass(frozen=True)
class FixedIntegers(AbstractCode[tuple[int, ...]]):
    """Integers of public bounds, value j in [-largest[j], largest[j]], at fixed width.

    A width that depended on the value would tell the value's size to whoever counts bytes.
    """

    largest: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return len(self.largest)

    def write(self, value: tuple[int, ...], out: BitWriter) -> None:
        out.fixed(value, self.largest)

    def read(self, bits: BitReader) -> tuple[int, ...]:
        return bits.fixed(self.largest)


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
@dataclass(frozen=True, kw_only=True)
class Differences(AbstractCode[tuple[int, ...]]):
    """Integers as differences from the last payload, in signed Elias-gamma codewords (S.2.1).

    With a ``width`` J they are absolute values in [-J, J] at fixed width instead.
    """

    dim: int
    width: int | None
    previous: Memory | None = None

    @property
    def numbers(self) -> int:
        return self.dim

    def after(self, memory: Memory | None) -> Differences:
        return Differences(dim=self.dim, width=self.width, previous=memory)

    def memory(self, value: tuple[int, ...]) -> Memory:
        return value

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
    def _origin(self) -> Memory:
        return self.previous or (0,) * self.dim


@final
@dataclass(frozen=True)
class Joined(AbstractCode[tuple[Any, ...]]):
    """Payloads one after the other; none of their codes may have a memory."""

    codes: tuple[AbstractCode[Any], ...]

    @property
    def numbers(self) -> int:
        return sum(code.numbers for code in self.codes)

    def write(self, value: tuple[Any, ...], out: BitWriter) -> None:
        for code, part in zip(self.codes, value, strict=True):
            code.write(part, out)

    def read(self, bits: BitReader) -> tuple[Any, ...]:
        return tuple(code.read(bits) for code in self.codes)


@final
@dataclass(frozen=True)
class Nothing(AbstractCode[None]):
    """No bits: an answer that consists in being given."""

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
    """Append a length and so many bytes: as one number, since appending one by one copies all before it."""
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
