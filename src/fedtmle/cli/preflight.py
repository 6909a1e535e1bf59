"""``fedtmle preflight``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtmle.cli.exits import reporting, say


def preflight(
    study: Path = typer.Argument(..., help="The study file, study.toml."),
    silo: str | None = typer.Option(
        None, help="Show this silo's own table in full: for its owner, on its machine."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the tables as JSON."),
) -> None:
    """Describe the cohort before a study: Table 1 by arm, missing values, overlap; small cells are hidden."""
    import json

    from fedtmle.studies.preflight import preflight as describe
    from fedtmle.studyfile.file import read_study
    from fedtmle.text.preflight import render

    with reporting(as_json=as_json):
        file = read_study(study)
        if silo is not None and silo not in file.silos:
            expected = f"expected one of the study's silos: {', '.join(file.silos)}"
            raise typer.BadParameter(expected, param_hint="--silo")
        view = describe(file.study, file.silos, silo=silo)
        say(json.dumps(view.to_dict()) if as_json else render(view))
