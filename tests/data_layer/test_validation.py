from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedtmle.data import ColumnMap, DataErrors, Defect
from fedtmle.errors import DataError, InputError
from tests.narrow import load, load_all

from .asking import SOURCES, binary, defect, defects, factor, frame, labels, numeric, schema


def test_an_unknown_column_brings_near_names() -> None:
    found = defect(frame(Age=[1], agee=[1], zip=[1]), schema(numeric("age")))
    assert found.message == "the table has no column 'age'"
    assert found.fix == "did you mean 'Age' or 'agee'? map it in [columns] of the silo file"
    assert found.column == "age"
    mapped = defect(frame(AGE_YRS=[1]), schema(numeric("age")), mapping={"age": "AGE_YR"})
    assert mapped.message == "the table has no column 'AGE_YR'"
    assert "'AGE_YRS'" in mapped.fix
    assert "did you mean" not in defect(frame(zip=[1]), schema(numeric("age"))).fix


def test_the_first_record_of_a_headless_file_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("kanarie,41\nkanarie2,42\n", encoding="utf-8")
    found = defect(path, schema(factor("kanari")))
    assert found.fix == "check that the first line of the file holds the column names"
    path.write_text(",kanarie.x\n1,2\n", encoding="utf-8")  # R's row names have an empty header
    assert "'kanarie.x'" in defect(path, schema(factor("kanari"))).fix


def test_a_column_that_is_there_twice(tmp_path: Path) -> None:
    double = pd.DataFrame([[1.0, 2.0, 3.0]], columns=["x", "x", "y"])
    double.to_csv(tmp_path / "rows.csv", index=False)
    for source in (double, tmp_path / "rows.csv"):
        assert defect(source, schema(numeric("x"), numeric("y"))).message == "the table has 2 columns 'x'"
    cased = tmp_path / "cased.csv"
    cased.write_text("x,X\n1,2\n", encoding="utf-8")
    table = load(cased, schema(numeric("x"), numeric("X")), silo="n")
    assert (table.numeric["x"][0], table.numeric["X"][0]) == (1.0, 2.0)


def test_two_names_for_one_column() -> None:
    found = defect(frame(age=[1]), schema(numeric("age"), numeric("years")), mapping={"years": "age"})
    assert found.message == "the study's columns 'age' and 'years' are all mapped to the hospital's 'age'"
    load(frame(age=[1]), schema(numeric("age")), silo="n", mapping={"years": "age"})  # not this study's


def test_counts_of_missing_outside_and_undeclared() -> None:
    rows = frame(y=[1.0, np.nan, 12.0, -3.0, np.nan], g=["a", "b", "zz", None, "q"], t=[0, 1, 2, 1, 1])
    asked = schema(numeric("y", bounds=(0, 10)), factor("g", levels=("a", "b")), binary("t"))
    found = [(one.column, one.message, one.rows) for one in defects(rows, asked)]
    assert found == [
        ("y", "is missing, and the study does not say what to do,", 2),
        ("y", "is outside the declared bounds", 2),
        ("g", "is missing, and the study does not say what to do,", 1),
        ("g", "has a level that the study does not declare", 2),
        ("t", "is neither 0 nor 1", 1),
    ]


def test_bounds_are_inclusive_and_in_the_studys_unit() -> None:
    asked = schema(numeric("y", bounds=(0, 10)))
    assert load(frame(y=[0.0, 10.0]), asked, silo="n").n_rows == 2
    pounds = {"y": ColumnMap(column="y", scale=0.5)}
    assert load(frame(y=[0.0, 20.0]), asked, silo="n", mapping=pounds).numeric["y"].tolist() == [0.0, 10.0]
    assert defect(frame(y=[0.0, 20.5]), asked, mapping=pounds).rows == 1


def test_infinite_numbers_also_after_conversion() -> None:
    assert defect(frame(y=[np.inf, -np.inf, 1.0]), schema(numeric("y"))).rows == 2
    asked, huge = schema(factor("y")), {"y": ColumnMap(column="y", scale=1e300)}
    assert defect(frame(y=[1e300, 0.0]), asked, mapping=huge).message == "is infinite"


def test_text_cannot_be_scaled() -> None:
    found = defect(frame(y=["a", "b"]), schema(factor("y")), mapping={"y": ColumnMap(column="y", shift=1.0)})
    assert (found.message, found.rows) == ("is text where a number is expected", 2)


def test_numbers_too_large_to_tell_apart_are_no_labels() -> None:
    ids = frame(cluster=[2**53, 2**53 + 1, 5])
    assert defect(ids, schema(factor("cluster"))).rows == 2
    assert load(ids, schema(numeric("cluster")), silo="n").n_rows == 3


def test_binary_text_only_through_levels() -> None:
    rows = frame(t=["no", "yes", None])
    asked = binary("t", may_be_missing=True)
    found = defect(rows, schema(asked))
    assert (found.message, found.rows) == ("is neither 0 nor 1", 2)
    mapped = {"t": ColumnMap(column="t", levels={"yes": "1", "no": "0"})}
    named = binary("t", may_be_missing=True, levels=("no", "yes"))
    for table in (
        load(rows, schema(asked), silo="n", mapping=mapped),
        load(rows, schema(named), silo="n"),
        load(frame(t=[0.0, 1.0, np.nan]), schema(named), silo="n"),
    ):
        np.testing.assert_array_equal(table.numeric["t"], [0.0, 1.0, np.nan])


def test_level_codes_translate_and_merge() -> None:
    codes = {"01": "low", "2.0": "low", "3": "high"}
    mapped = {"g": ColumnMap(column="g", levels=codes)}
    table = load(
        frame(g=[1, 2, 3]), schema(factor("g", levels=("low", "mid", "high"))), silo="n", mapping=mapped
    )
    assert labels(table.factors["g"]) == ["low", "low", "high"]
    assert table.factors["g"].levels == ("low", "mid", "high")  # the study's, in its order
    found = defect(frame(g=[1, 4, 4]), schema(factor("g")), mapping=mapped)
    assert (found.message, found.rows) == ("has a level code that the silo file does not list", 2)
    clash = {"g": ColumnMap(column="g", levels={"1": "a", "01": "b"})}
    assert (
        defect(frame(g=[1]), schema(factor("g")), mapping=clash).message
        == "levels give one number two meanings"
    )
    flags = {"g": ColumnMap(column="g", levels={"true": "yes", "false": "no"})}
    assert labels(
        load(frame(g=[True, False]), schema(factor("g")), silo="n", mapping=flags).factors["g"]
    ) == [
        "yes",
        "no",
    ]


def test_levels_of_a_number_must_be_numbers() -> None:
    rows, asked = frame(g=["lo", "hi"]), schema(numeric("g"), factor("g"))
    table = load(rows, asked, silo="n", mapping={"g": ColumnMap(column="g", levels={"lo": "9", "hi": "10"})})
    assert table.numeric["g"].tolist() == [9.0, 10.0]
    assert table.factors["g"].levels == ("9", "10")  # numeric order
    words = {"g": ColumnMap(column="g", levels={"lo": "low", "hi": "high"})}
    assert defect(rows, asked, mapping=words).message == "is text where a number is expected"


def test_a_problem_of_both_readings_is_told_once() -> None:
    assert defect(frame(x=[1.0, np.nan]), schema(numeric("x"), factor("x"))).rows == 1


@pytest.mark.parametrize("write", SOURCES)
def test_an_empty_table(write: Callable[[pd.DataFrame, Path], object], tmp_path: Path) -> None:
    empty = pd.DataFrame({"x": np.empty(0), "d": pd.to_datetime(pd.Series([], dtype="str"))})
    source = write(empty, tmp_path)
    assert defect(source, schema(numeric("x"))).message == "the table has no rows"
    assert defect(source, schema(numeric("d"))).message == "the table has no rows"


def test_what_is_no_source() -> None:
    with pytest.raises(InputError, match=r"silo 'n': a source is .* not list"):
        load([1.0], schema(numeric("x")), silo="n")


def test_all_silos_are_reported_together() -> None:
    asked = schema(numeric("x"), binary("t"))
    good = frame(x=[1.0], t=[1])
    assert list(load_all({"a": good, "b": good}, asked)) == ["a", "b"]
    with pytest.raises(DataErrors) as caught:
        load_all({"a": frame(x=["u"], t=[3]), "b": good, "c": frame(x=[1.0])}, asked)
    assert [(one.silo, one.column) for one in caught.value.defects] == [("a", "x"), ("a", "t"), ("c", "t")]
    assert str(caught.value).splitlines()[:2] == [
        "3 defects in the data:",
        "  - silo 'a', column 'x': is text where a number is expected in 1 row; "
        "write a decimal point or state decimal in the silo file, or map text with levels there",
    ]


def test_errors_survive_a_process_boundary_and_a_silos_name() -> None:
    errors = DataErrors([Defect(message="w", fix="f", rows=2, file="x.csv", line=3)])
    assert isinstance(errors, DataError)
    copy = pickle.loads(pickle.dumps(errors))  # noqa: S301 (our own bytes)
    assert (copy.defects, str(copy)) == (errors.defects, str(errors))
    assert str(errors.at("north")) == "1 defect in the data:\n  - x.csv:3: silo 'north': w in 2 rows; f"


def test_dates_where_a_number_is_expected_bring_the_difference_of_two_dates() -> None:
    for written in (["1950-02-03", "1961-12-24"], ["03.02.1950", "24.12.1961"], ["3/2/50 10:15", None]):
        found = defect(frame(age=written), schema(numeric("age", may_be_missing=True)))
        assert found.message == "is text where a number is expected"
        assert "map the time between two dates, with from and to in the silo file" in found.fix
        assert 'declare the variable as a "date difference"' in found.fix
    mixed = defect(frame(age=["1950-02-03", "fifty"]), schema(numeric("age")))
    assert "write a decimal point" in mixed.fix
