"""Commands that run a study and show its result, from ``fedtmle run`` to ``fedtmle emulate``.

The others are ``resume``, ``cancel``, ``show``, ``report``, ``watch`` and ``demo``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.base import (
    DEMOS,
    Exit,
    fail,
    fail_without_paper,
    load,
    reporting,
    require_flare,
    say,
    serve_page,
)

if TYPE_CHECKING:
    from fedtmle.defects import Defect
    from fedtmle.deploy.launch import Runs
    from fedtmle.engine.runs import RunFolder
    from fedtmle.errors import RefusedError
    from fedtmle.layout import Document
    from fedtmle.results.result import StudyResult
    from fedtmle.studyfile.file import StudyFile
    from fedtmle.trials.cohort import Cdm, Cohort
    from fedtmle.trials.file import TrialFile
    from fedtmle.trials.trial import TargetTrial


def report(
    result: Path = typer.Argument(..., help="A result saved by run --out."),
    out: Path = typer.Option(Path("report.html"), "--out", help="Where to write the page."),
    quiet: bool = typer.Option(False, "--quiet", help="Print nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print the file's name and size as JSON."),
) -> None:
    """Write a saved result as one HTML page that opens from disk, prints, and loads nothing."""
    import json

    from fedtmle.results.result import load

    require_folder(out, "--out")
    with reporting(as_json=as_json):
        size = write_page(load(result).document, out)
        if as_json:
            say(json.dumps({"written": str(out), "bytes": size}))
        elif not quiet:
            say(f"Written: {out} ({size / 1000:,.0f} kB). Open it in any browser.")


def require_folder(path: Path | None, option: str) -> None:
    """Raise a usage error if a file cannot be written to ``path``; called before a run, not after."""
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file", param_hint=option)
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent}", param_hint=option)


def write_page(document: Document, path: Path) -> int:
    """Write the page and return its size in bytes."""
    from fedtmle.report.page import render

    return path.write_bytes(render(document).encode())


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
    from fedtmle.studies.progress import each, following, live_progress
    from fedtmle.studies.run import run as run_study
    from fedtmle.studies.validate import lone_table, validate
    from fedtmle.studyfile.file import StudyFileErrors, read_study, study_here

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
        for warning in lone_table(study, file.silos):
            say(f"Warning: {warning}", err=True)
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


def watch(
    events: Path = typer.Argument(
        ..., help="The events of a run (run --events), the folder of a deployed run, or a silo's ledger."
    ),
    ledger: bool = typer.Option(False, "--ledger", help="The file is a silo's ledger."),
    port: int = typer.Option(8765, min=0, max=65535, help="The page's port; 0 for any free one."),
    host: str = typer.Option("127.0.0.1", help="The page's address; by default for this machine only."),
    silence: float = typer.Option(30.0, min=1.0, help="Seconds without news after which the page warns."),
    open_page: bool = typer.Option(False, "--open", help="Open the page in the browser."),
    as_json: bool = typer.Option(False, "--json", help="Print what the page would show now, and exit."),
    quiet: bool = typer.Option(False, "--quiet", help="Print nothing."),
) -> None:
    """Follow a run on a local web page, during the run or after it; Ctrl-C ends the view."""
    import json

    from fedtmle.watch import LOOPBACK, EventTail, LedgerTail, RunTail, WatchServer

    if events.is_dir() and not ledger:
        require_flare()
        look = RunTail(events).look
    else:
        look = (LedgerTail(events) if ledger else EventTail(events)).look
    if as_json:
        say(json.dumps(look(), allow_nan=False))
        return
    try:
        server = WatchServer(host, port, look, silence=silence)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port", param_hint="--port"
        ) from None
    if host not in LOOPBACK:
        say(f"Anyone who reaches {host} can see this view; it asks for no password.", err=True)
    line = f"Following {events} on {server.url}  (Ctrl-C ends the view, not the run)"
    if not events.exists():
        line += f"\n{events} does not exist yet; the view waits for it."
    serve_page(server, "" if quiet else line, server.url if open_page else None)


class DemoStudy(StrEnum):
    """The studies that `demo` can run."""

    IHDP = "ihdp"
    TRANSPORT = "transport"


def demo(
    study: DemoStudy = typer.Option(
        DemoStudy.IHDP,
        help="ihdp: the effect of early intervention on IQ, 8 real hospitals. "
        "transport: the paper's benchmark, 10 silos, 10,000 records (package fedtmle-paper).",
    ),
    epsilon: float | None = typer.Option(
        None,
        help="Add noise for differential privacy with this epsilon (ihdp): the trial, and one that is 100 "
        "times as large.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the federated result as JSON."),
    report: Path | None = typer.Option(None, "--report", help="Write the result here as an HTML page."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
) -> None:
    """Run a whole federated study on this machine, beside the same study pooled."""
    require_folder(report, "--report")
    if epsilon is not None:
        from fedtmle.demo import ihdp_private

        if study is not DemoStudy.IHDP:
            raise typer.BadParameter("only --study ihdp runs with noise", param_hint="--epsilon")
        with reporting(as_json=as_json):
            document = ihdp_private(epsilon, as_json=as_json, quiet=quiet)
    else:
        if study is DemoStudy.IHDP:
            from fedtmle.demo import ihdp as run
        else:
            run = load(DEMOS, study.value) or fail_without_paper(f"fedtmle demo --study {study.value}")
        pilot = as_json and study is DemoStudy.TRANSPORT  # `bounds --pilot` reads this
        document = run(as_json=as_json, quiet=quiet, observe=report is not None or pilot)
    if report is not None:
        write_page(document, report)
        if not as_json:
            typer.echo(f"\nThe report: {report.absolute().as_uri()}")


COUNTS = typer.Option(
    [], "--counts", metavar="FILE", help="With --on or --result: counts that a silo's owner sent."
)


def emulate(
    trial: Path = typer.Argument(..., help="The trial file, trial.toml."),
    sql: bool = typer.Option(False, "--sql", help="Print the SQL of every silo and stop; nothing is run."),
    attrition: bool = typer.Option(False, "--attrition", help="Read the cohorts, print the attrition, stop."),
    silo: str | None = typer.Option(
        None, "--silo", help="For its owner: this silo alone, its SQL (with --sql) or its attrition in full."
    ),
    write: Path | None = typer.Option(
        None, "--write", help="Write the study, the silo files and the tables into this folder, and stop."
    ),
    on: Path | None = typer.Option(
        None, "--on", help="Run on the deployment in this folder, where each owner has written a table."
    ),
    result: Path | None = typer.Option(
        None, "--result", help="Run nothing: add the trial to this saved result of its study."
    ),
    counts: list[Path] = COUNTS,
    out: Path | None = typer.Option(None, "--out", help="Save the result here, as JSON."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    report: Path | None = typer.Option(None, "--report", help="Write the result here as an HTML page."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
    threads: int = typer.Option(1, min=1, help="Silos that answer side by side, on this machine."),
    deadline: float = typer.Option(300.0, min=1.0, help="With --on: seconds to wait for a silo's answer."),
    patience: float = typer.Option(7 * 86400.0, min=1.0, help="With --on: seconds to wait for approvals."),
) -> None:
    """Emulate a target trial on OMOP databases: the cohorts, the attrition and the effect."""
    from fedtmle.trials.cohort import read_counts, with_counts
    from fedtmle.trials.file import read_trial

    for option, path in {"--out": out, "--report": report}.items():
        require_folder(path, option)
    here = {"--sql": sql, "--attrition": attrition, "--silo": silo, "--write": write}
    elsewhere = {"--on": on, "--result": result}
    chosen = [option for option, value in elsewhere.items() if value is not None]
    conflicts = [option for option, value in here.items() if value] + chosen[1:]
    if chosen and conflicts:
        raise typer.BadParameter(f"{conflicts[0]} does not go with {chosen[0]}")
    if counts and not chosen:
        raise typer.BadParameter("--counts goes with --on or --result")
    with reporting(as_json=as_json):
        if chosen:
            file = read_trial(trial, only=())
            views = read_counts(counts, file.trial, file.names)
            if on is not None:
                done = _run_on(on, file, deadline=deadline, patience=patience, as_json=as_json, quiet=quiet)
            else:
                done = _saved(file, result or Path())
            done = with_counts(done, file.trial, file.names, views)
            _conclude_emulation(done, out=out, report=report, as_json=as_json, quiet=quiet)
            return
        file = read_trial(trial, only=None if silo is None else (silo,))
        if silo is not None and silo not in file.names:
            raise typer.BadParameter(f"the trial lists no silo '{silo}'; it lists {', '.join(file.names)}")
        if sql:
            say("\n".join(_statements(file.trial, file.silos)))
            return
        cohorts = _read_cohorts(file)
        stops = attrition or silo is not None or write is not None
        if stops or not as_json:
            _show_attrition(file, cohorts, in_full=silo is not None, as_json=as_json)
        if write is not None:
            _write(file, cohorts, write)
        if stops:
            return
        done = _run_here(file, cohorts, threads=threads, as_json=as_json, quiet=quiet)
        _conclude_emulation(done, out=out, report=report, as_json=as_json, quiet=quiet, already_shown=True)


# On this machine.


def _read_cohorts(file: TrialFile) -> dict[str, Cohort]:
    """Return the cohort of each silo; warn if an account could write to its database."""
    from warnings import catch_warnings, simplefilter

    from fedtmle.data.drivers import WriteAccessWarning
    from fedtmle.trials.cohort import read_cohort

    with catch_warnings(record=True) as raised:
        simplefilter("always", WriteAccessWarning)
        cohorts = {name: read_cohort(file.trial, cdm) for name, cdm in file.silos.items()}
    for message in dict.fromkeys(str(warning.message) for warning in raised):
        say(f"Warning: {message}", err=True)
    return cohorts


def _show_attrition(file: TrialFile, cohorts: Mapping[str, Cohort], *, in_full: bool, as_json: bool) -> None:
    """Print the attrition: in full for a silo's owner, else as others may see it."""
    import json

    from fedtmle.text.certificate import render
    from fedtmle.trials.cohort import document_of
    from fedtmle.trials.emulate import shown_attrition

    own = {name: cohort.attrition for name, cohort in cohorts.items()}
    document = document_of(file.trial, own if in_full else shown_attrition(cohorts, file.silos))
    say(json.dumps(document) if as_json else render(document))


def _write(file: TrialFile, cohorts: Mapping[str, Cohort], folder: Path) -> None:
    from fedtmle.trials.emulate import write_study

    for path in write_study(file, cohorts, folder):
        say(f"Wrote {path}.", err=True)


def _run_here(
    file: TrialFile, cohorts: Mapping[str, Cohort], *, threads: int, as_json: bool, quiet: bool
) -> StudyResult:
    from fedtmle.studies.progress import live_progress
    from fedtmle.text.preflight import render_preflight
    from fedtmle.trials.emulate import emulate as emulate_trial

    with live_progress(file.path.stem, quiet=quiet or as_json) as progress:
        emulated = emulate_trial(file.trial, file.silos, threads=threads, progress=progress, cohorts=cohorts)
    if not as_json:
        say(f"\n{render_preflight(emulated.table1)}")
    return emulated.result


def _statements(trial: TargetTrial, silos: Mapping[str, Cdm]) -> Iterator[str]:
    """Yield the SQL of every silo, each below a comment with its name."""
    for name, cdm in silos.items():
        label = "".join(letter if letter.isprintable() else " " for letter in name)
        yield f"-- silo {label}, {cdm.dialect.name}"
        yield f"{cdm.sql(trial)}\n"


# On a deployment, or from a result of one.


def _run_on(
    folder: Path, file: TrialFile, *, deadline: float, patience: float, as_json: bool, quiet: bool
) -> StudyResult:
    """Run the trial's study on a deployment and return its result."""
    from contextlib import closing
    from tempfile import TemporaryDirectory

    from fedtmle.studyfile.file import read_study
    from fedtmle.trials.emulate import study_text

    require_flare()
    from fedtmle.deploy.launch import runs_on

    with closing(runs_on(folder)) as runs, TemporaryDirectory() as scratch:
        runs.require()
        path = Path(scratch) / f"{file.path.stem}.toml"
        path.write_text(study_text(file), encoding="utf-8")
        run = runs.new(read_study(path), deadline=deadline, patience=patience)
        return deployed(runs, run, as_json=as_json, quiet=quiet)


def _saved(file: TrialFile, path: Path) -> StudyResult:
    """Return a saved result, which must be of the trial's study over the trial's silos."""
    from fedtmle.errors import InputError
    from fedtmle.results.result import load
    from fedtmle.trials.emulate import study_plan_of

    saved = load(path)
    if saved.document["plan"] != study_plan_of(file).digest.hex():
        raise InputError(f"{path}: not a result of the trial's study under this version of fedtmle")
    return saved


def _conclude_emulation(
    result: StudyResult,
    *,
    out: Path | None,
    report: Path | None,
    as_json: bool,
    quiet: bool,
    already_shown: bool = False,
) -> None:
    """Print a result, save it if asked, and exit with its code.

    ``already_shown`` says whether the attrition was printed before.
    """
    from fedtmle.text.result import render

    if out is not None:
        result.save(out)
    if report is not None:
        write_page(result.document, report)
    hidden = {"emulation"} if already_shown else set()
    shown = {key: value for key, value in result.document.items() if key not in hidden}
    say(result.to_json() if as_json else f"\n{render(shown)}")
    for path in () if as_json or quiet else (out, report):
        if path is not None:
            say(f"Saved to {path}.", err=True)
    if not result.document["converged"]:
        raise typer.Exit(int(Exit.NOT_CONVERGED))
