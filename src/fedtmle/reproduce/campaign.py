"""All runs of the figures: cells are independent, so worker processes share them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from fedtmle.model import kernels
from fedtmle.reproduce.measure import Measured, measure
from fedtmle.reproduce.scenario import Cell, Dgp, Method, Partition, Scale, build

WARM_UP = Scale(n=60, pilot=40, tolerance=0.1, coded_tolerance=0.3)
Task = TypeVar("Task")
Answer = TypeVar("Answer")


def cells(seeds: Sequence[int], clients: Sequence[int], scale: Scale) -> list[Cell]:
    """Every distribution, partition and number of clients, the long cells first."""
    return [
        Cell(seed=seed, dgp=dgp, partition=partition, clients=M, scale=scale)
        for seed in seeds
        for M in sorted(clients, reverse=True)
        for dgp in Dgp
        for partition in Partition
    ]


def run_cell(cell: Cell) -> list[Measured]:
    """Every method on one cell's data."""
    data = build(cell)
    return [measure(cell, data, method) for method in Method]


def prepare() -> None:
    """One thread per worker, whose CPU time is then all there is; compiled before anything is timed."""
    kernels.set_threads(1)
    run_cell(Cell(seed=0, dgp=Dgp.GAUSSIAN, partition=Partition.RANDOM, clients=2, scale=WARM_UP))


def shared(run: Callable[[Task], Answer], tasks: Sequence[Task], workers: int) -> Iterator[Answer]:
    """``run`` over ``tasks`` in their order, by so many processes; one works in this process."""
    if workers == 1:
        before = kernels.threads()
        prepare()
        try:
            yield from map(run, tasks)
        finally:
            kernels.set_threads(before)
        return
    spawn = multiprocessing.get_context("spawn")  # numba's threads do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=prepare) as pool:
        yield from pool.map(run, tasks)
