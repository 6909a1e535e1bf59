"""A silo's key: Ed25519, made once and kept at the silo."""

from __future__ import annotations

import os
from pathlib import Path

from fedtmle.errors import InputError


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
