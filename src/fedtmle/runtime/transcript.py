"""The transcript: every message of a run, for replay and audit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fedtmle.errors import DecodeError


class Exchange(msgspec.Struct, frozen=True):
    """One round: what each silo was sent and what it replied."""

    requests: dict[str, bytes]
    replies: dict[str, bytes]


@dataclass
class Transcript:
    """The session's name and its exchanges, in order."""

    session: bytes
    exchanges: list[Exchange] = field(default_factory=list)

    def save(self, path: str | Path) -> None:
        """One self-contained msgpack file."""
        Path(path).write_bytes(msgspec.msgpack.encode((self.session, self.exchanges), order="deterministic"))

    @classmethod
    def load(cls, path: str | Path) -> Transcript:
        try:
            session, exchanges = msgspec.msgpack.decode(
                Path(path).read_bytes(), type=tuple[bytes, list[Exchange]]
            )
        except msgspec.MsgspecError:
            raise DecodeError(f"{path}: not a transcript") from None
        return cls(session, exchanges)
