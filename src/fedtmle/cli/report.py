"""``fedtmle report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.exits import reporting, say

if TYPE_CHECKING:
    from fedtmle.layout import Document


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
