"""A silo's key (Ed25519), and what it signs: answers under masks, closings and approvals.

The key for masks (X25519) is derived from the same secret. At the close of a run a silo signs the digest of
the broadcasts that it heard. Its owner's approvals are a file of signed JSON lines, of which the last about a
plan is in force. A changed plan has another digest, which nobody has approved yet; so has the same study
under another version of the package.
"""

from __future__ import annotations

import datetime
import hmac
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from fedtmle.errors import InputError, JournalError
from fedtmle.protocol.codes import Bits
from fedtmle.protocol.masks import MaskKey
from fedtmle.protocol.plan import Plan


class SigningKey:
    """Sign for one silo; the public half is in the plan's roster."""

    def __init__(self, seed: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed

    @classmethod
    def at(cls, path: str | Path) -> SigningKey:
        """Return the key in a file that only its owner can read; make one if there is no file."""
        path = Path(path)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            text = path.read_text(encoding="ascii", errors="replace").strip()
        else:
            text = os.urandom(32).hex()
            with os.fdopen(handle, "w") as file:
                file.write(text + "\n")
        try:
            return cls(bytes.fromhex(text))
        except ValueError:
            raise InputError(f"{path}: this is not a key; move it away to have a new one made") from None

    @property
    def public(self) -> bytes:
        """32 bytes."""
        return self._key.public_key().public_bytes_raw()

    @property
    def public_keys(self) -> bytes:
        """64 bytes: the public halves of this key and of the key for masks, as a study file lists them."""
        return self.public + self.mask_key.public

    @cached_property
    def mask_key(self) -> MaskKey:
        """The silo's key for masks: HMAC-SHA256 of a label under the secret."""
        return MaskKey(hmac.digest(self._seed, b"fedtmle key for masks", "sha256"))

    def sign(self, data: bytes) -> bytes:
        """Return the signature of ``data``, 64 bytes."""
        return self._key.sign(data)


def is_signed(data: bytes, signature: bytes, public: bytes) -> bool:
    """Return whether ``signature`` is that of ``data`` by the key with the ``public`` half."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def answer_statement(plan: Plan, session: bytes, silo: str, round: int, heard: bytes, data: Bits) -> bytes:
    """Return what a silo signs of a masked answer: what it sent in a round, after hearing ``heard``."""
    named = ("fedtmle answer", plan.digest, session, silo, round, heard, data.length, data.data)
    return msgspec.msgpack.encode(named)


def closing_statement(plan: Plan, session: bytes, silo: str, digest: bytes) -> bytes:
    """Return what a silo signs at the close: that it heard ``digest`` in this session of this plan."""
    return msgspec.msgpack.encode(("fedtmle close", plan.digest, session, silo, digest))


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One line: the owner's decision about a plan, and when it was made."""

    plan: str
    approved: bool
    time: str
    note: str = ""
    data: str = ""  # the digest of plan and rows for which it holds; empty: for any rows
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """The bytes that the key signs."""
        signed = ("fedtmle approval", self.plan, self.approved, self.time, self.note)
        return msgspec.msgpack.encode((*signed, self.data) if self.data else signed)


@dataclass(frozen=True)
class Approvals:
    """The decisions in one file, checked against the silo's key."""

    path: Path
    key: SigningKey

    def decisions(self) -> list[Decision]:
        """Return every decision, oldest first; raise if the silo's key did not sign one of them."""
        if not self.path.exists():
            return []
        decisions = []
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            try:
                decision = msgspec.json.decode(line, type=Decision)
                signature = bytes.fromhex(decision.signature)
            except (msgspec.MsgspecError, ValueError):
                raise JournalError(f"{self.path}, line {number}: this is not a decision") from None
            if not is_signed(decision.signed, signature, self.key.public):
                raise JournalError(f"{self.path}, line {number}: the silo's key did not sign this")
            decisions.append(decision)
        return decisions

    def current(self) -> dict[str, Decision]:
        """Return the decision in force for each plan, by the plan's digest in hexadecimal."""
        return {decision.plan: decision for decision in self.decisions()}

    def approves(self, plan: bytes) -> bool:
        """Return whether the approval of a plan is in force; no approval of a tampered file is."""
        try:
            decision = self.current().get(plan.hex())
        except JournalError:
            return False
        return decision is not None and decision.approved

    def decide(self, plan: bytes, *, approved: bool, note: str = "", data: bytes = b"") -> Decision:
        """Sign and append a decision, and return it; ``data`` is the digest of the rows that it is about."""
        self.decisions()  # never add to a file that was tampered with
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        bare = Decision(plan=plan.hex(), approved=approved, time=time, note=note, data=data.hex())
        decision = msgspec.structs.replace(bare, signature=self.key.sign(bare.signed).hex())
        with open(self.path, "ab", buffering=0) as file:
            file.write(msgspec.json.encode(decision) + b"\n")
            os.fsync(file.fileno())
        os.chmod(self.path, 0o600)
        return decision
