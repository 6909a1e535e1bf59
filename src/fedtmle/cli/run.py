"""``fedtmle run`` and ``fedtmle show``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtmle.cli.exits import Exit, fail, reporting


def run(
    study: Path = typer.Argument(..., help="The study file, study.toml."),
    out: Path | None = typer.Option(None, "--out", help="Save the result here, as JSON."),
    transcript: Path | None = typer.Option(
        None, "--transcript", help="Save every message here, for `fedtmle risk --transcript`."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
    threads: int = typer.Option(1, min=1, help="Silos that answer side by side."),
) -> None:
    """Run a study over the silos it lists, all on this machine."""
    from fedtmle.studies.file import StudyFileErrors, read_study
    from fedtmle.studies.progress import live_progress
    from fedtmle.studies.run import run as run_study
    from fedtmle.studies.validate import validate

    for option, path in (("--out", out), ("--transcript", transcript)):
        if path is not None and not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.absolute().parent}", param_hint=option)
    with reporting(as_json=as_json):
        try:
            file = read_study(study)
        except StudyFileErrors:  # then with whatever is wrong with the silos' files and data
            fail(validate(study).complaints, Exit.MISTAKES, as_json=as_json)
        with live_progress(study.stem, quiet=quiet or as_json) as progress:
            result = run_study(file.study, file.silos, threads=threads, progress=progress)
        if out is not None:
            result.save(out)
        if transcript is not None and result.run is not None:
            result.run.transcript.save(transcript)
        _print(result.document, result.to_json() if as_json else None)
        if out is not None and not as_json and not quiet:
            typer.echo(f"Saved to {out}.", err=True)
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
