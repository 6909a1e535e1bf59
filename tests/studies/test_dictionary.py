"""A study with a dictionary: what the silos are not asked, what they check, and that no number changes."""

from __future__ import annotations

import dataclasses
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.data import DataErrors
from fedtmle.errors import InputError
from fedtmle.initial.variables import Variables
from fedtmle.protocol.bins import BinsQuery
from fedtmle.protocol.plan import roster
from fedtmle.protocol.query import MomentsQuery
from fedtmle.protocol.sites import DeparturesQuery, OwnEstimateQuery
from fedtmle.protocol.sums import SumsQuery, TallyQuery
from fedtmle.runtime.certificate import heard_rounds
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


def study(dictionary: dict[str, Any] = DICTIONARY, **options: Any) -> ft.Study:
    return ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + age + C(sex) + log(age) + I(visits**2):C(sex)"),
        treatment_model=ft.GLM("age + C(sex)"),
        algorithm=ft.Gradient(optimizer=ft.Newton(), tolerance=1e-10),
        variables=Variables({"a": {"kind": "binary"}, **dictionary}),
        **options,
    )


OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"weights": "w"}, {"folds": 2}], ids=["plain", "weights", "folds"]
)


@OPTIONS
def test_no_labels_and_no_scales_are_asked(options: dict[str, Any]) -> None:
    """Every answer of the transcript is numbers: a tally, sums, bins, moments, or a silo's own estimate."""
    chosen = study(**options)
    result = ft.run(chosen, silos(columns())).run
    assert result is not None
    plan = study_plan(chosen, roster(list(result.sizes)))
    rounds = list(heard_rounds(plan, result.transcript, result.sizes))
    asked = {type(member) for heard in rounds for member in heard.query.members}
    assert asked == {TallyQuery, SumsQuery, MomentsQuery, BinsQuery, OwnEstimateQuery, DeparturesQuery}
    assert type(rounds[0].query) is TallyQuery  # nothing comes before the counts
    said = b"".join(reply for exchange in result.transcript.exchanges for reply in exchange.replies.values())
    assert not [word for word in ("female", "male", "sex", "age", "visits") if word.encode() in said]


def test_the_declared_range_changes_the_grid_and_no_number() -> None:
    wide = {
        **DICTIONARY,
        "age": {"kind": "number", "range": (1, 1e4)},
        "w": {"kind": "number", "range": (0, 1e4)},
    }
    numbers = ["estimate", "std_error"]
    for options in ({}, {"weights": "w"}, {"folds": 2}):
        one, other = (ft.run(study(d, **options), silos(columns())).table() for d in (DICTIONARY, wide))
        np.testing.assert_allclose(one[numbers], other[numbers], rtol=1e-9)


def test_a_range_far_too_wide_is_named() -> None:
    wide = {**DICTIONARY, "age": {"kind": "number", "range": (1, 1e8)}}
    with pytest.raises(InputError, match=r"model: .* the declared range behind age is far wider"):
        ft.run(study(wide), silos(columns()))


def test_a_level_that_nobody_has_changes_no_number() -> None:
    """Its column is zero in every row: the coefficient stays 0, as R drops unused levels."""
    more = {**DICTIONARY, "sex": {"kind": "category", "levels": ["f", "m", "x"]}}
    one, other = (ft.run(study(d), silos(columns())).table() for d in (DICTIONARY, more))
    pd.testing.assert_frame_equal(one, other)


def test_a_reference_level_that_nobody_has_is_explained() -> None:
    first = {**DICTIONARY, "sex": {"kind": "category", "levels": ["x", "f", "m"]}}
    with pytest.raises(InputError, match="nobody has the reference level of a factor"):
        ft.run(study(first), silos(columns()))


def test_the_outcome_is_what_the_dictionary_says() -> None:
    chosen = study(DICTIONARY)
    assert (chosen.response, chosen.outcome_bounds) == ("binary", (0.0, 1.0))
    cost = study({**DICTIONARY, "y": {"kind": "number", "range": (0, 50_000)}})
    assert (cost.response, cost.outcome_bounds) == ("continuous", (0.0, 50_000.0))


def test_the_arms_are_the_levels_of_the_treatment() -> None:
    named = {**DICTIONARY, "a": {"kind": "category", "levels": {"0": "usual care", "1": "exercise"}}}
    chosen = dataclasses.replace(study(), outcome_model=ft.GLM("C(a) + age"), variables=Variables(named))
    assert chosen.target.arms == ("0", "1")
    swapped = dataclasses.replace(chosen, target=ft.ATE(outcome="y", treatment="a", arms=("1", "0")))
    (one,), (other,) = (ft.run(each, silos(columns())).document["estimates"] for each in (chosen, swapped))
    assert one["estimate"] == pytest.approx(-other["estimate"], rel=1e-9)
    with pytest.raises(InputError, match="arms: expected the levels that the dictionary declares for 'a'"):
        dataclasses.replace(chosen, target=ft.ATE(outcome="y", treatment="a", arms=("0", "2")))


def test_a_study_without_a_dictionary_says_what_it_lacks_and_how_to_draft_it() -> None:
    with pytest.raises(InputError) as caught:
        dataclasses.replace(study(weights="w"), variables=Variables({}), cluster="family")
    message = str(caught.value)
    assert message.startswith("variables: the dictionary does not declare 'y' (the outcome: kind ")
    for name, words in {
        "a": "the treatment",
        "w": "the weights",
        "family": 'the cluster: kind "identifier"',
        "age": "a number",
        "sex": "a factor",
        "visits": "a number",
    }.items():
        assert f"'{name}' ({words}" in message
    assert "`fedtmle init --from table.csv`" in message
    assert "`ft.draft(table)`" in message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("age", 1060.0, "column 'age': is outside the declared range 18 to 110 in 2 rows"),
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
        ({"age": None}, r"variables: the dictionary does not declare 'age' \(a number"),
        (
            {"age": {"kind": "category", "levels": ["young", "old"]}},
            "'age' is declared as a category, and used as a number",
        ),
        ({"sex": {"kind": "number", "range": (0, 1)}}, "'sex' is declared as a number, and used as a factor"),
        ({"age": {"kind": "number", "range": (0, 110)}}, "outcome_model: log\\(age\\) has no finite range"),
        (
            {"y": {"kind": "category", "levels": ["no", "yes"]}},
            "'y' is declared as a category, and used as the outcome",
        ),
        ({"a": {"kind": "identifier"}}, "'a' is declared as an identifier, and used as the treatment"),
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
        ('smoker = {kind = "binary", label = "Current smoker"}', "", "[variables] does not declare 'smoker'"),
        (
            'smoker = {kind = "binary", label',
            'smoker = {kind = "binary", labels',
            "[variables.smoker] labels",
        ),
        (
            'outcome = "sbp_12" ',
            'outcome_bounds = [0, 300]\noutcome = "sbp_12" ',
            "[target] outcome_bounds: unknown key of ATE",
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


def test_a_draft_from_a_silo_file_has_the_study_s_names_units_and_levels(tmp_path: Path) -> None:
    """What the silo reads from its database, as the study sees it."""
    with closing(sqlite3.connect(tmp_path / "ward.sqlite")) as database:
        database.execute("create table stays (iq real, g real, sex text, ward text)")
        rows = [(80 + k, 1200 + 10 * k, "FM?"[k % 3], "ab"[k % 2]) for k in range(60)]
        database.executemany("insert into stays values (?, ?, ?, ?)", [*rows, (999, 1500, "F", "a")])
        database.commit()
    silo = tmp_path / "silo.toml"
    silo.write_text(
        '[silo]\nname = "ward"\n[data]\ndatabase = "ward.sqlite"\ntable = "stays"\n[columns]\n'
        'iqsb = {column = "iq", missing = [999]}\nkg = {column = "g", scale = 0.001}\n'
        'sex = {levels = {F = "female", M = "male"}, missing = ["?"]}\n'
    )
    drafted = ft.draft(silo)
    assert list(drafted) == ["iqsb", "kg", "sex", "ward"]
    assert drafted["iqsb"].range == (0.0, 200.0)  # 999 is a code
    assert drafted["kg"].range == (1.0, 2.0)
    assert drafted["sex"].codes == ("female", "male")
    done = CliRunner().invoke(
        app, ["init", str(tmp_path / "study"), "--from", str(silo), "--outcome", "iqsb", "--treatment", "sex"]
    )
    assert done.exit_code == 0, done.output
    text = (tmp_path / "study" / "study.toml").read_text(encoding="utf-8")
    assert 'ward = "../silo.toml"' in text


def test_a_name_that_is_nearly_declared_is_asked_about() -> None:
    with pytest.raises(InputError, match=r"'y-1' .*, did you mean 'y_1'\?; correct the name"):
        ft.Study(
            target=ft.OutcomeMean(outcome="y-1"),
            outcome_model=ft.GLM("x"),
            variables=ft.Variables({"y_1": {"kind": "binary"}, "x": {"kind": "binary"}}),
        )
