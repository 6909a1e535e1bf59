"""Bit strings: signed Elias-gamma codewords (S.2.1) and fixed-width integers.

The bits that are counted are the bits that are written here; padding to whole bytes and the
envelope around them are accounted separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedtmle.errors import DecodeError

LONGEST_RUN = 1 << 12  # zeros before a codeword's value; C g/h has at most some 2,100 bits
_WORD = 64


@dataclass(frozen=True, slots=True)
class Bits:
    """A bit string: ``length`` bits, most significant first, zero-padded to whole bytes."""

    length: int
    data: bytes


def zigzag(a: int) -> int:
    """iota of S.2.1: the bijection from the integers to the positive integers."""
    return 2 * a + 1 if a >= 0 else -2 * a


def unzigzag(v: int) -> int:
    """The inverse of iota."""
    return (v - 1) // 2 if v % 2 else -(v // 2)


def gamma_length(a: int) -> int:
    """|enc(a)| = 2 floor(log2 iota(a)) + 1 bits."""
    return 2 * zigzag(a).bit_length() - 1


def fixed_width(largest: int) -> int:
    """Bits of an offset-binary integer in [-largest, largest]."""
    return (2 * largest).bit_length()


class BitWriter:
    """Appends codewords to a growing bit string."""

    def __init__(self) -> None:
        self._value = 0
        self._length = 0

    def uint(self, value: int, width: int) -> None:
        """``width`` plain bits."""
        if not 0 <= value < 1 << width:
            raise ValueError(f"{value.bit_length()}-bit value does not fit {width} bits")
        self._value = self._value << width | value
        self._length += width

    def gamma(self, values: Iterable[int]) -> None:
        """Signed Elias-gamma codewords, one per value."""
        for a in values:
            # floor(log2 v) zeros, then v in binary: as a number of 2 floor(log2 v) + 1 bits it is v itself.
            self.uint(zigzag(a), gamma_length(a))

    def fixed(self, values: Sequence[int], largest: Sequence[int]) -> None:
        """Offset-binary integers, value j in [-largest[j], largest[j]]."""
        for value, reach in zip(values, largest, strict=True):
            self.uint(value + reach, fixed_width(reach))

    def finish(self) -> Bits:
        padding = -self._length % 8
        return Bits(self._length, (self._value << padding).to_bytes((self._length + 7) // 8, "big"))


class BitReader:
    """Reads what `BitWriter` wrote; anything else is a `DecodeError`.

    It works in place: time and memory are those of what is read, however long the bit string is.
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

    def _peek(self, start: int, stop: int) -> int:
        whole = int.from_bytes(self._data[start // 8 : (stop + 7) // 8], "big")
        return whole >> -stop % 8 & (1 << (stop - start)) - 1

    def gamma(self, count: int) -> tuple[int, ...]:
        """``count`` signed Elias-gamma codewords."""
        return tuple(self._gamma() for _ in range(count))

    def _gamma(self) -> int:
        return unzigzag(self.uint(2 * self._zeros() + 1))

    def _zeros(self) -> int:
        """How many zeros come before the next one."""
        for start in range(self._at, self._at + LONGEST_RUN, _WORD):
            stop = min(start + _WORD, self._end)
            if start >= stop:
                raise DecodeError("a bit string ends inside a codeword")
            if found := self._peek(start, stop):
                return stop - self._at - found.bit_length()
        raise DecodeError("a codeword is longer than that of any number of this protocol")

    def fixed(self, largest: Sequence[int]) -> tuple[int, ...]:
        """One offset-binary integer per bound."""
        values = []
        for reach in largest:
            value = self.uint(fixed_width(reach)) - reach
            if value > reach:
                raise DecodeError("a fixed-width integer is out of its range")
            values.append(value)
        return tuple(values)

    def finish(self) -> None:
        """All bits must have been read: a longer message is not canonical."""
        if self._at < self._end:
            raise DecodeError("a bit string goes on after its last codeword")
