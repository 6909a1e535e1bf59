"""``fedtmle init``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtmle.cli.exits import reporting, say


def init(
    folder: Path = typer.Argument(Path(), help="The folder to write to; it is created if need be."),
    force: bool = typer.Option(False, "--force", help="Overwrite existing files."),
    all_keys: bool = typer.Option(
        False, "--all-keys", help="Also write every other key of a study file, with its default, in comments."
    ),
    table: Path | None = typer.Option(
        None, "--from", help="Draft the study's dictionary from this table (.csv, .parquet or a silo file)."
    ),
    outcome: str | None = typer.Option(None, help="With --from: the outcome's column."),
    treatment: str | None = typer.Option(None, help="With --from: the treatment's column."),
    as_json: bool = typer.Option(False, "--json", help="Print the files' names as JSON."),
) -> None:
    """Write a short study with two example silos and toy records, ready to run.

    With --from, write a study whose dictionary is drafted from a table instead, for a person to edit.
    """
    import json

    from fedtmle.studyfile.draft import write_draft
    from fedtmle.studyfile.template import write_template

    with reporting(as_json=as_json):
        if table is None:
            written = [str(path) for path in write_template(folder, force=force, all_keys=all_keys)]
        else:
            written = [str(write_draft(folder, table, outcome, treatment, force=force))]
        if as_json:
            say(json.dumps({"written": written}))
            return
        study = written[0]
        say("\n".join(["Written:", *(f"  {path}" for path in written)]))
        if table is not None:
            say(
                "It is a draft: kinds are guesses, ranges come from this table's records, and the formulas\n"
                "have every column. Edit it first; its head says how.\n"
                f"Next:\n  fedtmle validate {study}"
            )
        else:
            say(f"Next:\n  fedtmle validate {study}\n  fedtmle run {study}")
