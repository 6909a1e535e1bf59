"""``fedtmle reproduce``: measures, draws, writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedtmle.errors import InputError
from fedtmle.reproduce import campaign, extra, figures, records
from fedtmle.reproduce.extra import Extra
from fedtmle.reproduce.measure import Measured
from fedtmle.reproduce.report import Effort, report
from fedtmle.reproduce.scenario import Scale
from fedtmle.reproduce.study import LATENCY, Study


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is wanted: which figures, of which seeds, at what size, where to."""

    figures: Sequence[int] = (1, 2, 3, 4)
    extra: bool = True
    seeds: Sequence[int] = (1,)
    scale: Scale = Scale()
    latency: float = LATENCY
    workers: int = 1
    out: Path = Path("reproduce")

    def __post_init__(self) -> None:
        if not self.seeds:
            raise InputError("replicates: expected at least 1")
        if not self.latency >= 0:
            raise InputError(f"latency: expected a time of at least 0, not {self.latency}")
        if self.workers < 1:
            raise InputError(f"workers: expected at least 1, not {self.workers}")

    @property
    def clients(self) -> Sequence[int]:
        """Figures 1 and 2 need the reference number of clients alone."""
        return self.scale.clients if {3, 4} & set(self.figures) else (self.scale.reference_clients,)


def carry_out(order: Order, *, quiet: bool = False) -> Path:
    """Everything that was ordered; returns the path of RESULTS.md."""
    order.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    cells = campaign.cells(order.seeds, order.clients, order.scale) if order.figures else []
    pieces = extra.experiments(order.seeds, order.scale) if order.extra else []
    measured: list[Measured] = []
    found = Extra() if order.extra else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bar:
        if cells:
            task = bar.add_task("cells of the figures", total=len(cells))
            for runs in campaign.shared(campaign.run_cell, cells, order.workers):
                measured += runs
                bar.advance(task)
        if found is not None:
            task = bar.add_task("extra experiments", total=len(pieces))
            for table in campaign.shared(extra.perform, pieces, order.workers):
                found.add(table)
                bar.advance(task)
    study = Study(measured, order.latency) if measured else None
    wall = time.perf_counter() - began
    return publish(order, study, found, wall)


def publish(order: Order, study: Study | None, found: Extra | None, wall: float) -> Path:
    """Figures, tables and RESULTS.md of what was measured."""
    compute = 0.0
    if study is not None:
        figures.draw(study, order.figures, order.out)
        for number in order.figures:
            records.write(order.out / f"figure{number}.csv", _TABLES[number](study))
        for name, table in (
            ("runs", records.runs),
            ("rounds", records.rounds),
            ("reference", records.reference),
        ):
            records.write(order.out / f"{name}.csv", table(study))
        compute = sum(t.silos + t.server for run in study.runs for t in run.times)
    if found is not None:
        extra.publish(found, order.out)
    path = order.out / "RESULTS.md"
    text = report(study, found, Effort(wall=wall, compute=compute, workers=order.workers))
    path.write_text(text, encoding="utf-8")
    return path


_TABLES: dict[int, Callable[[Study], list[records.Row]]] = {
    1: records.trajectories,
    2: records.trajectories,
    3: records.at_time_budget,
    4: records.at_round_budget,
}
