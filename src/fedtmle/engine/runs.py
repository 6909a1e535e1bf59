"""A run at the server: its folder with study, terms, status and result, and the states it goes through.

A run waits until every silo is connected and has approved, without an engine job. If its study goes on
without silos, it waits no longer for one that rejected the plan, nor for any other when the patience ends.
Then the server starts a job, which carries the run out. A run whose job is lost (a reboot, a network that
stays away) waits again, and the server starts another job that continues at the recorded round. A run that a
person has to look at stops.

`TRANSITIONS` decides every change of state. The status is written under a lock, whole, and whoever reads it
judges it against the machine: `RunFolder.look` reports a run whose process has ended as waiting.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fedtmle.engine.alive import Process
from fedtmle.errors import InputError, ProtocolError
from fedtmle.runtime.documents import write_document
from fedtmle.runtime.signing import SigningKey
from fedtmle.studyfile.file import StudyFile, read_study

LEAST_ROOM = 1 << 20  # bytes; no run is started on a disk with less
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
_Record = TypeVar("_Record")


def is_run_name(name: str) -> bool:
    """Return whether this can be the name of a run's folder; it cannot point outside the folder of runs."""
    return _NAME.fullmatch(name) is not None


def site_name(silo: str) -> str:
    """Return the engine's name of a silo: lower case letters, digits, ``_`` and ``-``."""
    return re.sub(r"[^a-z0-9_-]+", "-", silo.lower()).strip("-")


def sites(silos: Iterable[str]) -> dict[str, str]:
    """Return the engine's name of each silo; raise if two would share one."""
    named: dict[str, str] = {}
    for silo in silos:
        site = site_name(silo)
        if not site:
            raise InputError(f"silos: '{silo}' has no ASCII letter or digit; choose another name")
        if site in named.values() or site in ("server", "admin"):
            raise InputError(
                f"silos: '{silo}' would be '{site}' on the network, which is taken; choose another name"
            )
        named[silo] = site
    return named


def server_key(kit: Path) -> SigningKey:
    """Return the key with which a server signs its requests; it is in its kit, and made when first needed."""
    home = kit / "fedtmle"
    home.mkdir(parents=True, exist_ok=True)
    return SigningKey.at(home / "key")


class RunState(StrEnum):
    """How far a run has come."""

    WAITING = "waiting"  # for silos to connect and approve; there is no engine job
    STARTING = "starting"  # the engine starts a job; its silos read their data
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # a person has to look at it; `fedtmle resume` continues it
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Whether the run stays as it is unless a person acts."""
        return self in (RunState.DONE, RunState.STOPPED, RunState.CANCELLED)


class Move(StrEnum):
    """What happens to a run."""

    START = "start"  # the server submits a job
    ARRIVE = "arrive"  # the job's process claims the run
    NOTE = "note"  # news that change no state: who is awaited, the last round
    RUN = "run"  # every silo is ready
    LOSE = "lose"  # the job is gone, or a silo is; the server starts another when all are back
    FINISH = "finish"
    FAIL = "fail"  # a silo refused, or there is an error that waiting does not fix
    RESUME = "resume"  # a person looked at it
    CANCEL = "cancel"


TRANSITIONS: Mapping[tuple[RunState, Move], RunState] = {
    (RunState.WAITING, Move.NOTE): RunState.WAITING,
    (RunState.WAITING, Move.START): RunState.STARTING,
    (RunState.WAITING, Move.FAIL): RunState.STOPPED,
    (RunState.WAITING, Move.CANCEL): RunState.CANCELLED,
    (RunState.STARTING, Move.ARRIVE): RunState.STARTING,
    (RunState.STARTING, Move.NOTE): RunState.STARTING,
    (RunState.STARTING, Move.RUN): RunState.RUNNING,
    (RunState.STARTING, Move.LOSE): RunState.WAITING,
    (RunState.STARTING, Move.FAIL): RunState.STOPPED,
    (RunState.STARTING, Move.CANCEL): RunState.CANCELLED,
    (RunState.RUNNING, Move.NOTE): RunState.RUNNING,
    (RunState.RUNNING, Move.LOSE): RunState.WAITING,
    (RunState.RUNNING, Move.FINISH): RunState.DONE,
    (RunState.RUNNING, Move.FAIL): RunState.STOPPED,
    (RunState.RUNNING, Move.CANCEL): RunState.CANCELLED,
    (RunState.STOPPED, Move.RESUME): RunState.WAITING,
    (RunState.STOPPED, Move.CANCEL): RunState.CANCELLED,
}


class MoveError(ProtocolError):
    """The table has no such move: the run was cancelled, or another process has taken it over."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a run, the same each time it is resumed."""

    plan: str  # the plan's digest, in hex
    sites: Mapping[str, str]  # engine's name by silo, in the plan's order
    deadline: float  # seconds that a silo may take to answer one request
    patience: float  # seconds to wait for approvals, and for silos that are gone
    goes_on: bool = False  # without silos that refuse, or are absent when the patience ends
    owner: str = ""  # the statistician who posted the study from another machine


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The last status that a run reported."""

    state: RunState = RunState.WAITING
    since: float = 0.0  # when the state began, seconds since 1970
    why: str = ""
    refused: bool = False  # whether a silo refused
    silos: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)  # silos that take no part, and why
    has_opened: bool = False  # from then on no silo joins or is left out
    round: int = 0
    phase: str = ""
    bits: int = 0
    job: str = ""  # the engine's name of the last job
    process: Process | None = None  # the job's process at the server, once it has claimed the run
    attempt: int = 0
    lost: int = 0  # attempts in a row that were lost without a new round
    seconds: tuple[float, ...] = ()  # seconds of each round, once the run has ended

    def taking_part(self, sites: Mapping[str, str]) -> dict[str, str]:
        """Return the silos that are not absent, with their engine's names."""
        return {silo: site for silo, site in sites.items() if silo not in self.absent}


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self.result = path / "result.json"
        self.transcript = path / "transcript"
        self.events = path / "events.jsonl"

    @classmethod
    def new(cls, runs: Path, study: StudyFile, terms: Terms) -> RunFolder:
        """Make a folder with the text of the study and the terms of its run, which waits."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        folder = cls(runs / f"{study.path.stem[:40]}-{stamp}-{secrets.token_hex(2)}")
        if not is_run_name(folder.path.name):
            folder = cls(runs / f"run-{stamp}-{secrets.token_hex(2)}")
        folder.path.mkdir(parents=True)
        (folder.path / "study.toml").write_bytes(study.path.read_bytes())
        folder.write(RunStatus(since=time.time()))
        write_document(folder.path / "terms.json", asdict(terms))  # last: the run exists from here on
        return folder

    @classmethod
    def named(cls, runs: Path, name: str) -> RunFolder:
        """Return the folder of a run that was made; ``name`` cannot point outside ``runs``."""
        folder = cls(runs / name)
        if not is_run_name(name) or not (folder.path / "terms.json").is_file():
            raise InputError(f"there is no run '{name}' in {runs}")
        return folder

    @classmethod
    def every(cls, runs: Path) -> list[RunFolder]:
        """Return all runs in a folder, by name."""
        return [cls(path.parent) for path in sorted(runs.glob("*/terms.json"))]

    @property
    def name(self) -> str:
        return self.path.name

    def study(self) -> StudyFile:
        """Return the study as it was when the run was made."""
        return read_study(self.path / "study.toml", samples=False)

    def terms(self) -> Terms:
        """Return the terms."""
        return _read(self.path / "terms.json", Terms)

    def status(self) -> RunStatus:
        """Return the status as it was written last; `look` also asks whether it is still true."""
        return _read(self.path / "status.json", RunStatus)

    def look(self) -> RunStatus:
        """Return the status, judged against the machine: a run whose process has ended is waiting."""
        status = self.status()
        if status.process is None or status.process.find() is not None:
            return status
        if (status.state, Move.LOSE) not in TRANSITIONS:
            return status
        return replace(status, state=RunState.WAITING, why=process_ended(status))

    def move(self, move: Move, *, by: Process | None = None, **news: Any) -> RunStatus:
        """Make a move, write the new status with the ``news``, and return it.

        Raise `MoveError` if the table does not have it, or if ``by``, a job's process, does not hold the run.
        """
        with self._locked():
            status = self.status()
            state = TRANSITIONS.get((status.state, move))
            if state is None:
                raise MoveError(f"run '{self.name}' is {status.state}: it cannot {move}")
            holder = status.process
            if by is not None and holder != by and (holder is not None or move is not Move.ARRIVE):
                raise MoveError(f"run '{self.name}' was taken over by another process")
            if state is not status.state:
                news.setdefault("since", time.time())
                news.setdefault("why", "")
            holder = by or holder
            if state not in (RunState.STARTING, RunState.RUNNING) or move is Move.START:
                holder = None
            moved = replace(status, state=state, process=holder, **news)
            self.write(moved)
            return moved

    def write(self, status: RunStatus) -> None:
        """Replace the status; only a new run and `move` do."""
        write_document(self.path / "status.json", asdict(status))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def process_ended(status: RunStatus) -> str:
    """Return why a run whose process has ended is waiting."""
    where = f" in round {status.round}" if status.round else ""
    return f"the server's process for this run ended{where}; the run goes on by itself"


def full_disk(folder: Path) -> str:
    """Return a message if the disk of a folder has no room for a run, an empty string if it has."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f"{folder}: the disk is full; make room, and the run goes on by itself" * (free < LEAST_ROOM)


def _read(path: Path, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        raise InputError(f"{path}: missing or damaged; this is not the folder of a run") from None
