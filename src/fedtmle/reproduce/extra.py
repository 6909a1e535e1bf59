"""The extra experiments together: their tasks, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedtmle.reproduce import extra_figures, records
from fedtmle.reproduce.bounds import TOLERANCES, Cost, costs
from fedtmle.reproduce.coverage import Coverage, replicate
from fedtmle.reproduce.rebound import Rebound, rebounds
from fedtmle.reproduce.retirement import Retirement, retirements
from fedtmle.reproduce.scenario import QUICK, Cell, Dgp, Partition, Scale
from fedtmle.reproduce.style import house_style, save

DATA_SETS = 200  # of each distribution, for coverage
REBOUNDS = 50  # of each distribution
QUICK_DATA_SETS = 10
QUICK_REBOUNDS = 4
QUICK_TOLERANCES = (1e-1, 1e-2)

Table = list[Cost] | list[Rebound] | list[Retirement] | list[Coverage]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One independent piece of work."""

    run: Callable[..., Table]
    arguments: tuple[object, ...]


@dataclass(kw_only=True)
class Extra:
    """All measurements of the extra experiments."""

    costs: list[Cost] = field(default_factory=list)
    rebounds: list[Rebound] = field(default_factory=list)
    retirements: list[Retirement] = field(default_factory=list)
    coverage: list[Coverage] = field(default_factory=list)

    def add(self, table: Table) -> None:
        for row in table:
            if isinstance(row, Cost):
                self.costs.append(row)
            elif isinstance(row, Rebound):
                self.rebounds.append(row)
            elif isinstance(row, Retirement):
                self.retirements.append(row)
            else:
                self.coverage.append(row)


def experiments(seeds: Sequence[int], scale: Scale) -> list[Experiment]:
    """Costs on the first seed's distributions, rebounds, retirement on every seed's panels, coverage."""
    quick = scale == QUICK
    M = scale.reference_clients

    def cell(seed: int, dgp: Dgp, partition: Partition) -> Cell:
        return Cell(seed=seed, dgp=dgp, partition=partition, clients=M, scale=scale)

    tolerances = QUICK_TOLERANCES if quick else TOLERANCES
    data_sets = QUICK_DATA_SETS if quick else DATA_SETS
    samples = QUICK_REBOUNDS if quick else REBOUNDS
    return [
        *(
            Experiment(run=costs, arguments=(cell(seeds[0], dgp, Partition.RANDOM), tolerances))
            for dgp in Dgp
        ),
        *(
            Experiment(run=rebounds, arguments=(number, dgp, scale))
            for number in range(samples)
            for dgp in Dgp
        ),
        *(
            Experiment(run=retirements, arguments=(cell(seed, dgp, partition),))
            for seed in seeds
            for dgp in Dgp
            for partition in Partition
        ),
        *(
            Experiment(run=replicate, arguments=((number, dgp, scale),))
            for number in range(data_sets)
            for dgp in Dgp
        ),
    ]


def perform(experiment: Experiment) -> Table:
    return experiment.run(*experiment.arguments)


def publish(extra: Extra, out: Path) -> None:
    """CSV, PNG and SVG of each experiment."""
    records.write(out / "extra-cost.csv", map(asdict, extra.costs))
    records.write(out / "extra-rebound.csv", map(asdict, extra.rebounds))
    records.write(out / "extra-retirement.csv", map(asdict, extra.retirements))
    records.write(
        out / "extra-coverage.csv",
        ({**asdict(c), "covers": c.covers, "law_covers": c.law_covers} for c in extra.coverage),
    )
    with house_style():
        save(extra_figures.cost_figure(extra.costs), out, "extra-cost")
        save(extra_figures.retirement_figure(extra.retirements), out, "extra-retirement")
        save(extra_figures.coverage_figure(extra.coverage), out, "extra-coverage")
