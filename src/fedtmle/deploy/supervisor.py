"""The supervisor of a party's engine: start it, restart it if it dies, end everything when asked.

`fedtmle silo run` and `fedtmle server run` run it; `start` runs it in the background:

python -m fedtmle.deploy.supervisor <kit>
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from fedtmle.deploy.ahead import is_compiled
from fedtmle.deploy.kits import Kit, Role, read_kit
from fedtmle.deploy.processes import descendants, end, engine_command, engine_environment, record_engine
from fedtmle.deploy.validity import invalidity_now
from fedtmle.engine.process import tidy

RESTART_PAUSE = 1.0  # seconds; doubled each time the engine ends within `BRIEF_LIFE`
LONGEST_PAUSE = 30.0  # seconds
TIDY_EVERY = 600.0  # seconds
LOOK_EVERY = 10.0  # seconds between two looks at certificates that are not valid
BRIEF_LIFE = 20.0  # seconds
_PR_SET_CHILD_SUBREAPER = 36


def supervise(kit: Kit) -> int:
    """Run until asked to end; return the exit code.

    If the engine keeps ending soon after its start, as on a full disk, the pauses get longer.
    """
    adopt_orphans()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, _leave)
    pause = RESTART_PAUSE
    _serve_numbers(kit)
    try:
        if kit.role is Role.SILO and not is_compiled(kit):
            threading.Thread(target=_compile_ahead, args=(kit,), daemon=True).start()
        while True:
            _await_certificates(kit)
            started = time.monotonic()
            engine = subprocess.Popen(  # noqa: S603 - FLARE's own module
                engine_command(kit), env=engine_environment(), cwd=kit.path, stdin=subprocess.DEVNULL
            )
            record_engine(kit, engine.pid)
            while not _has_ended(engine):
                tidy(kit.path)
            # A job that outlives its engine would hold the run's journal.
            end(descendants(psutil.Process()))
            pause = next_pause(pause, lived=time.monotonic() - started)
            _log(f"the engine ended with code {engine.returncode}; it is started again in {pause:g} s")
            time.sleep(pause)
    except _Leave:
        return 0
    finally:
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        end(descendants(psutil.Process()))


def next_pause(pause: float, *, lived: float) -> float:
    """Return the seconds to wait before the engine is started again.

    ``pause`` is the last wait, and ``lived`` the seconds for which the engine then ran.
    """
    return min(2.0 * pause, LONGEST_PAUSE) if lived < BRIEF_LIFE else RESTART_PAUSE


def _await_certificates(kit: Kit) -> None:
    """Wait until the kit's certificates are valid by this machine's clock; log why they are not, once."""
    logged = ""
    while why := invalidity_now(kit):
        if why != logged:
            _log(f"{why}; the engine is started as soon as it is valid")
            logged = why
        time.sleep(LOOK_EVERY)


def _log(line: str) -> None:
    with suppress(OSError):  # the log's disk may be full
        print(line, flush=True)  # noqa: T201 - the engine's log


def _serve_numbers(kit: Kit) -> None:
    """Serve numbers for monitoring, if the kit names a port for them; only then load what reads them."""
    if not (kit.home / "health.json").exists():
        return
    from fedtmle.deploy.doctor import serve

    try:
        serve(kit)
    except OSError as error:
        print(f"no numbers for monitoring: the port cannot be used ({error.strerror})", file=sys.stderr)  # noqa: T201 - the engine's log


def _compile_ahead(kit: Kit) -> None:
    """Compile in a separate process, which ends with the supervisor at the latest."""
    command = [sys.executable, "-m", "fedtmle.deploy.ahead", str(kit.path)]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=False)  # noqa: S603 - our own module


def _has_ended(engine: subprocess.Popen[bytes]) -> bool:
    """Return whether the engine has ended, after `TIDY_EVERY` seconds at the latest."""
    try:
        engine.wait(timeout=TIDY_EVERY)
    except subprocess.TimeoutExpired:
        return False
    return True


def adopt_orphans() -> None:
    """Adopt the processes that a killed engine leaves behind (Linux), so that they can be ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Leave(BaseException):
    """Someone asked the supervisor to end."""


def _leave(_signal: int, _frame: FrameType | None) -> None:
    raise _Leave


if __name__ == "__main__":
    os.setsid()  # a session of its own outlives the terminal
    sys.exit(supervise(read_kit(Path(sys.argv[1]))))
