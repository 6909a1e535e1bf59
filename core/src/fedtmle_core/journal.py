"""Files that survive a crash: the journal of a party's messages, and JSON documents that are replaced whole.

A party records each message in the journal before it goes on, so that a crash loses or repeats none.
It is a file of records, each

    length (4 bytes) | CRC-32 of the length and of the chain so far (4) | payload | chain (32)

with chain = SHA-256(chain before, payload). A tail that ends inside a record was torn by a crash and is cut
off. A record that is whole but does not fit its chain was changed, and the journal is refused.

Locks on open files keep two processes from writing one journal or ledger at once. Windows has no such lock:
there the owner must see to it that only one process uses a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from fedtmle_core.errors import JournalError

# JSON files of runs, kits and parties: a reader sees the old document or the new one, whole.

Document: TypeAlias = dict[str, Any]  # a decoded JSON object


def read_document(path: Path) -> Document:
    """Return the JSON object in a file; raise `ValueError` or `OSError` if there is none."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return document


def write_document(path: Path, document: object) -> None:
    """Write plain data to a file, in one step."""
    scratch = path.with_suffix(f".{os.getpid()}.new")
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


if sys.platform != "win32":
    import fcntl

MAGIC = b"fedtmle journal 1\n"
START = hashlib.sha256(MAGIC).digest()
_HEAD = struct.Struct(">II")
_CHAIN = 32


class Journal(Protocol):
    """An append-only list of byte strings that outlives its process."""

    @property
    def records(self) -> list[bytes]: ...

    def append(self, payload: bytes, /) -> None: ...

    def close(self) -> None: ...


class MemoryJournal:
    """A journal that lives as long as the object: for tests, simulations and embedded runs."""

    def __init__(self) -> None:
        self.records: list[bytes] = []

    def append(self, payload: bytes, /) -> None:
        self.records.append(payload)

    def close(self) -> None:
        """There is nothing to close."""


class FileJournal:
    """A journal on disk; a record is durable when `append` returns."""

    def __init__(self, path: str | Path, *, sync: bool = True) -> None:
        self.path = Path(path)
        self._sync = sync
        self.records: list[bytes] = []
        self._chain, self._end = START, len(MAGIC)
        with contextlib.ExitStack() as unless_ready:
            try:
                self._file: IO[bytes] = unless_ready.enter_context(open(self.path, "a+b", buffering=0))
                self._open()
            except BlockingIOError:
                raise JournalError(f"{self.path}: another process is using the journal") from None
            except OSError:
                raise JournalError(f"{self.path}: the journal cannot be opened for writing") from None
            unless_ready.pop_all()  # keep the file open as long as the object

    def _open(self) -> None:
        hold(self._file)
        os.chmod(self.path, 0o600)
        data = self.path.read_bytes()
        for payload, chain, end in scan(data, self.path):
            self.records.append(payload)
            self._chain, self._end = chain, end
        if MAGIC.startswith(data):  # new, or torn in its first bytes
            self._file.truncate(0)
            self._write(MAGIC)
            if self._sync:
                sync_folder(self.path.parent)
        elif self._end < len(data):  # torn: the party had not gone on
            self._file.truncate(self._end)

    def append(self, payload: bytes, /) -> None:
        data, chain = frame(payload, self._chain)
        try:
            self._file.truncate(self._end)  # remove what a failed append may have left
            self._write(data)
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise JournalError(f"{self.path}: the record could not be written; is the disk full?") from None
        self._chain, self._end = chain, self._end + len(data)
        self.records.append(payload)

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        if self._sync:
            os.fsync(self._file.fileno())


def frame(payload: bytes, chain: bytes) -> tuple[bytes, bytes]:
    """Return one record as a file holds it after ``chain``, and the chain that it leads to."""
    length = struct.pack(">I", len(payload))
    check = struct.pack(">I", zlib.crc32(length, zlib.crc32(chain)))
    chain = hashlib.sha256(chain + payload).digest()
    return length + check + payload + chain, chain


def scan(data: bytes, path: str | Path) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield the whole records of a file, each with its chain and its end; stop at a torn tail."""
    if MAGIC.startswith(data):
        return
    if not data.startswith(MAGIC):
        raise JournalError(f"{path}: this is not a journal")
    chain, at = START, len(MAGIC)
    while at + _HEAD.size <= len(data):
        length, check = _HEAD.unpack_from(data, at)
        if check != zlib.crc32(data[at : at + 4], zlib.crc32(chain)):
            if not any(data[at:]):  # a file system may leave zeros where a write was cut off
                return
            raise JournalError(_changed(path, at))
        stop = at + _HEAD.size + length + _CHAIN
        if stop > len(data):
            return
        payload = data[at + _HEAD.size : stop - _CHAIN]
        expected = hashlib.sha256(chain + payload).digest()
        if data[stop - _CHAIN : stop] != expected:
            if not any(data[at + _HEAD.size :]):
                return
            raise JournalError(_changed(path, at))
        yield payload, expected, stop
        chain, at = expected, stop


def _changed(path: str | Path, at: int) -> str:
    return f"{path}: the journal was changed at byte {at}; it cannot be trusted"


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk: only then does the name of a new file survive a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hold(file: IO[bytes]) -> None:
    """Lock the file for as long as it is open, however the process ends; `OSError` if another has it."""
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Held:
    """A context that waits for the lock on a file and releases it at the end."""

    __slots__ = ("_file",)

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __enter__(self) -> None:
        if sys.platform != "win32":
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        if sys.platform != "win32":
            fcntl.flock(self._file, fcntl.LOCK_UN)
