"""Figures of a result as matplotlib axes: ``ft.plots.forest(result)`` and its siblings.

Each takes a study's result, a core result or a saved document, draws on ``ax`` or on new axes, and
returns them. `draw_risk` writes the figure of a disclosure audit. matplotlib (the extra ``figures``) is
loaded when the first figure is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from fedtmle.errors import InputError
from fedtmle.layout import Document, decreasing
from fedtmle.report import series
from fedtmle.report.series import document_of
from fedtmle.results.result import StudyResult
from fedtmle.runtime.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedtmle.privacy.audit import Audit, ColumnRisk

AnyResult = StudyResult | Result | Document
COLOURS = {
    "silo": "#0b5cad",
    "summary": "#9a4a00",
    "prediction": "#9a4a00",
    "without": "#9a4a00",
    "pooled": "#1b1f24",
}
WARN = "#b3261e"
GREY = "#666666"
WIDTH = 7.0  # inches: two columns of a journal
SMALLEST_SHARE = 1e-12  # smaller shares are drawn at this value


def forest(result: AnyResult, *, estimand: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw the intervals of one estimand: consenting silos, leave-one-out estimates, and the pooled one."""
    data = _chosen(series.forests(document_of(result)), estimand)
    ax = ax or _axes(height=1.2 + 0.28 * len(data.rows))
    for y, row in enumerate(reversed(data.rows)):
        colour = COLOURS[row.kind]
        ax.plot([row.low, row.high], [y, y], color=colour, linewidth=2.5 if row.kind == "pooled" else 1.5)
        ax.plot(row.estimate, y, "o", color=colour, markersize=7 if row.kind == "pooled" else 5)
    ax.set_yticks(range(len(data.rows)), [row.name for row in reversed(data.rows)])
    if data.null is not None:
        ax.axvline(data.null, color="0.5", linewidth=1)
    if data.ratio:
        ax.set_xscale("log")
    ax.set_xlabel(data.estimand)
    return ax


def trajectory(result: AnyResult, *, what: str = "residual", ax: Axes | None = None) -> Axes:
    """Draw the norm of the pooled gradient by round with the tolerance, or the loss if ``what`` is "loss".

    A norm of zero has a triangle at the foot of the log axis.
    """
    if what not in ("residual", "loss"):
        raise InputError(f"what: expected 'residual' or 'loss', not {what!r}")
    data = series.path(document_of(result))
    losses = zip(data.rounds, data.loss or (), strict=False)
    known = data.known if what == "residual" else [(r, v) for r, v in losses if v is not None]
    if not known:
        raise InputError(
            f"trajectory: this run does not know its {what}; for the loss, run with observe=True"
        )
    ax = ax or _axes()
    if what == "residual":
        _draw_norms(data, ax)
    else:
        _draw_path(known, ax)
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("round of targeting")
    ax.set_ylabel(
        "norm of the pooled gradient" if what == "residual" else "pooled loss, less its first value"
    )
    return ax


def _draw_path(points: Sequence[tuple[int, float]], ax: Axes) -> None:
    marker = "o" if len(points) <= 200 else ""
    ax.plot(*zip(*points, strict=True), marker=marker, markersize=4, color=COLOURS["silo"])


def _draw_norms(data: series.Path, ax: Axes) -> None:
    """Draw the norms by round on a log axis, with zeros at its foot, and the tolerance."""
    ax.set_yscale("log")
    foot = min((v for v in (*data.norm, data.tolerance) if v), default=1.0) / 10
    _draw_path([(r, v or foot) for r, v in data.known], ax)
    if data.tolerance is not None:
        ax.axhline(data.tolerance, color=WARN, linestyle="--", label=f"tolerance {data.tolerance:.2g}")
    if data.zeros:
        ax.set_ylim(bottom=foot)
        marks = [foot] * len(data.zeros)
        ax.plot(data.zeros, marks, "v", color=COLOURS["silo"], markersize=8, clip_on=False, label=series.ZERO)
    if data.zeros or data.tolerance is not None:
        ax.legend(frameon=False)


def bits(result: AnyResult, *, ax: Axes | None = None) -> Axes:
    """Draw the bits of each silo's answers by round on a log colour scale; white after a silo left."""
    import numpy as np
    from matplotlib.colors import LogNorm

    data = series.bits_by_round(document_of(result))
    ax = ax or _axes(height=1.6 + 0.22 * len(data.up))
    table = np.full((len(data.up), len(data.phases)), np.nan)
    for row, sent in zip(table, data.up.values(), strict=True):
        row[: len(sent)] = sent
    shown = np.ma.masked_invalid(table)
    extent = (0.5, len(data.phases) + 0.5, len(data.up) - 0.5, -0.5)
    drawn = ax.imshow(
        shown, norm=LogNorm(max(shown.min(), 1), shown.max()), cmap="Blues", aspect="auto", extent=extent
    )
    ax.figure.colorbar(drawn, ax=ax, label="bits")
    ax.set_yticks(range(len(data.up)), list(data.up))
    ax.set_xlabel("round")
    return ax


def overlap(result: AnyResult, *, ax: Axes | None = None) -> Axes:
    """Draw by arm: records, those with an outcome, and those whose propensity score was truncated."""
    data = series.overlap(document_of(result))
    if data is None:
        raise InputError("overlap: the result is not of a study, so that it has no arms")
    ax = ax or _axes(height=1.6 + 0.5 * len(data.arms))
    names = [arm.name for arm in data.arms]
    hidden = any(arm.observed_hidden_in for arm in data.arms)
    shown = "with outcome (some silos hide theirs)" if hidden else "with outcome"
    parts: Mapping[str, tuple[list[int], str, float]] = {
        "records": ([arm.records for arm in data.arms], "#9db8d4", 0.7),
        shown: ([arm.observed for arm in data.arms], COLOURS["silo"], 0.45),
        **({"truncated": ([arm.truncated for arm in data.arms], WARN, 0.2)} if data.effective else {}),
    }
    for label, (counts, colour, height) in parts.items():
        ax.barh(names, counts, height=height, color=colour, label=label)
    ax.invert_yaxis()
    ax.set_xlabel("records")
    _legend_above(ax)
    return ax


def balance(result: AnyResult, *, arm: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw a Love plot: standardised differences of ``arm`` from the reference, before and after weighting.

    The shaded range is 0.1 standard deviations. The title says if some silos hide a covariate.
    """
    plots = {data.arm: data for data in series.balance(document_of(result))}
    if not plots:
        raise InputError("balance: the result has none; ask for static arms, and diagnostics = True")
    if arm is not None and arm not in plots:
        raise InputError(f"arm: expected one of {', '.join(plots)}, not {arm!r}")
    data = plots[arm] if arm is not None else next(iter(plots.values()))
    ax = ax or _axes(height=1.4 + 0.26 * len(data.names))
    ax.axvspan(-0.1, 0.1, color="0.94")
    ax.axvline(0, color="0.5", linewidth=1)
    for values, label, marker, colour in (
        (data.unweighted, "unweighted", "o", COLOURS["without"]),
        (data.weighted, "weighted", "s", COLOURS["silo"]),
    ):
        for hidden, alpha in ((False, 1.0), (True, 0.3)):
            known = [
                (value, y)
                for y, value in enumerate(values)
                if value is not None and data.is_partial[y] is hidden
            ]
            if known:
                shown = f"{label}, some silos" if hidden else label
                ax.plot(
                    *zip(*known, strict=True), marker, color=colour, alpha=alpha, label=shown, markersize=5
                )
    ax.set_yticks(range(len(data.names)), list(data.names))
    ax.invert_yaxis()
    ax.set_xlabel(f"difference of arm {data.arm} from {data.reference}, in standard deviations")
    ax.locator_params(axis="x", nbins=7)  # more labels would touch each other beside long names
    if not data.is_complete:
        ax.set_title("some silos only")
    ax.legend(frameon=False)
    return ax


def heterogeneity(result: AnyResult, *, estimand: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw each releasing silo's distance from their weighted mean, in its own standard errors."""
    data = _chosen(series.heterogeneity(document_of(result)), estimand)
    ax = ax or _axes(height=1.2 + 0.28 * len(data.distance))
    ax.axvspan(-1.96, 1.96, color="0.94")
    ax.axvline(0, color="0.5", linewidth=1)
    names, values = list(data.distance), list(data.distance.values())
    ax.hlines(range(len(names)), 0, values, color=COLOURS["silo"])
    ax.plot(values, range(len(names)), "o", color=COLOURS["silo"])
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("distance from the weighted mean, in standard errors")
    ax.set_title(f"{data.estimand}: Q = {data.Q:.2f} on {data.df} df, I2 = {data.I2:.0%}")
    return ax


def curves(result: AnyResult, *, cause: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw each arm's risk, survival or mean time by horizon, with bands and the numbers at risk below.

    The shaded band holds for all horizons and arms at once. Of several causes the first is drawn, or
    ``cause``. Of treatment over time, the risks under each rule are drawn. Strata are not. A number at risk
    with a + is a lower bound, because some silos hide theirs; "hidden" if nothing is known of it.
    """
    document = document_of(result)
    over_time = [each for each in document.get("rules") or () if len(each["horizons"]) > 1]
    drawn = [{**each, "cause": None, "population": "", "times": each["horizons"]} for each in over_time]
    drawn = document.get("curves") or drawn
    if not drawn:
        raise InputError("curves: the result is not of a study of time to an event with several horizons")
    causes = list(dict.fromkeys(curve["cause"] for curve in drawn))
    chosen = causes[0] if cause is None else cause
    if chosen not in causes:
        raise InputError(f"cause: expected one of {', '.join(map(str, causes))}, not {cause!r}")
    ax = ax or _axes(height=4.0)
    grid = document.get("grid") or {
        "measure": "Risk",
        "edges": [each["period"] for each in document["periods"]],
    }
    start = 1.0 if grid["measure"] == "Survival" else 0.0
    for curve in (each for each in drawn if each["cause"] == chosen and not each["population"]):
        times = [0.0, *curve["times"]]
        name = series.rule(document, curve["rule"]) if over_time else series.arm(document, curve["arm"])
        (line,) = ax.plot(times, [start, *curve["estimate"]], label=name)
        ax.plot(curve["times"], curve["estimate"], "o", markersize=4, color=line.get_color())
        band = [start, *curve["band_low"]], [start, *curve["band_high"]]
        ax.fill_between(times, *band, alpha=0.15, color=line.get_color(), linewidth=0)
    ax.legend(frameon=False)
    ax.set_xlabel("period" if over_time else series.time(document))
    _write_at_risk(document, [0.0, *grid["edges"]], ax)
    measure = "risk" if over_time else series.curve_measure(document)
    of = f" of {chosen}" if len(causes) > 1 else ""
    ax.set_ylabel(f"{measure[:1].upper()}{measure[1:]}{of}")
    return ax


def _write_at_risk(document: Document, edges: Sequence[float], ax: Axes) -> None:
    """Write the numbers at risk below the time axis, a line for each arm; under rules, one for everyone."""
    at_risk = document.get("at_risk")
    if at_risk:
        arms = zip(document["arms"], at_risk["counts"], at_risk["hidden_in"], strict=True)
        rows = {series.arm(document, arm): decreasing(counts, hidden) for arm, counts, hidden in arms}
        begins = [edges[period - 1] for period in at_risk["periods"]]
    elif "periods" in document:
        rows = {"everyone": [f"{each['at_risk']:,}" for each in document["periods"]]}
        begins = list(edges[:-1])
    else:
        return
    ax.annotate("at risk", (-0.02, -0.2), xycoords="axes fraction", ha="right", fontsize=8, fontweight="bold")
    for row, (name, numbers) in enumerate(rows.items(), start=1):
        y = -0.2 - 0.07 * row
        ax.annotate(name, (-0.02, y), xycoords="axes fraction", ha="right", fontsize=8)
        for begin, number in zip(begins, numbers, strict=True):
            ax.annotate(number, (begin, y), xycoords=("data", "axes fraction"), ha="center", fontsize=8)


def adherence(result: AnyResult, *, ax: Axes | None = None) -> Axes:
    """Draw the share of those at risk who have followed each rule so far, by period of treatment over time.

    A period in which a silo hides its count has no point.
    """
    document = document_of(result)
    shown = series.adherence(document)
    if not shown:
        raise InputError("adherence: the result is not of a study of treatment over time with diagnostics")
    ax = ax or _axes()
    for each in shown:
        ax.plot(each.periods, each.shares, "o-", markersize=4, label=series.rule(document, each.rule))
    ax.set_ylim(0.0, 1.02)
    ax.legend(frameon=False, fontsize=8)
    ax.locator_params(axis="x", integer=True)
    ax.yaxis.set_major_formatter("{x:.0%}")
    ax.set_xlabel("period")
    ax.set_ylabel("Followed the rule so far")
    return ax


def weights(result: AnyResult, *, rule: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw the cumulative weights of those who have followed a rule so far, by period.

    A bar is the share of these people with weights in its row; the longest is as wide as its column.
    The first rule is drawn, or ``rule``, by its name in the result.
    """
    document = document_of(result)
    shown = series.weights(document)
    if not shown:
        raise InputError("weights: the result is not of a study of treatment over time with diagnostics")
    chosen = next((each for each in shown if rule in (None, each.rule)), None)
    if chosen is None:
        raise InputError(f"rule: expected one of {', '.join(each.rule for each in shown)}, not {rule!r}")
    ax = ax or _axes()
    periods = range(1, len(chosen.counts) + 1)
    for period in periods:
        lengths = [0.95 * share / chosen.largest for share in chosen.shares(period)]
        ax.barh(range(len(chosen.bins)), lengths, left=period, height=0.7, color=COLOURS["silo"])
        if chosen.counts[period - 1] is None:
            ax.text(period + 0.5, (len(chosen.bins) - 1) / 2, "hidden", ha="center", va="center", fontsize=8)
    marks = [
        "+" if partial and counts else ""
        for partial, counts in zip(chosen.is_partial, chosen.counts, strict=True)
    ]
    ax.set_xticks([t + 0.5 for t in periods], [f"{t}{mark}" for t, mark in zip(periods, marks, strict=True)])
    for period in periods:
        ax.axvline(period, color="0.85", linewidth=1, zorder=0)
    ax.set_xlim(1, len(chosen.counts) + 1)
    ax.set_yticks(range(len(chosen.bins)), chosen.bins)
    ax.set_xlabel("period")
    ax.set_ylabel("Cumulative weight")
    ax.set_title(f"{series.rule(document, chosen.rule)} (the longest bar is {chosen.largest:.0%})")
    return ax


def horizons(result: AnyResult, *, estimand: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw one estimand of time to an event by horizon, such as a difference of restricted means.

    Bars are pointwise intervals; the shaded band holds for all horizons at once.
    """
    data = _chosen(series.by_horizon(document_of(result)), estimand)
    ax, colour = ax or _axes(), COLOURS["silo"]
    ax.fill_between(data.horizons, data.band_low, data.band_high, color=colour, alpha=0.15, linewidth=0)
    ax.vlines(data.horizons, data.low, data.high, color=colour)
    ax.plot(data.horizons, data.estimate, "o-", color=colour, markersize=4)
    if data.null is not None:
        ax.axhline(data.null, color="0.5", linewidth=1)
    ax.locator_params(axis="x", integer=True)
    ax.set_xlabel("horizon, in periods")
    ax.set_ylabel(data.estimand)
    return ax


def _legend_above(ax: Axes) -> None:
    """Write the legend in one line above the axes, where it covers nothing."""
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles, labels, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(labels))


def _axes(height: float = 3.2) -> Axes:
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("figures need matplotlib: pip install 'fedtmle[figures]'")
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(7.0, height), layout="constrained")[1]


class _HasEstimand(Protocol):
    @property
    def estimand(self) -> str: ...


T = TypeVar("T", bound=_HasEstimand)


def _chosen(series: list[T], estimand: str | None) -> T:
    """Return the data of the named estimand, or of the first."""
    if not series:
        raise InputError(
            "this result has nothing to draw here: no estimate, or no two silos that released theirs"
        )
    if estimand is None:
        return series[0]
    for data in series:
        if data.estimand == estimand:
            return data
    raise InputError(f"estimand: expected one of {', '.join(d.estimand for d in series)}, not {estimand!r}")


@contextmanager
def journal_style() -> Iterator[None]:
    """Set the style of a journal for figures drawn inside: 8 pt sans serif, thin axes, reproducible SVG."""
    import matplotlib as mpl

    with mpl.rc_context(
        {
            "font.family": "sans-serif",
            "font.size": 8,
            "axes.titlesize": 8,
            "axes.labelsize": 8,
            "xtick.labelsize": 7,
            "ytick.labelsize": 7,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.6,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "xtick.major.size": 2.5,
            "ytick.major.size": 2.5,
            "ytick.minor.size": 0,
            "lines.linewidth": 1.1,
            "lines.markersize": 3.2,
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "fedtmle",  # the same figure gives the same file
            "savefig.dpi": 200,
        }
    ):
        yield


def draw_risk(audit: Audit, path: Path) -> None:
    """Write the figure of ``audit`` to ``path``: one panel per column, one set of bars per attacker.

    An attacker who knows nothing has no result per record, and is left out.
    """
    from matplotlib.figure import Figure

    from fedtmle.privacy.audit import Attacker

    ink = {Attacker.OTHERS: "#D55E00", Attacker.DESIGN: "#0072B2", Attacker.NOTHING: GREY}
    risks = [risk for risk in audit.findings if risk.attacker is not Attacker.NOTHING]
    columns = list(dict.fromkeys(risk.column for risk in risks)) or ["-"]
    with journal_style():
        figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
        panels = figure.subplots(1, len(columns), squeeze=False)[0]
        bins = np.logspace(np.log10(SMALLEST_SHARE), 0.0, 25)
        for axes, column in zip(panels, columns, strict=True):
            shown = [risk for risk in risks if risk.column == column]
            shares = [np.clip(_share_left(risk), SMALLEST_SHARE, 1.0) for risk in shown]
            axes.hist(
                shares,
                bins=bins.tolist(),
                color=[ink[risk.attacker] for risk in shown],
                label=[risk.attacker.value for risk in shown],
            )
            axes.set_xscale("log")
            axes.set_yscale("symlog", linthresh=1.0)
            axes.set_title(column, loc="left")
            axes.set_xlabel("share of the prior uncertainty left")
            axes.set_ylabel("records")
            axes.legend(frameon=False, title="attacker knows", title_fontsize=7, fontsize=7)
        figure.savefig(path)


def _share_left(risk: ColumnRisk) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.asarray(risk.after / risk.prior)
