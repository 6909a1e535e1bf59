"""A run at the server, on any engine: wait until every silo is ready, run the study, keep the result."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fedtmle.engine import frames
from fedtmle.engine.frames import Answer, Declined, Ready
from fedtmle.engine.runs import RunFolder, State, Status, Terms
from fedtmle.errors import DeadlineError, FedTMLEError, ProtocolError, RefusedError
from fedtmle.runtime.federation import Journalled
from fedtmle.runtime.journal import FileJournal
from fedtmle.runtime.session import RoundReport
from fedtmle.studies.over import run_over
from fedtmle.studyfile.file import file_plan

_log = logging.getLogger("fedtmle.server")
POLL = 0.5  # seconds between two looks at who is ready
HELLO_TIMEOUT = 10.0
REPORT_EVERY = 0.2


class Line(Protocol):
    """A federation that can also ask who is ready."""

    @property
    def silos(self) -> Sequence[str]: ...

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]: ...

    def ask(self, asked: Mapping[str, bytes], *, timeout: float) -> dict[str, Answer]: ...


class Coordination:
    """One attempt at a run: the first, or a resumed one."""

    def __init__(self, runs: Path, name: str) -> None:
        self._folder = RunFolder.named(runs, name)
        self._status = replace(self._folder.status(), state=State.WAITING, pid=os.getpid())
        self._reported = 0.0
        self._last = 0.0
        self._seconds: list[float] = []

    def carry_out(self, connect: Callable[[Mapping[str, str], float], Line]) -> None:
        """Runs to an end that the status tells; a run that stopped can be resumed."""
        try:
            terms = self._folder.terms()
            line = connect(terms.sites, terms.deadline)
            self._run(line, terms, self._wait(line, terms))
        except FedTMLEError as error:
            self._stop(str(error), refused=isinstance(error, RefusedError))
        except BaseException as error:
            _log.exception("the run stopped")
            self._stop(f"the engine ended the run ({type(error).__name__}): a silo or the server went away")
            raise

    def _wait(self, line: Line, terms: Terms) -> list[str]:
        """Returns when every silo has approved and read its data: those that let their estimate be shown."""
        until = time.monotonic() + terms.patience
        while True:
            answers = line.ask(dict.fromkeys(line.silos, frames.hello(time.time())), timeout=HELLO_TIMEOUT)
            said = {silo: _words(answers.get(silo)) for silo in line.silos}
            self._report(replace(self._status, silos=said), now=True)
            for silo, answer in answers.items():
                if isinstance(answer, Declined):
                    raise RefusedError(silo, answer.value)
            waiting = [silo for silo in line.silos if not isinstance(answers.get(silo), Ready)]
            if not waiting:
                return [silo for silo in line.silos if answers[silo] == Ready(release=True)]
            if time.monotonic() > until:
                raise DeadlineError(tuple(waiting), terms.patience)
            time.sleep(POLL)

    def _run(self, line: Line, terms: Terms, release: Sequence[str]) -> None:
        file = self._folder.study()
        plan = file_plan(file)
        if plan.digest.hex() != terms.plan or list(file.silos) != list(terms.sites):
            raise ProtocolError("the run's study was changed, or the package was; start a new run")
        self._last = time.monotonic()
        self._report(replace(self._status, state=State.RUNNING), now=True)
        with closing(FileJournal(self._folder.journal)) as journal:
            recorded = Journalled(line, journal, plan=plan)
            result = run_over(plan, recorded, progress=self._hear, release=release)
        if result.run is None:
            raise AssertionError("a fresh result has its run")
        result.run.transcript.save(self._folder.transcript)
        result.save(self._folder.result)
        done = replace(
            self._status, state=State.DONE, why=result.document["status_text"], seconds=tuple(self._seconds)
        )
        self._report(done, now=True)

    def _hear(self, report: RoundReport) -> None:
        now = time.monotonic()
        self._seconds.append(now - self._last)
        self._last = now
        self._report(
            replace(self._status, round=report.round, phase=str(report.phase), bits=report.bits), now=False
        )

    def _stop(self, why: str, *, refused: bool = False) -> None:
        seconds = tuple(self._seconds)
        stopped = replace(self._status, state=State.STOPPED, why=why, refused=refused, seconds=seconds)
        self._report(stopped, now=True)

    def _report(self, status: Status, *, now: bool) -> None:
        self._status = status
        if now or time.monotonic() - self._reported > REPORT_EVERY:
            self._folder.report(status)
            self._reported = time.monotonic()


def _words(answer: Answer | None) -> str:
    if answer is None:
        return "not reachable"
    return "ready" if isinstance(answer, Ready) else getattr(answer, "value", "ready")
