"""The server's dispatcher: it starts a run when every silo is there and has approved, and again after a loss.

A study may declare that it goes on without silos. Then the dispatcher starts its run without those whose
owner rejected the plan, and at the end of the patience without those that are absent or undecided.

It holds no run in memory: everything about a run is in its folder, so that after a reboot waiting runs wait
again and runs that had begun go on. `Dispatcher.turn` is called every second, `Dispatcher.hear` with every
report of a silo.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fedtmle.engine.alive import Process
from fedtmle.engine.post import LONGEST_STUDY, MAX_STUDIES, POST_EVERY, Notice, SiloReport, Standing
from fedtmle.engine.runs import (
    Move,
    MoveError,
    RunFolder,
    RunState,
    RunStatus,
    Terms,
    full_disk,
    process_ended,
)
from fedtmle.errors import FedTMLEError
from fedtmle.runtime.documents import read_document, write_document

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
