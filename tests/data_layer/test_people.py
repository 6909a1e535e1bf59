"""Whose rows a table has: one digest a person, whatever kind of source the identifiers come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest

from fedtmle.data import Column, DataErrors, Kind, Schema, load, load_people, read_silo_file, restricted
from fedtmle.model.table import AnyTable, StreamedTable, Table
from fedtmle_core.people import PERSON, Basis, Census, Digester

KEY = bytes(range(32))
SCHEMA = Schema(
    (
        Column(name="age", kind=Kind.NUMERIC, may_be_missing=True),
        Column(name="site", kind=Kind.FACTOR, may_be_missing=True),
        Column(name="sex", kind=Kind.FACTOR, levels=("f", "m")),
    )
)
FRAME = pd.DataFrame(
    {
        "id": [17, 3, 250, 4],
        "age": [40.5, np.nan, 61.0, -0.0],
        "site": ["a", "b", "c", None],
        "sex": ["f", "m", "m", "f"],
        "note": ["x", "1", "2.0", "x"],
    }
)


def silo(folder: Path, frame: pd.DataFrame, kind: str = "parquet", *, more: str = 'person = "id"') -> Path:
    """A silo file over a table of this kind; ``more`` goes into [data]."""
    folder.mkdir(exist_ok=True)
    path = folder / f"rows.{kind}"
    path.unlink(missing_ok=True)
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "parquet":
        frame.to_parquet(path, index=False)
    else:
        with duckdb.connect(str(path)) as connection:
            connection.register("frame", frame)
            connection.execute("CREATE TABLE people AS SELECT * FROM frame")
    where = f'database = "{path.name}"\ntable = "people"' if kind == "duckdb" else f'path = "{path.name}"'
    file = folder / "silo.toml"
    file.write_text(f'[silo]\nname = "one"\n[data]\n{where}\n{more}\n')
    return file


def counted(path: Path, *bases: Basis) -> tuple[AnyTable, Census]:
    return load_people(read_silo_file(path), SCHEMA, digester=Digester(KEY), bases=bases)


def people(path: Path) -> list[int]:
    return [int(each) for each in counted(path)[1].rows(PERSON)]


@pytest.mark.parametrize(
    "identifiers",
    [
        [17.0, 3.0, 250.0, 4.0],
        ["17", "3", "250", "4"],
        ["0017", "03", "250", " 4 "],
        np.array([17, 3, 250, 4], dtype=np.int16),
    ],
)
def test_an_identifier_is_one_whether_it_is_a_number_or_text(tmp_path: Path, identifiers: object) -> None:
    expected = [int(each) for each in Digester(KEY).of_people([b"17", b"3", b"250", b"4"])]
    assert people(silo(tmp_path, FRAME.assign(id=identifiers))) == expected


@pytest.mark.parametrize("kind", ["csv", "parquet", "duckdb"])
@pytest.mark.parametrize("more", ["", "\nstream = true"])
def test_every_source_gives_the_same_people_and_records(tmp_path: Path, kind: str, more: str) -> None:
    plain = counted(silo(tmp_path / "plain", FRAME))[1]
    assert plain.own == (PERSON, ("id", "age", "sex", "site"))
    found = counted(silo(tmp_path / "other", FRAME, kind, more=f'person = "id"{more}'))[1]
    for basis in plain.own:
        assert found.people(basis).tolist() == plain.people(basis).tolist(), basis
    assert found.reads == {"age", "sex", "site"}


def test_without_identifiers_a_record_is_known_by_all_of_its_cells(tmp_path: Path) -> None:
    whole = tuple(sorted(FRAME.columns))
    first = counted(silo(tmp_path, FRAME, more=""))[1]
    assert first.own == (whole, ("age", "sex", "site"))
    shuffled = counted(silo(tmp_path, FRAME.iloc[::-1], more=""))[1]
    assert shuffled.people(whole).tolist() == first.people(whole).tolist()
    changed = FRAME.assign(note=["x", "1", "2.0", "y"])  # a column that the study does not read
    other = counted(silo(tmp_path, changed, more=""))[1]
    assert len(set(first.people(whole).tolist()) - set(other.people(whole).tolist())) == 1
    assert first.people(first.own[1]).tolist() == other.people(first.own[1]).tolist()
    twins = counted(silo(tmp_path, pd.concat([FRAME, FRAME]), more=""))[1]
    assert len(twins.people(whole)) == 8


def test_bases_of_earlier_studies_are_computed_as_far_as_their_columns_are_there(tmp_path: Path) -> None:
    before = counted(silo(tmp_path, FRAME, more=""))[1]
    later = FRAME.assign(new=[1, 2, 3, 4])
    found = counted(silo(tmp_path, later), before.own[0], ("gone", "age"), PERSON)[1]
    assert set(found.views) == {PERSON, found.own[1], before.own[0]}
    assert found.people(before.own[0]).tolist() == before.people(before.own[0]).tolist()
    assert set(counted(silo(tmp_path, later, more=""), PERSON)[1].views) == {
        tuple(sorted(later.columns)),
        ("age", "sex", "site"),
    }


def test_a_cell_counts_by_its_value_and_not_by_its_type(tmp_path: Path) -> None:
    basis = ("id", "age", "sex", "site")
    tables = [FRAME.assign(site=site) for site in ([1.5, 2, 3, np.nan], ["1.5", "2", "3.0", None])]
    numbers, labels = (counted(silo(tmp_path, each))[1].people(basis).tolist() for each in tables)
    assert numbers == labels
    other = counted(silo(tmp_path, tables[0].assign(age=[40.5, np.nan, 61.0, 1e-300])))[1]
    assert len(set(numbers) - set(other.people(basis).tolist())) == 1


def test_rows_of_one_person_are_one(tmp_path: Path) -> None:
    census = counted(silo(tmp_path, pd.concat([FRAME, FRAME])))[1]
    assert census.n_rows == 8
    assert len(census.people(PERSON)) == 4


def test_a_long_table_is_known_by_its_people(tmp_path: Path) -> None:
    long = pd.DataFrame(
        {"id": [9, 9, 3, 3], "visit": [1, 2, 1, 2], "age": [50, 50, 60, 60], "site": "a", "sex": "f"}
    )
    path = silo(tmp_path, long, more='person = "id"\nperiod = "visit"')
    expected = [int(each) for each in Digester(KEY).of_people([b"3", b"9"])]
    assert people(path) == expected  # in the order of identifiers, as the wide table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="id"), "the table has no column 'id' of the person"),
        (lambda f: f.assign(id=[1, 2, 3, np.nan]), "column 'id' of the person is missing in 1 row"),
        (lambda f: f.assign(id=["a", None, None, "b"]), "column 'id' of the person is missing in 2 rows"),
        (
            lambda f: f.assign(id=[2.0**53, 2, 3, 4]),
            "column 'id' of the person is no exact whole number in 1",
        ),
        (lambda f: f.assign(id=[7654.5, 2, 3, 4]), "column 'id' of the person is no exact whole number in 1"),
        (lambda f: f.assign(id=pd.Timestamp("2026-01-01")), "column 'id' does not hold identifiers"),
    ],
)
@pytest.mark.parametrize("stream", ["", "\nstream = true"])
def test_identifiers_that_cannot_be_used_are_a_defect(
    tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame], message: str, stream: str
) -> None:
    path = silo(tmp_path, change(FRAME), more=f'person = "id"{stream}')
    with pytest.raises(DataErrors, match=message) as caught:
        counted(path)
    assert "7654" not in str(caught.value)
    assert load(path, SCHEMA, silo="one").n_rows == 4  # a run in one process asks for no identifiers


@pytest.mark.parametrize("stream", [False, True])
def test_a_restricted_table_is_the_table_without_the_other_rows(tmp_path: Path, stream: bool) -> None:
    """Levels that only the rows left out have are gone too, unless the study declares them."""
    more = 'person = "id"\nstream = true' if stream else 'person = "id"'
    kept = np.array([True, True, False, True])
    table = counted(silo(tmp_path / "all", FRAME, more=more))[0]
    found = restricted(table, kept, SCHEMA)
    fewer = counted(silo(tmp_path / "some", FRAME[kept], more=more))[0]
    assert isinstance(found, StreamedTable if stream else Table)
    assert found.n_rows == fewer.n_rows == 3
    for name in ("site", "sex"):
        assert found.levels(name) == fewer.levels(name)
        assert found.counts(name) == fewer.counts(name)
    if isinstance(found, StreamedTable):
        assert isinstance(fewer, StreamedTable)
        assert found.digest == fewer.digest
    for one, other in zip(found.blocks(), fewer.blocks(), strict=True):
        np.testing.assert_array_equal(one.numeric["age"], other.numeric["age"])
        assert one.factors["site"].codes.tolist() == other.factors["site"].codes.tolist()
    assert restricted(table, np.ones(4, dtype=bool), SCHEMA) is table
