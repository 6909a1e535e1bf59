"""The page: it renders every kind of result, says what the document says, and stays small."""

from __future__ import annotations

import copy
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.layout import decimals
from fedtmle.report.page import render
from fedtmle.results.result import load
from tests.report.studies import ALGORITHMS, TARGETS, VARIABLES, result, silos

LIMIT = 3_000_000  # bytes of a report of 1,000 rounds and 40 silos


def words(page: str) -> str:
    """The page's text, its figures' labels with it."""
    return unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithms_result_renders(algorithm: str) -> None:
    kept = result(algorithm)
    page = render(kept.document)
    assert kept.document["status_text"][1:] in words(page)
    for warning in kept.warnings:
        assert warning in words(page)
    assert ("No silo" in words(page)) == (not kept.document["silos"])


@pytest.mark.parametrize("target", TARGETS)
def test_every_targets_result_renders(target: str) -> None:
    document = result(target=target).document
    text = words(render(document))
    digits = max(decimals(row["std_error"]) for row in document["estimates"])
    for row in document["estimates"]:
        assert row["estimand"] in text
        assert f" {row['estimate']:.{digits}f} " in text


def test_the_page_holds_what_the_issue_lists() -> None:
    document = result(observe=True).document
    page = render(document)
    text = words(page)
    assert document["question"] not in text  # a clinician reads the measure and the labels
    for key in ("forest-0", "spread-0", "overlap-sizes", "probability-0", "trajectory", "bits"):
        assert f'<figure id="{key}">' in page
    for said in ("What is proved", "What is assumed", "tolerance", "pooled loss", "not in itself a privacy"):
        assert said in text
    for value in (document["plan"], document["transcript"], *document["versions"].values()):
        assert value in text
    for phase in document["account"]["rounds"]:
        assert ("models" if phase == "nuisance" else phase) in text


def test_a_norm_of_zero_is_a_triangle_below_the_tolerance() -> None:
    document = copy.deepcopy(result().document)
    assert "triangle" not in render(document)
    point = document["trajectory"]["points"][-1]
    point["gradient_norm"] = 0.0
    page = render(document)
    figure = page.split('<figure id="trajectory">')[1].split("</figure>")[0]
    told = f"<title>round {point['round']}: 0 to the grid&#x27;s rounding</title>"
    marks = re.findall(r'<path class="dot residual" d="M\S+ (\S+?)h[^"]*">' + re.escape(told), figure)
    lines = [float(y) for y in re.findall(r'class="tolerance"[^>]* y1="([^"]+)"', figure)]
    assert len(marks) == len(lines) == 2  # for a wide and for a narrow screen
    assert all(float(mark) > line for mark, line in zip(marks, lines, strict=True))
    assert "triangle: 0 to the grid's rounding)" in words(figure)
    assert f"in {len(document['trajectory']['points'])} rounds" in words(figure)


def test_a_saved_result_gives_the_same_page(tmp_path: Path) -> None:
    kept = result()
    kept.save(tmp_path / "result.json")
    assert render(load(tmp_path / "result.json").document) == render(kept.document)


def test_only_consenting_silos_are_shown_by_themselves() -> None:
    page = render(result(release=2).document)
    (forest,) = re.findall(r'<svg class="wide"[^>]*aria-labelledby="forest-0.*?</svg>', page, flags=re.DOTALL)
    assert "silo 0: " in forest
    assert "random effects: " in forest
    assert "silo 2" not in forest
    alone = render(result(release=0).document)
    assert "only the pooled one is drawn" in alone
    assert "spread-0" not in alone


def test_the_page_loads_nothing() -> None:
    page = render(result().document)
    assert not re.search(r"https?:|//[a-z]|src=|url\(|@import|<script|<link|<iframe", page)
    assert "default-src 'none'" in page


def test_what_a_user_wrote_is_escaped() -> None:
    bad = "<img src=x onerror=alert(1)>&\"'"
    document = result().document
    document = {**document, "question": bad, "warnings": [bad], "arms": [bad, "1"], "plan": bad}
    renamed = {bad: document["silos"]["silo 0"], "silo 1": document["silos"]["silo 1"]}
    document |= {"silos": renamed, "sizes": {bad: 120, **document["sizes"]}}
    page = render(document)
    assert "<img" not in page
    assert words(page).count(bad) >= 4


def long_run(rounds: int) -> dict[str, Any]:
    """40 silos that all show their own estimate; so many rounds of targeting."""
    data = silos(40, 30)
    study = ft.Study(
        target=TARGETS["ATE"],
        outcome_model=ft.GLM("C(a) + x"),
        treatment_model=ft.GLM("x"),
        # So large a smoothness makes steps so small that the budget of rounds is what ends the run.
        algorithm=ft.Coded(smoothness=1e5, max_rounds=rounds, tolerance=1e-6),
        variables=VARIABLES,
    )
    document = ft.run(study, data, release=tuple(data), observe=True).document
    assert document["account"]["rounds"]["targeting"] == rounds
    return document


def require_small(document: dict[str, Any]) -> None:
    assert len(document["account"]["by_round"]["up"]) == 40
    page = render(document)
    assert len(page.encode()) < LIMIT
    without = len(document["without"])
    assert without > 30  # some of the silos are too small for an estimate of their own
    assert len(re.findall(r"without silo \d+: ", page)) == 2 * without  # a wide and a narrow drawing


@pytest.mark.slow
def test_a_run_of_1000_rounds_and_40_silos_stays_small() -> None:
    document = long_run(1_000)
    assert np.isfinite(document["trajectory"]["loss_by_round"]).all()
    require_small(document)


def test_a_report_of_1000_rounds_and_40_silos_stays_small() -> None:
    """As above, in seconds: a run of 20 rounds whose rounds are told fifty times."""
    document = long_run(20)
    trajectory, by_round = document["trajectory"], document["account"]["by_round"]
    points = [{**point, "round": k + 1} for k, point in enumerate(trajectory["points"] * 50)]
    loss = trajectory["loss_by_round"] * 50
    by_round = {
        "phases": [[phase, 1_000 if phase == "targeting" else count] for phase, count in by_round["phases"]],
        "up": {silo: (sent * 50)[:1_030] for silo, sent in by_round["up"].items()},
        "down": (by_round["down"] * 50)[:1_030],
    }
    document["trajectory"] |= {"points": points, "loss_by_round": loss}
    document["account"]["by_round"] = by_round
    require_small(document)
