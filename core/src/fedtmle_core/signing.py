"""A party's keys: Ed25519 to sign, and X25519 for masks, which is derived from the same secret."""

from __future__ import annotations

import hmac
import os
from functools import cached_property
from pathlib import Path

from fedtmle_core.errors import InputError


class MaskKey:
    """A silo's X25519 key; its public half is in the plan's roster."""

    def __init__(self, seed: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.from_private_bytes(seed)

    @property
    def public(self) -> bytes:
        """32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def shared(self, public: bytes) -> bytes:
        """Return the secret that this silo shares with the silo whose public key is given."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        return self._key.exchange(X25519PublicKey.from_public_bytes(public))


class SigningKey:
    """Sign for one party; the public half is in the plan."""

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
