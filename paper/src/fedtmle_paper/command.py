"""``fedtmle reproduce``."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path

import typer


class Wanted(StrEnum):
    """The figures that `reproduce` can draw."""

    ONE = "1"
    TWO = "2"
    THREE = "3"
    FOUR = "4"
    EXTRA = "extra"
    ALL = "all"
    DISCLOSURE = "disclosure"


def reproduce(
    figure: Wanted = typer.Option(
        Wanted.ALL,
        help="1: loss against time. 2: EIF residual against time. 3: residual at a time budget. 4: loss at "
        "200 rounds. extra: costs, retirement, coverage. all: these. disclosure: section 4.3, alone.",
    ),
    quick: bool = typer.Option(False, "--quick", help="Small data: what it looks like, in seconds."),
    seed: int = typer.Option(1, min=0, help="The first seed."),
    replicates: int = typer.Option(1, min=1, help="How many seeds; the paper's sentences need at least 5."),
    latency: float = typer.Option(5.0, min=0.0, help="Milliseconds per round on the link."),
    workers: int | None = typer.Option(None, min=1, help="Worker processes; as a rule 2, for --quick 1."),
    out: Path = typer.Option(Path("reproduce"), help="The folder for figures, tables and RESULTS.md."),
    cache: Path | None = typer.Option(
        None, help="A folder that keeps what was measured, so that an interrupted run goes on."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the names of the written files as JSON."),
    quiet: bool = typer.Option(False, "--quiet", help="No progress display."),
) -> None:
    """Run the paper's experiments: PNG, SVG and CSV of each figure, and RESULTS.md."""
    from fedtmle_paper.reproduce.run import Order, carry_out
    from fedtmle_paper.reproduce.scenario import QUICK, Scale

    if figure is Wanted.DISCLOSURE:
        from fedtmle_paper.reproduce.disclosure import draw

        draw(out)
        typer.echo(f"Written: disclosure.png, .svg and .csv in {out}.")
        return
    numbered = figure not in (Wanted.EXTRA, Wanted.ALL)
    every = (1, 2, 3, 4) if figure is Wanted.ALL else ()
    order = Order(
        figures=(int(figure),) if numbered else every,
        extra=not numbered,
        seeds=range(seed, seed + replicates),
        scale=QUICK if quick else Scale(),
        latency=latency / 1e3,
        # A worker compiles the kernels first: on small data one process is done before two have started.
        workers=workers or (1 if quick else min(2, os.cpu_count() or 1)),
        out=out,
        cache=cache,
    )
    results = carry_out(order, quiet=quiet or as_json)
    if as_json:
        written = sorted(str(path) for path in results.parent.iterdir() if path.is_file())
        typer.echo(json.dumps({"results": str(results), "written": written}))
    else:
        typer.echo(results)
