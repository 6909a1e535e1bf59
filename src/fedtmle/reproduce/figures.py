"""Figures 1 to 4 of section 5."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedtmle.reproduce.measure import Measured
from fedtmle.reproduce.scenario import ROUND_BUDGET, Dgp, Method, Partition
from fedtmle.reproduce.study import TIME_BUDGET, Study
from fedtmle.reproduce.style import INKS, WIDTH, house_style, name_curves, save

SHOWN = (0.02, 4.0)  # reference units
FLOOR = 1e-3  # of figure 4: the lowest loss itself has no logarithm
TITLES = {Dgp.GAUSSIAN: "Gaussian mixture", Dgp.CURVED: "Curved mixture"}
CHANGE = r"$P_nL(p^k)-P_nL(p^0)$, $10^{-3}$"
RESIDUAL = r"EIF residual $r^k$"


def draw(study: Study, which: Sequence[int], out: Path) -> None:
    """The wanted figures as PNG and SVG."""
    makers = {1: figure_1, 2: figure_2, 3: figure_3, 4: figure_4}
    with house_style():
        for number in which:
            save(makers[number](study), out, f"figure{number}")


def figure_1(study: Study) -> Figure:
    """Pooled loss against elapsed targeting time, at the reference number of clients."""

    def change(run: Measured) -> list[float]:
        return [1e3 * (c.loss - run.checkpoints[0].loss) for c in run.checkpoints]

    return _against_time(study, change, CHANGE, log=False)


def figure_2(study: Study) -> Figure:
    """The pooled EIF residual against elapsed targeting time."""
    return _against_time(study, lambda run: [c.residual for c in run.checkpoints], RESIDUAL, log=True)


def figure_3(study: Study) -> Figure:
    """The residual at 1.5 reference units against the number of clients."""
    label = f"$r^k$ at {TIME_BUDGET} reference units"
    return _against_clients(study, lambda run: study.residual(run, TIME_BUDGET), label, log=True)


def figure_4(study: Study) -> Figure:
    """The loss after 200 rounds, above the lowest that any run reached on the data, against the clients."""

    def excess(run: Measured) -> float:
        return max(FLOOR, 1e3 * (run.at_round(ROUND_BUDGET).loss - study.best(run.cell)))

    return _against_clients(study, excess, r"loss above the lowest, $10^{-3}$", log=True)


def _panels(ylabel: str, xlabel: str) -> tuple[Figure, list[tuple[Axes, Dgp, Partition]]]:
    figure = Figure(figsize=(WIDTH, 4.3))
    grid = figure.subplots(2, 2, sharex=True)
    figure.subplots_adjust(left=0.085, right=0.87, top=0.95, bottom=0.09, wspace=0.62, hspace=0.22)
    panels = []
    for row, dgp in zip(grid, Dgp, strict=True):
        for axes, partition in zip(row, Partition, strict=True):
            axes.set_title(f"{TITLES[dgp]}, {partition} partition", loc="left")
            if partition is Partition.RANDOM:
                axes.set_ylabel(ylabel)
            if dgp is Dgp.CURVED:
                axes.set_xlabel(xlabel)
            panels.append((axes, dgp, partition))
    return figure, panels


def _against_time(
    study: Study, values: Callable[[Measured], list[float]], ylabel: str, *, log: bool
) -> Figure:
    """Step curves of the first seed: the shared density stays until the next is completed."""
    seed = study.seeds[0]
    unit = study.unit(seed)
    figure, panels = _panels(ylabel, "elapsed targeting time, reference units")
    for axes, dgp, partition in panels:
        cell = study.cell(seed, dgp, partition, study.scale.reference_clients)
        ends = {}
        if log:
            axes.set_yscale("log")
        axes.set_xscale("log")
        axes.set_xlim(*SHOWN)
        axes.set_xticks([0.1, 1.0], ["0.1", "1"])
        for method in reversed(Method):
            run, ink = study.run(cell, method), INKS[method]
            times = [max(SHOWN[0], c.elapsed(study.latency) / unit) for c in run.checkpoints]
            seen = [(t, v) for t, v in zip(times, values(run), strict=True) if t <= SHOWN[1]]
            last = seen[-1][1]
            steps = [*seen, (SHOWN[1], last)]
            axes.plot(*zip(*steps, strict=True), ink.dashes, color=ink.colour, drawstyle="steps-post")
            axes.plot(*zip(*seen[1:], strict=True), ink.marker, color=ink.colour)
            ends[ink.label] = (SHOWN[1], last, ink.colour)
        axes.minorticks_off()
        name_curves(axes, ends)
    return figure


def _against_clients(study: Study, value: Callable[[Measured], float], ylabel: str, *, log: bool) -> Figure:
    """Medians over the seeds, with bars from the least to the greatest."""
    figure, panels = _panels(ylabel, "clients $M$")
    for axes, dgp, partition in panels:
        if log:
            axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(study.clients, [str(M) for M in study.clients])
        axes.set_xlim(study.clients[0] * 0.85, study.clients[-1] * 1.18)
        ends = {}
        for at, method in enumerate(reversed(Method)):
            ink = INKS[method]
            # Side by side, so that bars of equal heights stay apart.
            places = [M * 1.025 ** (at - 2) for M in study.clients]
            samples = [
                [value(study.run(study.cell(seed, dgp, partition, M), method)) for seed in study.seeds]
                for M in study.clients
            ]
            middles = [statistics.median(sample) for sample in samples]
            axes.plot(places, middles, ink.dashes, marker=ink.marker, color=ink.colour, clip_on=False)
            axes.vlines(places, list(map(min, samples)), list(map(max, samples)), color=ink.colour, lw=0.7)
            ends[ink.label] = (places[-1], middles[-1], ink.colour)
        axes.minorticks_off()
        name_curves(axes, ends)
    return figure
