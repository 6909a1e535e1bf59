"""A silo's key (Ed25519, made once and kept at the silo), and what it signs at the close."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from fedtmle.errors import InputError
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
