"""Sums that nobody can read on the way: lanes side by side in one integer, its check, and its masks.

A *lane* is one integer of an answer, with a public bound of its total over all hospitals, |total| <= reach.
A message is one integer modulo 2^(8 size), the lowest part first:

    verdict | lane 1 | lane 2 | ... | check

    value  = sum of each part times 2^(its place), a plain signed sum: a hospital's own part may wrap around
    sent   = value + masks                       modulo 2^(8 size)
    summed = sum of what all hospitals sent      modulo 2^(8 size)

The masks cover the integer as a whole, so that the server adds byte strings of one length and knows no
boundaries. Once the masks have cancelled, the sum of the values is the packing of the totals, because each
total fits its width; carries between lanes belong to that packing and come out right.

**The check** is the sum of c_j x_j over the lanes, as an integer, with secret factors c_j of 64 random bits;
it is one more lane. Let somebody who does not know the factors add any number to the integer, so that
the lanes read t_j + d_j, not all d_j zero. The change of the topmost lane, e, depends on that number and on
carries from the lanes below, hence not on the factors. The check passes only if sum of c_j d_j = e modulo
2^w, w the width of the check. Take a j with d_j not 0 and fix the other factors: the 2^64 values of c_j give
2^64 different integers c_j d_j in a range of less than 2^w, so at most one of them passes. Hence tampering
passes with probability at most 2^-64, for lanes of any width. (A check modulo a prime p does not do this: it
never sees a d_j that is a multiple of p, and lanes may be wider than p.) One try ends the run.

**The verdict** is zero, or the sum of secret code words of 65 bits, one for each hospital that does not agree
to the round (`Word`); who does not know the words hides one with probability 2^-64, and invents one with
about M^3 times that, of M hospitals. It is lowest, so that it can be read even if such a hospital put noise
over everything above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import product
from operator import mul
from typing import final

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from fedtmle_core.errors import DecodeError
from fedtmle_core.plan import Lane

# One try is one run, which ends and is charged to its author; 2^-64 would last at a try each second for 5e11
# years. Each further bit would lengthen every message by two bits.
FACTOR_BITS = 64
OUT_OF_STEP = (
    "the masks of a round do not cancel: hospitals were told different things or asked different questions, "
    "one is out of step, or the sum was changed on its way"
)


class Word(IntEnum):
    """Why a core puts noise in place of its answer; of several words in one round the first counts."""

    REFUSED = 0  # too few people stand behind what the study asks
    FAILED = 1  # the answer could not be computed
    UNCLEAR = 2  # its judgement needs finer products before the question that was asked


def width(lane: Lane) -> int:
    """Return the fewest bits that distinguish the 2 reach + 1 possible totals of a lane."""
    return (2 * lane.reach).bit_length()


@final
@dataclass(frozen=True)
class Packing:
    """Lanes side by side in one integer, the first in the lowest bits."""

    lanes: tuple[Lane, ...]

    @cached_property
    def bits(self) -> int:
        """The length of all lanes."""
        return sum(width(lane) for lane in self.lanes)

    @cached_property
    def _lowest(self) -> int:
        """Minus the packing of the least totals: adding it makes every lane a number from 0 to 2 reach."""
        return self.join([lane.reach for lane in self.lanes])

    def join(self, values: Sequence[int]) -> int:
        """Return the sum of the values, each times 2^(the place of its lane); signed, of any size."""
        parts = [(value, width(lane)) for value, lane in zip(values, self.lanes, strict=True)]
        while len(parts) > 1:  # neighbours in pairs: n log n, where one after the other would be n^2
            odd = parts[-1:] if len(parts) % 2 else []
            pairs = zip(parts[::2], parts[1::2], strict=False)
            parts = [(low + (high << bits), bits + more) for (low, bits), (high, more) in pairs] + odd
        return parts[0][0] if parts else 0

    def split(self, packed: int, bits: int) -> tuple[int, ...]:
        """Return the total of each lane from their packing modulo 2^bits, or raise `DecodeError`.

        The totals within the bounds are unique. ``bits`` is at least the length of all lanes; the last lane
        takes the bits that are left over.
        """
        raised = (packed + self._lowest) % (1 << bits)
        digits, stop, totals = f"{raised:0{bits}b}", bits, []
        for lane in self.lanes:
            start = stop - width(lane)
            offset = int(digits[start:stop] or "0", 2)
            if offset > 2 * lane.reach:
                raise DecodeError(OUT_OF_STEP)
            totals.append(offset - lane.reach)
            stop = start
        if "1" in digits[:stop]:
            raise DecodeError(OUT_OF_STEP)
        return tuple(totals)


@dataclass(frozen=True, slots=True)
class Factors:
    """The secret numbers of one round: the factors of the check, and a word for each way to refuse."""

    of_lanes: tuple[int, ...]
    words: tuple[int, ...]

    @classmethod
    def of(cls, key: bytes, lanes: int, bits: int = FACTOR_BITS) -> Factors:
        """Return the numbers that a key expands to; ``bits`` is less only where a test counts forgeries."""
        size = FACTOR_BITS // 8
        data = keystream(key, (len(Word) + lanes) * size)
        drawn = [
            int.from_bytes(data[at : at + size], "little") >> (FACTOR_BITS - bits)
            for at in range(0, len(data), size)
        ]
        # A word is not 0, or it would be no refusal.
        return cls(tuple(drawn[len(Word) :]), tuple(word | (1 << FACTOR_BITS) for word in drawn[: len(Word)]))


@final
@dataclass(frozen=True)
class Frame:
    """The shape of one message: the lanes of a question, and the number of hospitals that answer it."""

    lanes: tuple[Lane, ...]
    members: int

    @cached_property
    def _front(self) -> int:
        """The bits of the verdict: at most a word from each hospital, each below 2^65."""
        return (self.members << (FACTOR_BITS + 1)).bit_length()

    @cached_property
    def _body(self) -> Packing:
        """The lanes and the check."""
        check = Lane(sum(lane.reach for lane in self.lanes) << FACTOR_BITS)
        return Packing((*self.lanes, check))

    @cached_property
    def size(self) -> int:
        """The bytes of a message: a function of public bounds alone."""
        return (self._front + self._body.bits + 7) // 8

    @property
    def modulus(self) -> int:
        """What messages are added modulo."""
        return 1 << 8 * self.size

    def pack(self, values: Sequence[int], factors: Factors) -> int:
        """Return one hospital's values and their check."""
        check = sum(map(mul, factors.of_lanes, values))
        return self._body.join((*values, check)) << self._front

    def refuse(self, word: Word, factors: Factors, noise: bytes) -> int:
        """Return what a hospital sends that refuses: its word, and noise over everything else."""
        return factors.words[word] + (int.from_bytes(noise, "little") << self._front)

    def verdict(self, total: int, factors: Factors) -> Word | None:
        """Return the word that hospitals added, and None if all of them answered."""
        front = total % (1 << self._front)
        if front == 0:
            return None
        refused, failed, unclear = factors.words
        for b, c in product(range(self.members + 1), repeat=2):
            a, rest = divmod(front - b * failed - c * unclear, refused)
            if rest == 0 and 0 <= a <= self.members - b - c:
                return Word.REFUSED if a else Word.FAILED if b else Word.UNCLEAR
        raise DecodeError(OUT_OF_STEP)

    def unpack(self, total: int, factors: Factors) -> tuple[int, ...]:
        """Return the totals of the lanes, or raise `DecodeError` unless the check fits them."""
        bits = 8 * self.size - self._front
        *totals, check = self._body.split(total >> self._front, bits)
        if check != sum(map(mul, factors.of_lanes, totals)):
            raise DecodeError(OUT_OF_STEP)
        return tuple(totals)


def add(messages: Iterable[bytes]) -> bytes:
    """Return the sum of messages of one length: all that the server computes."""
    parts = list(messages)
    sizes = set(map(len, parts))
    if len(sizes) != 1:
        raise DecodeError("the messages of a round have different lengths")
    (size,) = sizes
    total = sum(int.from_bytes(part, "little") for part in parts) % (1 << 8 * size)
    return total.to_bytes(size, "little")


def keystream(key: bytes, size: int) -> bytes:
    """Return the first bytes of the ChaCha20 stream of a key that is used for nothing else.

    The nonce may therefore be zero: a nonce keeps two uses of one key apart.
    """
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))
