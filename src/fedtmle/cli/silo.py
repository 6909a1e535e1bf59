"""``fedtmle silo``: the commands of a silo's owner, on the silo's own machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.exits import Exit, reporting, say
from fedtmle.cli.help import DECIDE, ReaderGroup, epilog
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
    from fedtmle.text.preview import render

    with reporting(as_json=as_json):
        view = rehearse(_plan(study), _lowered(Home.of(silo), lower, reason).file)
        say(json.dumps(view.to_dict()) if as_json else render(view))
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
    from fedtmle.text.approval import render
    from fedtmle.text.preview import refusal

    with reporting(as_json=False):
        file, home = read_study(study), _lowered(Home.of(silo), lower, reason)
        plan = file_plan(file)
        shown = review(file, home)
        say(render(shown))
        if shown.conflicts:
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
