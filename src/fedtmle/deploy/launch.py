"""Make, follow, resume and cancel a run on a deployment; the server's dispatcher carries it out."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from fedtmle.deploy.kits import Deployment, read_deployment
from fedtmle.deploy.presence import server_trouble
from fedtmle.engine.post import LONGEST_STUDY
from fedtmle.engine.runs import Move, RunFolder, RunState, RunStatus, Terms
from fedtmle.errors import InputError, ProtocolError
from fedtmle.layout import phase_name
from fedtmle.studyfile.file import StudyFile, file_plan, read_study

STATUS_INTERVAL = 0.2  # seconds between two reads of a run's status
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


def new_run(deployment: Deployment, study: StudyFile, *, deadline: float, patience: float) -> RunFolder:
    """Make a run; the server announces it to the silos and starts it when all have approved."""
    study = read_study(study.path, samples=False)
    if study.study.algorithm.pools_rows:
        raise InputError("algorithm: 'Central' pools the rows; it cannot run on a deployment")
    if len(study.path.read_bytes()) > LONGEST_STUDY:
        raise InputError(f"{study.path}: a deployed study has at most {LONGEST_STUDY >> 10} KiB of text")
    unknown = [silo for silo in study.silos if silo not in deployment.sites]
    if unknown:
        raise InputError(
            f"{study.path}: the deployment has no silo {' or '.join(map(repr, unknown))}; "
            f"it has {', '.join(map(repr, deployment.sites))}"
        )
    terms = Terms(
        plan=file_plan(study).digest.hex(),
        sites={silo: deployment.sites[silo] for silo in study.silos},
        deadline=deadline,
        patience=patience,
        goes_on=study.study.on_refusal == "go on",
    )
    _check_is_new(deployment, terms.plan)
    return RunFolder.new(deployment.runs, study, terms)


def _check_is_new(deployment: Deployment, plan: str) -> None:
    """Check that a plan was not started before: silos answer each plan once."""
    for run in RunFolder.every(deployment.runs):
        if run.terms().plan != plan:
            continue
        state = run.status().state
        if state is RunState.DONE:
            raise InputError(
                f"this plan was run already: `fedtmle show {run.result}`; to run the study again, change its "
                "seed and have the new plan approved"
            )
        if state is RunState.CANCELLED:
            raise InputError(
                f"this plan was cancelled ({run.path}); to run the study again, change its seed and have the "
                "new plan approved"
            )
        raise InputError(f"this plan was started already; continue it with `fedtmle resume {run.path}`")


def require_server(deployment: Deployment) -> None:
    """Raise `ProtocolError` unless the server runs: nobody would carry out a run."""
    trouble = server_trouble(deployment.server)
    if trouble:
        raise ProtocolError(trouble)


def resume(run: RunFolder) -> None:
    """Let a run that stopped go on; one that waits or runs does so by itself."""
    status = run.look()
    if status.state is RunState.DONE:
        raise InputError(f"{run.path}: this run is done; its result is {run.result}")
    if status.state is RunState.CANCELLED:
        raise InputError(f"{run.path}: this run was cancelled; start the study again with another seed")
    if status.state is RunState.STOPPED:
        run.move(Move.RESUME, lost=0, silos={})


def cancel(run: RunFolder) -> None:
    """Cancel a run: the server ends its job, and silos are asked nothing more."""
    state = run.status().state
    if state in (RunState.DONE, RunState.CANCELLED):
        raise InputError(f"{run.path}: this run is {state} already")
    run.move(Move.CANCEL, why="cancelled by the coordinator")


def follow(deployment: Deployment, run: RunFolder) -> Iterator[RunStatus]:
    """Yield each new status until the run is over; while the server is down, the status says so."""
    last, trouble, looked = None, "", -SERVER_INTERVAL
    while True:
        status = run.look()
        if time.monotonic() - looked > SERVER_INTERVAL:
            looked, trouble = time.monotonic(), server_trouble(deployment.server)
        if trouble and not status.state.is_over:
            status = replace(status, state=RunState.WAITING, why=trouble, silos={})
        if status != last:
            last = status
            yield status
        if status.state.is_over:
            return
        time.sleep(STATUS_INTERVAL)


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


def find_run(path: Path) -> tuple[Deployment, RunFolder]:
    """Return the run in this folder, and the deployment that it belongs to."""
    whole = path.absolute()
    try:
        deployment = read_deployment(whole.parent.parent.parent)
    except InputError:
        raise InputError(
            f"{path}: not a run's folder; expected DEPLOYMENT/server/runs/NAME, as `fedtmle run --on` prints "
            "it when it starts"
        ) from None
    return deployment, RunFolder.named(deployment.runs, whole.name)
