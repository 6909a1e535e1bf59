"""Logs of a deployed party: each is rotated, so that none grows for ever."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path


def write_log(path: Path) -> None:
    """Write the records of fedtmle's loggers to a file that is rotated."""
    log = logging.handlers.RotatingFileHandler(path, maxBytes=1 << 20, backupCount=4)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("fedtmle").addHandler(log)
