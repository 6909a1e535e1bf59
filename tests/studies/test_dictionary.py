"""A study with a dictionary: what the silos are not asked, what they check, and that no number changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.data import DataErrors
from fedtmle.errors import InputError
from fedtmle.initial.variables import Variables
from fedtmle.protocol.plan import roster
from fedtmle.protocol.tables import LevelsQuery, ScalesQuery
from fedtmle.runtime.replay import heard_rounds
from fedtmle.studyfile.file import StudyFileErrors, read_study, study_plan
from fedtmle.studyfile.template import write_template

ROWS = 600


def columns(rows: int = ROWS) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    age = rng.uniform(20, 90, rows)
    sex = rng.choice(["f", "m"], rows)
    visits = rng.poisson(3, rows)
    a = rng.binomial(1, 1 / (1 + np.exp(-0.02 * (age - 50))))
    y = rng.binomial(1, 1 / (1 + np.exp(-(0.5 * a + 0.03 * (age - 55) + 0.3 * (sex == "m")))))
    weight = rng.uniform(0.5, 2.0, rows)
    return {"age": age, "sex": sex, "visits": visits.astype(float), "a": a, "y": y.astype(float), "w": weight}


def silos(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {key: column[at::3] for key, column in data.items()} for at, name in enumerate("pqr")}


DICTIONARY: dict[str, Any] = {
    "age": {"kind": "number", "range": (18, 110), "unit": "years"},
    "sex": {"kind": "category", "levels": {"f": "female", "m": "male"}},
    "visits": {"kind": "count", "range": (0, 60)},
    "y": {"kind": "binary"},
    "w": {"kind": "number", "range": (0, 4)},
}


def study(dictionary: dict[str, Any] | None = None, **options: Any) -> ft.Study:
    bounds: dict[str, Any] = {} if dictionary else {"outcome_type": "binary"}
    return ft.Study(
        target=ft.ATE(outcome="y", treatment="a", **bounds),
        outcome_model=ft.GLM("a + age + C(sex) + log(age) + I(visits**2):C(sex)"),
        treatment_model=ft.GLM("age + C(sex)"),
        algorithm=ft.Gradient(optimizer=ft.Newton(), tolerance=1e-10),
        variables=None if dictionary is None else Variables({**dictionary, "a": {"kind": "binary"}}),
        **options,
    )


def asked(chosen: ft.Study, data: dict[str, Any]) -> list[type]:
    result = ft.run(chosen, silos(data)).run
    assert result is not None
    plan = study_plan(chosen, roster(list(result.sizes)))
    return [
        type(member)
        for heard in heard_rounds(plan, result.transcript, result.sizes)
        for member in heard.query.members
    ]


@pytest.mark.parametrize("options", [{}, {"weights": "w"}, {"folds": 2}], ids=["plain", "weights", "folds"])
def test_no_labels_and_no_scales_are_asked(options: dict[str, Any]) -> None:
    with_dictionary = asked(study(DICTIONARY, **options), columns())
    without = asked(study(**options), columns())
    assert {LevelsQuery, ScalesQuery} & set(with_dictionary) == set()
    assert {LevelsQuery, ScalesQuery} <= set(without)
    assert len(with_dictionary) < len(without)


@pytest.mark.parametrize("options", [{}, {"weights": "w"}, {"folds": 2}], ids=["plain", "weights", "folds"])
def test_the_estimate_is_the_same(options: dict[str, Any]) -> None:
    one, other = (ft.run(study(d, **options), silos(columns())) for d in (None, DICTIONARY))
    numbers = ["estimate", "std_error"]
    np.testing.assert_allclose(one.table()[numbers], other.table()[numbers], rtol=1e-9)


def test_the_outcome_is_what_the_dictionary_says() -> None:
    target = study(DICTIONARY).target
    assert (target.outcome_type, target.outcome_bounds) == ("binary", (0.0, 1.0))
    cost = study({**DICTIONARY, "y": {"kind": "number", "range": (0, 50_000)}}).target
    assert (cost.outcome_type, cost.outcome_bounds) == ("continuous", (0.0, 50_000.0))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("age", 1060.0, "column 'age': is outside the declared range in 2 rows"),
        ("visits", 2.5, "column 'visits'"),
        ("sex", "F", "column 'sex'"),
        ("y", 2.0, "column 'y'"),
    ],
)
def test_a_silo_checks_every_value_and_quotes_none(name: str, value: Any, message: str) -> None:
    data = columns()
    data[name] = data[name].astype(object) if isinstance(value, str) else data[name].copy()
    data[name][[1, 4]] = value  # both rows are at silo q
    with pytest.raises(DataErrors) as caught:
        ft.run(study(DICTIONARY), silos(data))
    text = str(caught.value)
    assert "silo 'q'" in text
    assert message in text
    assert "1060" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": None}, "variables: 'age' are used and not declared"),
        ({"age": {"kind": "category", "levels": ["young", "old"]}}, "'age' is a category; write C\\(age\\)"),
        ({"sex": {"kind": "binary"}}, "'sex' is used as a factor; declare it as a category"),
        ({"age": {"kind": "number", "range": (0, 110)}}, "outcome_model: log\\(age\\) has no finite range"),
        ({"y": {"kind": "category", "levels": ["no", "yes"]}}, "'y' is a category"),
    ],
)
def test_a_study_that_its_dictionary_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    dictionary = {name: entry for name, entry in {**DICTIONARY, **change}.items() if entry is not None}
    with pytest.raises(InputError, match=message):
        study(dictionary)


def written(tmp_path: Path, old: str, new: str) -> Path:
    """Write the example of `fedtmle init` with one change."""
    write_template(tmp_path, force=True)
    path = tmp_path / "study.toml"
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def test_the_example_declares_its_variables(tmp_path: Path) -> None:
    write_template(tmp_path, force=True)
    variables = read_study(tmp_path / "study.toml").study.variables
    assert variables is not None
    assert variables["sbp_12"].unit == "mmHg"
    assert variables.label("smoker") == "Current smoker"
    described = ft.run(*study_and_silos(tmp_path / "study.toml")).to_dict()["study"]["variables"]
    assert described["sex"]["levels"] == {"female": "", "male": ""}


def study_and_silos(path: Path) -> tuple[ft.Study, Any]:
    file = read_study(path)
    return file.study, file.silos


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'age = {kind = "number", range = [18, 110]',
            'age = {kind = "number", range = [110, 18]',
            "[variables.age] range",
        ),
        (
            'sex = {kind = "category", levels = ["female", "male"]',
            'sex = {kind = "category"',
            "[variables.sex]: levels",
        ),
        ('smoker = {kind = "binary"', 'smoker = {kind = "yes/no"', "[variables.smoker] kind"),
        (
            'smoker = {kind = "binary", label = "Current smoker"}',
            'smoker = "binary"',
            "describe the variable by keys",
        ),
        ('smoker = {kind = "binary", label = "Current smoker"}', "", "'smoker' are used and not declared"),
        (
            'smoker = {kind = "binary", label',
            'smoker = {kind = "binary", labels',
            "[variables.smoker] labels",
        ),
        (
            'outcome = "sbp_12" ',
            'outcome_bounds = [0, 300]\noutcome = "sbp_12" ',
            "[target] outcome_bounds: leave it out",
        ),
    ],
)
def test_a_defect_of_the_dictionary_has_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(StudyFileErrors) as caught:
        read_study(written(tmp_path, old, new))
    assert message in str(caught.value)
    assert all(defect.line is not None for defect in caught.value.defects)


def test_a_unit_that_differs_at_one_hospital_is_found(tmp_path: Path) -> None:
    """The southern hospital forgets that it measures blood pressure in kPa."""
    write_template(tmp_path, force=True)
    south = tmp_path / "south.toml"
    text = south.read_text(encoding="utf-8")
    assert "scale = 7.50062" in text
    south.write_text(text.replace("scale = 7.50062", "scale = 1.0"), encoding="utf-8")
    found = [str(defect) for defect in ft.validate(tmp_path / "study.toml").defects]
    assert any("sbp_0" in line and "is outside the declared range" in line for line in found)
