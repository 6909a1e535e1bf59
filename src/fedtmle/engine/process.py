"""A deployed party's processes and logs: whether a process still runs, and logs that do not grow for ever.

A process is known by its pid and its start time, never by its name.
"""

from __future__ import annotations

import gc
import logging
import logging.handlers
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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


LONGEST_LOG = 8 << 20  # bytes
KEPT_DAYS = 30  # days to keep a job's folder after its last change
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def write_log(path: Path) -> None:
    """Write the records of fedtmle's loggers to a file that is rotated."""
    log = logging.handlers.RotatingFileHandler(path, maxBytes=1 << 20, backupCount=4)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("fedtmle").addHandler(log)


def keep_loaded() -> None:
    """Leave all objects that exist now out of garbage collection, for good.

    An engine makes so many objects for a message that every few rounds all objects are searched. Those of the
    libraries and of a study's rows live as long as the process of a job, and are most of them. Call it once,
    before the first round.
    """
    gc.collect()
    gc.freeze()


def tidy(kit: Path) -> None:
    """Rotate the engine's logs that grew too long, and delete the folders of jobs that ended long ago.

    The engine appends to its logs and never reopens them, so a long one is copied and emptied. The records of
    fedtmle (journals, ledgers, runs) are never touched.
    """
    for log in (kit / "fedtmle" / "engine.log", kit / "audit.log", kit / "log.txt", kit / "error_log.txt"):
        with suppress(OSError):
            if log.stat().st_size > LONGEST_LOG:
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                with log.open("r+b") as file:
                    file.truncate(0)
    oldest = time.time() - KEPT_DAYS * 86400
    for folder in (kit, kit / "storage" / "jobs"):
        for job in folder.glob("*-*-*-*-*"):
            with suppress(OSError):
                if _JOB.fullmatch(job.name) and job.is_dir() and job.stat().st_mtime < oldest:
                    shutil.rmtree(job)
