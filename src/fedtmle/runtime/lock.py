"""Locks on open files, so that two processes never write one journal or ledger at once.

Windows has no such lock; there, one process per file is the owner's care.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

if sys.platform != "win32":
    import fcntl


def hold(file: IO[bytes]) -> None:
    """Keeps the file as long as it is open, however the process ends; `OSError` if another has it."""
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(file: IO[bytes]) -> Iterator[None]:
    """Waits for the file, and gives it back."""
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_UN)
