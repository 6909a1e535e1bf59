"""Silos that differ: the warning, the silos' own estimates, and why a silo has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedtmle as ft
from fedtmle.model.table import Table
from fedtmle.protocol.sites import OwnStatus
from fedtmle.studies.preflight import preflight
from fedtmle.studies.validate import validate
from fedtmle.targets.effects.moments import EffectRows
from fedtmle.targets.effects.prepare import Preparation
from fedtmle.text.preflight import render_preflight
from tests.effects.studies import change, expit
from tests.studies.test_silo_variable import HOSPITALS, hospitals, study, write

EVERY = list(HOSPITALS)


def found(terms: str, data: dict[str, pd.DataFrame], **options: Any) -> dict[str, Any]:
    return ft.run(study(terms, **options), data, release=EVERY).to_dict()


def test_the_statistic_is_that_of_the_residuals() -> None:
    """With an intercept alone, T is the score statistic of the silos, up to the variance's estimate."""
    data = hospitals(300)
    plain = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a"),
        treatment_model=ft.GLM("1"),
        variables=study().variables,
    )
    tests = {test["model"]: test for test in ft.run(plain, data).to_dict()["site_tests"]}
    arms = [frame["a"].to_numpy(dtype=float) for frame in data.values()]
    mean = np.concatenate(arms).mean()
    expected = sum((arm - mean).sum() ** 2 / ((arm - mean) ** 2).sum() for arm in arms)
    assert tests["treatment model"]["statistic"] == pytest.approx(expected, abs=1e-4)
    assert tests["treatment model"]["df"] == 2
    assert tests["treatment model"]["p_value"] == pytest.approx(stats.chi2.sf(expected, 2), rel=1e-3)


def like_hospitals(seed: int, silos: int = 4, n: int = 120) -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(seed)
    data = {}
    for m in range(silos):
        age = rng.normal(0.3 * m, 1, n).clip(-6, 6)  # the silos' patients differ, and the models explain it
        a = (rng.random(n) < expit(0.5 * age)).astype(int)
        y = (rng.random(n) < expit(0.4 * age + 0.3 * a)).astype(int)
        data[f"h{m}"] = pd.DataFrame({"age": age, "a": a, "y": y, "site": "north"})
    return data


def test_silos_that_the_models_explain_raise_no_alarm() -> None:
    p_values: dict[str, list[float]] = {}
    for seed in range(60):
        for test in ft.run(study(""), like_hospitals(seed)).to_dict()["site_tests"]:
            p_values.setdefault(test["model"], []).append(test["p_value"])
    assert set(p_values) == {"treatment model", "outcome model"}
    for values in p_values.values():
        assert len(values) == 60
        assert np.mean(np.array(values) < 0.05) <= 0.12  # conservative; 60 draws
        assert np.median(values) > 0.5 - 3 * 0.5 / np.sqrt(60)


def test_a_silo_without_an_estimate_says_why() -> None:
    data = hospitals(200)
    data["north"] = data["north"].assign(a=lambda frame: (frame["age"] > 0).astype(int))
    data["south"] = data["south"].assign(a=0)
    data["east"] = data["east"].assign(y=lambda frame: frame["a"])
    result = ft.run(study("", g_bounds=0.01), data, release=EVERY)
    why = {w.split("'")[1]: w.partition(": ")[2] for w in result.notes if "of its own" in w}
    assert why == {
        "north": OwnStatus.SEPARATION.reason,
        "south": OwnStatus.FEW.reason,
    }
    assert list(result.to_dict()["silos"]) == ["east"]  # its outcome model has a weak penalty
    assert any(w.startswith("the own estimate of east is from weakly penalised fits") for w in result.notes)


def test_a_level_that_a_silo_lacks_has_no_column_there() -> None:
    """The hospital's own column is constant at each: the silo's own study is the one without it."""
    data = hospitals(300)
    own = found(" + C(site)", data)["silos"]
    plain = found("", data)["silos"]
    assert list(own) == EVERY
    for name in EVERY:
        assert own[name][0]["estimate"] == pytest.approx(plain[name][0]["estimate"], abs=1e-8)


def test_only_silos_that_release_compute_and_send() -> None:
    data = hospitals(300)
    some = ft.run(study(""), data, release=["south"]).to_dict()
    assert list(some["silos"]) == ["south"]
    assert some["heterogeneity"] == []
    none = ft.run(study(""), data).to_dict()
    assert none["silos"] == {}
    sent = {name: by["diagnostics"] for name, by in some["account"]["bits_up"].items()}
    kept = {name: by["diagnostics"] for name, by in none["account"]["bits_up"].items()}
    assert 60 <= sent["south"] - kept["south"] <= 160  # two means, their errors and correlation
    assert sent["north"] == kept["north"]


def test_without_diagnostics_there_are_none_and_the_result_says_so() -> None:
    result = ft.run(change(study(""), diagnostics=False), hospitals(200), release=["south"])
    assert result.to_dict()["silos"] == {}
    assert "no silo has an estimate of its own: the study leaves out its diagnostics" in result.notes


def test_preflight_and_validate_warn_before_anything_runs(tmp_path: Path) -> None:
    view = preflight(study(""), hospitals(400))
    (warning,) = view.warnings
    assert "'a' and 'y' differ between silos" in warning
    assert "Warning: 'a' and 'y' differ" in render_preflight(view)
    assert preflight(study(), hospitals(400)).warnings == ()
    path = write(tmp_path, hospitals(400))
    assert validate(path).warnings == ()
    path.write_text(path.read_text().replace(" + C(silo)", ""))
    (defect,) = validate(path).warnings
    assert "Add C(silo) to the formulas" in defect.message
    assert validate(path).defects == ()


def test_silos_that_are_alike_are_not_warned_about() -> None:
    assert preflight(study(""), like_hospitals(1)).warnings == ()


def test_a_silo_prepares_its_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap, targeting, diagnostics and the comparison of silos read the same prepared rows."""
    prepared: list[int] = []
    prepare = Preparation.__call__

    def counted(self: Preparation, table: Table) -> EffectRows:
        prepared.append(table.n_rows)
        return prepare(self, table)

    monkeypatch.setattr(Preparation, "__call__", counted)
    data = hospitals(300)
    document = ft.run(study(""), data).to_dict()  # without release: no silo runs a study of its own
    assert document["site_tests"]
    assert sorted(prepared) == sorted(len(frame) for frame in data.values())
