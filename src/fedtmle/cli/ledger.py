"""``fedtmle ledger``: what a silo has been asked, what it decided, and what it said."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import typer

from fedtmle.cli.exits import CODES, reporting

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A silo's ledger: every request, decision and reply, each line chained to the one before.",
)

LEDGER = typer.Argument(..., help="The ledger, ledger.jsonl in the silo's .fedtmle folder.")


@app.command(epilog=CODES)
def verify(ledger: Path = LEDGER) -> None:
    """Check every line against its hash and the line before it."""
    from fedtmle.runtime.ledger import START, read

    with reporting(as_json=False):
        count, head = 0, START
        for line in read(ledger):
            count, head = line["line"], line["hash"]
        typer.echo(f"{count} line(s), unbroken; the last one's hash is {head}")
        typer.echo(
            "Lines cut off at the end leave no trace in the file: compare this hash with one\n"
            "that was kept elsewhere."
        )


@app.command(epilog=CODES)
def show(ledger: Path = LEDGER) -> None:
    """Print the ledger, one line per event."""
    from fedtmle.layout import aligned
    from fedtmle.runtime.ledger import read

    with reporting(as_json=False):
        for day, lines in groupby(read(ledger), key=lambda line: (line["time"][:10], line["session"][:16])):
            rows = [("time, what was asked", "round", "decision", "why", "numbers", "bits")]
            for line in lines:
                what = f"{line['time'][11:19]} {line['query'] or line['request']}"
                why = line["key"] or line["reason"] or "-"
                totals = (f"{line['functionals']:,}", f"{line['bits']:,}")
                rows.append((what, str(line["round"]), line["decision"], why, *totals))
            typer.echo(f"{day[0]}, session {day[1] or '(none yet)'}")
            typer.echo("\n".join(aligned(rows)) + "\n")


@app.command(epilog=CODES)
def export(
    ledger: Path = LEDGER,
    out: Path = typer.Option(..., "--out", help="Write the exchanges of one session here, as a transcript."),
    session: str = typer.Option("", help="The session, in hex; the last one if none is given."),
) -> None:
    """Write one session's exchanges as a transcript, for an audit of what was told."""
    from fedtmle.runtime.ledger import read
    from fedtmle.runtime.transcript import of_ledger

    with reporting(as_json=False):
        transcript = of_ledger(list(read(ledger)), session)
        transcript.save(out)
        typer.echo(f"{len(transcript.exchanges)} exchange(s) of session {transcript.session.hex()} in {out}")
