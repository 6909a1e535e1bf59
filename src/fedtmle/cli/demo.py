"""``fedtmle demo``."""

from __future__ import annotations

from enum import StrEnum

import typer


class Study(StrEnum):
    """The studies that `demo` can run."""

    IHDP = "ihdp"
    TRANSPORT = "transport"


def demo(
    study: Study = typer.Option(
        Study.IHDP,
        help="ihdp: the effect of early intervention on IQ, 8 real hospitals. "
        "transport: the paper's benchmark, 10 silos, 10,000 records.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the federated result as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
) -> None:
    """Run a whole federated study on this machine, beside the same study pooled."""
    from fedtmle import demo as demonstrations

    run = demonstrations.ihdp if study is Study.IHDP else demonstrations.transport
    run(as_json=as_json, quiet=quiet)
