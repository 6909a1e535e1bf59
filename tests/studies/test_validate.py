"""`validate` and `preflight` from Python, and how a defect reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.defects import Defect
from fedtmle.errors import InputError
from fedtmle.studies.preflight import preflight
from fedtmle.studies.validate import defects_of, validate
from fedtmle.studyfile.template import write_template
from tests.declare import declare

STUDY = ft.Study(
    target=ft.ATE(outcome="y", treatment="a"),
    outcome_model=ft.GLM("a + x"),
    treatment_model=ft.GLM("x"),
    variables=declare(y=(-9, 9), a="binary", x=(-9, 9)),
)


def frame(seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {"y": rng.normal(size=100), "a": rng.integers(0, 2, size=100), "x": rng.normal(size=100)}
    )


def test_a_sound_study_has_its_tables_and_no_defect(tmp_path: Path) -> None:
    write_template(tmp_path, force=False)
    checked = validate(tmp_path / "study.toml")
    assert checked.defects == checked.warnings == ()
    assert {name: table.n_rows for name, table in checked.tables.items()} == {"north": 240, "south": 160}
    assert checked.file is not None
    assert checked.schema is not None
    assert set(checked.schema.names) == {"sbp_12", "programme", "sbp_0", "age", "sex", "smoker"}


def test_defects_of_the_study_a_silo_file_and_the_data_are_listed_together(tmp_path: Path) -> None:
    write_template(tmp_path, force=False)
    study, north, south = tmp_path / "study.toml", tmp_path / "north.toml", tmp_path / "south.csv"
    study.write_text(study.read_text().replace("confidence = 0.95", "confidence = 95"))
    north.write_text(north.read_text().replace("[silo]", "[sillo]"))
    south.write_text(south.read_text().replace("yes", "sometimes"))
    defects = validate(study).defects
    assert {Path(str(defect.file)).name for defect in defects} == {"study.toml", "north.toml", "south.csv"}
    (smoker,) = [defect for defect in defects if defect.column == "smoker"]
    assert (smoker.silo, smoker.rows) == ("south", south.read_text().count("sometimes"))
    assert "sometimes" not in "".join(map(str, defects))


def test_a_defect_says_where_it_is_what_is_wrong_and_what_to_do() -> None:
    defect = Defect(
        message="is infinite", fix="correct it", silo="north", file="n.csv", line=3, column="x", rows=1
    )
    text = "silo 'north', column 'x': is infinite in 1 row; correct it"
    assert str(defect) == f"n.csv:3: {text}"
    assert defect.to_dict() == {"message": text, "file": "n.csv", "line": 3, "silo": "north"}
    assert str(Defect(message="no such file", file="study.toml")) == "study.toml: no such file"
    assert defects_of(InputError("models: wrong")) == [Defect(message="models: wrong")]


def test_preflight_takes_the_silos_of_a_run() -> None:
    silos = {"one": frame(1), "two": frame(2)}
    view = preflight(STUDY, silos)
    rows = pd.concat(silos.values())
    assert [count.count for count in view.arm_counts] == rows.groupby("a").size().tolist()
    assert view.n_rows == 200
    alone = preflight(STUDY, silos, silo="two")
    assert (alone.silos, alone.n_rows, alone.floor) == (("two",), 100, None)
    with pytest.raises(InputError, match="silo: expected one of one, two, not 'three'"):
        preflight(STUDY, silos, silo="three")
