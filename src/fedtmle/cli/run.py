"""``fedtmle run`` and ``fedtmle show``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtmle.cli.exits import Exit, fail, reporting
from fedtmle.cli.report import require_folder, write_page


def run(
    study: Path = typer.Argument(..., help="The study file, study.toml."),
    out: Path | None = typer.Option(None, "--out", help="Save the result here, as JSON."),
    transcript: Path | None = typer.Option(
        None, "--transcript", help="Save every message here, for `fedtmle risk --transcript`."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    report: Path | None = typer.Option(None, "--report", help="Write the result here as an HTML page."),
    events: Path | None = typer.Option(
        None, "--events", help="Append what happens here, line by line, for `fedtmle watch`."
    ),
    observe: bool = typer.Option(
        False, "--observe", help="Read the records outside the protocol too, for the loss by round."
    ),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
    threads: int = typer.Option(1, min=1, help="Silos that answer side by side."),
) -> None:
    """Run a study over the silos it lists, all on this machine."""
    from fedtmle.studies.file import StudyFileErrors, read_study
    from fedtmle.studies.progress import each, following, live_progress
    from fedtmle.studies.run import run as run_study
    from fedtmle.studies.validate import validate

    written = {"--out": out, "--transcript": transcript, "--report": report, "--events": events}
    for option, path in written.items():
        require_folder(path, option)
    with reporting(as_json=as_json):
        try:
            file = read_study(study)
        except StudyFileErrors:  # then with whatever is wrong with the silos' files and data
            fail(validate(study).complaints, Exit.MISTAKES, as_json=as_json)
        with (
            live_progress(study.stem, quiet=quiet or as_json) as shown,
            following(events, study.stem, file.study, list(file.silos)) as log,
        ):
            result = run_study(
                file.study,
                file.silos,
                threads=threads,
                progress=each(shown, None if log is None else log.round),
                observe=observe,
            )
            if log is not None:
                log.finished(text=result.document["status_text"], converged=result.document["converged"])
        if out is not None:
            result.save(out)
        if transcript is not None and result.run is not None:
            result.run.transcript.save(transcript)
        if report is not None:
            write_page(result.document, report)
        _print(result.document, result.to_json() if as_json else None)
        if not as_json and not quiet:
            for path in (out, transcript, report):
                if path is not None:
                    typer.echo(f"Saved to {path}.", err=True)
        if not result.document["converged"]:
            raise typer.Exit(int(Exit.NOT_CONVERGED))


def show(
    result: Path = typer.Argument(..., help="A result saved by run --out."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Print a saved result."""
    from fedtmle.studies.result import load

    with reporting(as_json=as_json):
        saved = load(result)
        _print(saved.document, saved.to_json() if as_json else None)


def _print(document: dict[str, object], json: str | None) -> None:
    from fedtmle.studies.show import render

    if json is not None:
        typer.echo(json)
        return
    title, _, rest = render(document).partition("\n")
    typer.echo(typer.style(title, bold=True))  # without colour where it does not end on a terminal
    typer.echo(rest)
