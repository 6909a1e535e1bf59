"""Whether a process still runs: it is known by its pid and its start time, never by its name."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Process:
    """A process of ours; its start time distinguishes it from a later one with the same pid."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, psutil.Process(pid).create_time())

    @classmethod
    def here(cls) -> Process:
        """Return this process."""
        return cls.of(os.getpid())

    def find(self) -> psutil.Process | None:
        """Return the process, None if it has ended."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started) < 1.0
            return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None
