"""A party's processes: known by pid and start time, never by name; ended with everything below them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from fedtmle.deploy.kits import Kit, Role
from fedtmle.errors import InputError

GRACE = 5.0  # seconds between asking a process to end and ending it


@dataclass(frozen=True)
class Process:
    """A process of ours; its start time tells it from a later one with the same pid."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, None if it has ended."""
        try:
            found = psutil.Process(self.pid)
            same = abs(found.create_time() - self.started) < 1.0
            return found if same and found.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def alive(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def record_of(kit: Kit) -> Path:
    return kit.home / "process.json"


def running(kit: Kit) -> psutil.Process | None:
    """The kit's supervisor, if it runs."""
    try:
        document = json.loads(record_of(kit).read_text(encoding="utf-8"))
        return Process(**document).find()
    except (OSError, ValueError, TypeError):
        return None


def start(kit: Kit) -> None:
    """Starts the party in the background; it outlives this command, and is started again if it dies."""
    if running(kit) is not None:
        raise InputError(f"{kit.path}: already running; `fedtmle {kit.role} stop` ends it")
    log = (
        os.POSIX_SPAWN_OPEN,
        1,
        str(kit.home / "engine.log"),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o600,
    )
    supervisor = os.posix_spawn(  # not `Popen`: it goes on without us
        sys.executable,
        [sys.executable, "-m", "fedtmle.deploy.supervisor", str(kit.path)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), log, (os.POSIX_SPAWN_DUP2, 1, 2)],
    )
    record = json.dumps(asdict(Process.of(supervisor)))
    record_of(kit).write_text(record + "\n", encoding="utf-8")


def stop(kit: Kit) -> bool:
    """Ends the party and everything below it; whether there was anything to end."""
    supervisor = running(kit)
    if supervisor is None:
        record_of(kit).unlink(missing_ok=True)
        return False
    end([supervisor])
    record_of(kit).unlink(missing_ok=True)
    return True


def end(processes: Sequence[psutil.Process]) -> None:
    """Asks processes and all their descendants to end, then ends those that have not."""
    every = {process.pid: process for process in processes}
    for process in processes:
        every |= {below.pid: below for below in descendants(process)}
    for process in processes:  # a supervisor ends what it started
        _signal(process, kill=False)
    _, left = psutil.wait_procs(list(every.values()), timeout=GRACE)
    for process in left:
        _signal(process, kill=True)
    psutil.wait_procs(left, timeout=GRACE)


def descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        found: list[psutil.Process] = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return found


def _signal(process: psutil.Process, *, kill: bool) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill() if kill else process.terminate()


def engine_command(kit: Kit) -> list[str]:
    """How FLARE's own start script starts the party."""
    if kit.role is Role.SERVER:
        module, config, uid = "server.server_train", "fed_server.json", []
    else:
        module, config, uid = "client.client_train", "fed_client.json", [f"uid={kit.site}"]
    command = [
        sys.executable,
        "-u",
        "-m",
        f"nvflare.private.fed.app.{module}",
        "-m",
        str(kit.path),
        "-s",
        config,
    ]
    return [*command, "--set", "secure_train=true", *uid, "org=fedtmle", "config_folder=config"]


def engine_environment() -> dict[str, str]:
    """No exception text in FLARE's own logs and messages; few arenas, as its start script sets."""
    return {**os.environ, "NVFLARE_SECURE_LOGGING": "true", "MALLOC_ARENA_MAX": "4"}


def wait_until(condition: object, seconds: float, *, pause: float = 0.2) -> bool:
    """Whether a callable came true in time."""
    if not callable(condition):
        raise TypeError("a condition is a function")
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True
