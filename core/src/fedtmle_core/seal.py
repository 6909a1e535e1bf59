"""The seal: keys by which hospitals add up numbers that the server, which carries them, cannot read.

**Who is there.** Each hospital has one secret seed, and two public keys made from it: one signs, one agrees
on secrets (X25519). A `Consortium` lists all names with their keys. Owners compare its fingerprint with each
other, over a channel on which they know each other's voice; everything below rests on that. A hospital that
somebody invented would hold the group key and open the seal.

**How a run begins.** Each core answers a request to open with a nonce and a signature. The server then
settles the roster, before the first answer, and gives everybody all openings. Their digest T covers the
consortium, the plan, the run, the roster and every nonce, and goes into all keys:

    nonce_i = PRF(own secret of i; plan, run, digest of i's table)
    G       = PRF(own secret of the first hospital; T)           the group key
    K_ij    = HKDF(X25519(i, j), salt = T, info = the entries of i and j in the list)

The first core of the roster seals a copy of G for each other core, under keys that this pair and T alone
have, and signs it. If the server tells two cores different rosters, plans, runs or nonces, their T differ:
copies do not open, masks do not cancel.

**A round.** `heard` is a running digest of T and of all broadcasts. With place = (round, heard, digest of the
question), hospital i sends, modulo 2^(8 size),

    packed values and check + sum of signed pair masks (+ the stream, if i is the first of the roster)
    pair mask = ChaCha20(HMAC(K_ij; place)), which i < j adds and j subtracts
    stream    = ChaCha20(HMAC(G; "stream", place))
    factors   = ChaCha20(HMAC(G; "factors", place))              of the check (`masks`)

The server adds, and broadcasts the sum; the pair masks are gone and the stream is left. Cores take it away,
verify the check, and read the totals.

**What the server learns.** Nothing but lengths, and who takes part. HMAC and ChaCha20 are pseudo-random
functions, X25519 secrets are random to outsiders (gap Diffie-Hellman), so that all messages of a round are
uniform byte strings: every roster has two hospitals whose pair mask the server lacks, and the sum has the
stream, which it lacks as well. A question asked of one hospital alone changes `place` there: its masks do
not cancel, nobody reads the round, and the check shows it, but for a chance of 2^-64 (`masks`). So do a
replayed, dropped, or reordered message and two different broadcasts: they change `round` or `heard`.

**No stream is used for two texts.** Everything sent is a function of the seed, the plan, the run, the roster,
the table, the release of this package and what was heard; there is no clock and no random number. So a
journal that was restored or lost leads to the same bytes. Another table gives another nonce, hence T, hence
other streams. Noise depends on neither `heard` nor the nonces of others, which a server with a hospital could
vary after it has taken a journal away: the same question gets the same noise, and cannot be averaged.

**What is left.** A hospital whose core is broken has G: with the server it reads totals and can forge a
broadcast, which is as much as it can do by lying about its own rows. It does not read another hospital's
numbers, as long as two honest hospitals are in the roster, nor tell them two stories: they would answer under
masks that do not cancel. There is no forward secrecy: the seed of any one hospital opens the totals of all
its earlier runs to whoever kept the messages. Seeds that could be forgotten could not repeat bytes after a
lost journal; renew keys with the consortium list. Lengths, names, times and the number of rounds are seen.

**How a copy of G is sealed.** By ChaCha20, under a key that the pair and T alone have and that is used for
this one text, and by a signature of the first hospital over the ciphertext, T and both names. One text to a
key: no nonce can repeat, and AES-GCM would do as well. But ChaCha20 is needed anyway, every language has it,
and a polynomial tag does not promise that a ciphertext opens under one key alone. A tag by HMAC would add
nothing: the signature is over the same bytes, it names the maker to third parties, and it holds even if
somebody has stolen the receiver's keys.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedtmle_core.errors import DecodeError, InputError
from fedtmle_core.masks import Factors, Frame, Word, keystream
from fedtmle_core.plan import Lane, Member, Plan
from fedtmle_core.version import __version__

KEY = 32  # bytes of every key, digest, nonce and public key
# In every digest. The nonce has the package's version as well: another release may compute other sums, and a
# run that it goes on with would use masks for two texts. Its openings differ, so it does not go on.
RELEASE = "fedtmle core 1"

# Digits of a consortium's fingerprint: log2(10^50) = 166 bits. Whoever writes the list may look for two lists
# with one fingerprint, with keys of its own in each, and give one to each owner. By the birthday bound that
# takes 2^83 lists with a new key each; 80 bits of work are the least that we accept. To fit a second list to
# a given fingerprint takes 2^166. Half as many digits would withstand the latter, but not the former (2^41).
FINGERPRINT_DIGITS = 50


def digest(*parts: object) -> bytes:
    """Return the SHA-256 of labelled parts; msgpack keeps the parts apart."""
    return hashlib.sha256(encoded(*parts)).digest()


def encoded(*parts: object) -> bytes:
    """Return labelled parts as bytes that are signed or hashed."""
    return msgspec.msgpack.encode((RELEASE, *parts), order="deterministic")


def prf(key: bytes, *parts: object) -> bytes:
    """Return a key made from a key for one purpose: HMAC-SHA256 of the labelled parts."""
    return hmac.digest(key, encoded(*parts), "sha256")


def hkdf(secret: bytes, *info: object, salt: bytes = b"") -> bytes:
    """Return a key made from a secret that need not be uniform: a seed, or an X25519 secret."""
    return HKDF(algorithm=SHA256(), length=KEY, salt=salt, info=encoded(*info)).derive(secret)


def is_signed(statement: bytes, signature: bytes, public: bytes) -> bool:
    """Return whether the key with this public half signed the statement."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


# ---- Who is there ----


@final
class Identity:
    """One hospital's secrets, all made from a seed of 32 random bytes."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY:
            raise InputError(f"seed: a seed has {KEY} bytes, got {len(seed)}")
        self._signing = Ed25519PrivateKey.from_private_bytes(hkdf(seed, "signing key"))
        self._exchange = X25519PrivateKey.from_private_bytes(hkdf(seed, "exchange key"))
        self._own = hkdf(seed, "own secret")

    def member(self, name: str) -> Member:
        """Return this hospital's entry in a consortium list."""
        exchange = self._exchange.public_key().public_bytes_raw()
        return Member(name=name, signing=self.signing, exchange=exchange)

    @property
    def signing(self) -> bytes:
        """The public half of the key that signs."""
        return self._signing.public_key().public_bytes_raw()

    def sign(self, *statement: object) -> bytes:
        """Return the signature of a labelled statement, 64 bytes."""
        return self._signing.sign(encoded(*statement))

    def shared(self, other: Member) -> bytes:
        """Return the secret that this hospital shares with another."""
        return self._exchange.exchange(X25519PublicKey.from_public_bytes(other.exchange))

    def secret(self, *parts: object) -> bytes:
        """Return a key that nobody else can compute, for one purpose."""
        return prf(self._own, *parts)


@final
@dataclass(frozen=True)
class Consortium:
    """All hospitals that may take part, in the order of their names."""

    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(sorted(self.members, key=lambda member: member.name)))
        names = [member.name for member in self.members]
        keys = [key for member in self.members for key in (member.signing, member.exchange)]
        if "" in names or len(set(names)) != len(names):
            raise InputError("consortium: every hospital needs a name of its own")
        if len(set(keys)) != len(keys):  # one hospital under two names would count twice
            raise InputError("consortium: two hospitals have the same public key")
        for member in self.members:
            if not _is_usable(member):
                raise InputError(f"consortium: the public keys of '{member.name}' are not keys")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all names and keys."""
        return digest("consortium", self.members)

    @property
    def fingerprint(self) -> str:
        """What owners read to each other: ten groups of five digits."""
        digits = f"{int.from_bytes(self.digest, 'big') % 10**FINGERPRINT_DIGITS:0{FINGERPRINT_DIGITS}d}"
        return " ".join(digits[at : at + 5] for at in range(0, FINGERPRINT_DIGITS, 5))

    def named(self, name: str) -> Member | None:
        """Return the hospital with this name, None if there is none."""
        return next((member for member in self.members if member.name == name), None)


def _is_usable(member: Member) -> bool:
    """Return whether both keys are points that a secret key could have."""
    try:
        Ed25519PublicKey.from_public_bytes(member.signing)
        # The exchange refuses points of small order, with which every secret would be zero.
        X25519PrivateKey.from_private_bytes(bytes(KEY)).exchange(
            X25519PublicKey.from_public_bytes(member.exchange)
        )
    except ValueError:
        return False
    return True


# ---- How a run begins ----


class Opening(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a core says when it opens a run: its nonce, and its signature."""

    name: str
    nonce: bytes
    signature: bytes


class Copy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The group key, sealed for one hospital by the first of the roster."""

    sealed: bytes
    signature: bytes


@final
@dataclass(frozen=True)
class Session:
    """One run of one plan as one core sees it: who it is, and what its keys depend on.

    ``table`` is the digest of this hospital's rows; it stays here.
    """

    identity: Identity
    name: str
    consortium: Consortium
    plan: Plan
    run: bytes
    table: bytes

    def __post_init__(self) -> None:
        for member in self.plan.members:
            if self.consortium.named(member.name) != member:
                raise InputError(f"plan: the consortium's list does not have '{member.name}' with these keys")
        if self.identity.member(self.name) not in self.plan.members:
            raise InputError(f"plan: hospital '{self.name}' is not in it with its own keys")

    @cached_property
    def opening(self) -> Opening:
        """What this core says when it opens the run."""
        nonce = self.identity.secret("nonce", __version__, self.plan.digest, self.run, self.table)
        return Opening(self.name, nonce, self.identity.sign(*self._statement(self.name, nonce)))

    def _statement(self, name: str, nonce: bytes) -> tuple[object, ...]:
        """Return what a core signs when it opens the run."""
        return ("opening", self.consortium.digest, self.plan.digest, self.run, name, nonce)

    def settle(self, openings: Sequence[Opening]) -> Roster:
        """Return the roster that these openings settle, or raise `DecodeError`."""
        names = [opening.name for opening in openings]
        if names != sorted(set(names)):
            raise DecodeError("the openings are not those of different hospitals in the order of their names")
        if len(names) < self.plan.min_hospitals:
            raise DecodeError("fewer hospitals have opened than the plan asks for")
        admitted = {member.name: member.signing for member in self.plan.members}
        for opening in openings:
            statement = encoded(*self._statement(opening.name, opening.nonce))
            if not is_signed(statement, opening.signature, admitted.get(opening.name, b"")):
                raise DecodeError("an opening was not signed by a hospital of the plan for this run")
        if self.opening not in openings:
            raise DecodeError("this hospital's own opening is missing, or its rows have changed since")
        return Roster(self, tuple(openings))


@final
@dataclass(frozen=True)
class Roster:
    """The hospitals that take part in a run, settled; made by `Session.settle`."""

    session: Session
    openings: tuple[Opening, ...]

    @cached_property
    def digest(self) -> bytes:
        """T: what every key of the run depends on."""
        session = self.session
        return digest("roster", session.consortium.digest, session.plan.digest, session.run, self.openings)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those who take part, in order."""
        return tuple(opening.name for opening in self.openings)

    @property
    def is_first(self) -> bool:
        """Whether this core makes the group key and adds the stream."""
        return self.names[0] == self.session.name

    def member(self, name: str) -> Member:
        """Return the consortium's entry of a hospital that takes part."""
        member = self.session.consortium.named(name)
        if member is None:
            raise AssertionError("`settle` has checked that the consortium has every name")
        return member

    def pair_key(self, name: str, purpose: str) -> bytes:
        """Return what this hospital and another alone can compute, in this run and for one purpose."""
        own, other = self.member(self.session.name), self.member(name)
        info = sorted((own, other), key=lambda member: member.name)
        return hkdf(self.session.identity.shared(other), purpose, *info, salt=self.digest)

    @cached_property
    def _own_group_key(self) -> bytes:
        return self.session.identity.secret("group key", self.digest)

    def copies(self) -> tuple[Copy, ...]:
        """Return the sealed copies of the group key for all others, in order, if this is the first."""
        if not self.is_first:
            return ()
        return tuple(self._copy(name) for name in self.names[1:])

    def _copy(self, name: str) -> Copy:
        sealed = self._sealed(name, self._own_group_key)
        return Copy(sealed, self.session.identity.sign(*self._statement(name, sealed)))

    def _sealed(self, other: str, text: bytes) -> bytes:
        """Return a group key under the key stream of this hospital and another; twice is the key again."""
        stream = keystream(self.pair_key(other, "copy of the group key"), KEY)
        return bytes(a ^ b for a, b in zip(text, stream, strict=True))

    def _statement(self, name: str, sealed: bytes) -> tuple[object, ...]:
        """Return what is signed of a copy: its purpose, its run, who made it, for whom, and its bytes."""
        return ("copy of the group key", self.digest, self.names[0], name, sealed)

    def seal(self, copy: Copy | None) -> Seal:
        """Return the seal of the run, from this hospital's copy of the group key; the first has none.

        Raise `DecodeError` if the copy is not from the first hospital for this one in this run.
        """
        if self.is_first != (copy is None):
            raise DecodeError("the first hospital of a roster gets no copy, and every other one does")
        if copy is None:
            return Seal(self, self._own_group_key)
        first = self.member(self.names[0])
        statement = encoded(*self._statement(self.session.name, copy.sealed))
        if len(copy.sealed) != KEY or not is_signed(statement, copy.signature, first.signing):
            raise DecodeError("the copy of the group key is not from the first hospital of the roster")
        return Seal(self, self._sealed(first.name, copy.sealed))


# ---- A round ----


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message stands: its round, the digest of all that was heard before, and of the question."""

    round: int
    heard: bytes
    question: bytes

    @property
    def parts(self) -> tuple[object, ...]:
        """What round keys are made from."""
        return (self.round, self.heard, self.question)


@final
class Seal:
    """One core's end of the sealed rounds of a run; made by `Roster.seal`."""

    def __init__(self, roster: Roster, group: bytes) -> None:
        self._roster, self._group = roster, group
        own = roster.session.name
        # Whether this hospital subtracts the mask, and K_ij, for each other hospital.
        self._pairs = [
            (own > other, roster.pair_key(other, "masks")) for other in roster.names if other != own
        ]

    def frame(self, lanes: Sequence[Lane]) -> Frame:
        """Return the shape of the messages of a question with these lanes."""
        return Frame(tuple(lanes), len(self._roster.names))

    def send(self, place: Place, lanes: Sequence[Lane], values: Sequence[int]) -> bytes:
        """Return this hospital's answer, sealed."""
        frame = self.frame(lanes)
        return self._masked(place, frame, frame.pack(values, self._factors(place, frame)))

    def refuse(self, place: Place, lanes: Sequence[Lane], word: Word) -> bytes:
        """Return what this hospital sends instead of an answer, so that the totals of the round are noise.

        It is as long as an answer, and the server cannot tell the two apart. No other hospital can take the
        noise away.
        """
        frame = self.frame(lanes)
        secret = self._roster.session.identity.secret("refusal", self._roster.digest, *place.parts)
        noise = keystream(secret, frame.size)
        return self._masked(place, frame, frame.refuse(word, self._factors(place, frame), noise))

    def read(self, place: Place, lanes: Sequence[Lane], summed: bytes) -> tuple[int, ...] | Word:
        """Return the totals of a round, or the word of a hospital that refused.

        Raise `DecodeError` if the broadcast is not the sum of what all hospitals answered to this question.
        """
        frame = self.frame(lanes)
        if len(summed) != frame.size:
            raise DecodeError("the sum of a round has another length than the answers to its question")
        stream = int.from_bytes(self._stream(place, frame), "little")
        total = (int.from_bytes(summed, "little") - stream) % frame.modulus
        factors = self._factors(place, frame)
        verdict = frame.verdict(total, factors)
        return frame.unpack(total, factors) if verdict is None else verdict

    def below(self, question: bytes) -> Callable[[int], int]:
        """Return a source of uniform integers for this hospital's share of the noise in an answer."""
        session = self._roster.session
        source = ("noise", session.plan.digest, session.run, self._roster.names, session.table, question)
        return _Draws(session.identity.secret(*source)).below

    def commitment(self, document: bytes) -> bytes:
        """Return what shows the other hospitals, and nobody else, which result this one has."""
        return prf(self._group, "result", self._roster.digest, hashlib.sha256(document).digest())

    def _masked(self, place: Place, frame: Frame, value: int) -> bytes:
        for subtracts, key in self._pairs:
            mask = int.from_bytes(keystream(prf(key, "mask", *place.parts), frame.size), "little")
            value += -mask if subtracts else mask
        if self._roster.is_first:
            value += int.from_bytes(self._stream(place, frame), "little")
        return (value % frame.modulus).to_bytes(frame.size, "little")

    def _stream(self, place: Place, frame: Frame) -> bytes:
        return keystream(prf(self._group, "stream", *place.parts), frame.size)

    def _factors(self, place: Place, frame: Frame) -> Factors:
        return Factors.of(prf(self._group, "factors", *place.parts), len(frame.lanes))


class _Draws:
    """Uniform integers from the key stream of one key."""

    def __init__(self, key: bytes) -> None:
        self._key, self._block = key, 0

    def below(self, limit: int) -> int:
        """Return a uniform integer from 0 to limit - 1: numbers of enough bits, the first that is below."""
        bits = (limit - 1).bit_length()
        while True:
            size = (bits + 7) // 8
            data = keystream(prf(self._key, self._block), size)
            self._block += 1
            drawn = int.from_bytes(data, "little") & ((1 << bits) - 1)
            if drawn < limit:
                return drawn
