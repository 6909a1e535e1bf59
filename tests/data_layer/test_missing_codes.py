"""Codes that stand for no value, declared per column: taken out before anything else is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedtmle.data import ColumnMap, DataErrors, read_silo_file
from fedtmle.errors import InputError
from tests.narrow import load

from .asking import SOURCES, binary, defect, factor, frame, labels, numeric, schema

ROWS = frame(
    age=[31.0, 999.0, 52.0, -1.0],
    dose=["1.5", "unknown", "2", "unknown"],
    sex=["M", "U", "F", "M"],
    ward=[1.0, 9.0, 2.0, 1.0],
    event=[0.0, 1.0, 9.0, 1.0],
)
ASKED = schema(
    numeric("age", may_be_missing=True, bounds=(0, 60)),
    numeric("dose", may_be_missing=True),
    factor("sex", levels=("male", "female"), may_be_missing=True),
    factor("ward", may_be_missing=True),
    binary("event", may_be_missing=True),
)
MAPS = {
    "age": ColumnMap(column="age", missing=("999", "-1.0")),
    "dose": ColumnMap(column="dose", scale=2.0, missing=("unknown",)),
    "sex": ColumnMap(column="sex", levels={"M": "male", "F": "female"}, missing=("U",)),
    "ward": ColumnMap(column="ward", missing=("9",)),
    "event": ColumnMap(column="event", missing=("9",)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_codes_are_missing_in_every_kind_of_source(
    source: Callable[[pd.DataFrame, Path], object], tmp_path: Path
) -> None:
    table = load(source(ROWS, tmp_path), ASKED, silo="north", mapping=MAPS)
    np.testing.assert_array_equal(table.numeric["age"], [31, np.nan, 52, np.nan])
    np.testing.assert_array_equal(table.numeric["dose"], [3, np.nan, 4, np.nan])
    np.testing.assert_array_equal(table.numeric["event"], [0, 1, np.nan, 1])
    assert labels(table.factors["sex"]) == ["male", None, "female", "male"]
    assert labels(table.factors["ward"]) == ["1", None, "2", "1"]


def test_a_code_is_taken_before_the_unit_is_changed() -> None:
    mapped = {"age": ColumnMap(column="age", scale=0.1, missing=("999",))}
    table = load(
        frame(age=[10.0, 999.0]), schema(numeric("age", may_be_missing=True)), silo="n", mapping=mapped
    )
    np.testing.assert_array_equal(table.numeric["age"], [1.0, np.nan])


def test_where_none_may_be_missing_they_are_counted_and_other_text_is_still_refused() -> None:
    asked, rows = schema(numeric("age")), frame(age=[1.0, 999.0, 999.0])
    found = defect(rows, asked, mapping={"age": ColumnMap(column="age", missing=("999",))})
    assert (found.message, found.rows) == ("is missing, and the study does not say what to do,", 2)
    mapped = {"age": ColumnMap(column="age", missing=("?",))}
    found = defect(frame(age=["1", "?", "old"]), asked, mapping=mapped)
    assert (found.message, found.rows) == ("is text where a number is expected", 1)


def test_a_silo_file_declares_them(tmp_path: Path) -> None:
    text = '[silo]\nname = "n"\n[data]\npath = "rows.csv"\n[columns]\nage = {missing = [999, "NA", -1.5]}\n'
    path = tmp_path / "silo.toml"
    path.write_text(text, encoding="utf-8")
    assert read_silo_file(path).columns["age"] == ColumnMap(column="age", missing=("999", "NA", "-1.5"))
    for wrong in ("999", "[]", "[true]"):
        path.write_text(text.replace('[999, "NA", -1.5]', wrong), encoding="utf-8")
        with pytest.raises(DataErrors, match="'missing' is not a list of codes") as caught:
            read_silo_file(path)
        assert caught.value.defects[0].line == 6
    with pytest.raises(InputError, match="both a level and missing"):
        ColumnMap(column="sex", levels={"U": "male"}, missing=("U",))
