"""The figure of a disclosure audit: records by the share of prior uncertainty that the answers leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fedtmle.privacy.audit import Attacker, Audit, ColumnRisk

WIDTH = 7.0  # inches: two columns of a journal
GREY = "#666666"
INK = {Attacker.OTHERS: "#D55E00", Attacker.DESIGN: "#0072B2", Attacker.NOTHING: GREY}
SMALLEST_SHARE = 1e-12  # smaller shares are drawn at this value


@contextmanager
def journal_style() -> Iterator[None]:
    """Set the style of a journal for figures drawn inside: 8 pt sans serif, thin axes, reproducible SVG."""
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
                color=[INK[risk.attacker] for risk in shown],
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
