"""A run at the server, on any engine: wait until every silo is ready, run the study, save the result."""

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
from fedtmle.engine.runs import RunFolder, RunState, RunStatus, Terms
from fedtmle.errors import DeadlineError, FedTMLEError, ProtocolError, RefusedError
from fedtmle.runtime.journal import FileJournal
from fedtmle.runtime.session import Federation, Journalled, RoundReport
from fedtmle.studies.over import run_over
from fedtmle.studyfile.file import file_plan

_log = logging.getLogger("fedtmle.server")
POLL = 0.5  # seconds between two looks at who is ready
HELLO_TIMEOUT = 10.0
REPORT_EVERY = 0.2


class EngineFederation(Federation, Protocol):
    """A federation that can also ask which silos are ready."""

    def ask(self, asked: Mapping[str, bytes], *, timeout: float) -> dict[str, Answer]:
        """Return the answers to these frames that came within ``timeout`` seconds."""
        ...


class Coordination:
    """One attempt at a run: the first, or a resumed one."""

    def __init__(self, runs: Path, name: str) -> None:
        self._folder = RunFolder.named(runs, name)
        self._status = replace(self._folder.status(), state=RunState.WAITING, pid=os.getpid())
        self._reported = 0.0
        self._last = 0.0
        self._seconds: list[float] = []

    def carry_out(self, connect: Callable[[Mapping[str, str], float], EngineFederation]) -> None:
        """Run to an end, which the status tells; a run that stopped can be resumed."""
        try:
            terms = self._folder.terms()
            federation = connect(terms.sites, terms.deadline)
            self._run(federation, terms, self._wait(federation, terms))
        except FedTMLEError as error:
            self._end(RunState.STOPPED, str(error), refused=isinstance(error, RefusedError))
        except BaseException as error:
            _log.exception("the run stopped")
            why = f"the engine ended the run ({type(error).__name__}): a silo or the server disconnected"
            self._end(RunState.STOPPED, why)
            raise

    def _wait(self, federation: EngineFederation, terms: Terms) -> list[str]:
        """Wait until every silo has approved and read its data; return those that release their estimate."""
        silos = federation.silos
        until = time.monotonic() + terms.patience
        while True:
            answers = federation.ask(dict.fromkeys(silos, frames.hello(time.time())), timeout=HELLO_TIMEOUT)
            words = {silo: _words(answers.get(silo)) for silo in silos}
            self._report(replace(self._status, silos=words), now=True)
            for silo, answer in answers.items():
                if isinstance(answer, Declined):
                    raise RefusedError(silo, answer.value)
            waiting = [silo for silo in silos if not isinstance(answers.get(silo), Ready)]
            if not waiting:
                return [silo for silo in silos if answers[silo] == Ready(release=True)]
            if time.monotonic() > until:
                raise DeadlineError(tuple(waiting), terms.patience)
            time.sleep(POLL)

    def _run(self, federation: EngineFederation, terms: Terms, release: Sequence[str]) -> None:
        file = self._folder.study()
        plan = file_plan(file)
        if plan.digest.hex() != terms.plan or list(file.silos) != list(terms.sites):
            raise ProtocolError("the run's study or the package was changed since it began; start a new run")
        self._last = time.monotonic()
        self._report(replace(self._status, state=RunState.RUNNING), now=True)
        with closing(FileJournal(self._folder.journal)) as journal:
            recorded = Journalled(federation, journal, plan=plan)
            result = run_over(plan, recorded, progress=self._hear, release=release)
        if result.run is None:
            raise AssertionError("a fresh result has its run")
        result.run.transcript.save(self._folder.transcript)
        result.save(self._folder.result)
        self._end(RunState.DONE, result.document["status_text"])

    def _hear(self, report: RoundReport) -> None:
        now = time.monotonic()
        self._seconds.append(now - self._last)
        self._last = now
        self._report(
            replace(self._status, round=report.round, phase=str(report.phase), bits=report.bits), now=False
        )

    def _end(self, state: RunState, why: str, *, refused: bool = False) -> None:
        seconds = tuple(self._seconds)
        self._report(replace(self._status, state=state, why=why, refused=refused, seconds=seconds), now=True)

    def _report(self, status: RunStatus, *, now: bool) -> None:
        self._status = status
        if now or time.monotonic() - self._reported > REPORT_EVERY:
            self._folder.report(status)
            self._reported = time.monotonic()


def _words(answer: Answer | None) -> str:
    if answer is None:
        return "not reachable"
    return "ready" if isinstance(answer, Ready) else getattr(answer, "value", "ready")
