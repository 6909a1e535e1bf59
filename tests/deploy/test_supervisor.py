"""The supervisor starts its engine again, ends everything below it, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from fedtmle.deploy import processes
from fedtmle.deploy.processes import wait_until
from fedtmle.deploy.supervisor import LONGEST_PAUSE, RESTART_PAUSE, next_pause
from fedtmle.engine.process import Process

# An engine that starts a job in a session of its own, as FLARE does, and waits.
ENGINE = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {job!r}], start_new_session=True)"
)
JOB = "import time; time.sleep(300)"
SUPERVISOR = """
import sys
from pathlib import Path
from fedtmle.deploy import supervisor
supervisor.RESTART_PAUSE = 0.1
supervisor.engine_command = lambda kit: [sys.executable, "-c", {engine!r}]
supervisor.engine_environment = lambda: None
supervisor.invalidity_now = lambda kit: {trouble}
supervisor.LOOK_EVERY = 0.1
class Kit: path = home = Path({folder!r}); role = None
sys.exit(supervisor.supervise(Kit()))
"""


def _start(folder: Path, engine: str, *, trouble: str = "''") -> psutil.Process:
    text = SUPERVISOR.format(engine=engine, folder=str(folder), trouble=trouble)
    return psutil.Process(os.posix_spawn(sys.executable, [sys.executable, "-c", text], os.environ))


def test_it_restarts_a_killed_engine_without_its_orphans_and_ends_all(tmp_path: Path) -> None:
    supervisor = _start(tmp_path, ENGINE.format(job=JOB) + "; time.sleep(300)")
    below = processes.descendants
    try:
        assert wait_until(lambda: len(below(supervisor)) == 2, 20)
        first = {process.pid: process for process in below(supervisor)}
        (engine,) = supervisor.children()
        os.kill(engine.pid, signal.SIGKILL)

        def only_new_ones() -> bool:  # by one look: between two the engine may go, and its job not yet
            now = set(map(_pid, below(supervisor)))
            return len(now) == 2 and not now & set(first)

        assert wait_until(only_new_ones, 20)  # the old job is gone, too
        second = below(supervisor)
    finally:
        processes.end([supervisor])
    assert not supervisor.is_running()
    assert all(not process.is_running() for process in [*first.values(), *second])


def test_it_never_gives_up_an_engine_that_keeps_dying(tmp_path: Path) -> None:
    """A disk that is full now may have room later, and nobody has to start the party again."""
    lives = tmp_path / "lives"
    supervisor = _start(tmp_path, f"open({str(lives)!r}, 'a').write('x'); raise SystemExit(3)")
    try:
        assert wait_until(lambda: lives.exists() and len(lives.read_text()) > 2, 60)
        assert supervisor.is_running()
    finally:
        processes.end([supervisor])


def test_it_starts_no_engine_before_its_certificates_are_valid(tmp_path: Path) -> None:
    """FLARE's engine would neither end nor connect later."""
    valid, lives = tmp_path / "valid", tmp_path / "lives"
    supervisor = _start(
        tmp_path,
        f"open({str(lives)!r}, 'a').write('x'); import time; time.sleep(300)",
        trouble=f"'' if Path({str(valid)!r}).exists() else 'it begins later'",
    )
    try:
        time.sleep(2.0)
        assert supervisor.is_running()
        assert not lives.exists()
        valid.touch()
        assert wait_until(lives.exists, 20)
    finally:
        processes.end([supervisor])


def test_it_starts_such_an_engine_ever_more_slowly() -> None:
    pauses = [next_pause(RESTART_PAUSE, lived=1.0)]
    for _ in range(9):
        pauses.append(next_pause(pauses[-1], lived=1.0))
    assert pauses[:4] == [2.0, 4.0, 8.0, 16.0]
    assert pauses[-1] == LONGEST_PAUSE
    assert next_pause(LONGEST_PAUSE, lived=3600.0) == RESTART_PAUSE


def test_a_supervisor_loads_no_statistics() -> None:
    """There is one beside every engine, for months."""
    text = "import fedtmle.deploy.supervisor, sys; print([m for m in ('numpy', 'scipy') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)  # noqa: S603
    assert told.stdout == "[]\n"


def test_a_pid_that_was_used_again_is_not_ours() -> None:
    own = Process.of(os.getpid())
    assert own.find() is not None
    assert Process(own.pid, own.started - 100).find() is None
    assert Process(2**22 + 1, 0.0).find() is None


def _pid(process: psutil.Process) -> int:
    return int(process.pid)
