"""Start, follow and resume a run on a deployment."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from fedtmle.deploy.jobs import EngineSession, engine_session, submit
from fedtmle.deploy.kits import Deployment, Role, read_deployment, read_kit
from fedtmle.deploy.processes import alive, running
from fedtmle.engine.runs import RunFolder, RunState, RunStatus, Terms
from fedtmle.errors import InputError, ProtocolError
from fedtmle.layout import phase_name
from fedtmle.studyfile.file import StudyFile, file_plan, read_study

STATUS_INTERVAL = 0.2  # seconds between two reads of a run's status
ENGINE_INTERVAL = 2.0  # seconds between two questions to the engine
VANISHED_AFTER = 1.0  # seconds without a process, after which a run has stopped


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
    if status.state is RunState.SUBMITTED:
        return f"submitted; {_silos(status)}" if status.silos else "submitted"
    if status.state is RunState.WAITING:
        return f"waiting; {_silos(status)}" if status.silos else ""
    if status.state is RunState.RUNNING:
        if not status.round:
            return "all silos are ready; running"
        phase = phase_name(status.phase)
        return f"round {status.round}, {phase}, {status.bits / 1000:.1f} kbit so far" if live else ""
    if status.state is RunState.STOPPED:
        return f"stopped after round {status.round}: {status.why}"
    return f"done in {status.round} rounds, {sum(status.seconds):.1f} s"


def _silos(status: RunStatus) -> str:
    by_words: dict[str, list[str]] = {}
    for silo, words in status.silos.items():
        by_words.setdefault(words, []).append(silo)
    return "; ".join(f"{words}: {', '.join(silos)}" for words, silos in by_words.items())


def new_run(deployment: Deployment, study: StudyFile, *, deadline: float, patience: float) -> RunFolder:
    """Make the folder of a run, which is not yet submitted to the engine."""
    study = read_study(study.path, samples=False)
    if study.study.algorithm.pools_rows:
        raise InputError("algorithm: 'Central' pools the rows; it cannot run on a deployment")
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
    )
    _check_is_new(deployment, terms.plan)
    folder = RunFolder.new(deployment.runs, study, terms)
    folder.report(RunStatus(state=RunState.SUBMITTED))
    return folder


def _check_is_new(deployment: Deployment, plan: str) -> None:
    """Check that a plan was not started before: silos answer each plan once."""
    for path in sorted(deployment.runs.glob("*/terms.json")):
        run = RunFolder(path.parent)
        if run.terms().plan != plan:
            continue
        if run.status().state is RunState.DONE:
            raise InputError(
                f"this plan was run already: `fedtmle show {run.result}`; to run the study again, change its "
                "seed and have the new plan approved"
            )
        raise InputError(f"this plan was started already; continue it with `fedtmle resume {run.path}`")


def launch(deployment: Deployment, run: RunFolder) -> None:
    """Submit a run to the engine, unless it is running.

    A run that stopped continues where its journal ends.
    """
    status = run.status()
    if status.state is RunState.DONE:
        raise InputError(f"{run.path}: this run is done; its result is {run.result}")
    if status.state is not RunState.STOPPED and status.pid and alive(status.pid):
        return
    if running(read_kit(deployment.server, Role.SERVER)) is None:
        raise ProtocolError(
            f"the server is not running; start it with `fedtmle server start {deployment.server}`"
        )
    with engine_session(deployment) as session:
        if run.job.is_file():
            _abort(session, run.job.read_text(encoding="utf-8"))
        # The status first: the engine's process may report before `submit` returns.
        run.report(RunStatus(state=RunState.SUBMITTED, attempt=status.attempt + 1))
        run.job.write_text(submit(session, run), encoding="utf-8")


def follow(deployment: Deployment, run: RunFolder) -> Iterator[RunStatus]:
    """Yield each new status until the run is over; a run whose process vanished has stopped."""
    asked, last, missing_since = 0.0, None, 0.0
    while True:
        status = run.status()
        if (
            not status.pid
            and status.state is RunState.SUBMITTED
            and time.monotonic() - asked > ENGINE_INTERVAL
        ):
            asked = time.monotonic()
            status = _ask_engine(deployment, run, status)
        elif not status.pid and last is not None and last.state is RunState.SUBMITTED:
            status = last  # the engine is not asked each time
        if status != last:
            last = status
            yield status
        if status.state in (RunState.DONE, RunState.STOPPED):
            return
        if not status.pid or alive(status.pid):
            missing_since = 0.0
        elif not missing_since:
            missing_since = time.monotonic()
        elif time.monotonic() - missing_since > VANISHED_AFTER and run.status() == status:
            run.report(replace(status, state=RunState.STOPPED, why="the server's process for this run ended"))
        time.sleep(STATUS_INTERVAL)


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


def _ask_engine(deployment: Deployment, run: RunFolder, status: RunStatus) -> RunStatus:
    """Return the status of a run that the engine has not started: who is connected, or that it gave up."""
    if running(read_kit(deployment.server, Role.SERVER)) is None:
        return _stopped(run, replace(status, why="the server is not running: `fedtmle server start`"))
    try:
        with engine_session(deployment) as session:
            connected = {client.name for client in session.get_connected_client_list()}
            job = run.job.read_text(encoding="utf-8")
            ended = str(session.get_job_meta(job).get("status", ""))
    except (ProtocolError, OSError):
        return status  # the supervisor restarts the server; the next look will tell
    sites = run.terms().sites
    silos = {silo: "connected" if site in connected else "not connected" for silo, site in sites.items()}
    if ended.startswith("FINISHED"):
        why = f"the engine did not start the run ({ended.removeprefix('FINISHED:').lower()})"
        return _stopped(run, replace(status, why=why, silos=silos))
    return replace(status, silos=silos)


def _stopped(run: RunFolder, status: RunStatus) -> RunStatus:
    """Report that the engine gave up, unless the run has reported meanwhile."""
    now = run.status()
    if now.pid:
        return now
    stopped = replace(status, state=RunState.STOPPED)
    run.report(stopped)
    return stopped


def _abort(session: EngineSession, job: str) -> None:
    """End an earlier attempt: after a crash the engine still lists it as running."""
    with suppress(Exception):  # it may be over already, or unknown to the engine
        session.abort_job(job)
