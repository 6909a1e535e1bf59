"""Figures of the extra experiments: cost against tolerance, retirement, coverage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from fedtmle.reproduce.bounds import Cost
from fedtmle.reproduce.coverage import Coverage, Z
from fedtmle.reproduce.retirement import MAX_UPDATES, Retirement
from fedtmle.reproduce.scenario import Dgp, Method, Partition
from fedtmle.reproduce.style import GREY, INKS, WIDTH, name_curves

WEIGHTS = {"size": INKS[Method.LOCAL_SIZE], "uniform": INKS[Method.LOCAL_UNIFORM]}
COORDINATES = {"raw": INKS[Method.CODED_RAW], "whitened": INKS[Method.CODED_WHITENED]}


def cost_figure(table: Sequence[Cost]) -> Figure:
    """Rounds and bits of the first cell against the tolerance (lines), with their bounds (dots)."""
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
