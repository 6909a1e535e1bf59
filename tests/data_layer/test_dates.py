"""Differences of dates and units by name, from a silo file to the study's numbers; no value is quoted."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.data import Column, ColumnMap, Database, DataErrors, Kind, Schema, load
from fedtmle.errors import InputError
from fedtmle.model.table import StreamedTable, Table
from fedtmle.studyfile.file import read_study
from fedtmle.studyfile.schema import schema_of
from tests.narrow import load as load_table

BIRTHS = [date(1950, 3, 1), date(1999, 12, 31), date(2000, 2, 29), None]
VISITS = [date(2020, 3, 1), date(2020, 1, 1), date(2021, 2, 28), date(2020, 5, 5)]
DAYS = np.array([25568.0, 7306.0, 7670.0, np.nan])
AGE = Schema((Column(name="age", kind=Kind.NUMERIC, may_be_missing=True, bounds=(0, 40_000), unit="days"),))
DIFFERENCE = {"age": ColumnMap(start="born", end="seen")}


def frame(**changes: Any) -> pd.DataFrame:
    return pd.DataFrame({"born": BIRTHS, "seen": VISITS, **changes})


def test_the_days_are_those_of_the_calendar() -> None:
    found = [(seen - born).days for born, seen in zip(BIRTHS, VISITS, strict=True) if born]
    assert found == DAYS[:3].tolist()


def sources(folder: Path) -> dict[str, object]:
    """The same dates as every kind of source holds them."""
    import duckdb
    import polars

    table = frame()
    stamped = table.apply(lambda column: pd.to_datetime(column) + pd.Timedelta(hours=23))
    table.to_csv(folder / "dates.csv", index=False)
    table.to_parquet(folder / "dates.parquet")
    stamped.to_parquet(folder / "stamped.parquet")
    with duckdb.connect(str(folder / "dates.duckdb")) as connection:
        connection.read_parquet(str(folder / "dates.parquet")).create("t")
    return {
        "csv": folder / "dates.csv",
        "parquet": folder / "dates.parquet",
        "stamps": folder / "stamped.parquet",
        "duckdb": Database(path=folder / "dates.duckdb", table="t"),
        "pandas dates": table,
        "pandas stamps": stamped,
        "polars": polars.from_pandas(stamped),
        "arrays": {"born": BIRTHS, "seen": [datetime(d.year, d.month, d.day) for d in VISITS]},
    }


@pytest.mark.parametrize(
    "kind", ["csv", "parquet", "stamps", "duckdb", "pandas dates", "pandas stamps", "polars", "arrays"]
)
def test_every_source_gives_the_same_days(kind: str, tmp_path: Path) -> None:
    source = sources(tmp_path)[kind]
    np.testing.assert_array_equal(
        load_table(source, AGE, silo="north", mapping=DIFFERENCE).numeric["age"], DAYS
    )


@pytest.mark.parametrize(("unit", "days"), [("weeks", 7.0), ("months", 365.25 / 12), ("years", 365.25)])
def test_the_dictionary_has_the_unit(unit: str, days: float) -> None:
    schema = Schema((Column(name="age", kind=Kind.NUMERIC, may_be_missing=True, unit=unit),))
    table = load_table(frame(), schema, silo="north", mapping=DIFFERENCE)
    np.testing.assert_allclose(table.numeric["age"], DAYS / days, rtol=1e-15)


def test_text_in_a_format_codes_for_missing_and_bad_dates(tmp_path: Path) -> None:
    written = pd.DataFrame(
        {
            "born": ["01.03.1950", "31.12.1999", "29.02.2000", "unknown"],
            "seen": ["01.03.2020", "01.01.2020", "28.02.2021", "05.05.2020"],
        }
    )
    written.to_csv(tmp_path / "t.csv", index=False)
    given = ColumnMap(start="born", end="seen", format="%d.%m.%Y", missing=("unknown",))
    table = load_table(tmp_path / "t.csv", AGE, silo="north", mapping={"age": given})
    np.testing.assert_array_equal(table.numeric["age"], DAYS)
    wrong = ColumnMap(start="born", end="seen", format="%d.%m.%Y")
    with pytest.raises(DataErrors) as caught:
        load(tmp_path / "t.csv", AGE, silo="north", mapping={"age": wrong})
    said = str(caught.value)
    assert "'born' is not a date in the format %d.%m.%Y, in 1 row" in said
    assert "unknown" not in said
    with pytest.raises(DataErrors, match="'born' is not a date such as YYYY-MM-DD, in 4 rows"):
        load(tmp_path / "t.csv", AGE, silo="north", mapping=DIFFERENCE)
    far = frame(seen=[date(9998, 12, 31)] * 2 + VISITS[2:])
    given = ColumnMap(start="born", end="seen", missing=("9998-12-31",))
    table = load_table(frame(seen=far.seen.astype(str)), AGE, silo="north", mapping={"age": given})
    assert np.isnan(table.numeric["age"]).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("source", "mapping", "unit", "message"),
    [
        (frame(born=[1.0, 2.0, 3.0, 4.0]), DIFFERENCE, "days", "column 'born' does not hold dates"),
        (frame().drop(columns="seen"), DIFFERENCE, "days", "the table has no column 'seen'"),
        (frame(), DIFFERENCE, "kg", "the dictionary's unit is kg; declare days or weeks or months or years"),
        (frame(), DIFFERENCE, "", "the dictionary's unit is not declared"),
        (frame(), {"age": "born"}, "days", "map the difference of two dates with from and to in the silo"),
        (
            frame(seen=[date(2020, 1, 1)] * 4),
            {"age": ColumnMap(start="seen", end="born")},
            "days",
            "is outside the declared bounds in 3 rows",
        ),
        (frame(seen=pd.to_datetime(VISITS, utc=True)), DIFFERENCE, "days", "'seen' does not hold dates"),
    ],
)
def test_one_clear_error(source: Any, mapping: Any, unit: str, message: str) -> None:
    column = Column(name="age", kind=Kind.NUMERIC, may_be_missing=True, bounds=(0, 40_000), unit=unit)
    with pytest.raises(DataErrors, match=message) as caught:
        load(source, Schema((column,)), silo="north", mapping=mapping)
    assert "2020-" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "born"}, "both from and to"),
        ({"column": "age", "start": "born", "end": "seen"}, "no other key"),
        ({"column": "age", "format": "%Y"}, "format is only for dates"),
        ({"column": "age", "unit": "lb", "scale": 2.0}, "can have no scale"),
        ({"column": "age", "molar_mass": 180.0}, "needs a unit by name"),
        ({"column": "age", "unit": "mg/dL", "molar_mass": -1.0}, "above 0"),
        ({}, "a column must have a name"),
    ],
)
def test_contradictory_maps_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ColumnMap(**arguments)


STUDY = """\
[target]
kind = "ATE"
outcome = "glucose"
treatment = "a"
[variables]
glucose = {kind = "number", range = [1, 40], unit = "mmol/L"}
a = {kind = "binary"}
age = {kind = "date difference", range = [0, 120], unit = "years", label = "Age"}
weight = {kind = "number", range = [20, 300], unit = "kg"}
[models.outcome]
formula = "a + age + weight"
[models.treatment]
formula = "age"
[silos]
north = "north.toml"
south = "south.toml"
"""
SOUTH = """\
[silo]
name = "south"
[data]
path = "south.PARQUET"
STREAM
[columns]
age = {from = "BORN", to = "SEEN"}
weight = {column = "WT", unit = "lb"}
glucose = {column = "GLUC", unit = "mg/dL", molar_mass = 180.16}
"""


def people(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    days = rng.integers(20 * 365, 90 * 365, n)
    a, weight = rng.integers(0, 2, n), rng.uniform(50, 120, n)
    glucose = (6 + 0.5 * a + days / 365.25 / 40 + weight / 60 + rng.normal(size=n)).clip(1, 40)
    return pd.DataFrame({"glucose": glucose, "a": a, "days": days, "age": days / 365.25, "weight": weight})


@pytest.mark.parametrize("stream", [False, True], ids=["memory", "stream"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_study_of_dates_and_units_is_that_of_their_numbers(tmp_path: Path, stream: bool, kind: str) -> None:
    north, south = people(150, 1), people(130, 2)
    north.drop(columns="days").to_csv(tmp_path / "north.csv", index=False)
    (tmp_path / "north.toml").write_text('[silo]\nname = "north"\n[data]\npath = "north.csv"\n')
    seen = pd.Timestamp("2024-05-17")
    theirs = pd.DataFrame(
        {
            "BORN": (seen - pd.to_timedelta(south.days, unit="D")).dt.date,
            "SEEN": seen.date(),
            "WT": south.weight / 0.45359237,
            "GLUC": south.glucose * 18.016,
            "a": south.a,
        }
    )
    (theirs.to_csv if kind == "csv" else theirs.to_parquet)(tmp_path / f"south.{kind}", index=False)
    text = SOUTH.replace("PARQUET", kind).replace("STREAM", "stream = true" if stream else "")
    (tmp_path / "south.toml").write_text(text)
    (tmp_path / "study.toml").write_text(STUDY)
    assert ft.validate(tmp_path / "study.toml").defects == ()
    file = read_study(tmp_path / "study.toml")
    table = load(file.silos["south"], schema_of(file.study), silo="south")
    assert isinstance(table, StreamedTable if stream else Table)
    found = ft.run(file.study, file.silos).table()
    expected = ft.run(file.study, {"north": north, "south": south}).table()
    np.testing.assert_allclose(found["estimate"], expected["estimate"], rtol=1e-6)
    np.testing.assert_allclose(found["std_error"], expected["std_error"], rtol=1e-6)


def test_a_date_difference_needs_its_unit() -> None:
    with pytest.raises(InputError, match="unit: a date difference is in days, weeks, months, years"):
        ft.Variables({"age": {"kind": "date difference", "range": (0, 120)}})
    with pytest.raises(InputError, match="range: a date difference needs its least"):
        ft.Variables({"age": {"kind": "date difference", "unit": "years"}})
