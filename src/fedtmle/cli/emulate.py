"""``fedtmle emulate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.exits import Exit, reporting, require_flare, say
from fedtmle.cli.report import require_folder, write_page

if TYPE_CHECKING:
    from fedtmle.results.result import StudyResult
    from fedtmle.trials.cohort import Cdm, Cohort
    from fedtmle.trials.file import TrialFile
    from fedtmle.trials.trial import TargetTrial

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
    from fedtmle.trials.counts import read_counts, with_counts
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
            _conclude(done, out=out, report=report, as_json=as_json, quiet=quiet)
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
        _conclude(done, out=out, report=report, as_json=as_json, quiet=quiet, already_shown=True)


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

    from fedtmle.text.emulation import render
    from fedtmle.trials.attrition import document_of
    from fedtmle.trials.emulate import shown_attrition

    own = {name: cohort.attrition for name, cohort in cohorts.items()}
    document = document_of(file.trial, own if in_full else shown_attrition(cohorts, file.silos))
    say(json.dumps(document) if as_json else render(document))


def _write(file: TrialFile, cohorts: Mapping[str, Cohort], folder: Path) -> None:
    from fedtmle.trials.write import write_study

    for path in write_study(file, cohorts, folder):
        say(f"Wrote {path}.", err=True)


def _run_here(
    file: TrialFile, cohorts: Mapping[str, Cohort], *, threads: int, as_json: bool, quiet: bool
) -> StudyResult:
    from fedtmle.text.preflight import render
    from fedtmle.text.progress import live_progress
    from fedtmle.trials.emulate import emulate as emulate_trial

    with live_progress(file.path.stem, quiet=quiet or as_json) as progress:
        emulated = emulate_trial(file.trial, file.silos, threads=threads, progress=progress, cohorts=cohorts)
    if not as_json:
        say(f"\n{render(emulated.table1)}")
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

    from fedtmle.cli.run import deployed
    from fedtmle.studyfile.file import read_study
    from fedtmle.trials.write import study_text

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
    from fedtmle.trials.write import study_plan_of

    saved = load(path)
    if saved.document["plan"] != study_plan_of(file).digest.hex():
        raise InputError(f"{path}: not a result of the trial's study under this version of fedtmle")
    return saved


def _conclude(
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
