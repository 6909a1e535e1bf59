"""The report of a study of time to an event: curves, numbers at risk, and words."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.report import wording
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
    assert "Numbers at risk" in page
    assert "with the event" in page


def test_measures_of_time_are_words(document: dict[str, Any]) -> None:
    assert wording.measure(document) == "risk difference"
    assert wording.curve_measure(document) == "risk"
    for kind, expected in (("RMSTDifference", "RMST"), ("TimeLost", "time lost"), ("Survival", "survival")):
        assert wording.curve_measure({"grid": {"measure": kind}}) == expected
