"""The transcript: every message of a run, for replay and audit."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fedtmle.errors import DecodeError, InputError

SELF = "self"  # the silo's name in a transcript that `of_ledger` made


class Exchange(msgspec.Struct, frozen=True):
    """One round: what each silo was sent and what it replied."""

    requests: dict[str, bytes]
    replies: dict[str, bytes]


@dataclass
class Transcript:
    """The session's name and its exchanges, in order."""

    session: bytes
    exchanges: list[Exchange] = field(default_factory=list)

    def encode(self) -> bytes:
        """The one byte string of a transcript."""
        return msgspec.msgpack.encode((self.session, self.exchanges), order="deterministic")

    @classmethod
    def decode(cls, data: bytes) -> Transcript:
        """The transcript, or `DecodeError`."""
        try:
            session, exchanges = msgspec.msgpack.decode(data, type=tuple[bytes, list[Exchange]])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise DecodeError("not a transcript") from None
        transcript = cls(session, exchanges)
        if transcript.encode() != data:
            raise DecodeError("not a transcript in its canonical form")
        return transcript

    def save(self, path: str | Path) -> None:
        """One self-contained msgpack file."""
        Path(path).write_bytes(self.encode())

    def digest(self) -> str:
        """SHA-256 of the saved file, in hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> Transcript:
        try:
            return cls.decode(Path(path).read_bytes())
        except DecodeError as error:
            raise DecodeError(f"{path}: {error}") from None


def of_ledger(lines: Sequence[Mapping[str, Any]], session: str = "") -> Transcript:
    """What one silo was asked and said in one session, from its own ledger; the last if none is named."""
    told = [line for line in lines if line["decision"] == "answered"]
    wanted = session or (told[-1]["session"] if told else "")
    own = [line for line in told if line["session"] == wanted]
    if not own:
        raise InputError("session: the ledger has no answer in it")
    exchanges = [
        Exchange({SELF: base64.b64decode(line["asked"])}, {SELF: base64.b64decode(line["replied"])})
        for line in own
    ]
    return Transcript(bytes.fromhex(wanted), exchanges)
