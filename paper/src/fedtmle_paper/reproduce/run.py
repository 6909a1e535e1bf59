"""``fedtmle reproduce``: measure, draw, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedtmle.errors import InputError
from fedtmle.plots import journal_style
from fedtmle_paper.reproduce.campaign import (
    LATENCY,
    Campaign,
    Row,
    at_round_budget,
    at_time_budget,
    reference,
    rounds,
    runs,
    trajectories,
    write,
)
from fedtmle_paper.reproduce.extra import (
    TOLERANCES,
    CodedCost,
    Coverage,
    Extra,
    Rebound,
    Retirement,
    costs,
    rebounds,
    replicate,
    retirements,
)
from fedtmle_paper.reproduce.figures import cost_figure, coverage_figure, draw, retirement_figure
from fedtmle_paper.reproduce.measure import Measured, run_scenario, scenarios, shared
from fedtmle_paper.reproduce.panels import PanelRun, panel
from fedtmle_paper.reproduce.report import Effort, report
from fedtmle_paper.reproduce.robustness import Retained, retained
from fedtmle_paper.reproduce.scenario import QUICK, Dgp, Partition, Scale, Scenario
from fedtmle_paper.reproduce.style import save

DATA_SETS = 200  # of each distribution, for coverage
REBOUNDS = 50  # of each distribution
SAMPLES = 100  # of retained estimates, from one population and from shifted ones
QUICK_DATA_SETS = 10
QUICK_REBOUNDS = 4
QUICK_SAMPLES = 4
QUICK_TOLERANCES = (1e-1, 1e-2)


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
    cache: Path | None = None

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
    chosen = scenarios(order.seeds, order.clients, order.scale) if order.figures else []
    pieces = experiments(order.seeds, order.scale) if order.extra else []
    measured: list[Measured] = []
    extra = Extra() if order.extra else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bar:
        if chosen:
            task = bar.add_task("scenarios of the figures", total=len(chosen))
            for done in shared(run_scenario, chosen, order.workers, order.cache):
                measured += done
                bar.advance(task)
        if extra is not None:
            task = bar.add_task("extra experiments", total=len(pieces))
            for table in shared(perform, pieces, order.workers, order.cache):
                extra.rows.extend(table)
                bar.advance(task)
    campaign = Campaign(measured, order.latency) if measured else None
    wall = time.perf_counter() - began
    return publish(order, campaign, extra, wall)


def publish(order: Order, campaign: Campaign | None, extra: Extra | None, wall: float) -> Path:
    """Figures, tables and RESULTS.md of what was measured."""
    compute = 0.0
    if campaign is not None:
        draw(campaign, order.figures, order.out)
        for number in order.figures:
            write(order.out / f"figure{number}.csv", _TABLES[number](campaign))
        for name, table in (
            ("runs", runs),
            ("rounds", rounds),
            ("reference", reference),
        ):
            write(order.out / f"{name}.csv", table(campaign))
        compute = sum(t.silos + t.server for run in campaign.measured for t in run.times)
    if extra is not None:
        _publish_extra(extra, order.out)
    path = order.out / "RESULTS.md"
    text = report(campaign, extra, Effort(wall=wall, compute=compute, workers=order.workers))
    path.write_text(text, encoding="utf-8")
    return path


_TABLES: dict[int, Callable[[Campaign], list[Row]]] = {
    1: trajectories,
    2: trajectories,
    3: at_time_budget,
    4: at_round_budget,
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One independent piece of work."""

    run: Callable[..., Sequence[object]]
    arguments: tuple[object, ...]


def experiments(seeds: Sequence[int], scale: Scale) -> list[Experiment]:
    """Return the extra experiments.

    Costs use the first seed alone, retirement and panels use all of them; the others draw seeds of their own.
    """
    quick = scale == QUICK
    M = scale.reference_clients

    def scenario(seed: int, dgp: Dgp, partition: Partition, clients: int = M) -> Scenario:
        return Scenario(seed=seed, dgp=dgp, partition=partition, clients=clients, scale=scale)

    tolerances = QUICK_TOLERANCES if quick else TOLERANCES
    data_sets = QUICK_DATA_SETS if quick else DATA_SETS
    samples = QUICK_REBOUNDS if quick else REBOUNDS
    return [
        *(
            Experiment(run=costs, arguments=(scenario(seeds[0], dgp, Partition.RANDOM), tolerances))
            for dgp in Dgp
        ),
        *(
            Experiment(run=rebounds, arguments=(number, dgp, scale))
            for number in range(samples)
            for dgp in Dgp
        ),
        *(
            Experiment(run=retirements, arguments=(scenario(seed, dgp, partition),))
            for seed in seeds
            for dgp in Dgp
            for partition in Partition
        ),
        *(
            Experiment(run=replicate, arguments=((number, dgp, scale),))
            for number in range(data_sets)
            for dgp in Dgp
        ),
        *(
            Experiment(run=panel, arguments=(scenario(seed, dgp, partition, clients),))
            for seed in seeds
            for dgp in Dgp
            for partition in Partition
            for clients in sorted({M, max(scale.clients)})
        ),
        *(
            Experiment(run=retained, arguments=(number, populations))
            for number in range(QUICK_SAMPLES if quick else SAMPLES)
            for populations in ("one", "shifted")
        ),
    ]


def perform(experiment: Experiment) -> Sequence[object]:
    """Return the table of one experiment, in whichever process runs it."""
    return experiment.run(*experiment.arguments)


_EXTRA_TABLES: dict[str, type[Any]] = {
    "cost": CodedCost,
    "rebound": Rebound,
    "retirement": Retirement,
    "coverage": Coverage,
    "panels": PanelRun,
    "robustness": Retained,
}


def _publish_extra(extra: Extra, out: Path) -> None:
    """CSV, PNG and SVG of each experiment."""
    for name, kind in _EXTRA_TABLES.items():
        derived = [key for key, value in vars(kind).items() if isinstance(value, property)]
        write(
            out / f"extra-{name}.csv",
            ({**asdict(row), **{key: getattr(row, key) for key in derived}} for row in extra.of(kind)),
        )
    with journal_style():
        save(cost_figure(extra.of(CodedCost)), out, "extra-cost")
        save(retirement_figure(extra.of(Retirement)), out, "extra-retirement")
        save(coverage_figure(extra.of(Coverage)), out, "extra-coverage")
