"""Make, follow, resume and cancel the runs of a server; its dispatcher carries them out.

`RunsHere` are those of a server on this machine, `fedtmle.deploy.remote.RemoteRuns` those of one elsewhere.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from fedtmle.deploy.kits import Deployment, Role, read_deployment, read_kit
from fedtmle.deploy.presence import server_trouble
from fedtmle.engine import office
from fedtmle.engine.runs import RunFolder, RunState, RunStatus
from fedtmle.errors import InputError, ProtocolError
from fedtmle.layout import phase_name
from fedtmle.studyfile.file import StudyFile

SERVER_INTERVAL = 5.0  # seconds between two looks at the server


def show(statuses: Iterable[RunStatus], *, quiet: bool, to: TextIO | None = None) -> RunStatus:
    """Print a line per change of status, to standard error by default; return the last status."""
    out = sys.stderr if to is None else to
    printed, last = "", None
    for last in statuses:
        line = _line(last, live=out.isatty())
        if not quiet and line and line != printed:
            print(line, file=out, flush=True)
            printed = line
    if last is None:
        raise AssertionError("a run has a status")
    return last


def _line(status: RunStatus, *, live: bool) -> str:
    if status.state is RunState.RUNNING:
        return _progress(status, live=live)
    if status.state is RunState.STOPPED:
        return f"stopped after round {status.round}: {status.why}"
    if status.state is RunState.DONE:
        return f"done in {status.round} rounds, {sum(status.seconds):.1f} s"
    return "; ".join(filter(None, (status.state, status.why, _silos(status))))


def _progress(status: RunStatus, *, live: bool) -> str:
    if not status.round and not status.absent:
        return "all silos are ready; running"
    if not status.round:
        return f"running without {_silos(replace(status, silos=status.absent))}"
    awaited = {silo: words for silo, words in status.silos.items() if words != "ready"}
    if awaited:
        return f"round {status.round}; {_silos(replace(status, silos=awaited))}"
    phase = phase_name(status.phase)
    return f"round {status.round}, {phase}, {status.bits / 1000:.1f} kbit so far" if live else ""


def _silos(status: RunStatus) -> str:
    by_words: dict[str, list[str]] = {}
    for silo, words in status.silos.items():
        by_words.setdefault(words, []).append(silo)
    return "; ".join(f"{words}: {', '.join(silos)}" for words, silos in by_words.items())


class Runs(ABC):
    """The runs of one server, as a statistician uses them."""

    folder: Path  # the folder that holds the runs on this machine
    interval: float  # seconds between two looks at a run

    @abstractmethod
    def require(self) -> None:
        """Raise `ProtocolError` unless the server runs: nobody would carry out a run."""

    @abstractmethod
    def new(self, study: StudyFile, *, deadline: float, patience: float) -> RunFolder:
        """Make a run; the server announces it to the silos and starts it when all have approved."""

    @abstractmethod
    def named(self, name: str) -> RunFolder:
        """Return the run of this name."""

    @abstractmethod
    def look(self, run: RunFolder) -> RunStatus:
        """Return the status of a run, judged by the machine that carries it out."""

    @abstractmethod
    def trouble(self) -> str:
        """Return what is wrong with the server, an empty string if it runs."""

    @abstractmethod
    def resume(self, run: RunFolder) -> None:
        """Let a run that stopped go on; one that waits or runs does so by itself."""

    @abstractmethod
    def cancel(self, run: RunFolder) -> None:
        """Cancel a run: the server ends its job, and silos are asked nothing more."""

    @abstractmethod
    def close(self) -> None:
        """End a connection that is open."""


class RunsHere(Runs):
    """The runs of a deployment whose server is on this machine."""

    interval = 0.2

    def __init__(self, deployment: Deployment) -> None:
        self.folder = deployment.runs
        self._deployment = deployment
        self._looked, self._seen = -SERVER_INTERVAL, ""

    def require(self) -> None:
        """Raise `ProtocolError` unless the server runs."""
        trouble = server_trouble(self._deployment.server)
        if trouble:
            raise ProtocolError(trouble)

    def new(self, study: StudyFile, *, deadline: float, patience: float) -> RunFolder:
        """Make a run in the server's folder."""
        known = self._deployment.sites
        return office.new_run(self.folder, study, known=known, deadline=deadline, patience=patience)

    def named(self, name: str) -> RunFolder:
        """Return the run of this name."""
        return RunFolder.named(self.folder, name)

    def look(self, run: RunFolder) -> RunStatus:
        """Return the status of a run, judged against this machine."""
        return run.look()

    def trouble(self) -> str:
        """Return what is wrong with the server, as it was some seconds ago."""
        if time.monotonic() - self._looked > SERVER_INTERVAL:
            self._looked, self._seen = time.monotonic(), server_trouble(self._deployment.server)
        return self._seen

    def resume(self, run: RunFolder) -> None:
        """Let a run that stopped go on."""
        office.resume(run)

    def cancel(self, run: RunFolder) -> None:
        """Cancel a run."""
        office.cancel(run)

    def close(self) -> None:
        """There is no connection to end."""


def follow(runs: Runs, run: RunFolder) -> Iterator[RunStatus]:
    """Yield each new status until the run is over; while the server is down, the status says so."""
    last = None
    while True:
        status = runs.look(run)
        trouble = runs.trouble()
        if trouble and not status.state.is_over:
            status = replace(status, state=RunState.WAITING, why=trouble, silos={})
        if status != last:
            last = status
            yield status
        if status.state.is_over:
            return
        time.sleep(runs.interval)


def runs_on(path: Path) -> Runs:
    """Return the runs of the deployment in this folder, or of the server that a statistician's kit names."""
    if (path / "fedtmle" / "kit.json").is_file():
        from fedtmle.deploy.remote import RemoteRuns  # it needs the engine

        return RemoteRuns(read_kit(path, Role.ADMIN))
    return RunsHere(read_deployment(path))


def copying(statuses: Iterable[RunStatus], source: Path, target: Path | None) -> Iterator[RunStatus]:
    """Yield the statuses; meanwhile append what ``source``, the run's events, gets to the file ``target``."""
    copied = 0
    for status in statuses:
        yield status
        if target is not None and source.exists():
            with source.open("rb") as read, target.open("ab") as write:
                read.seek(copied)
                write.write(read.read())
                copied = read.tell()


@contextmanager
def find_run(path: Path) -> Iterator[tuple[Runs, RunFolder]]:
    """Yield the run in this folder, and the runs that it belongs to; end their connection."""
    whole = path.absolute()
    for place in (whole.parent.parent.parent, whole.parent.parent):  # a deployment, a statistician's kit
        with suppress(InputError):
            runs = runs_on(place)
            break
    else:
        raise InputError(
            f"{path}: not a run's folder; expected DEPLOYMENT/server/runs/NAME or KIT/runs/NAME, as "
            "`fedtmle run --on` prints it when it starts"
        )
    with closing(runs):
        yield runs, runs.named(whole.name)
