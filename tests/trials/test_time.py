"""A trial that asks for risks by horizons: the time to the event, from the database to the effect."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.studyfile.file import StudyFileErrors
from fedtmle.trials import emulate, read_cohort
from tests.trials.test_eunomia import STRICTER, TRIAL, in_duckdb, in_postgresql, write
from tests.trials.test_write import written

GRID = "days = 365\nperiod_days = 73\nhorizons = [365]"
TIMED = TRIAL.replace("days = 365", GRID)
TWO = TIMED.replace("[365]", "[146, 365]")
RISKS = TWO.replace("[trial]", '[trial]\neffect = "risks"').partition("[covariates]")[0]


def test_without_covariates_the_risks_are_shares_of_people(eunomia: Path, tmp_path: Path) -> None:
    """Nobody is censored, so that a risk is the share with an event by then; 355 of 1,844 by day 365."""
    file = write(tmp_path, RISKS, in_duckdb(eunomia))
    emulated = emulate(file.trial, file.silos)
    cohorts = [read_cohort(file.trial, cdm).frame() for cdm in file.silos.values()]
    shares = {}
    for arm in ("diclofenac", "celecoxib"):
        people = [frame[frame.strategy == arm] for frame in cohorts]
        for day in (146, 365):
            had = sum(((rows.gi_bleed == 1) & (rows.gi_bleed_days <= day)).sum() for rows in people)
            shares[f"Risk({arm}) at {day // 73}"] = had / sum(map(len, people))
    assert shares["Risk(celecoxib) at 5"] == 355 / 1844
    assert shares["Risk(diclofenac) at 5"] == 124 / 850
    found = {row["estimand"]: row["estimate"] for row in emulated.result.document["estimates"]}
    assert found.keys() == shares.keys()
    for name, share in shares.items():
        np.testing.assert_allclose(found[name], share, rtol=1e-5, err_msg=name)


def test_with_covariates_the_effect_is_near_that_of_the_risk_on_the_last_day(
    eunomia: Path, tmp_path: Path
) -> None:
    """Nobody is censored: both estimate one number, from the same people and the same propensity score."""
    rows = []
    for text in (TRIAL, TIMED):
        file = write(tmp_path, text, in_duckdb(eunomia))
        rows += emulate(file.trial, file.silos).result.document["estimates"]
    last_day, timed = rows
    assert abs(timed["estimate"] - last_day["estimate"]) < 0.05 * last_day["std_error"]
    np.testing.assert_allclose(timed["std_error"], last_day["std_error"], rtol=0.02)


def test_the_written_study_gives_the_same_result(eunomia: Path, tmp_path: Path) -> None:
    file = write(tmp_path, STRICTER.replace("days = 365", GRID, 1), in_duckdb(eunomia))
    assert isinstance(file.trial.study.target, ft.RiskDifference)
    assert file.trial.study.censoring_model is not None
    study = written(file, tmp_path / "study")
    ran = CliRunner().invoke(app, ["run", str(study), "--json"])
    assert ran.exit_code == 0, ran.output
    document = dict(emulate(file.trial, file.silos).result.document)
    emulation = document.pop("emulation")
    assert json.loads(ran.output) == json.loads(json.dumps(document))
    assert sum(arm["unknown"] or 0 for silo in emulation["silos"].values() for arm in silo["arms"]) > 0
    page = tmp_path / "report.html"
    saved = tmp_path / "result.json"
    saved.write_text(json.dumps({**document, "emulation": emulation}), encoding="utf-8")
    shown = CliRunner().invoke(app, ["report", str(saved), "--out", str(page)])
    assert shown.exit_code == 0, shown.output
    assert "periods of 73 days" in page.read_text(encoding="utf-8")


def test_postgresql_gives_the_same_bytes(
    eunomia: Path, postgresql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDM", postgresql)
    here, there = (write(tmp_path, TIMED, places) for places in (in_duckdb(eunomia), in_postgresql()))
    results = [emulate(file.trial, file.silos).result.to_json() for file in (here, there)]
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("period_days = 73", "period_days = 74", "period_days: expected a divisor of days (365), got 74"),
        ("horizons = [365]", "horizons = [100]", "horizons: expected multiples of period_days (73)"),
        ("period_days = 73\n", "", "horizons: risks by several days need the time to the event"),
        ("[trial]", '[trial]\neffect = "odds ratio"', "effect: with period_days expected one of"),
        (
            "[covariates]",
            '[models.outcome]\nformula = "1"\n[covariates]',
            "this outcome has models of hazard",
        ),
        ("[covariates]", '[models.censoring]\nformula = "1"\n[covariates]', "every outcome is known"),
    ],
)
def test_defects(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = TIMED.replace(old, new)
    assert text != TIMED
    with pytest.raises(StudyFileErrors) as caught:
        write(tmp_path, text, iter(['[silos.north]\ndatabase = "x.duckdb"']))
    assert message in " ".join(str(defect) for defect in caught.value.defects)
