"""Figures 1 to 4 of section 5, and the figures of the extra experiments."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedtmle.plots import GREY, WIDTH, journal_style
from fedtmle_paper.reproduce.campaign import TIME_BUDGET, Campaign
from fedtmle_paper.reproduce.extra import MAX_UPDATES, CodedCost, Coverage, Retirement, Z
from fedtmle_paper.reproduce.measure import Measured
from fedtmle_paper.reproduce.scenario import ROUND_BUDGET, Dgp, Method, Partition, Profile
from fedtmle_paper.reproduce.style import INKS, name_curves, save

SHOWN = (0.02, 4.0)  # reference units
FLOOR = 1e-3  # of figures 1 and 4: the lowest loss itself has no logarithm
TITLES = {Dgp.GAUSSIAN: "Gaussian mixture", Dgp.CURVED: "Curved mixture"}
EXCESS = "loss above the lowest / decrease"
RESIDUAL = r"EIF residual $r^k$"


def draw(campaign: Campaign, which: Sequence[int], out: Path) -> None:
    """The wanted figures as PNG and SVG, one of each profile; A's have no suffix."""
    makers = {1: figure_1, 2: figure_2, 3: figure_3, 4: figure_4}
    with journal_style():
        for number in which:
            for profile in Profile:
                suffix = "" if profile is Profile.A else f"-{profile}"
                save(makers[number](campaign.under(profile)), out, f"figure{number}{suffix}")


def figure_1(campaign: Campaign) -> Figure:
    """Pooled loss against elapsed targeting time, at the reference number of clients.

    It is shown above the lowest loss of the paper's methods, in shares of the decrease from p^0 to it: every
    curve starts at 1, and bands show the methods, not how far from the optimum a seed's start was.
    """

    def excess(run: Measured) -> list[float]:
        best, decrease = campaign.best(run.scenario), campaign.decrease(run.scenario)
        return [max(FLOOR, (c.loss - best) / decrease) for c in run.checkpoints]

    return _against_time(campaign, excess, EXCESS)


def figure_2(campaign: Campaign) -> Figure:
    """The pooled EIF residual against elapsed targeting time."""
    return _against_time(campaign, lambda run: [c.residual for c in run.checkpoints], RESIDUAL)


def figure_3(campaign: Campaign) -> Figure:
    """The residual at 1.5 reference units against the number of clients."""
    label = f"$r^k$ at {TIME_BUDGET} reference units"
    return _against_clients(campaign, lambda run: campaign.residual(run, TIME_BUDGET), label)


def figure_4(campaign: Campaign) -> Figure:
    """The loss after 200 rounds, above the lowest of the paper's methods on the data, against the clients."""

    def excess(run: Measured) -> float:
        return max(FLOOR, 1e3 * (run.at_round(ROUND_BUDGET).loss - campaign.best(run.scenario)))

    return _against_clients(campaign, excess, r"loss above the lowest, $10^{-3}$")


def _panels(ylabel: str, xlabel: str) -> tuple[Figure, list[tuple[Axes, Dgp, Partition]]]:
    figure = Figure(figsize=(WIDTH, 4.3))
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
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


def _against_time(campaign: Campaign, values: Callable[[Measured], list[float]], ylabel: str) -> Figure:
    """The median over the seeds at each time, and a band from the least to the greatest.

    The shared density stays until the next is completed. Each seed's time is in its own reference unit.
    """
    times = np.geomspace(*SHOWN, 160)
    figure, panels = _panels(ylabel, "elapsed targeting time, reference units")
    named = []
    for axes, dgp, partition in panels:
        ends = {}
        axes.set(xscale="log", yscale="log")
        axes.set_xlim(*SHOWN)
        axes.set_xticks([0.1, 1.0], ["0.1", "1"])
        for method in reversed(Method):
            ink = INKS[method]
            curves = []
            for seed in campaign.seeds:
                scenario = campaign.scenario(seed, dgp, partition, campaign.scale.reference_clients)
                run, unit = campaign.run(scenario, method), campaign.unit(seed)
                done = [c.elapsed(campaign.latency) / unit for c in run.checkpoints]
                heights = np.array(values(run))
                curves.append(heights[np.maximum(np.searchsorted(done, times, side="right") - 1, 0)])
            middle = np.median(curves, axis=0)
            low, high = np.min(curves, axis=0), np.max(curves, axis=0)
            axes.fill_between(times, low, high, color=ink.colour, alpha=0.15, lw=0)
            axes.plot(times, middle, ink.dashes, color=ink.colour)
            ends[ink.label] = (SHOWN[1], float(middle[-1]), ink.colour)
        axes.minorticks_off()
        named.append((axes, ends))
    for axes, ends in named:  # once all panels have given their common range its ends
        name_curves(axes, ends)
    return figure


def _against_clients(campaign: Campaign, value: Callable[[Measured], float], ylabel: str) -> Figure:
    """Medians over the seeds, with bars from the least to the greatest."""
    figure, panels = _panels(ylabel, "clients $M$")
    named = []
    for axes, dgp, partition in panels:
        axes.set_yscale("log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(campaign.clients, [str(M) for M in campaign.clients])
        axes.set_xlim(campaign.clients[0] * 0.85, campaign.clients[-1] * 1.18)
        ends = {}
        for at, method in enumerate(reversed(Method)):
            ink = INKS[method]
            # Side by side, so that bars of equal heights stay apart.
            places = [M * 1.025 ** (at - 2) for M in campaign.clients]
            samples = [
                [
                    value(campaign.run(campaign.scenario(seed, dgp, partition, M), method))
                    for seed in campaign.seeds
                ]
                for M in campaign.clients
            ]
            middles = [statistics.median(sample) for sample in samples]
            axes.plot(places, middles, ink.dashes, marker=ink.marker, color=ink.colour, clip_on=False)
            axes.vlines(places, list(map(min, samples)), list(map(max, samples)), color=ink.colour, lw=0.7)
            ends[ink.label] = (places[-1], middles[-1], ink.colour)
        axes.minorticks_off()
        named.append((axes, ends))
    for axes, ends in named:  # once all panels have given their common range its ends
        name_curves(axes, ends)
    return figure


WEIGHTS = {"size": INKS[Method.LOCAL_SIZE], "uniform": INKS[Method.LOCAL_UNIFORM]}
COORDINATES = {"raw": INKS[Method.CODED_RAW], "whitened": INKS[Method.CODED_WHITENED]}


def cost_figure(table: Sequence[CodedCost]) -> Figure:
    """Rounds and bits of the first scenario against the tolerance (lines), with their bounds (dots)."""
    first = (table[0].seed, table[0].dgp, table[0].partition)
    figure = Figure(figsize=(WIDTH, 2.5))
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.075, right=0.86, top=0.9, bottom=0.17, wspace=0.75)
    for axes, title in ((left, "Rounds $R$"), (right, "Bits $B$, all links")):
        axes.set(xscale="log", yscale="log", xlabel=r"tolerance $\delta$")
        axes.set_title(title, loc="left")
        axes.invert_xaxis()
    named: list[dict[str, tuple[float, float, str]]] = [{}, {}]
    for coordinates, ink in COORDINATES.items():
        chosen = (*first, coordinates, "step")  # the default; the table has the paper's inner solves too
        costs = [c for c in table if (c.seed, c.dgp, c.partition, c.coordinates, c.inner) == chosen]
        deltas = [c.tolerance for c in costs]
        series = (
            (left, [c.rounds for c in costs], [c.round_bound for c in costs]),
            (right, [c.bits for c in costs], [c.pathwise_bit_bound for c in costs]),
        )
        for names, (axes, realised, bound) in zip(named, series, strict=True):
            axes.plot(deltas, realised, "-", marker=ink.marker, color=ink.colour)
            axes.plot(deltas, bound, ":", color=ink.colour)
            names[coordinates] = (deltas[-1], realised[-1], ink.colour)
            names[f"bound, {coordinates}"] = (deltas[-1], bound[-1], ink.colour)
    for axes, names in zip((left, right), named, strict=True):
        axes.minorticks_off()
        name_curves(axes, names)
    return figure


def retirement_figure(table: Sequence[Retirement]) -> Figure:
    """The update at which each silo of the first seed retired, against its size."""
    seed = table[0].seed
    figure = Figure(figsize=(WIDTH, 3.6))
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    figure.subplots_adjust(left=0.1, right=0.98, top=0.94, bottom=0.11, wspace=0.12, hspace=0.28)
    never = MAX_UPDATES + 1
    for row, dgp in zip(grid, Dgp, strict=True):
        for axes, partition in zip(row, Partition, strict=True):
            axes.set_title(f"{dgp.capitalize()} mixture, {partition} partition", loc="left")
            for shift, (weights, ink) in zip((0.97, 1.03), WEIGHTS.items(), strict=True):
                silos = [
                    item
                    for item in table
                    if (item.seed, item.dgp, item.partition, item.weights)
                    == (seed, dgp.value, partition.value, weights)
                ]
                axes.plot(
                    [shift * item.n_rows for item in silos],
                    [never if item.retired_at is None else item.retired_at for item in silos],
                    ink.marker,
                    color=ink.colour,
                    label=f"{weights} weights",
                    clip_on=False,
                )
            axes.set_xscale("log")
            axes.set_yticks([0, 5, 10, 15, never], ["0", "5", "10", "15", f"not in {MAX_UPDATES}"])
            sizes = sorted({item.n_rows for item in table})[:: max(1, len({i.n_rows for i in table}) // 4)]
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            axes.minorticks_off()
        row[0].set_ylabel("retired at update")
    for axes in grid[1]:
        axes.set_xlabel("rows of the silo, $N_m$")
    for at, (weights, ink) in enumerate(WEIGHTS.items()):
        grid[0][0].text(
            0.98,
            0.62 - 0.12 * at,
            f"{weights} weights",
            color=ink.colour,
            ha="right",
            transform=grid[0][0].transAxes,
        )
    return figure


def coverage_figure(table: Sequence[Coverage]) -> Figure:
    """Coverage of the nominal 95% intervals, each with a 95% interval of its own (Wilson's)."""
    figure = Figure(figsize=(WIDTH / 2, 2.2))
    axes = figure.subplots()
    figure.subplots_adjust(left=0.3, right=0.97, top=0.97, bottom=0.2)
    groups = sorted({(item.dgp, item.name) for item in table}, reverse=True)
    for at, (dgp, name) in enumerate(groups):
        chosen = [item for item in table if (item.dgp, item.name) == (dgp, name)]
        share, low, high = wilson(sum(item.covers for item in chosen), len(chosen))
        axes.plot([low, high], [at, at], "-", color="#0072B2")
        axes.plot([share], [at], "o", color="#0072B2")
    axes.axvline(0.95, color=GREY, lw=0.7, ls=":")
    axes.set_yticks(
        range(len(groups)), [rf"{dgp}, $\theta_{name.removeprefix('theta_')}$" for dgp, name in groups]
    )
    axes.set_xlabel("coverage of 95% intervals")
    return figure


def wilson(hits: int, trials: int) -> tuple[float, float, float]:
    """A proportion and its 95% score interval."""
    share = hits / trials
    scale = 1 + Z * Z / trials
    middle = (share + Z * Z / (2 * trials)) / scale
    half = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials)) / scale
    return share, middle - half, middle + half
