"""`ft.plots` and what a notebook shows."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from tests.report.studies import ALGORITHMS, result


@pytest.fixture(autouse=True)
def no_window() -> Iterator[None]:
    mpl.use("Agg")
    yield
    plt.close("all")


def test_forest_draws_the_estimates() -> None:
    kept = result(release=2)
    ax: Any = ft.plots.forest(kept)
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert names == ["pooled", "prediction", "random effects", "silo 1", "silo 0"]
    pooled = kept.document["estimates"][0]
    assert ax.lines[0].get_xdata().tolist() == [pooled["conf_low"], pooled["conf_high"]]
    assert ax.lines[1].get_xdata().tolist() == [pooled["estimate"]]
    assert ax.get_xlabel() == "ATE"


def test_forest_takes_axes_and_an_estimand() -> None:
    _, mine = plt.subplots()
    kept = result(target="strata")
    name = kept.document["estimates"][-1]["estimand"]
    ax = ft.plots.forest(kept, estimand=name, ax=mine)
    assert ax is mine
    assert ax.get_xlabel() == name
    with pytest.raises(InputError, match="estimand"):
        ft.plots.forest(kept, estimand="no such")


def test_trajectory_has_the_tolerance() -> None:
    kept = result(observe=True)
    ax: Any = ft.plots.trajectory(kept)
    assert ax.get_yscale() == "log"
    tolerance = kept.document["certificate"]["tolerance"]
    assert tolerance in [line.get_ydata()[0] for line in ax.lines]
    loss: Any = ft.plots.trajectory(kept, what="loss")
    assert len(loss.lines[0].get_xdata()) == len(kept.document["trajectory"]["points"])
    with pytest.raises(InputError, match="observe"):
        ft.plots.trajectory(result(), what="loss")


def test_norms_of_zero_are_drawn_at_the_foot_of_the_axis() -> None:
    document = copy.deepcopy(result().document)
    points = document["trajectory"]["points"]
    points[-1]["gradient_norm"] = 0.0
    ax: Any = ft.plots.trajectory(document)
    path, tolerance, zeros = ax.lines
    assert zeros.get_xdata().tolist() == [points[-1]["round"]]
    assert zeros.get_ydata()[0] == path.get_ydata()[-1] == ax.get_ylim()[0] < tolerance.get_ydata()[0]
    assert [text.get_text() for text in ax.get_legend().get_texts()][-1] == "0 to the grid's rounding"


def test_bits_overlap_and_heterogeneity() -> None:
    kept = result(release=3)
    drawn = ft.plots.bits(kept).images[0].get_array()
    assert drawn is not None
    up = kept.document["account"]["by_round"]["up"]
    assert np.array_equal(np.asarray(drawn), list(up.values()))
    drawing = ft.plots.overlap(kept)
    drawing.figure.canvas.draw()
    legend = drawing.get_legend()
    assert legend is not None
    assert not legend.get_window_extent().overlaps(drawing.get_window_extent())  # it covers no bar
    bars: Any = drawing.patches
    assert [bar.get_width() for bar in bars[:2]] == kept.document["arm_counts"]
    assert "Q = " in ft.plots.heterogeneity(kept).get_title()
    with pytest.raises(InputError, match="no two silos"):
        ft.plots.heterogeneity(result(release=0))


def test_plots_take_core_results() -> None:
    kept = result("personal").run
    assert kept is not None
    assert ft.plots.bits(kept).get_xlabel() == "round"
    with pytest.raises(InputError, match="not of a study"):
        ft.plots.overlap(kept)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_notebooks_show_results_and_certificates(algorithm: str) -> None:
    kept = result(algorithm)
    assert kept.run is not None
    for shown in (kept, kept.run, kept.run.certificate):
        if shown is not None:
            html = shown._repr_html_()
            assert html.startswith("<div>")
            assert html.count("<table") == html.count("</table>")
    assert kept.document["status_text"] in kept._repr_html_()


def test_notebooks_run_nothing() -> None:
    kept = result(target="TSM")
    evil = ft.StudyResult(document={**kept.document, "question": "<script>", "warnings": ["<script>"]})
    assert "<script>" not in evil._repr_html_()


def test_a_report_needs_no_matplotlib() -> None:
    """It is an extra: the page, and `import fedtmle`, do without."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import fedtmle.report.page, fedtmle.plots, fedtmle as ft\n"
        "from fedtmle.errors import InputError\n"
        "from tests.report.studies import result\n"
        "fedtmle.report.page.render(result().document)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
