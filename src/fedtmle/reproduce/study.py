"""All measured runs as one table: lookups, the reference unit of time, losses along a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import final

from fedtmle.errors import InputError
from fedtmle.reproduce.measure import Measured
from fedtmle.reproduce.scenario import Cell, Dgp, Method, Partition, Scale

LATENCY = 0.005  # seconds per round, request and reply together
REFERENCE_DROP = 0.01
TIME_BUDGET = 1.5  # of figure 3, in reference units


@final
class Study:
    """The runs of a campaign, read at one link latency."""

    def __init__(self, runs: Sequence[Measured], latency: float = LATENCY) -> None:
        if not runs:
            raise InputError("runs: a study needs at least one")
        self.runs = tuple(runs)
        self.latency = latency
        self.scale: Scale = runs[0].cell.scale
        self._by_key = {_key(run.cell, run.method): run for run in runs}

    @cached_property
    def seeds(self) -> list[int]:
        return sorted({run.cell.seed for run in self.runs})

    @cached_property
    def clients(self) -> list[int]:
        return sorted({run.cell.clients for run in self.runs})

    def cells(self, seed: int) -> Iterator[Cell]:
        """The four panels at the reference number of clients."""
        for dgp in Dgp:
            for partition in Partition:
                yield self.cell(seed, dgp, partition, self.scale.reference_clients)

    def cell(self, seed: int, dgp: Dgp, partition: Partition, clients: int) -> Cell:
        return Cell(seed=seed, dgp=dgp, partition=partition, clients=clients, scale=self.scale)

    def run(self, cell: Cell, method: Method) -> Measured:
        return self._by_key[_key(cell, method)]

    def unit(self, seed: int) -> float:
        """Seconds of FedTMLE-G until r <= 0.01 r^0: DGP 1, random partition, M = 10."""
        cell = self.cell(seed, Dgp.GAUSSIAN, Partition.RANDOM, self.scale.reference_clients)
        run = self.run(cell, Method.GRADIENT)
        goal = REFERENCE_DROP * run.checkpoints[0].residual
        return next(c.elapsed(self.latency) for c in run.checkpoints if c.residual <= goal)

    def loss(self, run: Measured, units: float) -> float:
        """P_n L of the last density completed within so many reference units."""
        return run.at_time(units * self.unit(run.cell.seed), self.latency).loss

    def residual(self, run: Measured, units: float) -> float:
        """r of the last density completed within so many reference units."""
        return run.at_time(units * self.unit(run.cell.seed), self.latency).residual

    def mean_loss(self, run: Measured, units: float) -> float:
        """The loss of the current shared density, averaged over [0, units]."""
        end = units * self.unit(run.cell.seed)
        seen = [c for c in run.checkpoints if c.elapsed(self.latency) <= end]
        times = [c.elapsed(self.latency) for c in seen] + [end]
        return sum(c.loss * (b - a) for c, (a, b) in zip(seen, pairwise(times), strict=True)) / end

    def best(self, cell: Cell) -> float:
        """The lowest loss that any method reached on this cell's data, at any number of clients."""
        return min(
            c.loss
            for run in self.runs
            if (run.cell.seed, run.cell.dgp) == (cell.seed, cell.dgp)
            for c in run.checkpoints
        )

    def decrease(self, cell: Cell) -> float:
        """P_n L(p^0) less the best loss: the scale on which losses are compared."""
        return self.run(cell, Method.GRADIENT).checkpoints[0].loss - self.best(cell)


def _key(cell: Cell, method: Method) -> tuple[int, Dgp, Partition, int, Method]:
    return cell.seed, cell.dgp, cell.partition, cell.clients, method
