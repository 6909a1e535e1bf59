"""``fedtmle validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.exits import Exit, fail, reporting, say

if TYPE_CHECKING:
    from fedtmle.studies.validate import Validation


def validate(
    study: Path = typer.Argument(..., help="The study file, study.toml."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Check a study file, its silo files and their data; report all defects with file and line."""
    import json

    from fedtmle.studies.validate import validate as check

    with reporting(as_json=as_json):
        checked = check(study)
        if checked.defects:
            fail(checked.defects, Exit.DEFECTS, as_json=as_json)
        if as_json:
            say(json.dumps(_summary(checked)))
        else:
            say("\n".join(_lines(_summary(checked))))
            for warning in checked.warnings:
                say(f"Warning: {warning}", err=True)


def _summary(checked: Validation) -> dict[str, object]:
    if checked.file is None or checked.schema is None:
        raise AssertionError("a validation without defects has read the study")
    return {
        "defects": [],
        "warnings": [warning.to_dict() for warning in checked.warnings],
        "question": checked.file.study.target.question,
        "columns": {
            column.name: column.kind.value + (", may be missing" if column.may_be_missing else "")
            for column in checked.schema.columns
        },
        "silos": {name: table.n_rows for name, table in checked.tables.items()},
    }


def _lines(summary: dict[str, object]) -> list[str]:
    from fedtmle.layout import aligned, wrapped

    columns, silos = summary["columns"], summary["silos"]
    if not (isinstance(columns, dict) and isinstance(silos, dict)):
        raise AssertionError("a summary has columns and silos")
    rows = [("silo", "records"), *((name, f"{count:,}") for name, count in silos.items())]
    return [
        *wrapped(str(summary["question"])),
        "",
        *wrapped("Columns: " + "; ".join(f"{name} ({kind})" for name, kind in columns.items()) + "."),
        "",
        *aligned(rows),
        "",
        "No defects found.",
    ]
