"""``fedtmle run``, ``fedtmle resume`` and ``fedtmle show``."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.exits import Exit, fail, reporting, require_flare, say
from fedtmle.cli.report import require_folder, write_page

if TYPE_CHECKING:
    from fedtmle.defects import Defect
    from fedtmle.deploy.launch import Runs
    from fedtmle.engine.runs import RunFolder
    from fedtmle.errors import RefusedError
    from fedtmle.results.result import StudyResult
    from fedtmle.studyfile.file import StudyFile


def run(
    study: Path = typer.Argument(..., help="The study file, study.toml."),
    on: Path | None = typer.Option(
        None, "--on", help="Run on the deployment in this folder, or with this kit of a statistician."
    ),
    out: Path | None = typer.Option(None, "--out", help="Save the result here, as JSON."),
    transcript: Path | None = typer.Option(
        None, "--transcript", help="Save all messages here, for `fedtmle risk --transcript`."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    report: Path | None = typer.Option(None, "--report", help="Write the result here as an HTML page."),
    events: Path | None = typer.Option(
        None, "--events", help="Append the events of the run here, for `fedtmle watch`."
    ),
    observe: bool = typer.Option(
        False,
        "--observe",
        help="Also read the records outside the protocol, for the loss by round and `bounds --pilot`.",
    ),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
    threads: int = typer.Option(1, min=1, help="How many silos answer at the same time, on this machine."),
    deadline: float = typer.Option(300.0, min=1.0, help="With --on: seconds to wait for a silo's answer."),
    patience: float = typer.Option(7 * 86400.0, min=1.0, help="With --on: seconds to wait for approvals."),
) -> None:
    """Run a study over the silos it lists: all on this machine, or with --on across a deployment."""
    from fedtmle.errors import RefusedError
    from fedtmle.studies.run import run as run_study
    from fedtmle.studies.validate import validate
    from fedtmle.studyfile.file import StudyFileErrors, read_study, study_here
    from fedtmle.text.progress import each, following, live_progress

    written = {"--out": out, "--transcript": transcript, "--report": report, "--events": events}
    for option, path in written.items():
        require_folder(path, option)
    with reporting(as_json=as_json):
        try:
            file = read_study(study)
        except StudyFileErrors:
            if on is not None:  # the silos' files are elsewhere
                raise
            # Report it with all errors of the silos' files and data.
            fail(validate(study).defects, Exit.DEFECTS, as_json=as_json)
        if on is not None:
            if observe:
                raise typer.BadParameter("--observe works for runs on this machine only, not with --on")
            require_flare()
            from fedtmle.deploy.launch import RunsHere, runs_on

            runs = runs_on(on)
            if transcript is not None and not isinstance(runs, RunsHere):
                raise typer.BadParameter(
                    "the messages of silos stay at the server; the coordinator has them in the run's folder",
                    param_hint="--transcript",
                )
            with closing(runs):
                runs.require()  # before the plan is claimed
                folder = runs.new(file, deadline=deadline, patience=patience)
                last = deployed(runs, folder, as_json=as_json, quiet=quiet, events=events)
            if transcript is not None:
                transcript.write_bytes(folder.transcript.read_bytes())
            _conclude(last, out=out, transcript=transcript, report=report, as_json=as_json, quiet=quiet)
            return
        with (
            live_progress(study.stem, quiet=quiet or as_json) as shown,
            following(events, study.stem, file.study, list(file.silos)) as log,
        ):
            try:
                result = run_study(
                    study_here(file),
                    file.silos,
                    threads=threads,
                    progress=each(shown, None if log is None else log.round),
                    observe=observe,
                    colluders=file.colluders,
                )
            except RefusedError as refused:
                fail([_refusal(refused, file)], Exit.REFUSED, as_json=as_json, reached=refused.reached)
            if log is not None:
                log.finished(text=result.document["status_text"], converged=result.document["converged"])
        if transcript is not None and result.run is not None:
            result.run.transcript.save(transcript)
        _conclude(result, out=out, transcript=transcript, report=report, as_json=as_json, quiet=quiet)


def _refusal(refused: RefusedError, file: StudyFile) -> Defect:
    """Return the defect that reports a refusal; on this machine the reader may learn which key refused."""
    from fedtmle.defects import Defect

    source, message = file.silos.get(refused.silo), f"refused: {refused.code}"
    if source is not None and source.suffix.lower() == ".toml":
        message += (
            f"\n`fedtmle silo preview {file.path} --silo {source}` shows which key of its policy refuses"
        )
    return Defect(message=message, silo=refused.silo)


def resume(
    run: Path = typer.Argument(..., help="The run's folder, as `run --on` and `server status` print it."),
    out: Path | None = typer.Option(None, "--out", help="Save the result here, as JSON."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
) -> None:
    """Resume a deployed run where it stopped, or follow one in progress. No silo answers a query twice.

    A run that lost a silo, its network or the server goes on by itself; this follows it.
    """
    require_flare()
    from fedtmle.deploy.launch import find_run

    with reporting(as_json=as_json):
        with find_run(run) as (runs, folder):
            runs.resume(folder)
            runs.require()
            result = deployed(runs, folder, as_json=as_json, quiet=quiet)
        _conclude(result, out=out, as_json=as_json, quiet=quiet)


def cancel(
    run: Path = typer.Argument(..., help="The run's folder, as `run --on` and `server status` print it."),
    as_json: bool = typer.Option(False, "--json", help="Print the run's folder and state as JSON."),
) -> None:
    """Cancel a deployed run, whether it waits, runs or has stopped. Silos are asked nothing more."""
    require_flare()
    from fedtmle.deploy.launch import find_run
    from fedtmle.engine.runs import RunState

    with reporting(as_json=as_json):
        with find_run(run) as (runs, folder):
            runs.cancel(folder)
        if as_json:
            say(json.dumps({"run": str(folder.path), "state": RunState.CANCELLED.value}))
        else:
            say(f"Cancelled: {folder.path}")


def deployed(
    runs: Runs, folder: RunFolder, *, as_json: bool, quiet: bool, events: Path | None = None
) -> StudyResult:
    """Follow a deployed run to its end, and return its result; copy its ``events`` to a file."""
    from fedtmle.defects import Defect
    from fedtmle.deploy.launch import copying, follow
    from fedtmle.deploy.launch import show as show_progress
    from fedtmle.engine.runs import RunState
    from fedtmle.results.result import load

    if not quiet:
        say(f"run {folder.path}", err=True)
    try:
        last = show_progress(copying(follow(runs, folder), folder.events, events), quiet=quiet)
    except KeyboardInterrupt:
        say(f"The run continues; follow it with: fedtmle resume {folder.path}", err=True)
        raise
    if last.state is RunState.CANCELLED:
        fail([Defect(message="the run was cancelled")], Exit.NOT_CONVERGED, as_json=as_json)
    if last.state is not RunState.DONE:
        stopped = Defect(message=f"{last.why}; resume with: fedtmle resume {folder.path}")
        fail([stopped], Exit.REFUSED if last.refused else Exit.NOT_CONVERGED, as_json=as_json)
    return load(folder.result)


def _conclude(
    result: StudyResult,
    *,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    transcript: Path | None = None,
    report: Path | None = None,
) -> None:
    """Print a result, save it if asked, and exit with its code."""
    if out is not None:
        result.save(out)
    if report is not None:
        write_page(result.document, report)
    _print(result.document, result.to_json() if as_json else None)
    if not as_json and not quiet:
        for path in (out, transcript, report):
            if path is not None:
                say(f"Saved to {path}.", err=True)
    if not result.document["converged"]:
        raise typer.Exit(int(Exit.NOT_CONVERGED))
    if result.document["overlap"]["is_poor"]:
        raise typer.Exit(int(Exit.POOR_OVERLAP))


def show(
    result: Path = typer.Argument(..., help="A result saved by run --out."),
    certificate: bool = typer.Option(
        False, "--certificate", help="Print what was proved about the run, at length."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Print a saved result."""
    from fedtmle.results.result import load
    from fedtmle.text.certificate import certificate_table

    with reporting(as_json=as_json):
        saved = load(result)
        if certificate and not as_json:
            typer.echo(certificate_table(saved.document))
            return
        _print(saved.document, saved.to_json() if as_json else None)


def _print(document: dict[str, object], json: str | None) -> None:
    from fedtmle.layout import visible
    from fedtmle.text.result import render

    if json is not None:
        say(json)
        return
    title, _, rest = render(document).partition("\n")
    typer.echo(typer.style(visible(title), bold=True))  # `echo` drops the style if the output is no terminal
    say(rest)
