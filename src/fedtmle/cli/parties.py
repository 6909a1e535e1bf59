"""``fedtmle server`` and ``fedtmle silo``: start, stop and inspect a party on its own machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.exits import Exit, reporting, require_flare, say, serve_page
from fedtmle.cli.help import ReaderGroup, epilog

if TYPE_CHECKING:
    from fedtmle.deploy.kits import Kit

KIT = typer.Argument(..., help="The party's start-up kit.")
METRICS = typer.Option(
    None,
    "--metrics-port",
    min=0,
    max=65535,
    help="Serve /metrics and /health on this port of 127.0.0.1, from now on; 0 turns it off.",
)

server = typer.Typer(
    cls=ReaderGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Start, stop and inspect the server, which adds up the silos' answers.",
)


@server.command("start", epilog=epilog("server start kit"))
def start_server(kit: Path = KIT, metrics: int | None = METRICS) -> None:
    """Start the server in the background; it is restarted if it dies."""
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import start_server as begin

    with reporting(as_json=False):
        party = read_kit(kit, Role.SERVER)
        _keep_port(party, metrics)
        begin(party)
        say(f"Started. `fedtmle server status {kit}` says when it listens.")


@server.command("run", epilog=epilog("server run kit"))
def run_server(kit: Path = KIT, metrics: int | None = METRICS) -> None:
    """Run the server in the foreground, for a service manager; SIGTERM ends it."""
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import prepare_server
    from fedtmle.deploy.processes import run_here
    from fedtmle.deploy.supervisor import supervise

    with reporting(as_json=False):
        party = read_kit(kit, Role.SERVER)
        _keep_port(party, metrics)
        prepare_server(party)
        raise typer.Exit(run_here(party, supervise))


@server.command("stop", epilog=epilog("server stop kit"))
def stop_server(kit: Path = KIT) -> None:
    """Stop the server; a run in progress can be resumed."""
    _stop(kit, "server")


@server.command("status", epilog=epilog("server status kit"))
def server_status(
    kit: Path = KIT, as_json: bool = typer.Option(False, "--json", help="Print the status as JSON.")
) -> None:
    """Show whether the server runs and listens, and its runs."""
    _status(kit, "server", as_json=as_json)


SILO_FILE = typer.Option(
    None, "--silo-file", help="This silo's silo.toml, needed the first time. Its path stays in the kit."
)


def run_silo(kit: Path = KIT, silo_file: Path | None = SILO_FILE, metrics: int | None = METRICS) -> None:
    """Run this silo in the foreground, for a service manager; SIGTERM ends it."""
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import prepare_silo
    from fedtmle.deploy.processes import run_here
    from fedtmle.deploy.supervisor import supervise

    with reporting(as_json=False):
        party = read_kit(kit, Role.SILO)
        _keep_port(party, metrics)
        prepare_silo(party, silo_file)
        raise typer.Exit(run_here(party, supervise))


def start_silo(kit: Path = KIT, silo_file: Path | None = SILO_FILE, metrics: int | None = METRICS) -> None:
    """Start this silo in the background: it connects to the server and answers the plans you approved."""
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import start_silo as begin

    with reporting(as_json=False):
        party = read_kit(kit, Role.SILO)
        _keep_port(party, metrics)
        begin(party, silo_file)
        say(f"Started. `fedtmle silo status {kit}` lists the studies that wait for your approval.")


def notify_silo(
    kit: Path = KIT,
    command: list[str] = typer.Argument(
        None, help="The program with its whole path, and its arguments; without any, notices are turned off."
    ),
) -> None:
    """Run a command of yours whenever a study waits for you: it reads the notice as JSON from its input.

    The command is tried now, with a notice whose event is "test".
    """
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.engine.notice import notice_of, set_command, tell
    from fedtmle.errors import InputError

    with reporting(as_json=False):
        party = read_kit(kit, Role.SILO)
        if command:
            trouble = tell(command, {**notice_of(party.site, Path("none")), "event": "test"})
            if trouble:
                raise InputError(f"{command[0]}: {trouble}; nothing was changed")
        set_command(party.home, command or [])
        say("The command was run, and will be when a study waits." if command else "Notices are off.")


def silo_page(
    kit: Path = KIT,
    port: int = typer.Option(0, min=0, max=65535, help="The page's port on this machine; 0 for any."),
    open_page: bool = typer.Option(False, "--open", help="Open the page in the browser."),
) -> None:
    """Show a local page of the studies that came: what each asks, approve or reject it, and your ledger.

    The printed address opens the page once, in one browser. Ctrl-C ends it.
    """
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.owner import OwnerServer
    from fedtmle.deploy.parties import home_of
    from fedtmle.engine.post import last_contact

    with reporting(as_json=False):
        party = read_kit(kit, Role.SILO)
        home = home_of(party)
        try:
            server = OwnerServer(home, port=port, open_plans=lambda: last_contact(party.home).get("open"))
        except OSError as error:
            raise typer.BadParameter(
                f"cannot listen on port {port} ({error.strerror}); choose another", param_hint="--port"
            ) from None
        line = f"Open this address, once: {server.url}  (Ctrl-C ends the page)"
        serve_page(server, line, server.url if open_page else None)


def _keep_port(kit: Kit, port: int | None) -> None:
    """Note the port for monitoring in the kit, if one was given."""
    from fedtmle.deploy.health import set_port

    if port is not None:
        set_port(kit, port)


def stop_silo(kit: Path = KIT) -> None:
    """Stop this silo and all its processes."""
    _stop(kit, "silo")


def silo_status(
    kit: Path = KIT, as_json: bool = typer.Option(False, "--json", help="Print the status as JSON.")
) -> None:
    """Show whether the silo runs, and the studies that came."""
    _status(kit, "silo", as_json=as_json)


def _stop(path: Path, role: str) -> None:
    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.processes import stop

    with reporting(as_json=False):
        say("Stopped." if stop(read_kit(path, Role(role))) else "It was not running.")


def _status(path: Path, role: str, *, as_json: bool) -> None:
    import json
    from dataclasses import asdict

    require_flare()
    from fedtmle.deploy.kits import Role, read_kit
    from fedtmle.deploy.parties import status_of

    with reporting(as_json=as_json):
        status = status_of(read_kit(path, Role(role)))
        say(json.dumps(asdict(status)) if as_json else str(status))
        if not status.running:
            raise typer.Exit(int(Exit.NOT_CONVERGED))
