"""How a hospital writes its .csv: encodings, decimal commas and grouped digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedtmle.data import Column, DataErrors, Kind, Schema, load, read_silo_file
from fedtmle.model.table import StreamedTable, Table

SCHEMA = Schema(
    (Column(name="cost", kind=Kind.NUMERIC, bounds=(-1e7, 1e7)), Column(name="city", kind=Kind.FACTOR))
)
CITIES = ["Köln", "Zürich", "Köln"]
NUMBERS = [1234.5, -0.25, 1234567.0]


def silo(folder: Path, cells: list[str], *, encoding: str = "utf-8", lines: str = "") -> Path:
    rows = "\n".join(f"{cell};{city}" for cell, city in zip(cells, CITIES, strict=True))
    (folder / "data.csv").write_bytes(f"cost;city\n{rows}\n".encode(encoding))
    text = f'[silo]\nname = "one"\n[data]\npath = "data.csv"\n{lines}\n'
    (folder / "silo.toml").write_text(text, encoding="utf-8")
    return folder / "silo.toml"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252", "utf-16"])
@pytest.mark.parametrize(
    ("cells", "lines"),
    [
        (["1234.5", "-0.25", "1234567"], ""),
        (["1234,5", "-0,25", "1234567"], 'decimal = ","'),
        (["1.234,5", "-0,25", "1.234.567"], 'decimal = ","\nthousands = "."'),
        (["1,234.5", "-0.25", "1,234,567"], 'thousands = ","'),
        (["1'234.5", "-.25", "1'234'567"], 'thousands = "\'"'),
        (["1 234,5", "-,25", "1234567"], 'decimal = ","\nthousands = " "'),
    ],
)
def test_every_way_of_writing_gives_the_same_table(
    tmp_path: Path, cells: list[str], lines: str, encoding: str, stream: bool
) -> None:
    more = f'encoding = "{encoding}"\n{lines}\nstream = {str(stream).lower()}'
    table = load(silo(tmp_path, cells, encoding=encoding, lines=more), SCHEMA, silo="one")
    assert isinstance(table, StreamedTable if stream else Table)
    blocks = list(table.blocks())
    np.testing.assert_array_equal(np.concatenate([block.numeric["cost"] for block in blocks]), NUMBERS)
    assert set(table.levels("city")) == set(CITIES)


@pytest.mark.parametrize(
    ("cells", "lines"),
    [
        (["1234,5", "-0,25", "3"], ""),  # a comma that nobody declared
        (["1.5", "2,5", "3"], 'decimal = ","'),  # a point where only commas are
        (["12.34,5", "2", "3"], 'decimal = ","\nthousands = "."'),  # not in groups of three
        (["1.234.56", "2", "3"], 'decimal = ","\nthousands = "."'),
    ],
)
def test_what_is_no_number_there_is_counted_and_not_guessed(
    tmp_path: Path, cells: list[str], lines: str
) -> None:
    with pytest.raises(DataErrors) as caught:
        load(silo(tmp_path, cells, lines=lines), SCHEMA, silo="one")
    text = str(caught.value)
    assert "column 'cost': is text where a number is expected" in text
    assert "state decimal in the silo file" in text
    assert not any(cell in text for cell in cells if len(cell) > 2)  # a folder's number may hold "34"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('encoding = "ebcdic"', "expected one of utf-8, latin-1, cp1252, utf-16"),
        ('decimal = ";"', 'expected "." or ","'),
        ('decimal = ","\nthousands = ","', "other than decimal"),
        ("decimal = 1", "this is not text"),
    ],
)
def test_wrong_keys_are_named(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(DataErrors, match=r"silo\.toml") as caught:
        read_silo_file(silo(tmp_path, ["1", "2", "3"], lines=lines))
    assert message in str(caught.value)


def test_they_are_for_csv_only(tmp_path: Path) -> None:
    path = silo(tmp_path, ["1", "2", "3"], lines='decimal = ","')
    path.write_text(path.read_text().replace("data.csv", "data.parquet"), encoding="utf-8")
    with pytest.raises(DataErrors, match=r"this is for a \.csv file only"):
        read_silo_file(path)


def test_a_file_in_another_encoding_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataErrors, match="state its encoding in the silo file"):
        load(silo(tmp_path, ["1", "2", "3"], encoding="latin-1"), SCHEMA, silo="one")
