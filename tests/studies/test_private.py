"""A study with privacy from end to end: embedded and masked, its file, its document, its refusals."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.privacy import Cell, draw, run_flow, study_of

import fedtmle as ft
from fedtmle.errors import InputError, RefusedError
from fedtmle.protocol.plan import roster
from fedtmle.report.page import render as page_of
from fedtmle.runtime import silo
from fedtmle.runtime.session import run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.studies.preflight import preflight
from fedtmle.studyfile.file import read_study, study_plan
from fedtmle.text.certificate import certificate
from fedtmle.text.result import render as text_of
from fedtmle_core.noise import discrete_gaussian
from tests.declare import declare
from tests.initial.silos import pooled_table, split, trial

CELL = Cell(n=3000, p=3, epsilon=2.0)
Silos = dict[str, dict[str, Any]]


def silos(cell: Cell = CELL, count: int = 4) -> Silos:
    columns, _ = draw(cell, cell.n, np.random.default_rng(8))
    return {f"s{m}": {name: values[m::count] for name, values in columns.items()} for m in range(count)}


@pytest.fixture(scope="module")
def result() -> ft.StudyResult:
    return ft.run(study_of(CELL), silos())


def test_a_study_runs_masked_in_four_rounds(result: ft.StudyResult) -> None:
    document = result.document
    assert document["study"]["options"]["aggregation"] == "masked"
    assert document["account"]["rounds"] == {"nuisance": 3, "closing": 1}
    (row,) = document["estimates"]
    assert row["estimand"] == "ATE"
    assert row["conf_low"] < row["estimate"] < row["conf_high"]
    privacy = document["privacy"]
    assert privacy["spent_epsilon"] <= 2.0
    assert privacy["spent_epsilon"] > 1.999
    parts = [privacy[f"std_error_{part}"][0] ** 2 for part in ("sampling", "noise", "models")]
    assert abs(sum(parts) - row["std_error"] ** 2) < 1e-12
    assert privacy["inflation"][0] > 1
    json.dumps(document, allow_nan=False)
    assert "zCDP" in " ".join(certificate(document))


def test_noise_is_not_drawn_from_the_plan(result: ft.StudyResult) -> None:
    again = ft.run(study_of(CELL), silos())
    assert again.document["plan"] == result.document["plan"]
    assert again.document["psi"] != result.document["psi"]


def test_without_noise_the_run_gives_the_numbers_of_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silo, "discrete_gaussian", lambda _variance, _below: 0)
    pooled = {name: np.concatenate([rows[name] for rows in silos().values()]) for name in silos()["s0"]}
    ours = ft.run(study_of(CELL), silos()).document
    simulated = run_flow(study_of(CELL), pooled, None, silos=4)
    # Each silo rounds its sums to 2^-24.
    np.testing.assert_allclose(ours["psi"], simulated.estimate.psi, rtol=1e-7)
    np.testing.assert_allclose(ours["covariance"], simulated.estimate.covariance, rtol=1e-7)


def test_masked_and_trusted_runs_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silo, "discrete_gaussian", lambda _variance, _below: 5)
    study = study_of(CELL)
    assert study.privacy is not None
    trusted = replace(study, privacy=replace(study.privacy, server="trusted"), aggregation="open")
    documents = [ft.run(each, silos()).document for each in (study, trusted)]
    assert documents[0]["psi"] == documents[1]["psi"]
    assert documents[0]["covariance"] == documents[1]["covariance"]


def test_an_answer_leaves_under_a_mask_only() -> None:
    """A plan that says "masked" without keys for masks is refused by each silo, before any answer."""
    study = trial(ft.GLM("a + x"), binary=True, algorithm=ft.OneStep(), privacy=ft.Privacy(epsilon=1.0))
    tables = split(pooled_table(300, 1, binary=True), 3)
    plan = study_plan(study, roster(list(tables)))
    parties = [Silo(name, plan, table) for name, table in tables.items()]
    with pytest.raises(RefusedError):
        run_embedded(plan, parties)
    assert {party.refused_by for party in parties} <= {"privacy", ""}
    assert any(party.refused_by == "privacy" for party in parties)


def test_a_repeated_request_gets_the_recorded_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second draw is given for one question: the bytes are those of the first answer."""
    drawn = 0

    def counted(variance: Any, below: Any) -> int:
        nonlocal drawn
        drawn += 1
        return discrete_gaussian(variance, below)

    monkeypatch.setattr(silo, "discrete_gaussian", counted)
    study = trial(
        ft.GLM("a + x"),
        binary=True,
        algorithm=ft.OneStep(),
        privacy=ft.Privacy(epsilon=1.0, server="trusted"),
    )
    tables = split(pooled_table(300, 1, binary=True), 3)
    plan = study_plan(study, roster(list(tables)))

    class Repeating(Silo):
        def step(self, request: bytes) -> bytes:
            first, second, third = super().step(request), super().step(request), super().step(request)
            assert first == second == third
            return first

    run_embedded(plan, [Repeating(name, plan, table) for name, table in tables.items()])
    lanes = 4 * 5 // 2 + 2 * (2 + 3) + (1 + 1 + 2)  # of the Gram matrix, two gradients and the closing sums
    assert drawn == 3 * lanes


OTHERS: dict[str, dict[str, Any]] = {
    "ATT is not available": {"target": ft.ATT(outcome="y", treatment="a")},
    "one-step": {"algorithm": ft.Gradient()},
    "weights are": {"weights": "w"},
    "folds are": {"folds": 3},
    "g must be bounded": {"g_bounds": None},
    "expected a GLM": {"outcome_model": ft.SuperLearner((ft.GLM("a"), ft.GLM("a + x")), folds=2)},
    "logistic GLM": {"outcome_model": ft.GLM("a + x", family="gaussian")},
    "C\\(silo\\)": {"outcome_model": ft.GLM("a + C(silo)")},
}


@pytest.mark.parametrize("message", OTHERS)
def test_what_is_not_available_says_so(message: str) -> None:
    settings: dict[str, Any] = {
        "target": ft.ATE(outcome="y", treatment="a"),
        "outcome_model": ft.GLM("a + x"),
        "treatment_model": ft.GLM("x"),
        "variables": declare(y=(0, 1), a="binary", x=(-1, 1), w=(0, 2), site=["a", "b"]),
        "privacy": ft.Privacy(epsilon=1.0),
    }
    ft.Study(**settings)
    with pytest.raises(InputError, match=f"privacy: .*{message}"):
        ft.Study(**(settings | OTHERS[message]))


def test_a_treatment_in_an_interaction_is_refused() -> None:
    study = replace(study_of(CELL), outcome_model=ft.GLM("a + x0 + a:x0"))
    with pytest.raises(InputError, match="the treatment enters a model by itself only"):
        ft.run(study, silos())


def test_a_preflight_of_all_silos_is_refused() -> None:
    with pytest.raises(InputError, match="without noise"):
        preflight(study_of(CELL), silos())


def test_all_silos_cannot_collude() -> None:
    study = replace(study_of(CELL), privacy=ft.Privacy(epsilon=1.0, colluders=4))
    with pytest.raises(InputError, match="may collude"):
        ft.run(study, silos())


@pytest.mark.parametrize("target", [ft.RR, ft.OR, ft.TSM], ids=lambda target: target.__name__)
def test_other_estimands_run(target: Any) -> None:
    study = replace(
        study_of(CELL), target=target(outcome="y", treatment="a"), submodel="per arm", algorithm=ft.OneStep()
    )
    document = ft.run(study, silos()).document
    assert all(row["conf_low"] < row["estimate"] < row["conf_high"] for row in document["estimates"])
    assert len(document["privacy"]["inflation"]) == 2


STRATA = {
    "ATE": (ft.ATE(outcome="y", treatment="a", strata="x1"), ["ATE", "ATE in 0", "ATE in 1"], 1),
    "RR": (ft.RR(outcome="y", treatment="a", strata="x1"), ["RR", "RR in 0", "RR in 1"], 2),
    "OR": (ft.OR(outcome="y", treatment="a", strata="x1"), ["OR", "OR in 0", "OR in 1"], 2),
    "TSM": (
        ft.TSM(outcome="y", treatment="a", strata="x1"),
        [f"E[Y({arm})]{place}" for place in ("", " in 0", " in 1") for arm in (0, 1)],
        2,
    ),
    "OutcomeMean": (ft.OutcomeMean(outcome="y", strata="x1"), ["E[Y]", "E[Y] in 0", "E[Y] in 1"], 1),
}


@pytest.mark.parametrize("kind", STRATA)
def test_estimates_by_stratum_are_those_of_exact_sums_up_to_the_models(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise, each estimate and standard error is near that of the same study without privacy."""
    monkeypatch.setattr(silo, "discrete_gaussian", lambda _variance, _below: 0)
    target, names, dim = STRATA[kind]
    has_arms = target.treatment is not None
    covariates = "x0 + C(x1) + x2"
    study = ft.Study(
        target=target,
        outcome_model=ft.GLM(f"a + {covariates}" if has_arms else covariates),
        treatment_model=ft.GLM(covariates) if has_arms else None,
        missingness_model=None if has_arms else ft.GLM(covariates),
        variables=study_of(CELL).variables,
        g_bounds=0.1,
        privacy=ft.Privacy(epsilon=20.0),
    )
    rows = silos(CELL if has_arms else replace(CELL, kind="missing"))
    document = ft.run(study, rows).document
    exact = ft.run(
        replace(study, privacy=None, submodel="per arm", aggregation="open", diagnostics=False), rows
    ).document
    assert [row["estimand"] for row in document["estimates"]] == names
    for ours, other in zip(document["estimates"], exact["estimates"], strict=True):
        assert abs(ours["estimate"] - other["estimate"]) < 0.1 * other["std_error"]
    privacy = document["privacy"]
    for ours, other in zip(document["estimates"], exact["estimates"], strict=True):
        assert ours["std_error"] == pytest.approx(other["std_error"], rel=0.15)
    assert len(privacy["std_error_sampling"]) == 3 * dim
    counts = [sum(np.sum(part["x1"] == level) for part in rows.values()) for level in (0, 1)]
    np.testing.assert_allclose(list(privacy["rows"].values()), counts, atol=1e-3)
    assert document["account"]["rounds"] == {"nuisance": 3, "closing": 1}
    (test, *_), (expected, *_) = document["interaction"], exact["interaction"]
    assert test["df"] == 1
    assert test["p_value"] == pytest.approx(expected["p_value"], abs=0.1)
    json.dumps(document, allow_nan=False)


def test_estimates_by_stratum_cost_noise_in_every_part() -> None:
    study = replace(study_of(CELL), target=ft.ATE(outcome="y", treatment="a", strata="x1"))
    result = ft.run(study, silos())
    document = result.document
    assert [row["estimand"] for row in document["estimates"]] == ["ATE", "ATE in 0", "ATE in 1"]
    privacy = document["privacy"]
    assert 1.999 < privacy["spent_epsilon"] <= 2.0  # no more than without strata
    for k, row in enumerate(document["estimates"]):
        parts = [privacy[f"std_error_{part}"][k] ** 2 for part in ("sampling", "noise", "models")]
        assert sum(parts) == pytest.approx(row["std_error"] ** 2, rel=1e-9)
    assert privacy["places"] == ["", "in 0", "in 1"]
    assert set(privacy["rows"]) == {"0", "1"}
    # The sum over everyone is that of two strata, each with the same noise.
    everyone, *strata = (deviation**2 for deviation in privacy["std_error_noise"])
    for noise_of, rows in zip(strata, privacy["rows"].values(), strict=True):
        assert everyone * CELL.n**2 == pytest.approx(2 * noise_of * rows**2, rel=0.05)
    page, shown = page_of(document), text_of(document)
    assert "ATE in 1" in page
    assert "contrast in 0" not in page  # no mean of an arm was estimated
    for part in ("times as wide as without noise", " in 0 (some ", "the numbers of records have noise"):
        assert part in page
        assert part in " ".join(shown.split())
    limited = [text for text in document["warnings"] if text.startswith("privacy: in ")]
    assert bool(limited) == any(each > 2 for each in privacy["inflation"][1:])


def test_strata_must_be_in_a_model() -> None:
    study = replace(
        study_of(CELL),
        target=ft.ATE(outcome="y", treatment="a", strata="x1"),
        outcome_model=ft.GLM("a + x0"),
        treatment_model=ft.GLM("x0 + x1:x2"),
    )
    with pytest.raises(InputError, match=r"strata: .*'x1' must be in a model by itself; add C\(x1\)"):
        ft.run(study, silos())


def test_the_mean_of_missing_outcomes_runs() -> None:
    cell = replace(CELL, kind="missing")
    study = ft.Study(
        target=ft.OutcomeMean(outcome="y"),
        outcome_model=ft.GLM("x0 + x1"),
        missingness_model=ft.GLM("x0 + x1"),
        variables=study_of(cell).variables,
        privacy=ft.Privacy(epsilon=2.0),
    )
    (row,) = ft.run(study, silos(cell)).document["estimates"]
    assert 0.2 < row["conf_low"] < row["conf_high"] < 0.8


def test_the_file_declares_the_budget(tmp_path: Path) -> None:
    text = """
[target]
kind = "ATE"
outcome = "y"
treatment = "a"
[variables]
y = {kind = "binary"}
a = {kind = "binary"}
x = {kind = "number", range = [-1, 1]}
[models.outcome]
formula = "a + x"
[models.treatment]
formula = "x"
[privacy]
epsilon = 1.5
delta = 1e-7
[silos]
one = "one.csv"
two = "two.csv"
three = "three.csv"
"""
    path = tmp_path / "study.toml"
    path.write_text(text)
    study = read_study(path).study
    assert study.privacy == ft.Privacy(epsilon=1.5, delta=1e-7)
    assert study.aggregation == "masked"
    path.write_text(text.replace("epsilon = 1.5", "epsilon = -1"))
    with pytest.raises(InputError, match="epsilon"):
        read_study(path)
    path.write_text(text.replace('kind = "ATE"', 'kind = "ATT"'))
    with pytest.raises(InputError, match="ATT is not available"):
        read_study(path)


def test_randomness_is_that_of_the_operating_system() -> None:
    assert silo.with_noise.__defaults__ == (secrets.randbelow,)
