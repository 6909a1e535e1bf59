"""A run at the server: its folder, the states it goes through, and the dispatcher that starts it.

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
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from fedtmle.engine.post import LONGEST_STUDY, MAX_STUDIES, POST_EVERY, Notice, SiloReport, Standing
from fedtmle.engine.process import Process
from fedtmle.errors import FedTMLEError, InputError, ProtocolError
from fedtmle.studyfile.file import StudyFile, read_study
from fedtmle_core.journal import read_document, write_document
from fedtmle_core.signing import SigningKey

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


# The server's dispatcher: it starts a run when every silo is there and has approved, and again after a loss.
#
# A study may declare that it goes on without silos. Then the dispatcher starts its run without those whose
# owner rejected the plan, and at the end of the patience without those that are absent or undecided.
#
# It holds no run in memory: everything about a run is in its folder, so that after a reboot waiting runs wait
# again and runs that had begun go on. `Dispatcher.turn` is called every second, `Dispatcher.hear` with every
# report of a silo.

_log = logging.getLogger("fedtmle.server")
FRESH = 4 * POST_EVERY  # seconds after its last report for which a silo counts as connected
START_LIMIT = 180.0  # seconds for the engine to start a job's process
GRACE = 60.0  # seconds after the server's start before any run's patience ends: silos are still connecting
MAX_LOST = 20  # consecutive attempts without a new round, after which the run stops
LONGEST_PAUSE = 15.0  # seconds between two attempts
TEXTS_PER_NOTICE = 8
NOT_CONNECTED = "not connected"
NOT_THERE_YET = "connected, and the study is on its way"
REMOVED = "removed from the deployment"


class Jobs(Protocol):
    """The engine's jobs, as the dispatcher needs them."""

    def submit(self, run: RunFolder) -> str:
        """Start a job for a run; return the engine's name of it."""
        ...

    def ended(self, job: str) -> str:
        """Return how a job ended, in the engine's words; an empty string if it has not."""
        ...

    def stop(self, job: str) -> None:
        """End a job at the server and at every silo; do nothing if it is over or unknown."""
        ...


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A silo's last report, and when it came, by the monotonic and by the wall clock."""

    report: SiloReport
    at: float
    time: float


class Dispatcher:
    """Carry every run of a server forward; ``runs`` is the folder of its runs."""

    def __init__(
        self,
        runs: Path,
        jobs: Jobs,
        *,
        version: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._runs, self._jobs, self._version = runs, jobs, version
        self._clock, self._now = clock, now
        self._began = clock()
        self.revoked: frozenset[str] = frozenset()  # sites that the coordinator removed
        self._heard: dict[str, Heard] = {}
        self._over: dict[str, int] = {}  # runs that are over, and when their status was written
        self._started: dict[str, str] = {}  # the job of each run that is not over
        self._engines: dict[str, dict[str, str]] = {}  # by run, the engine of each silo when it was started

    def hear(self, site: str, report: SiloReport) -> Notice:
        """Note a silo's report, and return the studies that are open for it; a removed silo has none."""
        if site in self.revoked:
            return Notice(time=self._now(), version=self._version, open=[])
        self._heard[site] = Heard(report=report, at=self._clock(), time=self._now())
        plans: dict[str, RunFolder] = {}
        for run in RunFolder.every(self._runs):
            try:
                terms = run.terms()
                is_open = run.status().state not in (RunState.DONE, RunState.CANCELLED)
            except FedTMLEError:
                continue  # `turn` reports a damaged run
            if site in terms.sites.values() and is_open:
                plans[terms.plan] = run
        open_plans = list(plans)[-MAX_STUDIES:]
        texts: dict[str, bytes] = {}
        for plan in open_plans:
            if plan not in report.standings and len(texts) < TEXTS_PER_NOTICE:
                text = (plans[plan].path / "study.toml").read_bytes()
                if len(text) <= LONGEST_STUDY:
                    texts[plan] = text
        return Notice(time=self._now(), version=self._version, open=open_plans, texts=texts)

    def presence(self) -> dict[str, dict[str, object]]:
        """Return the silos that are connected: when each was heard, and its version."""
        return {
            site: {"heard": heard.time, "version": heard.report.version}
            for site, heard in self._heard.items()
            if self._clock() - heard.at < FRESH and site not in self.revoked
        }

    def write_presence(self, path: Path) -> None:
        """Write who is connected, as a sign of life of the server's engine."""
        document = {"process": asdict(Process.here()), "time": self._now(), "sites": self.presence()}
        write_document(path, {**document, "version": self._version})

    def turn(self) -> None:
        """Look at every run once, and make the move that is due."""
        for run in RunFolder.every(self._runs):
            try:
                self._turn(run)
            except MoveError as error:
                _log.info("%s", error)  # somebody else moved it meanwhile
            except (FedTMLEError, OSError) as error:
                _log.error("%s: %s", run.path, error)

    def _turn(self, run: RunFolder) -> None:
        written = (run.path / "status.json").stat().st_mtime_ns
        if self._over.get(run.name) == written:
            return
        status = run.status()
        terms = run.terms()
        removed = [s for s, site in status.taking_part(terms.sites).items() if site in self.revoked]
        is_open = status.state is RunState.WAITING and _may_leave_out(terms, status)
        if removed and not is_open and not status.state.is_over:
            run.move(Move.FAIL, why=f"silo '{removed[0]}' was {REMOVED}")
            self._started.pop(run.name, None)
            if status.job:
                self._jobs.stop(status.job)
            return
        if status.state.is_over:
            self._over[run.name] = written
            job = self._started.pop(run.name, "")
            if job and status.state is RunState.CANCELLED:
                self._jobs.stop(job)
        elif status.state is RunState.WAITING:
            self._wait(run, status)
        else:
            if status.job:
                self._started[run.name] = status.job
            self._judge(run, status)

    def _wait(self, run: RunFolder, status: RunStatus) -> None:
        """Start the run if all that it needs are there; stop it if a silo refused or the patience is over."""
        terms = run.terms()
        silos = {silo: self._standing(site, terms) for silo, site in terms.sites.items()}
        awaited = _awaited(terms, status, silos)
        missing = {silo: words for silo, words in awaited.items() if words != Standing.READY}
        waited = self._now() - status.since
        is_late = waited > terms.patience and self._clock() - self._began > GRACE
        gives_up = is_late and len(missing) < len(awaited) and _may_leave_out(terms, status)
        rejected = [silo for silo, words in awaited.items() if words == Standing.REJECTED]
        if rejected or not awaited:  # nobody is awaited if every silo refused or was removed
            silo = next(iter(rejected or silos))
            why = f"silo '{silo}' refused: {silos[silo]}"
            run.move(Move.FAIL, why=why, refused=True, silos=silos)
        elif not missing or gives_up:
            if waited >= _pause(status.lost) and not full_disk(run.path):
                present = [silo for silo in awaited if silo not in missing]
                left_out = {silo: reason(words) for silo, words in silos.items() if silo not in present}
                absent = status.absent if status.has_opened else left_out
                self._start(run, replace(status, silos=silos, absent=absent))
        elif is_late:
            why = "; ".join(f"'{silo}': {words}" for silo, words in missing.items())
            run.move(Move.FAIL, why=f"waited {_duration(waited)}; {why}", silos=silos)
        elif silos != status.silos:
            run.move(Move.NOTE, silos=silos)

    def _start(self, run: RunFolder, status: RunStatus) -> None:
        sites = status.taking_part(run.terms().sites)
        self._engines[run.name] = {silo: self._heard[site].report.engine for silo, site in sites.items()}
        # Move first, because the job's process may claim the run before `submit` returns.
        run.move(
            Move.START,
            job="",
            refused=False,
            attempt=status.attempt + 1,
            silos=status.silos,
            absent=status.absent,
        )
        try:
            job = self._jobs.submit(run)
        except Exception as error:
            _log.exception("the engine did not accept the job of run '%s'", run.name)
            self._lose(run, run.status(), f"the engine did not accept the job ({type(error).__name__})")
            return
        self._started[run.name] = job
        run.move(Move.NOTE, job=job)

    def _judge(self, run: RunFolder, status: RunStatus) -> None:
        """Find out whether a run that should be going on still is."""
        restarted = self._restarted(run)
        if restarted:
            why = f"silo '{restarted}' was restarted; the run goes on by itself"
            self._lose(run, status, why)
            return
        if status.process is not None:
            if status.process.find() is None:
                self._lose(run, status, process_ended(status))
            return
        ended = self._jobs.ended(status.job) if status.job else ""
        if ended:
            self._lose(run, status, f"the engine did not start the run ({ended})")
        elif self._now() - status.since > START_LIMIT:
            self._lose(run, status, f"the engine did not start the run within {START_LIMIT:g} s")

    def _restarted(self, run: RunFolder) -> str:
        """Return a silo whose engine was restarted since the job began, and so lost its part of the job."""
        sites = run.terms().sites
        for silo, engine in self._engines.get(run.name, {}).items():
            heard = self._heard.get(sites[silo])
            if heard is not None and heard.report.engine != engine:
                return silo
        return ""

    def _lose(self, run: RunFolder, status: RunStatus, why: str) -> None:
        lose(run, status, why)
        if status.job:
            self._jobs.stop(status.job)
        left = None if status.process is None else status.process.find()
        if left is not None:  # it would hold the run's journal
            left.kill()

    def _standing(self, site: str, terms: Terms) -> str:
        """Return where a run stands at a silo, in words."""
        heard = self._heard.get(site)
        if site in self.revoked:
            return REMOVED
        if heard is None or self._clock() - heard.at > FRESH:
            return NOT_CONNECTED
        theirs = heard.report.version
        if theirs != self._version:
            return f"has fedtmle {theirs}, the server has {self._version}; install the same version"
        return str(heard.report.standings.get(terms.plan, NOT_THERE_YET))


def lose(run: RunFolder, status: RunStatus, why: str, **news: Any) -> RunStatus:
    """Let a run wait for another attempt; after `MAX_LOST` attempts without a new round, stop it."""
    lost = status.lost + 1
    if lost > MAX_LOST:
        return run.move(Move.FAIL, why=f"tried {lost} times in round {status.round}: {why}", lost=0, **news)
    return run.move(Move.LOSE, why=why, lost=lost, **news)


def reason(words: str) -> str:
    """Return why a silo is absent, for readers of the result, without references to the silo's own log."""
    return words.partition(";")[0]


def _may_leave_out(terms: Terms, status: RunStatus) -> bool:
    """Return whether a run may still start without some of its silos."""
    return terms.goes_on and not status.has_opened


def _awaited(terms: Terms, status: RunStatus, silos: Mapping[str, str]) -> dict[str, str]:
    """Return the standings of the silos that a run waits for.

    A run that may leave silos out does not wait for those that refused or were removed, nor again for those
    that an earlier attempt was started without, unless they are ready now.
    """
    if not _may_leave_out(terms, status):
        return {silo: silos[silo] for silo in status.taking_part(terms.sites)}
    return {
        silo: words
        for silo, words in silos.items()
        if words == Standing.READY
        or (words not in (Standing.REJECTED, REMOVED) and silo not in status.absent)
    }


def _pause(lost: int) -> float:
    return 0.0 if lost == 0 else min(2.0**lost, LONGEST_PAUSE)


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def revoked(server: Path) -> frozenset[str]:
    """Return the sites that were removed from the deployment; ``server`` is the server's kit."""
    try:
        return frozenset(map(str, read_document(server / "fedtmle" / "revoked.json")["sites"]))
    except FileNotFoundError:
        return frozenset()
