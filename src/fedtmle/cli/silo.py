"""``fedtmle silo``: what a silo's owner does, on the silo's own machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedtmle.cli.exits import CODES, Exit, reporting

if TYPE_CHECKING:
    from fedtmle.protocol.plan import Plan

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A silo's own side: see what would leave, say yes or no, and look at what was decided.",
)

STUDY = typer.Argument(..., help="The study file, study.toml, as the statistician sent it.")
SILO = typer.Option(Path("silo.toml"), "--silo", help="This silo's own file.")


@app.command(epilog=CODES)
def preview(
    study: Path = STUDY,
    silo: Path = SILO,
    as_json: bool = typer.Option(False, "--json", help="Print the preview as JSON."),
) -> None:
    """Rehearse a study on your own rows: each kind of message that would leave, and your floors."""
    import json

    from fedtmle.data.silofile import read_silo_file
    from fedtmle.studies.preview import preview as rehearse
    from fedtmle.text.preview import render

    with reporting(as_json=as_json):
        view = rehearse(_plan(study), read_silo_file(silo))
        typer.echo(json.dumps(view.to_dict()) if as_json else render(view))
        if view.refused_by:
            raise typer.Exit(int(Exit.REFUSED))


@app.command(epilog=CODES)
def approve(
    study: Path = STUDY,
    silo: Path = SILO,
    note: str = typer.Option("", help="A note for your own records."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask again."),
) -> None:
    """Approve one plan, signed with the silo's key. Any change to the study voids it."""
    from fedtmle.studies.home import Home
    from fedtmle.studyfile.file import study_of

    with reporting(as_json=False):
        plan, home = _plan(study), Home.of(silo)
        typer.echo(study_of(plan).target.question)
        typer.echo(f"Plan {plan.digest.hex()}")
        typer.echo(f"Silos: {', '.join(plan.silos)}")
        if not yes:
            typer.confirm(f"Approve this plan for silo '{home.file.name}'?", abort=True)
        home.approvals.decide(plan.digest, approved=True, note=note)
        typer.echo("Approved. `fedtmle silo reject` takes it back.")


@app.command(epilog=CODES)
def reject(
    study: Path = STUDY,
    silo: Path = SILO,
    note: str = typer.Option("", help="A note for your own records."),
) -> None:
    """Reject a plan, or take an approval back: from then on the silo answers nothing in it."""
    from fedtmle.studies.home import Home

    with reporting(as_json=False):
        plan, home = _plan(study), Home.of(silo)
        home.approvals.decide(plan.digest, approved=False, note=note)
        typer.echo(f"Rejected: plan {plan.digest.hex()}")


@app.command(epilog=CODES)
def decisions(
    silo: Path = SILO, as_json: bool = typer.Option(False, "--json", help="Print them as JSON.")
) -> None:
    """The plans that this silo has approved or rejected, and its public key."""
    import json

    import msgspec

    from fedtmle.studies.home import Home

    with reporting(as_json=as_json):
        home = Home.of(silo)
        found = home.approvals.current().values()
        if as_json:
            rows = [msgspec.to_builtins(decision) for decision in found]
            typer.echo(json.dumps({"key": home.key.public.hex(), "decisions": rows}))
            return
        typer.echo(f"Public key {home.key.public.hex()}")
        for decision in found:
            typer.echo(
                f"{decision.time}  {'approved' if decision.approved else 'rejected'}  {decision.plan[:16]}"
                f"  {decision.note}".rstrip()
            )


def _plan(study: Path) -> Plan:
    from fedtmle.studyfile.file import file_plan, read_study

    return file_plan(read_study(study))
