"""Whether a disk has room for a run."""

from __future__ import annotations

import shutil
from pathlib import Path

LEAST_ROOM = 1 << 20  # bytes; with less no run is started


def full_disk(folder: Path) -> str:
    """Return a message if the disk of a folder has no room for a run, an empty string if it has."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"{folder}: the disk is full; make room, and the run goes on by itself" * (free < LEAST_ROOM)
