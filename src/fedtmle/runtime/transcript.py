"""The transcript: every message of a run, for replay and audit."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fedtmle.errors import DecodeError, InputError
from fedtmle.runtime.ledger import LedgerLine

SELF = "self"  # the silo's name in a transcript that `of_ledger` made


class Exchange(msgspec.Struct, frozen=True):
    """One round: each silo's request and reply."""

    requests: dict[str, bytes]
    replies: dict[str, bytes]


@dataclass
class Transcript:
    """Every message of a run, in order. A run can be replayed from it.

    Parameters
    ----------
    session
        The session's name.
    exchanges
        Requests and replies, round by round.

    Examples
    --------
    >>> transcript = result.run.transcript
    >>> ft.Transcript.decode(transcript.encode()).digest() == transcript.digest()
    True
    """

    session: bytes
    exchanges: list[Exchange] = field(default_factory=list)

    def encode(self) -> bytes:
        """Return the one byte string of a transcript."""
        return msgspec.msgpack.encode((self.session, self.exchanges), order="deterministic")

    @classmethod
    def decode(cls, data: bytes) -> Transcript:
        """Return the transcript, or raise `DecodeError`."""
        try:
            session, exchanges = msgspec.msgpack.decode(data, type=tuple[bytes, list[Exchange]])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise DecodeError("not a transcript") from None
        transcript = cls(session, exchanges)
        if transcript.encode() != data:
            raise DecodeError("not a transcript in its canonical form")
        return transcript

    def save(self, path: str | Path) -> None:
        """Write the transcript to one msgpack file."""
        Path(path).write_bytes(self.encode())

    def digest(self) -> str:
        """Return the SHA-256 of the saved file, in hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    @classmethod
    def load(cls, path: str | Path) -> Transcript:
        """Read a saved transcript."""
        try:
            return cls.decode(Path(path).read_bytes())
        except DecodeError as error:
            raise DecodeError(f"{path}: {error}") from None


def of_ledger(lines: Sequence[LedgerLine], session: str = "") -> Transcript:
    """Return one silo's requests and replies in one session, from its ledger; the last session by default."""
    answered = [line for line in lines if line["decision"] == "answered"]
    wanted = session or (answered[-1]["session"] if answered else "")
    exchanges = [
        Exchange({SELF: base64.b64decode(line["asked"])}, {SELF: base64.b64decode(line["replied"])})
        for line in answered
        if line["session"] == wanted
    ]
    if not exchanges:
        raise InputError("session: the ledger has no answer in it")
    return Transcript(bytes.fromhex(wanted), exchanges)
