"""The command line: one module for the commands of one reader; each imports what it needs when it runs."""

from __future__ import annotations

import typer

from fedtmle import __version__
from fedtmle.cli import deploy, silo
from fedtmle.cli.base import (
    ADMINISTRATOR,
    EVERYONE,
    OPERATE,
    OWNER,
    RESEARCHER,
    STATISTICIAN,
    ExtensibleGroup,
    epilog,
    reproduce,
)
from fedtmle.cli.before import bounds, budget, init, preflight, validate
from fedtmle.cli.run import cancel, demo, emulate, report, resume, run, show, watch
from fedtmle.cli.silo import risk

app = typer.Typer(
    cls=ExtensibleGroup,
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


app.command(
    rich_help_panel=EVERYONE,
    epilog=epilog("demo", "demo --report report.html", "demo --epsilon 1", "demo --study transport"),
)(demo)
app.command(
    rich_help_panel=EVERYONE,
    epilog=epilog("init example", "init mystudy --from extract.csv --outcome died --treatment drug"),
)(init)
for command, examples in (
    (validate, ("validate study.toml",)),
    (preflight, ("preflight study.toml", "preflight study.toml --silo north")),
    (run, ("run study.toml --out result.json --report report.html", "run study.toml --on deployment")),
    (show, ("show result.json", "show result.json --certificate")),
    (report, ("report result.json --out report.html",)),
    (watch, ("watch run.jsonl --open",)),
    (resume, ("resume deployment/runs/3f2a --out result.json",)),
    (cancel, ("cancel deployment/runs/3f2a",)),
    (emulate, ("emulate trial.toml --attrition", "emulate trial.toml --report report.html")),
    (bounds, ("bounds --n 10000 --silos 8 --dim 2 --tolerance 0.01",)),
    (budget, ("budget study.toml", "budget study.toml --n 20000 --outcome-mean 0.05")),
):
    app.command(rich_help_panel=STATISTICIAN, epilog=epilog(*examples))(command)
for name, party, example in (
    ("start", deploy.start_silo, "silo start kit --silo-file silo.toml"),
    ("run", deploy.run_silo, "silo run kit"),
    ("notify", deploy.notify_silo, "silo notify kit /usr/local/bin/mail-the-owner"),
    ("page", deploy.silo_page, "silo page kit --open"),
    ("stop", deploy.stop_silo, "silo stop kit"),
    ("status", deploy.silo_status, "silo status kit"),
):
    silo.app.command(name, rich_help_panel=OPERATE, epilog=epilog(example))(party)
app.add_typer(silo.app, name="silo", rich_help_panel=OWNER)
app.command(
    rich_help_panel=OWNER,
    epilog=epilog(
        "risk study.toml --silo silo.toml",
        "risk study.toml --silo silo.toml --attribute age --figure risk.png",
    ),
)(risk)
app.add_typer(silo.ledger_app, name="ledger", rich_help_panel=OWNER)
app.add_typer(deploy.app, name="deploy", rich_help_panel=ADMINISTRATOR)
app.add_typer(deploy.server, name="server", rich_help_panel=ADMINISTRATOR)
# A placeholder for the help; the group replaces it by the command of fedtmle-paper.
app.command(
    rich_help_panel=RESEARCHER,
    epilog=epilog("reproduce --quick --figure 1 --out quick"),
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)(reproduce)


def main() -> None:
    """The entry point of the ``fedtmle`` command."""
    app()
