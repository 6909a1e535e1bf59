"""``fedtmle demo``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from fedtmle.cli.exits import reporting
from fedtmle.cli.extensions import DEMOS, fail_without_paper, load
from fedtmle.cli.report import require_folder, write_page


class DemoStudy(StrEnum):
    """The studies that `demo` can run."""

    IHDP = "ihdp"
    TRANSPORT = "transport"


def demo(
    study: DemoStudy = typer.Option(
        DemoStudy.IHDP,
        help="ihdp: the effect of early intervention on IQ, 8 real hospitals. "
        "transport: the paper's benchmark, 10 silos, 10,000 records (package fedtmle-paper).",
    ),
    epsilon: float | None = typer.Option(
        None,
        help="Add noise for differential privacy with this epsilon (ihdp): the trial, and one that is 100 "
        "times as large.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the federated result as JSON."),
    report: Path | None = typer.Option(None, "--report", help="Write the result here as an HTML page."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
) -> None:
    """Run a whole federated study on this machine, beside the same study pooled."""
    require_folder(report, "--report")
    if epsilon is not None:
        from fedtmle.demo_private import ihdp_private

        if study is not DemoStudy.IHDP:
            raise typer.BadParameter("only --study ihdp runs with noise", param_hint="--epsilon")
        with reporting(as_json=as_json):
            document = ihdp_private(epsilon, as_json=as_json, quiet=quiet)
    else:
        if study is DemoStudy.IHDP:
            from fedtmle.demo import ihdp as run
        else:
            run = load(DEMOS, study.value) or fail_without_paper(f"fedtmle demo --study {study.value}")
        pilot = as_json and study is DemoStudy.TRANSPORT  # `bounds --pilot` reads this
        document = run(as_json=as_json, quiet=quiet, observe=report is not None or pilot)
    if report is not None:
        write_page(document, report)
        if not as_json:
            typer.echo(f"\nThe report: {report.absolute().as_uri()}")
