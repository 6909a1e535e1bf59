"""A run at the server, on any engine: wait until every silo is ready, run the study, save the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from fedtmle.engine import frames
from fedtmle.engine.frames import Answer, Declined, Ready
from fedtmle.engine.process import Process
from fedtmle.engine.runs import Move, MoveError, RunFolder, Terms, full_disk, lose, reason, server_key
from fedtmle.errors import DeadlineError, FedTMLEError, InputError, JournalError, ProtocolError, RefusedError
from fedtmle.programs.study import Study
from fedtmle.runtime.session import ABSENT, Federation, Journalled, RoundReport, opened_silos
from fedtmle.studies.over import leaving, run_over
from fedtmle.studies.progress import EventLog
from fedtmle.studyfile.file import StudyFile, file_plan
from fedtmle_core.journal import FileJournal

_log = logging.getLogger("fedtmle.server")
POLL = 0.5  # seconds between two looks at who is ready
HELLO_TIMEOUT = 10.0
REPORT_EVERY = 0.2
REPAIR = "restore it from a backup and resume, or cancel the run and start the study with another seed"

Awaited: TypeAlias = Callable[[Mapping[str, str]], None]


class EngineFederation(Federation, Protocol):
    """A federation that can also ask which silos are ready."""

    def ask(self, asked: Mapping[str, bytes], *, timeout: float) -> dict[str, Answer]:
        """Return the answers to these frames that came within ``timeout`` seconds."""
        ...


class Gathered:
    """The silos of a federation that are ready; ``release`` names those that release their estimate."""

    def __init__(self, federation: Federation, silos: Sequence[str], *, release: Sequence[str]) -> None:
        self._federation = federation
        self.silos: Sequence[str] = tuple(silos)
        self.release = release

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        """Return the reply of each silo to its request."""
        return self._federation.exchange(requests)


Seal: TypeAlias = Callable[[bytes], bytes]  # a frame as it is sent
Connect: TypeAlias = Callable[[Mapping[str, str], float, Awaited, Seal], EngineFederation]


class Coordination:
    """One attempt at a run: the first, or one that continues at the recorded round."""

    def __init__(self, runs: Path, name: str) -> None:
        self._folder = RunFolder.named(runs, name)
        self._process = Process.here()
        status = self._folder.move(Move.ARRIVE, by=self._process)
        self._reached = status.round  # the round that earlier attempts reached
        self._absent, self._has_opened = dict(status.absent), status.has_opened
        self._news: dict[str, Any] = {}  # news that were not written yet
        self._reported = 0.0
        self._last = 0.0
        self._seconds: list[float] = []
        self._awaited: tuple[str, ...] = ()
        self._events = EventLog(self._folder.events)
        self._masked = True

    def carry_out(self, connect: Connect) -> None:
        """Run until the run ends; the status says how."""
        try:
            terms = self._folder.terms()
            file = self._check(terms)
            with closing(self._journal()) as journal:
                sites = self._sites(terms, opened_silos(journal))
                federation = connect(sites, terms.deadline, self._await, self._seal(file))
                gathered = self._wait(federation, terms)
                self._run(gathered, file, journal)
        except MoveError as error:
            self._events.failed(error)
            _log.warning("%s", error)  # the run was cancelled or taken over: do not write its status
        except DeadlineError as error:
            self._lose(error.full_text, error)
        except (FedTMLEError, OSError) as error:
            full = full_disk(self._folder.path)
            if full:  # if the status cannot be written either, the dispatcher finds that this process ended
                self._lose(full, error)
                return
            if isinstance(error, FedTMLEError):
                why = error.full_text
            else:
                why = _disk_fault(error, self._folder.path)
            self._events.failed(error)
            self._move(Move.FAIL, why=why, refused=isinstance(error, RefusedError))
        except BaseException as error:
            _log.exception("the run was interrupted")
            names = ", ".join(map(repr, self._awaited))
            whom = f" while {names} was awaited" if names else ""
            self._lose(f"the engine ended the run{whom}: a silo or the server disconnected", error)
            raise
        finally:
            self._events.close()

    def _check(self, terms: Terms) -> StudyFile:
        """Return the study; raise if it is no longer the one that the terms name."""
        file = self._folder.study()
        if file_plan(file).digest.hex() != terms.plan or list(file.silos) != list(terms.sites):
            raise ProtocolError("the run's study or the package was changed since it began; start a new run")
        return file

    def _seal(self, file: StudyFile) -> Seal:
        """Return how frames are signed with the server's key, which the study must name if it names any."""
        plan, key = file_plan(file), server_key(self._folder.path.parent.parent)
        if plan.server and plan.server != key.public:
            raise InputError(
                "server: the study has the key of another server under [plan]; this one's is "
                f"{key.public.hex()}"
            )
        return lambda frame: frames.sealed(frame, plan, key)

    def _sites(self, terms: Terms, opened: Sequence[str] | None) -> dict[str, str]:
        """Return the silos of this attempt: if the run has opened, those that opened it."""
        if opened is None:
            return self._folder.status().taking_part(terms.sites)
        self._has_opened = True
        for silo in terms.sites:
            if silo not in opened:
                self._absent.setdefault(silo, ABSENT)
        return {silo: site for silo, site in terms.sites.items() if silo in opened}

    def _wait(self, federation: EngineFederation, terms: Terms) -> Gathered:
        """Wait until every silo has read its data.

        A run that goes on leaves out the silos that decline, and at the end of the patience those that are
        not ready, unless it has opened.
        """
        silos = federation.silos
        may_leave_out = terms.goes_on and not self._has_opened
        until = time.monotonic() + terms.patience
        reached: set[str] = set()
        began = time.monotonic()
        while True:
            answers = federation.ask(dict.fromkeys(silos, frames.HELLO), timeout=HELLO_TIMEOUT)
            reached |= set(answers)
            said = {silo: words(answers.get(silo)) for silo in silos}
            self._note(now=True, silos=said)
            declined = {silo: each.value for silo, each in answers.items() if isinstance(each, Declined)}
            if declined and (len(declined) == len(silos) or not may_leave_out):
                raise RefusedError(*next(iter(declined.items())))
            ready = [silo for silo in silos if isinstance(answers.get(silo), Ready)]
            waiting = {silo: said[silo] for silo in silos if silo not in ready and silo not in declined}
            is_late = time.monotonic() > until
            if not waiting or (is_late and ready and may_leave_out):
                self._absent |= {silo: reason(each) for silo, each in {**declined, **waiting}.items()}
                release = [silo for silo in ready if answers[silo] == Ready(release=True)]
                return Gathered(federation, ready, release=release)
            self._awaited = tuple(waiting)
            absent = [silo for silo in silos if silo not in reached]
            if absent and time.monotonic() - began > terms.deadline:
                raise DeadlineError(tuple(absent), terms.deadline)
            if is_late:
                why = "; ".join(f"'{silo}': {each}" for silo, each in waiting.items())
                raise ProtocolError(f"not every silo was ready within {terms.patience:g} s: {why}")
            time.sleep(POLL)

    def _run(self, gathered: Gathered, file: StudyFile, journal: FileJournal) -> None:
        plan = file_plan(file)
        self._masked = plan.is_masked
        self._last = time.monotonic()
        self._awaited = ()
        silos = dict.fromkeys(gathered.silos, words(Ready()))
        self._move(Move.RUN, silos=silos, absent=self._absent, has_opened=True)
        self._start_events(file.study, plan.digest.hex(), list(file.silos))
        recorded = Journalled(gathered, journal, plan=plan)
        result = run_over(plan, recorded, progress=self._hear, release=gathered.release, absent=self._absent)
        if result.run is None:
            raise AssertionError("a fresh result has its run")
        result.run.transcript.save(self._folder.transcript)
        leaving(result).save(self._folder.result)
        self._events.finished(text=result.document["status_text"], converged=result.document["converged"])
        self._move(Move.FINISH, why=result.document["status_text"], absent=result.document["absent"])

    def _journal(self) -> FileJournal:
        """Open the run's journal; without it the silos' answers so far cannot be known."""
        path = self._folder.journal
        if self._reached and not path.exists():
            raise JournalError(f"{path}: the journal is gone after round {self._reached}; {REPAIR}")
        try:
            return FileJournal(path)
        except JournalError as error:
            raise JournalError(f"{error}; {REPAIR}") from None

    def _start_events(self, study: Study, plan: str, silos: list[str]) -> None:
        self._events.start(
            title=self._folder.name,
            question=study.target.question,
            algorithm=type(study.algorithm).__name__,
            plan=plan,
            silos=silos,
        )
        for silo, why in self._absent.items():
            self._events.silo(silo, "refused", why)

    def _hear(self, report: RoundReport) -> None:
        now = time.monotonic()
        self._seconds.append(now - self._last)
        self._last = now
        # Whoever follows a masked run sees rounds and states: a gradient is a total of records.
        self._events.round(replace(report, gradient_norm=None, tolerance=None) if self._masked else report)
        if report.round > self._reached:
            self._news["lost"] = 0  # this attempt got further than those before
        if report.absent != self._absent:
            for silo in report.absent.keys() - self._absent.keys():  # the silo refused to open
                self._events.silo(silo, "refused", report.absent[silo])
            self._absent = dict(report.absent)
            self._note(now=True, absent=self._absent)
        self._note(now=False, round=report.round, phase=str(report.phase), bits=report.bits)

    def _await(self, silos: Mapping[str, str]) -> None:
        """Note who keeps the round waiting, and who is back."""
        for silo in silos:
            if silo not in self._awaited:
                self._events.silo(silo, "lost", silos[silo])
        for silo in self._awaited:
            if silo not in silos:
                self._events.silo(silo, "back")
        self._awaited = tuple(silos)
        self._note(now=True, silos=dict(silos))

    def _lose(self, why: str, error: BaseException) -> None:
        self._events.failed(error)
        self._note(now=True)
        lose(self._folder, self._folder.status(), why, by=self._process, seconds=tuple(self._seconds))

    def _move(self, move: Move, **news: object) -> None:
        """Make a move with all news so far."""
        self._folder.move(move, by=self._process, seconds=tuple(self._seconds), **self._news | news)
        self._news = {}
        self._reported = time.monotonic()

    def _note(self, *, now: bool, **news: object) -> None:
        """Report news, ``now`` or when the last report is `REPORT_EVERY` seconds old."""
        self._news |= news
        if now or time.monotonic() - self._reported > REPORT_EVERY:
            self._folder.move(Move.NOTE, by=self._process, **self._news)
            self._news = {}
            self._reported = time.monotonic()


def words(answer: Answer | None) -> str:
    """Return the state of a silo in words, from its answer or the lack of one."""
    if answer is None:
        return "no answer yet"
    return "ready" if isinstance(answer, Ready) else getattr(answer, "value", "ready")


def _disk_fault(error: OSError, folder: Path) -> str:
    """Return what went wrong with a file at the server, with its path."""
    where = error.filename or folder
    return f"{where}: {error.strerror or type(error).__name__}; mend it at the server and resume the run"
