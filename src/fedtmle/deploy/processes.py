"""A party's processes: known by pid and start time, never by name; ended with all their descendants."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from fedtmle.deploy.kits import Kit, Role
from fedtmle.engine.process import Process
from fedtmle.errors import InputError
from fedtmle_core.journal import read_document, write_document

GRACE = 5.0  # seconds between asking a process to end and ending it


def record_of(kit: Kit) -> Path:
    """Return the file that records the kit's supervisor."""
    return kit.home / "process.json"


def engine_record(kit: Kit) -> Path:
    """Return the file that records the engine that the supervisor started."""
    return kit.home / "engine.json"


def running(kit: Kit) -> psutil.Process | None:
    """Return the kit's supervisor, None if it does not run."""
    return _recorded(record_of(kit))


def _recorded(path: Path) -> psutil.Process | None:
    """Return the process that a file records, None if it has ended."""
    try:
        return Process(**read_document(path)).find()
    except (OSError, ValueError, TypeError):
        return None


def record_engine(kit: Kit, pid: int) -> None:
    """Record the engine's process; if that fails, as on a full disk, the engine runs anyway."""
    with suppress(OSError, psutil.NoSuchProcess):
        write_document(engine_record(kit), asdict(Process.of(pid)))


def start(kit: Kit) -> None:
    """Start the party in the background; it outlives this command, and is restarted if it dies."""
    _check_is_free(kit)
    log = (
        os.POSIX_SPAWN_OPEN,
        1,
        str(kit.home / "engine.log"),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o600,
    )
    supervisor = os.posix_spawn(  # not `Popen`: it outlives this process
        sys.executable,
        [sys.executable, "-m", "fedtmle.deploy.supervisor", str(kit.path)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), log, (os.POSIX_SPAWN_DUP2, 1, 2)],
    )
    write_document(record_of(kit), asdict(Process.of(supervisor)))


def run_here(kit: Kit, supervise: Callable[[Kit], int]) -> int:
    """Run the party in the foreground, as a service manager wants it; return the exit code."""
    _check_is_free(kit)
    write_document(record_of(kit), asdict(Process.here()))
    try:
        return supervise(kit)
    finally:
        record_of(kit).unlink(missing_ok=True)


def _check_is_free(kit: Kit) -> None:
    """Raise if the party runs; end an engine that outlived its supervisor, so that there are never two."""
    if running(kit) is not None:
        raise InputError(f"{kit.path}: already running; stop it with `fedtmle {kit.role} stop {kit.path}`")
    left = _recorded(engine_record(kit))
    if left is not None:
        end([left])


def stop(kit: Kit) -> bool:
    """End the party and all its descendants; return whether it was running."""
    processes = [process for process in (running(kit), _recorded(engine_record(kit))) if process is not None]
    end(processes)
    for record in (record_of(kit), engine_record(kit)):
        record.unlink(missing_ok=True)
    return bool(processes)


def end(processes: Sequence[psutil.Process]) -> None:
    """Ask processes and all their descendants to end, then kill those that have not."""
    every = {process.pid: process for process in processes}
    for process in processes:
        every |= {descendant.pid: descendant for descendant in descendants(process)}
    for process in processes:  # a supervisor ends the processes that it started
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, remaining = psutil.wait_procs(list(every.values()), timeout=GRACE)
    for process in remaining:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(remaining, timeout=GRACE)


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return the processes below this one, at any depth."""
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def engine_command(kit: Kit) -> list[str]:
    """Return the command with which FLARE's own start script starts the party."""
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
    """Return an environment that keeps exception texts out of FLARE's logs and messages.

    gRPC's own resolver asks a DNS server even for names in the hosts file; the machine's does not.
    """
    own = {"NVFLARE_SECURE_LOGGING": "true", "MALLOC_ARENA_MAX": "4", "GRPC_DNS_RESOLVER": "native"}
    return {**os.environ, **own}


def wait_until(condition: Callable[[], bool], seconds: float, *, pause: float = 0.2) -> bool:
    """Wait for a condition; return whether it came true in time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
    return True
