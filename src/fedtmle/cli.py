"""The command line."""

from __future__ import annotations

from enum import StrEnum

import typer

from fedtmle import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Federated targeted maximum likelihood estimation: the estimate and interval that pooled "
    "data would have given, from records that stay in their silos.",
)


class Study(StrEnum):
    """The studies that `demo` can run."""

    IHDP = "ihdp"
    TRANSPORT = "transport"


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


@app.command()
def demo(
    study: Study = typer.Option(
        Study.IHDP,
        help="ihdp: the effect of early intervention on IQ, 8 real hospitals. "
        "transport: the paper's benchmark, 10 silos, 10,000 records.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the federated result as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
) -> None:
    """Run a whole federated study on this machine, beside the same study pooled."""
    from fedtmle import demo as demonstrations

    run = demonstrations.ihdp if study is Study.IHDP else demonstrations.transport
    run(as_json=as_json, quiet=quiet)


def main() -> None:
    """The entry point of the ``fedtmle`` command."""
    app()
