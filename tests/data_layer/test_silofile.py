from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fedtmle.data import ColumnMap, Database, DataErrors, Defect, SiloFile, read_silo_file
from fedtmle.errors import InputError
from fedtmle.protocol.policy import Policy
from tests.narrow import load

from .asking import as_csv, defect, factor, labels, make_database, numeric, schema

GOOD = """
[silo]
name = "north"

[data]
path = "rows.csv"

[columns]
age = "AGE_YEARS"
weight = {column = "WT_LB", scale = 0.5, shift = 1}
sex = {column = "SEX", levels = {"1" = "male", "2" = "female"}}
smoker = {levels = {Y = 1, N = 0}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "silo.toml"
    path.write_text(text, encoding="utf-8")
    return path


def defects(folder: Path, text: str) -> tuple[Defect, ...]:
    with pytest.raises(DataErrors) as caught:
        read_silo_file(write(folder, text))
    return caught.value.defects


def test_a_silo_file_says_where_and_how(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert read_silo_file(str(path)) == SiloFile(
        path=path,
        name="north",
        data=tmp_path / "rows.csv",
        columns={
            "age": ColumnMap(column="AGE_YEARS"),
            "weight": ColumnMap(column="WT_LB", scale=0.5, shift=1.0),
            "sex": ColumnMap(column="SEX", levels={"1": "male", "2": "female"}),
            "smoker": ColumnMap(column="smoker", levels={"Y": "1", "N": "0"}),
        },
        policy=Policy(),
    )
    stricter = write(tmp_path, GOOD + "[policy]\nmin_rows = 50\nrelease = true\n")
    assert read_silo_file(stricter).policy == Policy(min_rows=50, release=True)


def test_names_units_and_codes_are_translated(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"AGE_YEARS": [40, 50], "WT_LB": [100.0, 200.0], "SEX": [2, 1], "smoker": ["N", "Y"]}
    )
    as_csv(frame.assign(site=[3, 3]), tmp_path)
    asked = schema(numeric("age"), numeric("weight"), factor("sex"), numeric("smoker"), factor("site"))
    path = write(tmp_path, GOOD)
    for source in (path, str(path), read_silo_file(path)):
        table = load(source, asked, silo="north")
        assert {name: column.tolist() for name, column in table.numeric.items()} == {
            "age": [40.0, 50.0],
            "weight": [51.0, 101.0],
            "smoker": [0.0, 1.0],
        }
        assert labels(table.factors["sex"]) == ["female", "male"]
        assert table.factors["sex"].levels == ("female", "male")
        assert table.factors["site"].levels == ("3",)


@pytest.mark.parametrize("what", ['table = "patients"', 'query = "SELECT * FROM patients WHERE age > 40"'])
def test_a_database_with_a_table_or_a_query(tmp_path: Path, what: str) -> None:
    make_database(pd.DataFrame({"age": [40, 50]}), tmp_path)
    path = write(tmp_path, f'[silo]\nname = "n"\n[data]\ndatabase = "rows.duckdb"\n{what}\n')
    assert isinstance(read_silo_file(path).data, Database)
    table = load(path, schema(numeric("age")), silo="n")
    assert table.numeric["age"].tolist() == ([40.0, 50.0] if "table" in what else [50.0])


@pytest.mark.parametrize(
    ("old", "new", "says", "line"),
    [
        ('name = "north"', 'nme = "north"', "[silo] nme: unknown key", 3),
        ('name = "north"', "name = 3", "[silo] name: this is not text", 3),
        ('name = "north"', "", "[silo]: the silo has no name", 2),
        ('path = "rows.csv"', 'pth = "rows.csv"', "[data] pth: unknown key", 6),
        ('path = "rows.csv"', "", "[data]: this does not say what to read", 5),
        ('path = "rows.csv"', 'path = "a.csv"\ntable = "t"', "[data]: this does not say what to read", 5),
        ('path = "rows.csv"', 'database = "a.db"', "[data]: this does not say what to read", 5),
        ("[columns]", "[polcy]\nfloor = 3\n[columns]", "[polcy]: unknown section", 8),
        ("[columns]", "[policy]\nfloor = 3\n[columns]", "[policy] floor: unknown key", 9),
        (
            "[columns]",
            "[policy]\nmin_rows = 3\n[columns]",
            "[policy] min_rows: may be raised; lowered only",
            9,
        ),
        ("[columns]", "[columns]\nbmi = 3", "[columns] bmi: this is neither a name nor a table", 9),
        ("scale = 0.5", "scal = 0.5", "[columns] weight: unknown key 'scal'", 10),
        ("scale = 0.5", 'scale = "0.5"', "[columns] weight: 'scale' is not a number", 10),
        ("scale = 0.5", "scale = true", "[columns] weight: 'scale' is not a number", 10),
        ("scale = 0.5", "scale = 0", "[columns] weight: scale and shift must be finite", 10),
        ("scale = 0.5", "scale = inf", "[columns] weight: scale and shift must be finite", 10),
        ("scale = 0.5", f"scale = 1{'0' * 400}", "[columns] weight: int too large", 10),
        (
            "scale = 0.5",
            "levels = {a = 'b'}",
            "[columns] weight: a column can have scale and shift, or levels",
            10,
        ),
        ('column = "WT_LB"', "column = 3", "[columns] weight: 'column' is not text", 10),
        ("levels = {Y = 1, N = 0}", "levels = {}", "[columns] smoker: 'levels' is not a table", 12),
        ("levels = {Y = 1, N = 0}", "levels = {Y = true}", "[columns] smoker: 'levels' is not a table", 12),
        ("levels = {Y = 1, N = 0}", "levels = 'Y'", "[columns] smoker: 'levels' is not a table", 12),
        ("[columns]", "[columns", "this is not TOML", 8),
    ],
)
def test_each_mistake_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, says: str, line: int
) -> None:
    assert old in GOOD
    found = defects(tmp_path, GOOD.replace(old, new, 1))
    assert (says, line) in [(one.message[: len(says)], one.line) for one in found]
    assert all(one.file == str(tmp_path / "silo.toml") for one in found)


def test_a_section_that_is_none_is_named(tmp_path: Path) -> None:
    assert "[columns]: this is not a section" in [one.message for one in defects(tmp_path, "columns = 3")]


def test_all_mistakes_are_reported_together_and_under_the_silo(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("name", "nme").replace("path", "pth").replace("scale", "scal"))
    with pytest.raises(DataErrors) as caught:
        load(path, schema(numeric("age")), silo="south")
    assert len(caught.value.defects) == 5
    assert {one.silo for one in caught.value.defects} == {"south"}
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "text",
    [
        '[columns]\nsex = {column = "SEX", kanarie = "male"}',  # levels forgotten
        '[columns]\nsex = {levels = {kanarie = "a", kanarie = "b"}}',
        "[columns]\nsex = {levels = {kanarie = kanarie}}",
    ],
)
def test_a_misplaced_level_code_is_not_quoted(tmp_path: Path, text: str) -> None:
    assert "kanarie" not in str(
        DataErrors(defects(tmp_path, f'[silo]\nname="n"\n[data]\npath="a.csv"\n{text}'))
    )


def test_an_absent_or_binary_silo_file(tmp_path: Path) -> None:
    assert defect(tmp_path / "none.toml", schema(numeric("age"))).message == "the file does not exist"
    (tmp_path / "silo.toml").write_bytes(b"\xff\xfe\x00")
    assert defect(tmp_path / "silo.toml", schema(numeric("age"))).message == "the file cannot be read"


def test_a_silo_file_brings_its_own_mapping(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its own mapping"):
        load(write(tmp_path, GOOD), schema(numeric("age")), silo="n", mapping={"age": "AGE"})


def test_a_database_has_a_table_or_a_query() -> None:
    with pytest.raises(InputError, match="a table or a query"):
        Database(path=Path("a.db"))


@pytest.mark.parametrize("name", ["rows.csv", "ROWS.CSV", "rows.parquet"])
def test_a_table_in_place_of_a_silo_file_is_named_as_one(tmp_path: Path, name: str) -> None:
    """Not as broken TOML, whose line 1 would be the table's header."""
    (tmp_path / name).write_bytes(b"age,sex\n61,2\n")
    with pytest.raises(DataErrors) as caught:
        read_silo_file(tmp_path / name)
    (only,) = caught.value.defects
    assert (only.message, only.line) == ("this is a table", None)
    assert only.fix == "give a silo file (.toml) whose section [data] names it"
