"""``fedtmle watch``."""

from __future__ import annotations

from pathlib import Path

import typer

from fedtmle.cli.exits import require_flare, say, serve_page


def watch(
    events: Path = typer.Argument(
        ..., help="The events of a run (run --events), the folder of a deployed run, or a silo's ledger."
    ),
    ledger: bool = typer.Option(False, "--ledger", help="The file is a silo's ledger."),
    port: int = typer.Option(8765, min=0, max=65535, help="The page's port; 0 for any free one."),
    host: str = typer.Option("127.0.0.1", help="The page's address; by default for this machine only."),
    silence: float = typer.Option(30.0, min=1.0, help="Seconds without news after which the page warns."),
    open_page: bool = typer.Option(False, "--open", help="Open the page in the browser."),
    as_json: bool = typer.Option(False, "--json", help="Print what the page would show now, and exit."),
    quiet: bool = typer.Option(False, "--quiet", help="Print nothing."),
) -> None:
    """Follow a run on a local web page, during the run or after it; Ctrl-C ends the view."""
    import json

    from fedtmle.watch.follow import EventTail, LedgerTail, RunTail
    from fedtmle.watch.server import LOOPBACK, WatchServer

    if events.is_dir() and not ledger:
        require_flare()
        look = RunTail(events).look
    else:
        look = (LedgerTail(events) if ledger else EventTail(events)).look
    if as_json:
        say(json.dumps(look(), allow_nan=False))
        return
    try:
        server = WatchServer(host, port, look, silence=silence)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port", param_hint="--port"
        ) from None
    if host not in LOOPBACK:
        say(f"Anyone who reaches {host} can see this view; it asks for no password.", err=True)
    line = f"Following {events} on {server.url}  (Ctrl-C ends the view, not the run)"
    serve_page(server, "" if quiet else line, server.url if open_page else None)
