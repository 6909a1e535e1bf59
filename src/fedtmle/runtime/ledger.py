"""The ledger: what a silo's owner reads. Every request, decision, reply and running total.

One line of JSON per event; each carries the hash of the line before it, so that a line cannot be
changed, dropped or put in later without showing. It stays at the silo: it names the key of the
policy behind a refusal, which the server is not told.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from fedtmle.errors import JournalError

START = "0" * 64


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One event, before it is chained."""

    time: str
    session: str
    request: str  # what was asked: open, begin, ask, close, compare, or not a message
    round: int
    query: str = ""  # what the silo derived from it
    phase: str = ""
    decision: str = "answered"  # answered, repeated, refused
    reason: str = ""  # told to the server
    key: str = ""  # of the policy; not told
    asked: str = ""  # the request, base64
    replied: str = ""  # the reply, base64
    queries: int = 0  # running totals of the session
    functionals: int = 0
    bits: int = 0


class Ledger:
    """An append-only, hash-chained file, one for all studies of a silo."""

    def __init__(self, path: str | Path, *, sync: bool = True) -> None:
        self.path = Path(path)
        self._sync = sync
        self.count, self._head = 0, START
        if self.path.exists():
            _cut_torn_tail(self.path)
            for line in read(self.path):
                self.count, self._head = line["line"], line["hash"]
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - as long as the object
        os.chmod(self.path, 0o600)

    def add(self, entry: Entry) -> None:
        line = _chained(asdict(entry), self.count + 1, self._head)
        data = msgspec.json.encode(line) + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError
            if self._sync:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(end)
            raise JournalError(f"{self.path}: the line could not be written; is the disk full?") from None
        self.count, self._head = line["line"], line["hash"]

    def close(self) -> None:
        self._file.close()


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a ledger, each checked against its hash and the line before it."""
    head = START
    for number, data in enumerate(Path(path).read_bytes().splitlines(), start=1):
        try:
            line = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise JournalError(f"{path}, line {number}: this is not a line of a ledger") from None
        bare = {key: value for key, value in line.items() if key not in ("line", "previous", "hash")}
        if line != _chained(bare, number, head):
            raise JournalError(f"{path}, line {number}: the ledger was changed here, or before it")
        head = line["hash"]
        yield line


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def text(data: bytes) -> str:
    """Bytes as they stand in a ledger."""
    return base64.b64encode(data).decode("ascii")


def _chained(bare: dict[str, Any], number: int, previous: str) -> dict[str, Any]:
    line = {"line": number, **bare, "previous": previous}
    return {**line, "hash": hashlib.sha256(msgspec.json.encode(line, order="sorted")).hexdigest()}


def _cut_torn_tail(path: Path) -> None:
    """A line without its end was torn by a crash; what it told had not been answered yet."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
