"""Commands of a silo's owner, on the silo's machine: ``fedtmle silo``, ``ledger`` and ``risk``.

The ledger lists the requests that the silo received, its decisions and its replies.
"""

from __future__ import annotations

import importlib.util
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.base import DECIDE, Exit, ReaderGroup, epilog, reporting, say
from fedtmle.layout import visible

if TYPE_CHECKING:
    from fedtmle.protocol.plan import Plan
    from fedtmle.studies.home import Home


app = typer.Typer(
    cls=ReaderGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Preview what would leave your silo, approve or reject a study, and run the silo.",
)

STUDY = typer.Argument(..., help="The study file, study.toml, as the statistician sent it.")
SILO = typer.Option(Path("silo.toml"), "--silo", help="This silo's file.")
LOWER = typer.Option(
    [],
    "--lower",
    metavar="KEY=NUMBER",
    help="Make a limit of your policy laxer than the package's own, for this plan only.",
)
REASON = typer.Option("", "--reason", help="Why; it is signed, and the study's result states it.")


@app.command(rich_help_panel=DECIDE, epilog=epilog("silo preview study.toml --silo silo.toml"))
def preview(
    study: Path = STUDY,
    silo: Path = SILO,
    as_json: bool = typer.Option(False, "--json", help="Print the preview as JSON."),
    lower: list[str] = LOWER,
    reason: str = REASON,
) -> None:
    """Rehearse a study on your own rows: show each kind of message that would leave, and your limits."""
    import json

    from fedtmle.studies.home import Home
    from fedtmle.studies.preview import preview as rehearse
    from fedtmle.text.approval import render_preview

    with reporting(as_json=as_json):
        view = rehearse(_plan(study), _lowered(Home.of(silo), lower, reason).file)
        say(json.dumps(view.to_dict()) if as_json else render_preview(view))
        if view.refused_by:
            raise typer.Exit(int(Exit.REFUSED))


@app.command(
    rich_help_panel=DECIDE, epilog=epilog("silo assess study.toml --silo silo.toml --out assessment.md")
)
def assess(
    study: Path = STUDY,
    silo: Path = SILO,
    out: Path | None = typer.Option(None, "--out", help="The file to write; otherwise it is printed."),
) -> None:
    """Write a data-protection impact summary of a study, in the terms of the GDPR, for your officer."""
    import datetime

    from fedtmle.studies.approval import review
    from fedtmle.studies.home import Home
    from fedtmle.studyfile.file import file_plan, read_study
    from fedtmle.text.assessment import render

    with reporting(as_json=False):
        file, home = read_study(study), Home.of(silo)
        today = datetime.datetime.now(datetime.UTC).date()
        text = render(file_plan(file), file.study, home.file, review(file, home), today)
        if out is None:
            say(text, nl=False)
        else:
            out.write_text(text, encoding="utf-8")
            say(f"Written: {out}")


@app.command(
    rich_help_panel=DECIDE,
    epilog=epilog(
        "silo approve study.toml --silo silo.toml",
        "silo approve study.toml --silo silo.toml --note 'ethics 12/2026'",
        "silo approve study.toml --lower min_arm_rows=5 --reason 'ethics 12'",
    ),
)
def approve(
    study: Path = STUDY,
    silo: Path = SILO,
    note: str = typer.Option("", help="A note for your own records."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask for confirmation."),
    lower: list[str] = LOWER,
    reason: str = REASON,
) -> None:
    """Approve one plan, signed with the silo's key. A changed study or changed data need a new approval."""
    from fedtmle.studies.approval import review
    from fedtmle.studies.home import Home
    from fedtmle.studyfile.file import file_plan, read_study
    from fedtmle.text.approval import refusal, render_approval

    with reporting(as_json=False):
        file, home = read_study(study), _lowered(Home.of(silo), lower, reason)
        plan = file_plan(file)
        shown = review(file, home)
        say(render_approval(shown))
        if shown.preview.conflicts:
            raise typer.Exit(int(Exit.REFUSED))
        asked = f"Approve plan {plan.digest.hex()} for silo '{visible(home.file.name)}'?"
        if not yes and not typer.confirm(asked):
            say("Not approved; nothing was recorded.")
            raise typer.Exit(int(Exit.DEFECTS))
        home.approve(plan, note=note, bits=shown.bits)
        if shown.preview.refused_by:
            say(f"Approved, but your silo will refuse the study as it is. {refusal(shown.preview)}")
        else:
            say("Approved. `fedtmle silo reject` revokes it.")


@app.command(rich_help_panel=DECIDE, epilog=epilog("silo reject study.toml --silo silo.toml"))
def reject(
    study: Path = STUDY,
    silo: Path = SILO,
    note: str = typer.Option("", help="A note for your own records."),
) -> None:
    """Reject a plan, or revoke its approval: from then on the silo answers no query of it."""
    from fedtmle.studies.home import Home

    with reporting(as_json=False):
        plan, home = _plan(study), Home.of(silo)
        home.reject(plan, note=note)
        say(f"Rejected: plan {plan.digest.hex()}")
        say("Your silo answers no further request of it. Answers already sent cannot be recalled.")


@app.command(rich_help_panel=DECIDE, epilog=epilog("silo decisions --silo silo.toml"))
def decisions(
    silo: Path = SILO, as_json: bool = typer.Option(False, "--json", help="Print the decisions as JSON.")
) -> None:
    """List every decision of this silo's owner in order, and the silo's public keys."""
    import json

    import msgspec

    from fedtmle.studies.approval import decided, fingerprint_of
    from fedtmle.studies.home import Home
    from fedtmle.text.approval import render_decision

    with reporting(as_json=as_json):
        home = Home.of(silo)
        made = decided(home)
        if as_json:
            rows = [
                {**msgspec.to_builtins(each.decision), "in_force": each.in_force, "answers": each.answers}
                for each in made
            ]
            say(json.dumps({"key": home.key.public_keys.hex(), "decisions": rows}))
            return
        say(f"Public keys {home.key.public_keys.hex()}")
        own = (home.key.public, home.key.mask_key.public)
        say(f"Their fingerprints {' and '.join(map(fingerprint_of, own))}")
        for each in made:
            say(render_decision(each))


@app.command("home", rich_help_panel=DECIDE, epilog=epilog("silo home --silo silo.toml --create"))
def show_home(
    silo: Path = SILO,
    create: bool = typer.Option(False, "--create", help="Make the home, once for your institution."),
    pardon: str = typer.Option(
        "", metavar="KEY", help="Strike out the refusals charged to a server's key, or to those 'unsigned'."
    ),
) -> None:
    """Show your institution's home: where it is, and what it remembers; or make it.

    It holds keys, ledgers and the memory of whom studies were about, for all silos of the institution.
    """
    from fedtmle.studies.home import Home
    from fedtmle.text.home import render_home

    with reporting(as_json=False):
        home = Home.create(silo) if create else Home.of(silo)
        if pardon:
            home.pardon(pardon)
        say(render_home(home.account()))
        if create:
            say("Back it up: without its key nothing in it can be read.")


def _lowered(home: Home, limits: list[str], reason: str) -> Home:
    """Return the silo's home with these limits laxer, in addition to those of its file."""
    from fedtmle.errors import InputError
    from fedtmle.lowered import LoweredLimit

    if not limits:
        if reason:
            raise InputError("--reason: this is for --lower KEY=NUMBER; use --note for your own records")
        return home
    given = []
    for limit in limits:
        key, _, number = limit.partition("=")
        try:
            given.append(LoweredLimit(key.strip(), float(number), reason))
        except ValueError:
            raise InputError(f"--lower: expected KEY=NUMBER, as in min_arm_rows=5, got '{limit}'") from None
    return home.lowering([*home.file.policy.lowered, *given])


def _plan(study: Path) -> Plan:
    from fedtmle.studyfile.file import file_plan, read_study

    return file_plan(read_study(study))


ledger_app = typer.Typer(
    cls=ReaderGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Read and verify a silo's ledger: every request, decision and reply.",
)

LEDGER = typer.Argument(..., help="The ledger, ledger.jsonl in the silo's folder of its home.")


@ledger_app.command(epilog=epilog("ledger verify home/hospitals/north/ledger.jsonl"))
def verify(ledger: Path = LEDGER) -> None:
    """Check every line against its hash and the line before it, and the ledger against its signed head."""
    from fedtmle.runtime.ledger import read
    from fedtmle.runtime.ledger import verify as check
    from fedtmle.runtime.signing import head_path
    from fedtmle_core.home import key_beside

    with reporting(as_json=False):
        for _ in read(ledger):  # also notices a last line that is incomplete
            pass
        key = key_beside(ledger)
        count, head = check(ledger, None if key is None else key.public)
        say(f"{count} line(s), unbroken; the last one's hash is {head}")
        if key is not None and head_path(ledger).is_file():
            say("The silo's key signed its head: no line is missing.")
            return
        say(
            "The file cannot show that lines were cut off at its end: compare this hash\n"
            "with one that you noted elsewhere."
        )


@ledger_app.command(epilog=epilog("ledger show home/hospitals/north/ledger.jsonl"))
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


@ledger_app.command(epilog=epilog("ledger studies home/hospitals/north/ledger.jsonl"))
def studies(
    ledger: Path = LEDGER, as_json: bool = typer.Option(False, "--json", help="Print the accounts as JSON.")
) -> None:
    """Print what every study asked, what was answered and refused, and what each spent."""
    import json
    from dataclasses import asdict

    from fedtmle.runtime import ledger as ledger_module
    from fedtmle.runtime.ledger import read
    from fedtmle.text.approval import render_accounts

    with reporting(as_json=as_json):
        recorded = (
            ledger_module.studies(read(ledger)) if ledger.exists() or not ledger.parent.is_dir() else []
        )
        if as_json:
            rows = [{**asdict(study), "kinds": list(map(asdict, study.kinds.values()))} for study in recorded]
            say(json.dumps({"studies": rows}))
        else:
            say(render_accounts(recorded, titles(ledger.parent)))


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


@ledger_app.command(epilog=epilog("ledger export home/hospitals/north/ledger.jsonl --out run.transcript"))
def export(
    ledger: Path = LEDGER,
    out: Path = typer.Option(..., "--out", help="The transcript to write."),
    session: str = typer.Option("", help="The session, in hexadecimal; by default the last one."),
) -> None:
    """Write one session's requests and replies as a transcript, for `fedtmle risk --transcript`."""
    from fedtmle.runtime.ledger import of_ledger, read

    with reporting(as_json=False):
        transcript = of_ledger(list(read(ledger)), session)
        transcript.save(out)
        say(f"{len(transcript.exchanges)} exchange(s) of session {transcript.session.hex()} in {out}")


def risk(
    study: Path = typer.Argument(..., help="The study file, study.toml."),
    silo: str = typer.Option(..., help="This silo: its silo.toml, or its name in the study."),
    transcript: Path | None = typer.Option(
        None, help="After a run: its transcript (run --transcript). Without one, the planned queries."
    ),
    attribute: list[str] = typer.Option(
        [],
        metavar="COLUMN",
        help="A column to attack; repeat for more. By default the outcome and the treatment.",
    ),
    attacker: list[str] = typer.Option(
        [],
        metavar="ATTACKER",
        help="What the attacker knows beforehand: others, design or nothing; repeat for more. Default: all.",
    ),
    noise: float = typer.Option(
        0.0,
        min=0.0,
        help="eta: noise declared to be in the answers, as the norm over all of them (means per record).",
    ),
    radius: float | None = typer.Option(
        None, min=0.0, help="Half the range in which the attacker knows each value beforehand."
    ),
    figure: Path | None = typer.Option(
        None, help="Draw what stays unknown of each column, as .png, .svg or .pdf."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the audit as JSON."),
) -> None:
    """Audit disclosure before or after a study: how well could a server know my records from my answers?

    Runs inside the silo, reads its table, and sends nothing.
    """
    import json

    from fedtmle.layout import visible
    from fedtmle.privacy.audit import Attacker
    from fedtmle.studies.risk import risk as audit
    from fedtmle.studyfile.file import read_study
    from fedtmle.text.approval import render_risk

    unknown = [name for name in attacker if name not in {known.value for known in Attacker}]
    if unknown:
        raise typer.BadParameter(f"expected one of {', '.join(Attacker)}", param_hint="--attacker")
    if figure is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "drawing needs matplotlib: pip install 'fedtmle[figures]'", param_hint="--figure"
        )
    if figure is not None and figure.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter("expected a file ending in .png, .svg or .pdf", param_hint="--figure")
    with reporting(as_json=as_json):
        result = audit(
            read_study(study),
            silo,
            transcript=transcript,
            attributes=attribute,
            attackers=[Attacker(name) for name in attacker] or tuple(Attacker),
            noise=noise,
            radius=radius,
        )
        document = result.to_dict()
        if figure is not None:
            from fedtmle.plots import draw_risk

            draw_risk(result.audit, figure)
        if as_json:
            say(json.dumps(document))
            return
        title, _, rest = render_risk(document).partition("\n")
        typer.echo(typer.style(visible(title), bold=True))
        say(rest)
