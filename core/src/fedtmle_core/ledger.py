"""The ledger: what a hospital's owner reads afterwards. It stays at the hospital.

Each line is JSON and has the SHA-256 of the line before it, and the head, the number of lines and the hash of
the last, is signed: nobody can change, insert, drop or cut off a line unnoticed. The journal (`journal`) is
what a core needs to go on; the ledger is for people, one for all studies of a hospital, and it outlives a
journal. If a lost journal led to other bytes than before, the ledger shows it before they leave (`Core`).
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import final

import msgspec

from fedtmle_core.errors import JournalError
from fedtmle_core.journal import Held, sync_folder
from fedtmle_core.seal import Identity, encoded, is_signed

START = "0" * 64


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event: what was heard and said, in words for the owner.

    ``step`` counts the admitted requests of a run; it is 0 for one that was refused and changed nothing.
    ``numbers`` and ``bits`` are running totals of the run. ``sent`` is the SHA-256 of the reply. ``note`` is
    for the owner alone: which column a judgement refused, and what to do about it.
    """

    time: str
    plan: str
    run: str
    step: int
    heard: str
    said: str
    asked: str = ""
    numbers: int = 0
    bits: int = 0
    sent: str = ""
    note: str = ""
    line: int = 0
    previous: str = START


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """After ``count`` lines the hash of the last was ``last``; signed by the hospital."""

    count: int
    last: str
    signature: str


@final
class Ledger:
    """A ledger that is open for writing; several studies of one hospital may share it."""

    def __init__(self, path: str | Path, identity: Identity) -> None:
        self.path, self._identity = Path(path), identity
        self._count, self._last, self._end = 0, START, 0
        self._sent: dict[tuple[str, str, int], str] = {}
        with ExitStack() as unless_ready:
            try:
                self._file = unless_ready.enter_context(open(self.path, "a+b", buffering=0))
                os.chmod(self.path, 0o600)
                with Held(self._file):
                    verify(self.path, identity.signing)
                    self._catch_up()
                    self._write_head()  # a crash may have left it one line behind
            except OSError:
                raise JournalError(f"{self.path}: the ledger cannot be opened for writing") from None
            unless_ready.pop_all()  # keep the file open as long as the object

    def sent(self, plan: str, run: str, step: int) -> str | None:
        """Return the hash of the reply that was sent at a step of a run, None if there was none."""
        return self._sent.get((plan, run, step))

    def add(self, line: Line) -> None:
        """Append a line; it is durable when this returns."""
        try:
            with Held(self._file):
                self._catch_up()  # another study may have added lines
                whole = msgspec.structs.replace(line, line=self._count + 1, previous=self._last)
                self._write(msgspec.json.encode(whole) + b"\n")
                self._catch_up()
                self._write_head()
        except OSError:
            raise JournalError(f"{self.path}: a line could not be written; is the disk full?") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _catch_up(self) -> None:
        """Read the lines that were added since the last time, and remove an incomplete last one."""
        size = self._file.seek(0, os.SEEK_END)
        if size < self._end:
            raise JournalError(f"{self.path}: the ledger was cut off after line {self._count}")
        self._file.seek(self._end)
        data = self._file.read()
        lines = _lines(data, self.path, self._count, self._last)
        for line in lines:
            if line.step:
                self._sent[line.plan, line.run, line.step] = line.sent
        whole = data.rfind(b"\n") + 1
        if lines:
            self._count, self._last = lines[-1].line, _hash(data[:whole].splitlines()[-1])
        self._end += whole
        if self._end < size:
            self._file.truncate(self._end)

    def _write(self, data: bytes) -> None:
        try:
            if self._file.write(data) != len(data):
                raise OSError
            os.fsync(self._file.fileno())
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise

    def _write_head(self) -> None:
        """Replace the head. After a crash the file may be ahead of it, never behind."""
        signature = self._identity.sign(*_statement(self._count, self._last)).hex()
        path = _head_path(self.path)
        scratch = path.with_name(f"{path.name}.new")
        with open(scratch, "wb") as file:
            file.write(msgspec.json.encode(Head(self._count, self._last, signature)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        sync_folder(path.parent)


def verify(path: str | Path, public: bytes) -> list[Line]:
    """Return the lines of a ledger; raise `JournalError` if it does not go on from its signed head."""
    path = Path(path)
    head = _read_head(path, public)  # first: a line may be added meanwhile
    data = path.read_bytes() if path.exists() else b""
    lines = _lines(data, path)
    if head is None:
        # The head is written after each line, so that a crash leaves at most one line without it.
        if len(lines) > 1:
            raise JournalError(f"{_head_path(path)}: the head of the ledger is gone; restore it")
        return lines
    if len(lines) < head.count:
        raise JournalError(f"{path}: it has {len(lines)} lines, its signed head says {head.count}")
    whole = data.splitlines()
    if (_hash(whole[head.count - 1]) if head.count else START) != head.last:
        raise JournalError(f"{path}: it differs from its signed head: it was written anew")
    return lines


def _lines(data: bytes, path: Path, count: int = 0, last: str = START) -> list[Line]:
    """Return the complete lines after line ``count``, each checked against the one before it."""
    found = []
    for text in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            line = msgspec.json.decode(text, type=Line)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            line = None
        count += 1
        if line is None or (line.line, line.previous) != (count, last):
            raise JournalError(f"{path}, line {count}: the ledger was changed here, or before it")
        found.append(line)
        last = _hash(text)
    return found


def _read_head(path: Path, public: bytes) -> Head | None:
    place = _head_path(path)
    try:
        head = msgspec.json.decode(place.read_bytes(), type=Head)
        signature = bytes.fromhex(head.signature)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError):
        raise JournalError(f"{place}: this is not the head of {path.name}") from None
    if not is_signed(encoded(*_statement(head.count, head.last)), signature, public):
        raise JournalError(f"{place}: the hospital's key did not sign this")
    return head


def _head_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.head")


def _statement(count: int, last: str) -> tuple[object, ...]:
    return ("head of a ledger", count, last)


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
