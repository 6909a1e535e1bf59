"""An audit's histograms: records by the share of their prior uncertainty that the answers leave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedtmle.privacy.audit import Attacker, Audit, Finding
from fedtmle.reproduce.style import GREY, WIDTH, house_style

INK = {Attacker.OTHERS: "#D55E00", Attacker.DESIGN: "#0072B2", Attacker.NOTHING: GREY}
FLOOR = 1e-12  # what is left of exact answers is drawn here


def draw_risk(audit: Audit, path: Path) -> None:
    """One panel per column, one set of bars per attacker with a record-by-record answer."""
    findings = [f for f in audit.findings if f.attacker is not Attacker.NOTHING]
    columns = list(dict.fromkeys(finding.column for finding in findings)) or ["-"]
    with house_style():
        figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
        panels = figure.subplots(1, len(columns), squeeze=False)[0]
        bins = np.logspace(np.log10(FLOOR), 0.0, 25)
        for axes, column in zip(panels, columns, strict=True):
            own = [finding for finding in findings if finding.column == column]
            shares = [np.clip(_left(finding), FLOOR, 1.0) for finding in own]
            axes.hist(
                shares,
                bins=bins.tolist(),
                color=[INK[finding.attacker] for finding in own],
                label=[finding.attacker.value for finding in own],
            )
            axes.set_xscale("log")
            axes.set_yscale("symlog", linthresh=1.0)
            axes.set_title(column, loc="left")
            axes.set_xlabel("share of the prior uncertainty left")
            axes.set_ylabel("records")
            axes.legend(frameon=False, title="attacker knows", title_fontsize=7, fontsize=7)
        figure.savefig(path)


def _left(finding: Finding) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.asarray(finding.after / finding.prior)
