"""``fedtmle emulate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.exits import Exit, reporting
from fedtmle.cli.report import require_folder, write_page

if TYPE_CHECKING:
    from fedtmle.results.result import StudyResult
    from fedtmle.trials.cohort import Cdm
    from fedtmle.trials.trial import TargetTrial


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
    out: Path | None = typer.Option(None, "--out", help="Save the result here, as JSON."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    report: Path | None = typer.Option(None, "--report", help="Write the result here as an HTML page."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
    threads: int = typer.Option(1, min=1, help="Silos that answer side by side, on this machine."),
) -> None:
    """Emulate a target trial on OMOP databases: the cohorts, the attrition and the effect."""
    import json

    from fedtmle.text import preflight as table1_text
    from fedtmle.text.emulation import render as render_attrition
    from fedtmle.text.progress import live_progress
    from fedtmle.trials.attrition import document_of
    from fedtmle.trials.cohort import read_cohort
    from fedtmle.trials.emulate import emulate as emulate_trial
    from fedtmle.trials.emulate import shown_attrition
    from fedtmle.trials.file import read_trial
    from fedtmle.trials.write import write_study

    for option, path in {"--out": out, "--report": report}.items():
        require_folder(path, option)
    with reporting(as_json=as_json):
        file = read_trial(trial)
        silos = file.silos if silo is None else _one_silo(file.silos, silo)
        if sql:
            typer.echo("\n".join(_statements(file.trial, silos)))
            return
        cohorts = {name: read_cohort(file.trial, cdm) for name, cdm in silos.items()}
        if silo is None:
            shown = shown_attrition(cohorts, silos)
        else:  # the reader is the owner
            shown = {name: cohort.attrition for name, cohort in cohorts.items()}
        stops = attrition or silo is not None or write is not None
        if not as_json:
            typer.echo(render_attrition(document_of(file.trial, shown)))
        elif stops:
            typer.echo(json.dumps(document_of(file.trial, shown)))
        for path in () if write is None else write_study(file, cohorts, write):
            typer.echo(f"Wrote {path}.", err=True)
        if stops:
            return
        with live_progress(trial.stem, quiet=quiet or as_json) as progress:
            emulated = emulate_trial(file.trial, silos, threads=threads, progress=progress, cohorts=cohorts)
        if not as_json:
            typer.echo(f"\n{table1_text.render(emulated.table1)}")
        _conclude(emulated.result, out=out, report=report, as_json=as_json, quiet=quiet)


def _one_silo(silos: Mapping[str, Cdm], name: str) -> dict[str, Cdm]:
    if name not in silos:
        raise typer.BadParameter(f"the trial lists no silo '{name}'; it lists {', '.join(silos)}")
    return {name: silos[name]}


def _conclude(
    result: StudyResult, *, out: Path | None, report: Path | None, as_json: bool, quiet: bool
) -> None:
    """Print a result, save it if asked, and leave with its exit code."""
    from fedtmle.text.result import render

    if out is not None:
        result.save(out)
    if report is not None:
        write_page(result.document, report)
    shown = {key: value for key, value in result.document.items() if key != "emulation"}  # printed before
    typer.echo(result.to_json() if as_json else f"\n{render(shown)}")
    for path in () if as_json or quiet else (out, report):
        if path is not None:
            typer.echo(f"Saved to {path}.", err=True)
    if not result.document["converged"]:
        raise typer.Exit(int(Exit.NOT_CONVERGED))


def _statements(trial: TargetTrial, silos: Mapping[str, Cdm]) -> Iterator[str]:
    """Yield the SQL of every silo, each below a comment with its name."""
    for name, cdm in silos.items():
        label = "".join(letter if letter.isprintable() else " " for letter in name)
        yield f"-- silo {label}, {cdm.dialect.name}"
        yield f"{cdm.sql(trial)}\n"
