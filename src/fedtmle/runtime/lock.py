"""Locks on open files, so that two processes never write one journal or ledger at once.

Windows has no such lock; there, one process per file is the owner's care.
"""

from __future__ import annotations

import sys
from typing import IO

if sys.platform != "win32":
    import fcntl


def hold(file: IO[bytes]) -> None:
    """Keeps the file as long as it is open, however the process ends; `OSError` if another has it."""
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Held:
    """As a context, waits for the file and gives it back."""

    __slots__ = ("_file",)

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def __enter__(self) -> None:
        if sys.platform != "win32":
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        if sys.platform != "win32":
            fcntl.flock(self._file, fcntl.LOCK_UN)
