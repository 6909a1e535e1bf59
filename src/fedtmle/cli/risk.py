"""``fedtmle risk``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import typer

from fedtmle.cli.exits import reporting, say


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
    from fedtmle.text.risk import render

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
            from fedtmle.report.audit_figure import draw_risk

            draw_risk(result.audit, figure)
        if as_json:
            say(json.dumps(document))
            return
        title, _, rest = render(document).partition("\n")
        typer.echo(typer.style(visible(title), bold=True))
        say(rest)
