"""``fedtmle init``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtmle.cli.exits import reporting


def init(
    folder: Path = typer.Argument(Path(), help="The folder to write to; it is created if need be."),
    force: bool = typer.Option(False, "--force", help="Overwrite existing files."),
    as_json: bool = typer.Option(False, "--json", help="Print the files' names as JSON."),
) -> None:
    """Write a commented study with two example silos and toy records, ready to run."""
    import json

    from fedtmle.studyfile.template import write_template

    with reporting(as_json=as_json):
        written = [str(path) for path in write_template(folder, force=force)]
        if as_json:
            typer.echo(json.dumps({"written": written}))
            return
        study = written[0]
        typer.echo("\n".join(["Written:", *(f"  {path}" for path in written)]))
        typer.echo(f"Next:\n  fedtmle validate {study}\n  fedtmle run {study}")
