"""Masked sums: silos add pairwise masks to their integers, so that only totals over all silos can be read.

A silo sends y_j = x_j + its masks, modulo 2^k_j, for each number (a *lane*). Silos i < j of the roster share
a mask, which i adds and j subtracts, so that the masks cancel in the total. The width k_j follows from a
public bound of the *total*: what a single silo adds may wrap around.

    K_ij   = HKDF-SHA256(X25519(i, j), salt = SHA-256(plan, session), info = names and public keys of i, j)
    subkey = HMAC-SHA256(K_ij, SHA-256(n, round, digest of everything heard)), used once
    masks  = the ChaCha20 key stream of the subkey

A subkey depends on everything that a silo heard. If a server tells two silos different things, their masks do
not cancel, and the totals are noise. One more number, the check, is the sum of c_j x_j modulo a prime, with
public factors c_j and masks of its own. Its total must fit the totals of the lanes. A silo that is out of
step, or a total beyond its bound, escapes detection with a probability of 2^-31.

A silo that may not disclose its part yet sends a mask of its own, which no other silo shares and which does
not cancel, in place of its integers: all totals of the round are noise, and the check shows it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import final

import msgspec

from fedtmle.errors import DecodeError, InputError
from fedtmle.protocol.codes import BitReader, BitWriter
from fedtmle_core.signing import MaskKey

PRIME = (1 << 31) - 1  # modulus of the check
CHECK_BITS = 31
FACTOR = 7  # c_j = 7^(j + 1): 7 generates the units of the prime
CHECK_BYTES = 16  # key-stream bytes for one mask of the check: its bias is 2^-97
MOST_ROWS = 1 << 40  # largest number of rows of all silos together
OUT_OF_STEP = (
    "the masks of a round do not cancel: silos were told different things, one is out of step, or a total "
    "exceeds its public bound"
)


@dataclass(frozen=True, slots=True)
class Lane:
    """The public bound of one total: |total - centre| <= reach."""

    reach: int
    centre: int = 0

    @property
    def width(self) -> int:
        """The fewest bits that distinguish the 2 reach + 1 possible totals."""
        return (2 * self.reach).bit_length()

    def total(self, residue: int, width: int) -> int:
        """Return the total within the bound that has this residue modulo 2^width, of the lane's width."""
        lowest = self.centre - self.reach
        offset = (residue - lowest) & ((1 << width) - 1)
        if offset > 2 * self.reach:
            raise DecodeError(OUT_OF_STEP)
        return lowest + offset


@dataclass(frozen=True, slots=True)
class Masked:
    """The residues of all lanes in one integer, and the check: what one silo sends, or a sum of these."""

    packed: int
    check: int


@final
@dataclass(frozen=True)
class Packing:
    """The lanes of one message side by side in one integer, the first in the highest bits."""

    lanes: tuple[Lane, ...]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The bits of each lane."""
        return tuple(lane.width for lane in self.lanes)

    @cached_property
    def bits(self) -> int:
        """The length of all lanes, without the check."""
        return sum(self.widths)

    @cached_property
    def _tops(self) -> int:
        """The highest bit of each lane."""
        return self._joined([1 << width >> 1 for width in self.widths])

    @cached_property
    def _ones(self) -> int:
        """The lowest bit of each lane."""
        return self._joined([width > 0 for width in self.widths])

    def _joined(self, residues: Iterable[int]) -> int:
        """Return residues side by side in one integer."""
        packed = 0
        for width, residue in zip(self.widths, residues, strict=True):
            packed = packed << width | residue
        return packed

    def pack(self, values: Sequence[int]) -> Masked:
        """Return integers of any size, each modulo 2^width, and their check; nothing is masked."""
        packed, check, factor = 0, 0, 1
        for width, value in zip(self.widths, values, strict=True):
            packed = packed << width | value & ((1 << width) - 1)
            factor = factor * FACTOR % PRIME
            check += factor * value
        return Masked(packed, check % PRIME)

    def add(self, one: Masked, other: Masked) -> Masked:
        """Return the sum, each lane modulo 2^width: no carry leaves its lane."""
        low = (one.packed & ~self._tops) + (other.packed & ~self._tops)
        return Masked(low ^ ((one.packed ^ other.packed) & self._tops), (one.check + other.check) % PRIME)

    def negative(self, value: Masked) -> Masked:
        """Return minus each lane, modulo 2^width."""
        complement = Masked(value.packed ^ ((1 << self.bits) - 1), -value.check % PRIME)
        return self.add(complement, Masked(self._ones, 0))

    def totals(self, sums: Sequence[Masked]) -> tuple[int, ...]:
        """Return the total of each lane from what all silos sent, or raise `DecodeError`."""
        whole = reduce(self.add, sums)
        digits, at, totals = f"{whole.packed:0{self.bits}b}", 0, []
        for lane, width in zip(self.lanes, self.widths, strict=True):
            totals.append(lane.total(int(digits[at : at + width] or "0", 2), width))
            at += width
        if self.pack(totals).check != whole.check:
            raise DecodeError(OUT_OF_STEP)
        return tuple(totals)

    def write(self, value: Masked, out: BitWriter) -> None:
        """Append the lanes and the check."""
        out.uint(value.packed, self.bits)
        out.uint(value.check, CHECK_BITS)

    def read(self, bits: BitReader) -> Masked:
        """Read what `write` appended."""
        packed, check = bits.uint(self.bits), bits.uint(CHECK_BITS)
        if check >= PRIME:
            raise DecodeError("the check of a masked answer is out of its range")
        return Masked(packed, check)


COUNT = Packing((Lane(MOST_ROWS),))  # N_m, in the opening


class Masker:
    """One silo's masks in one session of a plan; ``roster`` has each silo's name and public key, in order."""

    def __init__(
        self, key: MaskKey, roster: Sequence[tuple[str, bytes]], own: str, *, plan: bytes, session: bytes
    ) -> None:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        salt = _digest("fedtmle masks", plan, session)
        place = [name for name, _ in roster].index(own)

        def derived(secret: bytes, info: bytes) -> bytes:
            return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(secret)

        # K_ii: only who has this silo's private key can compute what it shares with itself.
        self._own = derived(key.shared(key.public), msgspec.msgpack.encode(("blind", roster[place])))
        # The other silo, whether this one subtracts the mask, and K_ij.
        self._pairs: list[tuple[str, bool, bytes]] = []
        for number, other in enumerate(roster):
            if number == place:
                continue
            first, second = sorted((number, place))
            info = msgspec.msgpack.encode((roster[first], roster[second]))
            try:
                secret = key.shared(other[1])
            except ValueError:
                raise InputError(f"silo '{other[0]}': its public key for masks is not one") from None
            self._pairs.append((other[0], place == second, derived(secret, info)))

    def mask(
        self,
        packing: Packing,
        values: Sequence[int],
        *,
        n: int,
        round: int,
        heard: bytes,
        among: Collection[str] = (),
    ) -> Masked:
        """Return the integers under the masks of one round.

        ``heard`` is a digest of everything before. The masks cancel in the total over the silos ``among``,
        those of the roster by default.
        """
        context = _context(n, round, heard)
        added, subtracted = packing.pack(values), Masked(0, 0)
        for other, subtracts, key in self._pairs:
            if among and other not in among:
                continue
            mask = _expanded(hmac.digest(key, context, "sha256"), packing)
            if subtracts:
                subtracted = packing.add(subtracted, mask)
            else:
                added = packing.add(added, mask)
        return packing.add(added, packing.negative(subtracted))

    def blind(self, packing: Packing, *, n: int, round: int, heard: bytes) -> Masked:
        """Return what a silo sends instead of its integers, so that all totals of a round are noise."""
        return _expanded(hmac.digest(self._own, _context(n, round, heard), "sha256"), packing)


def _expanded(subkey: bytes, packing: Packing) -> Masked:
    """Return the mask of one pair of silos in one round."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    size = (packing.bits + 7) // 8
    stream = Cipher(ChaCha20(subkey, bytes(16)), mode=None).encryptor()  # the nonce may be 0: one use
    data = stream.update(bytes(size + CHECK_BYTES))
    packed = int.from_bytes(data[:size], "big") >> (8 * size - packing.bits)
    return Masked(packed, int.from_bytes(data[size:], "big") % PRIME)


def _context(n: int, round: int, heard: bytes) -> bytes:
    return _digest("fedtmle round", n, round, heard)


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()
