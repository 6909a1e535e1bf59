"""A table with one row per person and period is read as the wide table that it stands for."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pytest

from fedtmle.data import Column, DataErrors, Kind, LongTable, Schema, load, read_silo_file
from fedtmle.model.table import AnyTable, Table

PERIODS = 3
SEVERITY = [Column(name=f"sev{t}", kind=Kind.NUMERIC, may_be_missing=True) for t in range(1, PERIODS + 1)]
WARD = [
    Column(name=f"ward{t}", kind=Kind.FACTOR, may_be_missing=True, levels=("a", "b"))
    for t in range(1, PERIODS + 1)
]
SCHEMA = Schema(
    (
        *SEVERITY,
        *WARD,
        Column(name="age", kind=Kind.NUMERIC),
        Column(name="visit_last", kind=Kind.COUNT),
        Column(name="sev_last", kind=Kind.NUMERIC),
    )
)


def wide(seed: int, people: int = 40) -> pd.DataFrame:
    """Draw people who are followed for one to three periods, some of whom come into the ward late."""
    rng = np.random.default_rng(seed)
    last = rng.integers(1, PERIODS + 1, people)
    columns: dict[str, object] = {
        "id": rng.permutation(1000)[:people],
        "age": rng.normal(50, 9, people).round(1),
    }
    severity = rng.normal(size=(PERIODS, people)).round(2)
    for t in range(1, PERIODS + 1):
        here = last >= t
        columns[f"sev{t}"] = np.where(here, severity[t - 1], np.nan)
        columns[f"ward{t}"] = np.where(here, rng.choice(["a", "b"], people), None)
    columns["visit_last"] = last
    columns["sev_last"] = severity[last - 1, np.arange(people)]
    return pd.DataFrame(columns).sort_values("id", ignore_index=True)


def long(frame: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return the rows of the people in any order; age is known in some of a person's rows only."""
    table = pd.concat(
        frame.loc[frame.visit_last >= t, ["id", "age", f"sev{t}", f"ward{t}"]]
        .rename(columns={f"sev{t}": "sev", f"ward{t}": "ward"})
        .assign(visit=t)
        for t in range(1, PERIODS + 1)
    )
    table["age"] = table.age.where((table.visit == 1) | (table.id % 2 == 0))
    return table.sample(frac=1.0, random_state=seed, ignore_index=True)


def assert_same(got: AnyTable, expected: AnyTable) -> None:
    assert isinstance(got, Table)
    assert isinstance(expected, Table)
    assert got.n_rows == expected.n_rows
    for name, values in expected.numeric.items():
        np.testing.assert_array_equal(got.numeric[name], values)
    for name, factor in expected.factors.items():
        assert got.factors[name].levels == factor.levels
        np.testing.assert_array_equal(got.factors[name].codes, factor.codes)


@pytest.mark.parametrize("seed", range(12))
def test_long_is_wide(seed: int) -> None:
    frame = wide(seed)
    got = load(LongTable(data=long(frame, seed), person="id", period="visit"), SCHEMA, silo="one")
    assert_same(got, load(frame, SCHEMA, silo="one"))


@pytest.mark.parametrize("kind", ["csv", "parquet", "duckdb", "sqlite"])
def test_from_a_silo_file(tmp_path: Path, kind: str) -> None:
    frame = wide(3)
    table = long(frame, 3)
    path = tmp_path / f"visits.{kind}"
    where = f'path = "{path.name}"'
    if kind == "csv":
        table.to_csv(path, index=False)
    elif kind == "parquet":
        pl.from_pandas(table).write_parquet(path)
    elif kind == "duckdb":
        with duckdb.connect(str(path)) as connection:
            connection.register("given", table)
            connection.execute("CREATE TABLE visits AS SELECT * FROM given")
        where = f'database = "{path.name}"\ntable = "visits"'
    else:
        with sqlite3.connect(path) as connection:
            table.to_sql("visits", connection, index=False)
        where = f'database = "{path.name}"\ntable = "visits"'
    silo = tmp_path / "silo.toml"
    silo.write_text(f'[silo]\nname = "one"\n[data]\n{where}\nperson = "id"\nperiod = "visit"\n')
    assert_same(load(silo, SCHEMA, silo="one"), load(frame, SCHEMA, silo="one"))


def test_identifiers_that_are_text() -> None:
    frame = wide(4)
    table = long(frame, 4)
    table["id"] = table["id"].map(lambda number: f"p{number:04d}")
    assert_same(
        load(LongTable(data=table, person="id", period="visit"), SCHEMA, silo="one"),
        load(frame, SCHEMA, silo="one"),
    )


def _periods(table: pd.DataFrame, rows: int, value: float) -> None:
    table.loc[table.index[:rows], "visit"] = value


def _differing(table: pd.DataFrame) -> None:
    person = table.id[table.visit == 2].iloc[0]
    table.loc[table.id == person, "age"] = [7654.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: _periods(t, 2, 1.5), "column 'visit' is not the number of a period in 2 rows"),
        (lambda t: _periods(t, 1, np.nan), "column 'visit' is not the number of a period in 1 row;"),
        (lambda t: _periods(t, 3, 0), "column 'visit' is not the number of a period in 3 rows"),
        (lambda t: t.insert(0, "visit", "two", allow_duplicates=True), "exactly one column 'visit'"),
        (lambda t: t.pop("visit"), "exactly one column 'visit'"),
        (lambda t: t.pop("id"), "for the person of each row"),
        (lambda t: t.__setitem__("visit", "second"), "column 'visit' does not hold numbers of periods"),
        (lambda t: t.loc.__setitem__((t.index[:4], "id"), np.nan), "column 'id' is missing in 4 rows"),
        (
            lambda t: t.loc.__setitem__(len(t), t.loc[0]),
            "1 row with the person and the period of another row",
        ),
        (_differing, "column 'age' differs between the rows of 1 of the people"),
    ],
)
def test_defects_are_counted_and_quote_nothing(
    change: Callable[[pd.DataFrame], object], message: str
) -> None:
    frame = wide(5)
    table = long(frame[frame.visit_last <= 2].reset_index(drop=True), 5)
    table[["visit", "id"]] = table[["visit", "id"]].astype(float)
    change(table)
    with pytest.raises(DataErrors) as caught:
        load(LongTable(data=table, person="id", period="visit"), SCHEMA, silo="one")
    text = str(caught.value)
    assert "silo 'one'" in text
    assert message in text
    assert "7654" not in text


def test_a_name_that_two_columns_could_have() -> None:
    table = long(wide(6), 6).assign(sev1=0.0)
    with pytest.raises(DataErrors, match="the table has 2 columns 'sev1'"):
        load(LongTable(data=table, person="id", period="visit"), SCHEMA, silo="one")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('period = "visit"', "a long table also needs person"),
        ("person = 3", "this is not the name of a column"),
        ('person = "id"\nperiod = 3', "this is not the name of a column"),
        ('person = "id"\nperiod = "visit"\nstream = true', "a long table cannot be read in batches"),
    ],
)
def test_defects_of_the_silo_file(tmp_path: Path, lines: str, message: str) -> None:
    silo = tmp_path / "silo.toml"
    silo.write_text(f'[silo]\nname = "one"\n[data]\npath = "x.csv"\n{lines}\n')
    with pytest.raises(DataErrors, match=message):
        read_silo_file(silo)
