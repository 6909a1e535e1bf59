"""The report of a study of time to an event: curves, numbers at risk, and words."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.report import series
from fedtmle.report.page import render


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    rng = np.random.default_rng(5)

    def silo(n: int) -> dict[str, np.ndarray]:
        a = rng.binomial(1, 0.5, n)
        t = np.minimum(rng.geometric(0.15 + 0.05 * a), 6).astype(float)
        return {"a": a, "t": t, "d": (rng.random(n) < 0.8).astype(int)}

    study = ft.Study(
        target=ft.RiskDifference(outcome="d", time="t", treatment="a", periods=6, horizons=(2, 4, 6)),
        treatment_model=ft.GLM("1"),
        variables=ft.Variables(
            {
                "t": {"kind": "number", "range": (0, 6), "label": "Time to relapse", "unit": "months"},
                "d": {"kind": "binary", "label": "Relapse"},
                "a": {"kind": "binary", "label": "Arm", "levels": {"0": "control", "1": "new"}},
            }
        ),
    )
    return ft.run(study, {"north": silo(300), "south": silo(300)}).document


def test_the_page_draws_one_curve_per_arm_and_lists_those_at_risk(document: dict[str, Any]) -> None:
    page = render(document)
    figure = re.search(r'<figure id="curve-0">(.*?)</figure>', page, re.DOTALL)
    assert figure
    wide = figure[1].split("</svg>")[0]
    assert wide.count('class="curve arm0" d=') == wide.count('class="curve arm1" d=') == 1
    assert len(re.findall(r'class="dot arm\d"', wide)) == 2 * len(document["grid"]["horizons"])
    assert "Time to relapse (months)" in wide
    assert "Risk by time and arm" in figure[1]
    assert "People at risk when a period begins" in page
    assert "with the event" in page


def test_measures_of_time_are_words(document: dict[str, Any]) -> None:
    assert series.measure(document) == "risk difference"
    assert series.curve_measure(document) == "risk"
    words = {
        "RMSTDifference": "RMST in periods",
        "TimeLost": "time lost in periods",
        "Survival": "survival",
        "PolicyRisk": "risk",
    }
    for kind, expected in words.items():
        assert series.curve_measure({"grid": {"measure": kind}}) == expected


def test_a_long_study_shows_its_curves_first_and_each_comparison_by_horizon() -> None:
    from tests.time.law import Law, study
    from tests.time.studies import split

    silos = split(Law(1).draw(500, seed=2), 2)
    survival = ft.run(study(ft.Survival, 1, horizons=(1, 2, 3, 4)), silos).document
    many = {**survival, "estimates": survival["estimates"] * 2, "simultaneous": survival["simultaneous"] * 2}
    assert survival["question"].endswith("by the end of each period from 1 to 4 of 4?")
    for document, is_first in ((survival, False), (many, True)):
        html = render(document)
        assert (html.index('id="survival-curves"') < html.index('id="estimates"')) is is_first
        assert "<th>p</th>" not in html
        assert "by horizon; bars are" not in html
    assert (
        'class="curve arm0" d="M46.0 10.0' in html
    )  # a survival curve begins at 1, in the upper left corner
    compared = ft.run(study(ft.RMSTDifference, 1, horizons=(2, 3, 4)), silos).document
    assert "RMSTDifference by horizon; bars are 95% intervals, the band holds for all horizons at" in render(
        compared
    )


def test_names_are_shown_whole() -> None:
    from fedtmle.report.charts import NARROW, WIDE, name_column, shortened

    name = "Universitair Ziekenhuis Nijmegen-Oost"
    assert shortened(name, name_column([name], WIDE) - 18) == name
    assert shortened(name[:23], name_column([name[:23]], NARROW) - 18) == name[:23]
