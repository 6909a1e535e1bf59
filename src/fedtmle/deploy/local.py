"""A whole deployment on one machine, on loopback: for the demonstration, tests and benchmarks."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fedtmle.deploy.kits import Deployment, Kit, Role, read_kit
from fedtmle.deploy.parties import start_server, start_silo
from fedtmle.deploy.presence import presence
from fedtmle.deploy.processes import stop, wait_until
from fedtmle.deploy.provision import provision
from fedtmle.errors import ProtocolError
from fedtmle.studies.home import Home
from fedtmle.studyfile.file import StudyFile, file_plan

START_UP = 60.0  # seconds until the server and every silo are connected


@contextmanager
def local_deployment(
    folder: Path,
    study: StudyFile,
    *,
    host: str = "localhost",
    port: int | None = None,
    spare: tuple[str, ...] = (),
    within: float = START_UP,
) -> Iterator[Deployment]:
    """Provision and start a server and the study's silos; stop all of them at the end, however it ends.

    ``spare`` names silos that get a kit and are not started. All others must be connected ``within`` so many
    seconds.
    """
    made = provision(folder, silos=[*study.silos, *spare], host=host, port=port or free_port())
    try:
        with _interrupted_by_terminate():
            start_server(read_kit(made.server, Role.SERVER))
            for silo, path in study.silos.items():
                start_silo(silo_kit(made, silo), path)
            await_silos(made, list(study.silos), seconds=within)
            yield made
    finally:
        for silo in study.silos:
            stop(silo_kit(made, silo))
        stop(read_kit(made.server, Role.SERVER))


def await_silos(made: Deployment, silos: list[str], *, seconds: float = START_UP) -> None:
    """Wait until the server runs and these silos are connected to it."""
    expected = {made.sites[silo] for silo in silos}

    def connected() -> bool:
        seen = presence(made.server)
        return seen is not None and expected <= set(seen.sites)

    if not wait_until(connected, seconds):
        raise ProtocolError(f"the server and its silos were not connected within {seconds:g} s")


def approve_everywhere(study: StudyFile) -> None:
    """Approve a study at every silo, as each owner would on the silo's own machine."""
    for path in study.silos.values():
        home = Home.of(path)
        home.approvals.decide(file_plan(study).digest, approved=True, lowered=home.file.policy.lowered)


def silo_kit(made: Deployment, silo: str) -> Kit:
    """Return the kit of a silo."""
    return read_kit(made.kit(silo), Role.SILO)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def _interrupted_by_terminate() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that started processes are stopped."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
