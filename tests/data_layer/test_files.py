from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest

from fedtmle import data
from fedtmle.data import Database
from tests.narrow import load

from .asking import (
    SOURCES,
    as_csv,
    as_parquet,
    as_query,
    as_table,
    binary,
    defect,
    factor,
    labels,
    make_database,
    numeric,
    schema,
)

ASKED = schema(
    numeric("age", may_be_missing=True),
    factor("age", may_be_missing=True),
    binary("treat"),
    factor("sex", may_be_missing=True),
    factor("site"),
)


@pytest.mark.parametrize("write", SOURCES)
def test_all_sources_give_the_same_table(
    write: Callable[[pd.DataFrame, Path], object], tmp_path: Path
) -> None:
    frame = pd.DataFrame(
        {
            "notes": ["not, needed", "", 'a "quoted"\nline'],
            "age": [40.5, np.nan, 9.0],
            "treat": [True, False, True],
            "sex": ["m", None, "f"],
            "site": [10, 9, 10],
        }
    )
    table = load(write(frame, tmp_path), ASKED, silo="north")
    assert table.n_rows == 3
    assert set(table.numeric) == {"age", "treat"}
    np.testing.assert_array_equal(table.numeric["age"], [40.5, np.nan, 9.0])
    np.testing.assert_array_equal(table.numeric["treat"], [1.0, 0.0, 1.0])
    assert all(column.dtype == np.float64 for column in table.numeric.values())
    assert all(type(column) is np.ndarray for column in table.numeric.values())
    assert labels(table.factors["age"]) == ["40.5", None, "9"]
    assert table.factors["age"].levels == ("9", "40.5")
    assert labels(table.factors["sex"]) == ["m", None, "f"]
    assert table.factors["sex"].levels == ("f", "m")
    assert table.factors["site"].levels == ("9", "10")


def csv(folder: Path, text: str, name: str = "rows.csv", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_csv_dialects(tmp_path: Path, delimiter: str, newline: str) -> None:
    rows = [["\ufeff" + '"the, age; x|y"', "sex"], ["40", '"f,;|\t"'], ["NA", ""], ['"41"', '"m"']]
    path = csv(tmp_path, newline.join(delimiter.join(row) for row in rows) + newline)
    asked = schema(numeric("age", may_be_missing=True), factor("sex", may_be_missing=True))
    table = load(path, asked, silo="n", mapping={"age": "the, age; x|y"})
    np.testing.assert_array_equal(table.numeric["age"], [40.0, np.nan, 41.0])
    assert labels(table.factors["sex"]) == ["f,;|\t", None, "m"]


def test_csv_text_decides_nothing_by_a_sample(tmp_path: Path) -> None:
    path = csv(tmp_path, "x,y\n" + "1,2020\n" * 60_000 + "high,2020\n")
    found = defect(path, schema(numeric("x")))
    assert (found.message, found.rows) == ("is text where a number is expected", 1)
    assert load(path, schema(factor("x")), silo="n").factors["x"].levels == ("1", "high")


@pytest.mark.parametrize("stream", [False, True])
def test_blanks_around_a_csv_cell_are_no_part_of_it(tmp_path: Path, stream: bool) -> None:
    rows = ["x, z ,t", "1 , red ,a b", '2,"red ",  ', " 3,   red,\u00a0NA ", "  ,blue,a b "]
    (tmp_path / "t.csv").write_text("\n".join(rows).replace(" z ", "z"), encoding="utf-8")
    silo = tmp_path / "t.toml"
    silo.write_text(f'[silo]\nname = "n"\n[data]\npath = "t.csv"\nstream = {str(stream).lower()}\n')
    asked = schema(numeric("x", may_be_missing=True), factor("z"), factor("t", may_be_missing=True))
    (table,) = data.load(silo, asked, silo="n").blocks()
    np.testing.assert_array_equal(table.numeric["x"], [1, 2, 3, np.nan])
    assert labels(table.factors["z"]) == ["red", "red", "red", "blue"]
    assert table.factors["z"].levels == ("blue", "red")
    assert labels(table.factors["t"]) == ["a b", None, None, "a b"]


def test_csv_numbers_have_one_label_each(tmp_path: Path) -> None:
    path = csv(tmp_path, "x\n01\n1.0\n1e0\n-0.0\n0\n.5\n10\n9\n")
    column = load(path, schema(factor("x")), silo="n").factors["x"]
    assert labels(column) == ["1", "1", "1", "0", "0", "0.5", "10", "9"]
    assert column.levels == ("0", "0.5", "1", "9", "10")


def test_comment_signs_and_dates_are_plain_text(tmp_path: Path) -> None:
    table = load(csv(tmp_path, "x,y\n#1,2020-01-02\n#2,3\n"), schema(factor("x"), factor("y")), silo="n")
    assert table.n_rows == 2
    assert table.factors["x"].levels == ("#1", "#2")
    assert table.factors["y"].levels == ("2020-01-02", "3")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x,y\n1,2\n3\n", 3),
        ("x,y\n1,2\n3,4,5\n", 3),
        ("x,y\n" + "1,2\n" * 50_000 + "3\n", 50_002),
        ('x,y\n1,"open\n', 2),
    ],
)
def test_malformed_csv_is_refused_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    found = defect(csv(tmp_path, text), schema(numeric("x")))
    assert (found.message, found.line) == ("the file cannot be read as CSV", line)


def test_csv_in_another_encoding_is_refused(tmp_path: Path) -> None:
    asked = schema(factor("x"))
    for text in ("x\né\n", "é,x\n1,2\n"):
        path = csv(tmp_path, text, encoding="latin-1")
        assert defect(path, asked).message == "the file cannot be read as CSV"


def test_a_path_is_no_pattern(tmp_path: Path) -> None:
    csv(tmp_path, "x\n1\n", name="a1.csv")
    table = load(csv(tmp_path, "x\n2\n", name="a[1].csv"), schema(numeric("x")), silo="n")
    assert table.numeric["x"].tolist() == [2.0]
    assert defect(tmp_path / "*.csv", schema(numeric("x"))).message == "the file does not exist"


@pytest.mark.parametrize(
    "name", ["rows.csv", "rows.parquet", "folder.csv", "rows.xlsx", "rows", "rows.duckdb"]
)
def test_files_that_are_not_there_or_not_known(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.csv").mkdir()
    found = defect(tmp_path / name, schema(numeric("x")))
    expected = {
        "folder.csv": "this is not a file",
        "rows.xlsx": "the file's extension is not known",
        "rows": "the file's extension is not known",
        "rows.duckdb": "a database alone does not say which table to read",
    }
    assert found.message == expected.get(name, "the file does not exist")
    assert found.file == str(tmp_path / name)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    for name in ("rows.parquet", "rows.db", "rows.csv"):
        (tmp_path / name).write_bytes(b"\x00\xffPAR1 not at all" * 500)
    asked = schema(numeric("x"))
    assert defect(tmp_path / "rows.parquet", asked).message == "the file cannot be read as Parquet"
    damaged = Database(path=tmp_path / "rows.db", table="t")
    assert defect(damaged, asked).message == "this cannot be opened as a DuckDB database"
    assert defect(tmp_path / "rows.csv", asked).message == "the file cannot be read as CSV"
    (tmp_path / "rows.csv").write_bytes(b"")
    assert defect(tmp_path / "rows.csv", asked).message == "the file is empty"


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = Path(str(as_parquet(pd.DataFrame({"x": np.arange(5000.0)}), tmp_path)))
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 3000 + whole[3004:])  # the footer is whole, the pages are not
    assert defect(path, schema(numeric("x"))).message == "the file cannot be read as Parquet"


def test_database_problems(tmp_path: Path) -> None:
    path = make_database(pd.DataFrame({"x": [1.0], "t": ["a"]}), tmp_path)
    asked = schema(numeric("x"))

    def says(**what: str) -> str:
        return defect(Database(path=path, **what), asked).message

    assert says(table="nobody") == "the database has no table of that name"
    assert says(query="SELECT nothing FROM patients") == "the silo's query failed"
    assert says(query="SELEKT") == "the silo's query failed"
    assert says(query="SELECT CAST(t AS DOUBLE) AS x FROM patients") == "the silo's query failed"
    assert says(query="SELECT 1 AS x; SELECT 2 AS x") == "the silo's query is not one SELECT"
    assert says(query=f"COPY patients TO '{tmp_path / 'out.csv'}'") == "the silo's query is not one SELECT"
    assert says(query="DELETE FROM patients") == "the silo's query is not one SELECT"
    assert defect(Database(path=tmp_path / "no.db", table="t"), asked).message == "the file does not exist"
    with duckdb.connect(str(path)):
        assert says(table="patients") == "this cannot be opened as a DuckDB database"


def test_a_query_runs_read_only_in_one_order_and_spills_nowhere(tmp_path: Path) -> None:
    path = make_database(pd.DataFrame({"x": [1.0]}), tmp_path)
    query = """SELECT current_setting('threads') AS threads, current_setting('temp_directory') AS spill,
    readonly, current_setting('autoinstall_known_extensions') AS fetches
    FROM duckdb_databases() WHERE database_name = 'rows'"""
    asked = schema(numeric("threads"), numeric("readonly"), numeric("fetches"), factor("spill"))
    table = load(Database(path=path, query=query), asked, silo="n")
    assert {name: column.tolist() for name, column in table.numeric.items()} == {
        "threads": [1.0],
        "readonly": [1.0],
        "fetches": [0.0],
    }
    assert table.factors["spill"].levels == ("",)


def test_database_types_and_schemas(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE SCHEMA ward")
        connection.execute(
            '''CREATE TABLE ward."the table" AS SELECT 1.25::DECIMAL(6, 2) AS decimal, 7::HUGEINT AS huge,
            true AS bool, NULL AS nothing, 'b'::ENUM('z', 'b') AS enum, uuid() AS uuid,
            DATE '2020-01-01' AS date, [1] AS list, 'q' AS "odd ""name"""'''
        )
    table = Database(path=path, table='ward."the table"')
    numbers = ("decimal", "huge", "bool", "nothing")
    asked = [numeric(name, may_be_missing=True) for name in numbers]
    asked += [factor(name) for name in ("enum", "uuid", 'odd "name"')]
    read = load(table, schema(*asked), silo="n")
    np.testing.assert_array_equal([read.numeric[name][0] for name in numbers], [1.25, 7.0, 1.0, np.nan])
    assert read.factors["enum"].levels == ("b",)
    assert read.factors['odd "name"'].levels == ("q",)
    assert "dates or times" in defect(table, schema(numeric("date"))).message
    assert "neither numbers nor text" in defect(table, schema(factor("list"))).message


@pytest.mark.parametrize("write", [as_csv, as_parquet, as_table, as_query])
def test_reading_leaves_nothing_behind(
    write: Callable[[pd.DataFrame, Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(pd.DataFrame({"x": np.arange(1000.0)}), tmp_path)
    monkeypatch.chdir(tmp_path)

    def files() -> dict[str, bytes]:
        return {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}

    before = files()
    load(source, schema(numeric("x")), silo="n")
    assert files() == before


@pytest.mark.parametrize("write", [as_csv, as_parquet])
def test_a_million_rows_keep_their_order(
    write: Callable[[pd.DataFrame, Path], object], tmp_path: Path
) -> None:
    n = 1_000_000
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({"x": np.round(rng.normal(size=n), 6), "k": rng.integers(0, 12, n), "unused": "u"})
    frame["x"] = frame["x"].where(frame.index % 1000 != 0)
    with duckdb.connect() as connection:  # pandas' own writer is the slow part of this test
        connection.register("frame", frame)
        connection.execute(f"COPY frame TO '{tmp_path / 'rows.csv'}' (HEADER)")
    source = tmp_path / "rows.csv" if write is as_csv else write(frame, tmp_path)
    table = load(source, schema(numeric("x", may_be_missing=True), factor("k")), silo="n")
    np.testing.assert_array_equal(table.numeric["x"], frame["x"].to_numpy())
    assert table.numeric["x"].flags["C_CONTIGUOUS"]
    np.testing.assert_array_equal(table.factors["k"].codes, frame["k"].to_numpy())
    assert table.factors["k"].levels == tuple(str(k) for k in range(12))
