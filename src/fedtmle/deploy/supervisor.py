"""The supervisor: starts a party's engine, starts it again if it dies, ends everything when asked.

python -m fedtmle.deploy.supervisor <kit>
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import psutil

from fedtmle.deploy.kits import Kit, read_kit
from fedtmle.deploy.processes import descendants, end, engine_command, engine_environment

PAUSE = 1.0  # seconds before the engine is started again
BRIEF, MOST = 20.0, 5  # an engine that dies this often within this many seconds each is left alone
_PR_SET_CHILD_SUBREAPER = 36


def supervise(kit: Kit) -> int:
    """Runs until it is asked to end, or until the engine keeps dying at once."""
    os.setsid()  # of a session of its own: it outlives the terminal that it was started from
    adopt_orphans()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, _leave)
    brief = 0
    try:
        while brief < MOST:
            started = time.monotonic()
            engine = subprocess.Popen(  # noqa: S603 - FLARE's own module
                engine_command(kit), env=engine_environment(), cwd=kit.path, stdin=subprocess.DEVNULL
            )
            engine.wait()
            # A job of a dead engine would hold the run's journal: nothing of it may stay.
            end(descendants(psutil.Process()))
            brief = brief + 1 if time.monotonic() - started < BRIEF else 0
            time.sleep(PAUSE)
    except _Leave:
        return 0
    finally:
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        end(descendants(psutil.Process()))
    return 1


def adopt_orphans() -> None:
    """Linux: what a killed engine leaves behind becomes ours, and can be found and ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Leave(BaseException):
    """Someone asked the supervisor to end."""


def _leave(_signal: int, _frame: FrameType | None) -> None:
    raise _Leave


if __name__ == "__main__":
    sys.exit(supervise(read_kit(Path(sys.argv[1]))))
