"""The command line: one module per command, each importing what it needs when it runs."""

from __future__ import annotations

import typer

from fedtmle import __version__
from fedtmle.cli.bounds import bounds
from fedtmle.cli.demo import demo

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Federated targeted maximum likelihood estimation: the estimate and interval that pooled "
    "data would have given, from records that stay in their silos.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedtmle {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """Options that every command shares; `version` is handled before any of them runs."""


app.command()(demo)
app.command()(bounds)


def main() -> None:
    """The entry point of the ``fedtmle`` command."""
    app()
