"""Logs and job folders of a deployed party: none grows for ever."""

from __future__ import annotations

import logging
import logging.handlers
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

LONGEST_LOG = 8 << 20  # bytes
KEPT_DAYS = 30  # days to keep a job's folder after its last change
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def write_log(path: Path) -> None:
    """Write the records of fedtmle's loggers to a file that is rotated."""
    log = logging.handlers.RotatingFileHandler(path, maxBytes=1 << 20, backupCount=4)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("fedtmle").addHandler(log)


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
