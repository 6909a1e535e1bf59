from __future__ import annotations

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from fedtmle.data.convert import relabel
from fedtmle.data.frames import text
from fedtmle.model.table import Table
from tests.narrow import load

from .asking import defect, factor, labels, numeric, schema

nan = np.nan
NUMBERS = {
    "int64": pd.Series([1, 0]),
    "uint8": pd.Series([1, 0], dtype="uint8"),
    "float32": pd.Series([1, 0], dtype="float32"),
    "bool": pd.Series([True, False]),
    "Int64": pd.Series([1, None], dtype="Int64"),
    "Float64": pd.Series([1.0, pd.NA], dtype="Float64"),
    "boolean": pd.Series([True, None], dtype="boolean"),
    "object ints": pd.Series([1, None], dtype=object),
    "object bools": pd.Series([True, pd.NA], dtype=object),
    "decimals": pd.Series([Decimal(1), None], dtype=object),
    "nothing": pd.Series([None, None], dtype=object),
    "category of ints": pd.Series([1, None], dtype="Int64").astype("category"),
    "category of bools": pd.Series([True, False]).astype("category"),
}
TEXTS = {
    "str": pd.Series(["b", None, "a"]),
    "object": pd.Series(["b", nan, "a"], dtype=object),
    "string": pd.Series(["b", pd.NA, "a"], dtype="string"),
    "category": pd.Series(["b", None, "a"]).astype(pd.CategoricalDtype(["c", "b", "a"])),
}


def one(series: object) -> Table:
    asked = schema(numeric("x", may_be_missing=True), factor("x", may_be_missing=True))
    return load({"x": series} if not isinstance(series, pd.DataFrame) else series, asked, silo="north")


@pytest.mark.parametrize("kind", NUMBERS)
def test_all_pandas_numbers_become_float64(kind: str) -> None:
    series = NUMBERS[kind]
    column = one(series.to_frame("x")).numeric["x"]
    assert column.dtype == np.float64
    assert column.flags["C_CONTIGUOUS"]
    expected = [nan if pd.isna(value) else float(value) for value in series]
    np.testing.assert_array_equal(column, expected)
    np.testing.assert_array_equal(one(series).numeric["x"], expected)


@pytest.mark.parametrize("kind", TEXTS)
def test_all_pandas_texts_become_factors_of_the_levels_present(kind: str) -> None:
    asked = schema(factor("x", may_be_missing=True))
    column = load(TEXTS[kind].to_frame("x"), asked, silo="north").factors["x"]
    assert labels(column) == ["b", None, "a"]
    assert column.levels == ("a", "b")
    assert column.counts == (1, 1)
    assert column.codes.dtype == np.int64


def test_labels_that_are_one_level_are_counted_together() -> None:
    column = relabel(np.array([0, 1, 2, -1, 2, 3]), ["x", "y", "x", None, "never"])
    assert labels(column) == ["x", "y", "x", None, "x", None]
    assert (column.levels, column.counts) == (("x", "y"), (3, 1))


@pytest.mark.parametrize(
    "values",
    [
        pd.to_datetime(pd.Series(["2020-01-01", "2020-01-02"])),
        pd.Series([pd.Timedelta(1, "D")]),
        pd.Series([pd.Period("2020-01")]),
        pd.to_datetime(pd.Series(["2020-01-01"])).astype("category"),
    ],
)
def test_dates_are_no_numbers(values: pd.Series) -> None:
    assert "dates or times" in defect(values.to_frame("x"), schema(numeric("x"))).message


@pytest.mark.parametrize("values", [[b"a"], [[1], [2]], [1 + 2j], [{"a": 1}, 1]])
def test_other_objects_are_no_numbers(values: list[object]) -> None:
    assert "neither numbers nor text" in defect(pd.DataFrame({"x": values}), schema(factor("x"))).message


def test_stray_text_among_numbers_is_counted() -> None:
    mixed = pd.DataFrame({"x": pd.Series([1, "unknown", None, 2.5, "?"], dtype=object)})
    found = defect(mixed, schema(numeric("x", may_be_missing=True)))
    assert (found.message, found.rows) == ("is text where a number is expected", 2)
    assert "map text with levels" in found.fix


def test_numbers_stored_as_text_are_not_guessed_at() -> None:
    found = defect(pd.DataFrame({"x": ["1", "2", None]}), schema(numeric("x", may_be_missing=True)))
    assert (found.message, found.rows) == ("is a number stored as text", 2)


def test_the_table_is_a_copy() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0]})
    array = np.array([1.0, 2.0])
    tables = [load(source, schema(numeric("x")), silo="n") for source in (frame, {"x": array})]
    frame.loc[0, "x"] = 9.0
    array[0] = 9.0
    assert all(table.numeric["x"].tolist() == [1.0, 2.0] for table in tables)


def test_without_a_copy_whole_columns_stay_where_they_are() -> None:
    """Of a study that is over when the call returns; what is no contiguous float64 is copied all the same."""
    frame, array = pd.DataFrame({"x": np.array([1.0, -3.0])}), np.array([1.0, -3.0])
    strided, fixed = np.arange(4.0)[::2], np.array([1.0, 2.0])
    fixed.flags.writeable = False
    for source, own in ((frame, frame["x"].to_numpy()), ({"x": array}, array), ({"x": fixed}, fixed)):
        table = load(source, schema(numeric("x")), silo="n", copy=False)
        assert np.shares_memory(table.numeric["x"], own) or own is fixed
        assert table.numeric["x"].tolist() == own.tolist()
        assert table.reach == {"x": np.abs(own).max()}
    for other in (strided, pd.Series([1, 2]), pd.Series([1.5, None], dtype="Float64")):
        asked = schema(numeric("x", may_be_missing=True))
        column = load({"x": other}, asked, silo="n", copy=False).numeric["x"]
        assert column.dtype == np.float64
        assert column.flags.c_contiguous
        assert not np.shares_memory(column, np.asarray(other))


@pytest.mark.parametrize(
    "values",
    [[0, 1, 1, 0], [5, 0, 2, 2], [255, 254, 0], [256, 3, 0], [-1, 0, 1], [0.5, 1, 2], [1, nan, 0]],
)
def test_whole_numbers_are_labelled_like_any_others(values: list[float]) -> None:
    column = one(pd.Series(values, dtype="float64")).factors["x"]
    wanted = [None if np.isnan(v) else f"{v:g}" for v in values]
    assert labels(column) == wanted
    assert column.levels == tuple(sorted({label for label in wanted if label is not None}, key=float))


def test_masked_and_strided_arrays_and_lists() -> None:
    masked = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])
    strided = np.arange(6.0)[::2]
    asked = schema(numeric("a", may_be_missing=True), numeric("b"), factor("c"))
    table = load({"a": masked, "b": strided, "c": ["u", "v", "u"]}, asked, silo="n")
    assert labels(text(np.ma.array(["u", "?"], mask=[False, True], dtype=object))) == ["u", None]
    np.testing.assert_array_equal(table.numeric["a"], [1.0, nan, 3.0])
    assert table.numeric["b"].flags["C_CONTIGUOUS"]
    assert labels(table.factors["c"]) == ["u", "v", "u"]


def test_arrays_must_be_columns_of_one_length() -> None:
    asked = schema(numeric("a"), numeric("b"))
    assert "different lengths" in defect({"a": [1.0], "b": [1.0, 2.0]}, asked).message
    assert "one-dimensional" in defect({"a": [1.0], "b": np.ones((1, 2))}, asked).message


def test_polars_types() -> None:
    pl = pytest.importorskip("polars", reason="polars is not installed")
    frame = pl.DataFrame(
        {
            "int": [1, None],
            "bool": [True, None],
            "float": [1.5, float("nan")],
            "decimal": pl.Series([Decimal("1.25"), None], dtype=pl.Decimal(6, 2)),
            "null": [None, None],
            "text": ["b", None],
            "category": pl.Series(["b", None], dtype=pl.Categorical),
            "enum": pl.Series(["b", None], dtype=pl.Enum(["z", "b"])),
            "date": pl.Series([0, 1]).cast(pl.Date),
            "list": [[1], [2]],
        }
    )
    numbers, texts = ("int", "bool", "float", "decimal", "null"), ("text", "category", "enum")
    asked = [numeric(name, may_be_missing=True) for name in numbers]
    asked += [factor(name, may_be_missing=True) for name in texts]
    table = load(frame, schema(*asked), silo="n")
    np.testing.assert_array_equal(
        np.array([table.numeric[name][0] for name in numbers]), [1, 1, 1.5, 1.25, nan]
    )
    assert all(np.isnan(table.numeric[name][1]) for name in numbers)
    assert all(labels(table.factors[name]) == ["b", None] for name in texts)
    assert all(table.numeric[name].flags.writeable for name in numbers)
    assert "dates or times" in defect(frame, schema(factor("date"))).message
    assert "neither numbers nor text" in defect(frame, schema(factor("list"))).message
