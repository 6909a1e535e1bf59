"""A silo's key (Ed25519, made once and kept at the silo), and what it signs at the close."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedtmle.errors import InputError, JournalError
from fedtmle.protocol.messages import Compare
from fedtmle.protocol.plan import Plan


class SigningKey:
    """Signs what the silo says it heard and approved; the public half is in the plan's roster."""

    def __init__(self, seed: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(seed)

    @classmethod
    def at(cls, path: str | Path) -> SigningKey:
        """The key in a file that only its owner can read; made if there is none."""
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

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)


def is_signed(data: bytes, signature: bytes, public: bytes) -> bool:
    """Whether the holder of the key whose public half this is signed ``data``."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def closing_statement(plan: Plan, session: bytes, silo: str, digest: bytes) -> bytes:
    """Return what a silo signs at the close: that it heard this digest, in this session of this plan."""
    return msgspec.msgpack.encode(("fedtmle close", plan.digest, session, silo, digest))


def all_heard_the_same(
    plan: Plan, silo: str, message: Compare, session: bytes, heard: bytes, *, complete: bool
) -> bool:
    """Return whether the roster's silos signed the digest ``heard`` of ``silo``.

    ``complete`` means that every silo of the roster is in the run to its end.
    """
    closings = {closing.silo: closing for closing in message.closings}
    expected = set(plan.silos) if complete else set(plan.silos) & set(closings)
    if set(closings) != expected or len(closings) != len(message.closings) or silo not in closings:
        return False
    for member in plan.roster:
        closing = closings.get(member.name)
        if closing is None:
            continue
        statement = closing_statement(plan, session, member.name, heard)
        if closing.digest != heard or (
            member.key and not is_signed(statement, closing.signature, member.key)
        ):
            return False
    return True


# Approvals: which plans a silo's owner has said yes to, signed with the silo's key.
#
# A file of JSON lines; the last line about a plan holds. Any change of a plan, the package's version
# included, is another plan with another digest, to which nobody has said yes yet.


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One line: what the owner decided of a plan, and when."""

    plan: str
    approved: bool
    time: str
    note: str = ""
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """What the signature is of."""
        return msgspec.msgpack.encode(("fedtmle approval", self.plan, self.approved, self.time, self.note))


@dataclass(frozen=True)
class Approvals:
    """The decisions in one file, checked against the silo's key."""

    path: Path
    key: SigningKey

    def decisions(self) -> list[Decision]:
        """Every decision, oldest first; a line that the silo's key did not sign is refused."""
        if not self.path.exists():
            return []
        found = []
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            try:
                decision = msgspec.json.decode(line, type=Decision)
                signature = bytes.fromhex(decision.signature)
            except (msgspec.MsgspecError, ValueError):
                raise JournalError(f"{self.path}, line {number}: this is not a decision") from None
            if not is_signed(decision.signed, signature, self.key.public):
                raise JournalError(f"{self.path}, line {number}: the silo's key did not sign this")
            found.append(decision)
        return found

    def current(self) -> dict[str, Decision]:
        """The decision in force for each plan."""
        return {decision.plan: decision for decision in self.decisions()}

    def approves(self, plan: bytes) -> bool:
        """Whether the owner approved the plan and still does; a file that was tampered with says no."""
        try:
            decision = self.current().get(plan.hex())
        except JournalError:
            return False
        return decision is not None and decision.approved

    def decide(self, plan: bytes, *, approved: bool, note: str = "") -> Decision:
        """Write a decision."""
        self.decisions()  # never add to a file that was tampered with
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        bare = Decision(plan=plan.hex(), approved=approved, time=time, note=note)
        decision = msgspec.structs.replace(bare, signature=self.key.sign(bare.signed).hex())
        with open(self.path, "ab", buffering=0) as file:
            file.write(msgspec.json.encode(decision) + b"\n")
            os.fsync(file.fileno())
        os.chmod(self.path, 0o600)
        return decision
