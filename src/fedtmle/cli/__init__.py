"""The command line: one module per command, each importing what it needs when it runs."""

from __future__ import annotations

import typer

from fedtmle import __version__
from fedtmle.cli import deploy, ledger, parties, silo
from fedtmle.cli.bounds import bounds
from fedtmle.cli.demo import demo
from fedtmle.cli.emulate import emulate
from fedtmle.cli.exits import CODES
from fedtmle.cli.extensions import ExtensibleGroup, reproduce
from fedtmle.cli.init import init
from fedtmle.cli.preflight import preflight
from fedtmle.cli.report import report
from fedtmle.cli.risk import risk
from fedtmle.cli.run import cancel, resume, run, show
from fedtmle.cli.validate import validate
from fedtmle.cli.watch import watch

app = typer.Typer(
    cls=ExtensibleGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # a pretty traceback may show local variables, and so records
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


for command in (demo, init, validate, preflight, risk, run, emulate, resume, cancel, show, report, watch):
    app.command(epilog=CODES)(command)
silo.app.command("start", epilog=CODES)(parties.start_silo)
silo.app.command("run", epilog=CODES)(parties.run_silo)
silo.app.command("notify", epilog=CODES)(parties.notify_silo)
silo.app.command("page", epilog=CODES)(parties.silo_page)
silo.app.command("stop", epilog=CODES)(parties.stop_silo)
silo.app.command("status", epilog=CODES)(parties.silo_status)
app.add_typer(silo.app, name="silo")
app.add_typer(ledger.app, name="ledger")
app.add_typer(deploy.app, name="deploy")
app.add_typer(parties.server, name="server")
app.command(epilog=CODES)(bounds)
# A placeholder for the help; the group replaces it by the command of fedtmle-paper.
app.command(
    epilog=CODES,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)(reproduce)


def main() -> None:
    """The entry point of the ``fedtmle`` command."""
    app()
