"""``fedtmle ledger``: the requests that a silo received, its decisions and its replies."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import typer

from fedtmle.cli.exits import reporting, say
from fedtmle.cli.help import ReaderGroup, epilog

app = typer.Typer(
    cls=ReaderGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Read and verify a silo's ledger: every request, decision and reply.",
)

LEDGER = typer.Argument(..., help="The ledger, ledger.jsonl in the silo's .fedtmle folder.")


@app.command(epilog=epilog("ledger verify .fedtmle/ledger.jsonl"))
def verify(ledger: Path = LEDGER) -> None:
    """Check every line against its hash and the line before it, and the ledger against its signed head."""
    from fedtmle.runtime.heads import head_path
    from fedtmle.runtime.ledger import read
    from fedtmle.runtime.ledger import verify as check
    from fedtmle.runtime.signing import SigningKey

    with reporting(as_json=False):
        for _ in read(ledger):  # also notices a last line that is incomplete
            pass
        key = ledger.parent / "key"
        count, head = check(ledger, SigningKey.at(key).public if key.is_file() else None)
        say(f"{count} line(s), unbroken; the last one's hash is {head}")
        if key.is_file() and head_path(ledger).is_file():
            say("The silo's key signed its head: no line is missing.")
            return
        say(
            "The file cannot show that lines were cut off at its end: compare this hash\n"
            "with one that you noted elsewhere."
        )


@app.command(epilog=epilog("ledger show .fedtmle/ledger.jsonl"))
def show(ledger: Path = LEDGER) -> None:
    """Print the ledger, one line per event."""
    from fedtmle.layout import aligned
    from fedtmle.runtime.ledger import read

    with reporting(as_json=False):
        for day, lines in groupby(read(ledger), key=lambda line: (line["time"][:10], line["session"][:16])):
            rows = [("time, request", "round", "decision", "why", "numbers", "bits")]
            for line in lines:
                request = f"{line['time'][11:19]} {line['query'] or line['request']}"
                why = line["key"] or line["reason"] or "-"
                totals = (f"{line['functionals']:,}", f"{line['bits']:,}")
                rows.append((request, str(line["round"]), line["decision"], why, *totals))
            say(f"{day[0]}, session {day[1] or '(none yet)'}")
            say("\n".join(aligned(rows)) + "\n")


@app.command(epilog=epilog("ledger studies .fedtmle/ledger.jsonl"))
def studies(
    ledger: Path = LEDGER, as_json: bool = typer.Option(False, "--json", help="Print the accounts as JSON.")
) -> None:
    """Print what every study asked, what was answered and refused, and what each spent."""
    import json
    from dataclasses import asdict

    from fedtmle.runtime import accounts
    from fedtmle.runtime.ledger import read
    from fedtmle.text.accounts import render

    with reporting(as_json=as_json):
        recorded = accounts.studies(read(ledger)) if ledger.exists() or not ledger.parent.is_dir() else []
        if as_json:
            rows = [{**asdict(study), "kinds": list(map(asdict, study.kinds.values()))} for study in recorded]
            say(json.dumps({"studies": rows}))
        else:
            say(render(recorded, titles(ledger.parent)))


def titles(folder: Path) -> dict[str, str]:
    """Return the title, or the question, of each study that came to the silo with this folder, by plan."""
    from fedtmle.errors import InputError
    from fedtmle.studyfile.file import file_plan, read_study

    names = {}
    for path in sorted(folder.glob("studies/*.toml")):
        try:
            study = read_study(path, samples=False)
            if file_plan(study).digest.hex() == path.stem:  # else it was announced under another version
                names[path.stem] = study.study.title or study.study.target.question
        except InputError:  # a study file of another version
            continue
    return names


@app.command(epilog=epilog("ledger export .fedtmle/ledger.jsonl --out run.transcript"))
def export(
    ledger: Path = LEDGER,
    out: Path = typer.Option(..., "--out", help="The transcript to write."),
    session: str = typer.Option("", help="The session, in hexadecimal; by default the last one."),
) -> None:
    """Write one session's requests and replies as a transcript, for `fedtmle risk --transcript`."""
    from fedtmle.runtime.ledger import read
    from fedtmle.runtime.transcript import of_ledger

    with reporting(as_json=False):
        transcript = of_ledger(list(read(ledger)), session)
        transcript.save(out)
        say(f"{len(transcript.exchanges)} exchange(s) of session {transcript.session.hex()} in {out}")
