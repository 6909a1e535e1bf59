"""A distinctive value in each bad cell, and no error that tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from fedtmle.data import ColumnMap, Database, DataErrors, load

from .asking import (
    as_csv,
    as_pandas,
    as_polars,
    as_query,
    binary,
    factor,
    frame,
    make_database,
    numeric,
    schema,
)

CANARY = "k4n4r1e"
NUMBER = 987654.321
BAD = {
    "text for a number": (frame(x=[CANARY, "1"]), numeric("x")),
    "mixed": (frame(x=pd.Series([CANARY, 1, 2.0], dtype=object)), numeric("x")),
    "outside": (frame(x=[NUMBER, 1.0]), numeric("x", bounds=(0, 10))),
    "binary": (frame(x=[NUMBER, 1.0]), binary("x")),
    "binary text": (frame(x=[CANARY, "0"]), binary("x")),
    "level": (frame(x=[CANARY, "a"]), factor("x", levels=("a",))),
    "number as level": (frame(x=[NUMBER, 1.0]), factor("x", levels=("1",))),
    "missing": (frame(x=[CANARY, None]), factor("x")),
    "object": (frame(x=pd.Series([[CANARY], 1], dtype=object)), numeric("x")),
}


def told(error: BaseException) -> Iterator[str]:
    """All that an error can tell: its own text and arguments, and those of what led to it."""
    links = [error]
    while links:
        link = links.pop()
        yield from (str(link), repr(link), repr(link.args), repr(vars(link)))
        links += [each for each in (link.__cause__, link.__context__) if each is not None]


def assert_untold(caught: pytest.ExceptionInfo[DataErrors]) -> None:
    text = "\n".join(told(caught.value))
    assert CANARY not in text
    assert str(NUMBER) not in text


UNTYPED = ("mixed", "object")  # cells that polars and a database cannot hold


@pytest.mark.parametrize(
    ("case", "write"),
    [
        (case, write)
        for case in BAD
        for write in (as_pandas, as_polars, as_csv, as_query)
        if case not in UNTYPED or write in (as_pandas, as_csv)
    ],
)
def test_no_error_tells_a_value(
    case: str, write: Callable[[pd.DataFrame, Path], object], tmp_path: Path
) -> None:
    rows, column = BAD[case]
    mappings = [None, {"x": ColumnMap(column="x", levels={CANARY + "2": "a"})}]
    mappings += (
        [{"x": ColumnMap(column="x", scale=2.0)}] if "level" not in case and "miss" not in case else []
    )
    source = write(rows, tmp_path)
    for mapping in mappings:
        with pytest.raises(DataErrors) as caught:
            load(source, schema(column), silo="n", mapping=mapping)
        assert_untold(caught)


@pytest.mark.parametrize(
    "text",
    [
        f"x,y\n1,2\n{CANARY}\n",
        f'x,y\n1,"{CANARY}\n',
        f"x,y\n{CANARY},\xe9\n",
        f"{CANARY},{NUMBER}\n{CANARY},3\n",
        f"{CANARY}\n",
    ],
)
def test_no_malformed_file_tells_a_value(tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataErrors) as caught:
        load(tmp_path / "rows.csv", schema(numeric("x")), silo="n")
    assert_untold(caught)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT CAST(x AS DOUBLE) AS x FROM patients",
        "SELECT error(x) AS x FROM patients",
        f"SELECT '{CANARY}",
        f"SELECT {CANARY}",
    ],
)
def test_no_failed_query_tells_a_value(tmp_path: Path, query: str) -> None:
    path = make_database(frame(x=[CANARY]), tmp_path)
    with pytest.raises(DataErrors) as caught:
        load(Database(path=path, query=query), schema(numeric("x")), silo="n")
    assert_untold(caught)
