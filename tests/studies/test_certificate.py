"""The certificate of a study in the document, in words, on the command line and in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.report.page import render
from fedtmle.results.inference import uncovered
from fedtmle.text.certificate import certificate, certificate_table
from tests.theory.test_anytime import STUDY, silos


@pytest.fixture(scope="module")
def result() -> ft.StudyResult:
    return ft.run(STUDY, silos(2))


def test_the_summary_states_distance_and_history(result: ft.StudyResult) -> None:
    text = " ".join(certificate(result.document))
    bound = result.document["convergence"]["estimands"][0]["bound"]
    assert f"The estimate is within {bound:.1g} (" in text
    terms = result.document["certificate"]["remainder"]
    bits = f"For the run's {terms['initial_bits'] + terms['history_bits']:,} bits of fitted numbers"
    assert bits in text
    process, envelope = (f"{terms[key] / terms['std_error']:.2g}" for key in ("process", "envelope"))
    assert f"a worst case, far wider than the interval: {process} standard errors times" in text
    assert f"influence function, plus {envelope} standard errors." in text


def test_a_finite_sample_bound_is_told_as_it_is(result: ft.StudyResult) -> None:
    stated = result.document["certificate"]
    error = stated["remainder"]["std_error"]

    def told(process: float, envelope: float | None) -> str:
        terms = {**stated["remainder"], "process": process, "envelope": envelope}
        changed = {**result.document, "certificate": {**stated, "remainder": terms}}
        return " ".join(" ".join(certificate(changed)).split())

    small = ": 0.2 standard errors times the relative error of the influence function, plus 0.1 "
    assert small in told(0.2 * error, 0.1 * error)
    assert "worst case" not in told(0.2 * error, 0.1 * error)
    assert "is a worst case, far wider" in told(0.4 * error, 0.2 * error)
    assert "influence function, plus a term without a known bound." in told(0.2 * error, None)


def test_show_and_report_have_the_statistical_terms(result: ft.StudyResult, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result.save(path)
    shown = CliRunner().invoke(app, ["show", str(path), "--certificate"])
    assert shown.exit_code == 0
    assert shown.output.strip() == certificate_table(result.document).strip()
    assert "thm:statistical, 95%" in shown.output
    assert "envelope term" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    page = render(result.document)
    assert "The terms of the statistical theorem" in page
    assert "of the value that more rounds would reach" in page


def test_what_the_theorem_does_not_cover_is_named(result: ft.StudyResult) -> None:
    assert uncovered(STUDY) == result.document["uncovered"] == []
    text = " ".join(certificate({**result.document, "uncovered": ["records are clustered"]}))
    assert "The theorem does not cover this study: records are clustered." in text


def test_a_stop_too_early_says_that_there_is_no_bound(result: ft.StudyResult) -> None:
    none = {"reason": "the residual is too large", "estimands": []}
    text = " ".join(certificate({**result.document, "convergence": none}))
    assert "no bound on the distance from the estimate at convergence: the residual is too large" in text
