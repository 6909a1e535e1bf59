"""A whole study, sealed in one process: judged twice, added up, published, and equal to the open one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.errors import InputError, RefusedError
from fedtmle.studies.sealed import run_study

LOST = "treat + bw + nnhealth + b_marr + momblack"  # few columns: 77 infants have no outcome
STUDY = replace(IHDP, missingness_model=ft.GLM(LOST))


def test_the_demonstration_is_that_of_one_process() -> None:
    sealed, opened = run_study(STUDY, ihdp_silos()), ft.run(STUDY, ihdp_silos()).document
    exact, published = sealed.exact.document, sealed.published.document
    (before,), (row,), (shown,) = opened["estimates"], exact["estimates"], published["estimates"]
    error = before["std_error"]
    assert abs(row["estimate"] - before["estimate"]) < 1e-6 * error
    assert abs(row["std_error"] - error) < 1e-6 * error
    assert abs(shown["estimate"] - before["estimate"]) <= 0.006 * error
    assert exact["arm_counts"] == opened["arm_counts"]
    assert exact["diagnostics"]["outcome_fit"]["r_squared"]["targeted"] == pytest.approx(
        opened["diagnostics"]["outcome_fit"]["r_squared"]["targeted"], abs=1e-3
    )
    assert [rung["bound"] for rung in exact["ladder"]] == [rung["bound"] for rung in opened["ladder"]]
    assert sealed.carried.rounds <= 18
    assert published["published"] == {"floor": 5}
    assert published["trajectory"]["points"] == []
    assert json.loads(sealed.published.to_json()) == published


def test_the_demonstrations_own_model_of_who_was_lost_has_columns_of_few_people() -> None:
    """Four infants of several births were lost: a model of who was lost may not have a column for them."""
    with pytest.raises(RefusedError, match="too few people stand behind what the study asks"):
        run_study(IHDP, ihdp_silos())


def test_a_column_of_one_person_is_refused_and_not_read() -> None:
    rng = np.random.default_rng(1)
    n = 600
    columns = {"x": rng.uniform(size=n), "a": rng.integers(0, 2, n), "y": rng.integers(0, 2, n)}
    lone = np.zeros(n)
    lone[17] = 1.0
    silos = {
        f"hospital {m}": {name: column[m::3] for name, column in {**columns, "z": lone}.items()}
        for m in range(3)
    }
    variables: Any = {
        "x": {"kind": "number", "range": (0, 1)},
        **{name: {"kind": "binary"} for name in ("a", "y", "z")},
    }

    def study(formula: str) -> ft.Study:
        return ft.Study(
            target=ft.ATE(outcome="y", treatment="a"),
            outcome_model=ft.GLM(f"a + {formula}"),
            treatment_model=ft.GLM("x"),
            variables=variables,
        )

    assert run_study(study("x"), silos).exact.document["converged"]
    with pytest.raises(RefusedError, match="too few people"):
        run_study(study("x + z"), silos)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"algorithm": ft.LocalAverage()}, "algorithm"),
        ({"privacy": ft.Privacy(epsilon=5.0, delta=1e-6)}, "privacy"),
    ],
)
def test_what_is_not_in_the_language_yet_is_refused_with_its_name(change: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=f"^{key}: "):
        run_study(replace(STUDY, **change), ihdp_silos())


def test_time_to_an_event_is_that_of_one_process() -> None:
    rng = np.random.default_rng(3)
    n = 3000
    x, a = rng.uniform(-1, 1, n), rng.integers(0, 2, n)
    event, end = rng.exponential(6.0 / np.exp(0.3 * x - 0.4 * a)), rng.uniform(0, 6, n)
    columns = {"x": x, "a": a, "time": np.minimum(event, end), "event": (event <= end).astype(int)}
    silos = {f"hospital {m}": {name: column[m::3] for name, column in columns.items()} for m in range(3)}
    variables: Any = {
        "x": {"kind": "number", "range": (-1, 1)},
        "time": {"kind": "number", "range": (0, 10)},
        **{name: {"kind": "binary"} for name in ("a", "event")},
    }
    study = ft.Study(
        target=ft.Risk(
            outcome="event",
            time="time",
            treatment="a",
            periods=4,
            period_length=1.0,
            beyond="truncate",
            horizons=(4,),
        ),
        hazard_model=ft.GLM("a + x + C(period)"),
        treatment_model=ft.GLM("x"),
        censoring_model=ft.GLM("a + C(period)"),
        variables=variables,
    )
    sealed, opened = run_study(study, silos).exact.document, ft.run(study, silos).document
    for row, before in zip(sealed["estimates"], opened["estimates"], strict=True):
        assert abs(row["estimate"] - before["estimate"]) < 1e-6 * before["std_error"]
        assert abs(row["std_error"] - before["std_error"]) < 1e-6 * before["std_error"]
