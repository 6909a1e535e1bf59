"""A table that is checked in its database has the defects that reading its rows finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtmle.data import (
    Column,
    ColumnMap,
    CountedTable,
    DatabaseQuery,
    DataErrors,
    Kind,
    Schema,
    SiloFile,
    check,
    load,
)
from fedtmle.model.table import StreamedTable, Table
from fedtmle.protocol.policy import Policy
from tests.databases.server import Server
from tests.premise import Premise

NUMBERS = ("0", "1", "2", "-1", "1.5", "999", "9", "120", "1e300", "-5e-324", "NaN", "Infinity", "-Infinity")
WORDS = ("0", "1", "yes", "no", "", " 1", "9", "9.0", "abc", "1.5", "unknown", "true", "it's")
TYPES = {
    "double precision": NUMBERS,
    "real": ("0", "1", "0.1", "999", "NaN", "Infinity"),
    "numeric": ("0", "1", "0.1", "2", "999", "-3.25", "NaN"),
    "integer": ("0", "1", "2", "-1", "9", "999", "120"),
    "boolean": ("true", "false"),
    "text": WORDS,
    "char(4)": ("0", "1", "yes", "no"),
    "date": ("2020-01-01",),
}
ASKED = (
    Column(name="x", kind=Kind.NUMERIC, bounds=(0.0, 100.0)),
    Column(name="x", kind=Kind.NUMERIC, bounds=(0.0, np.inf), may_be_missing=True),
    Column(name="x", kind=Kind.NUMERIC, may_be_missing=True),
    Column(name="x", kind=Kind.COUNT, bounds=(0.0, 100.0)),
    Column(name="x", kind=Kind.COUNT, may_be_missing=True),
    Column(name="x", kind=Kind.BINARY),
    Column(name="x", kind=Kind.BINARY, levels=("no", "yes"), may_be_missing=True),
    Column(name="x", kind=Kind.FACTOR, levels=("0", "1", "2")),
    Column(name="x", kind=Kind.FACTOR, levels=("yes", "no"), may_be_missing=True),
)
MAPS = (
    ColumnMap(column="x"),
    ColumnMap(column="x", missing=("999", "unknown")),
    ColumnMap(column="x", missing=(" 9",)),
    ColumnMap(column="x", scale=0.5, shift=-3.25),
    ColumnMap(column="x", scale=1e10, missing=("1",)),
    ColumnMap(column="x", levels={"yes": "1", "no": "0"}),
    ColumnMap(column="x", levels={"0": "no", "1": "yes", "01": "yes"}, missing=("999",)),
    ColumnMap(column="absent"),
)
OUTCOME = Column(name="y", kind=Kind.NUMERIC, bounds=(0.0, 1.0), may_be_missing=True)
TREATMENT = Column(name="a", kind=Kind.FACTOR, levels=("0", "1"))


@pytest.fixture(scope="module", autouse=True)
def url(server: Server) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        server.execute("create role checker login password 'checker'")
        patch.setenv("CHECKED_DB", server.url(user="checker", password="checker"))
        yield


@st.composite
def silos(draw: st.DrawFn) -> tuple[SiloFile, Schema]:
    """A query of a few rows, a mapping of its columns, and the schema of a study."""
    count, plain = draw(st.integers(1, 3)), draw(st.booleans())  # a plain table has few defects, or none
    names = ["y", "a", *(f"x{k}" for k in range(count))]
    types = {"y": "double precision", "a": draw(st.sampled_from(("integer", "text", "boolean")))}
    kinds = ("double precision", "integer", "numeric") if plain else sorted(TYPES)
    types |= {name: draw(st.sampled_from(kinds)) for name in names[2:]}
    pools = {"y": ("0", "0.5", "NaN"), "a": ("0", "1") if types["a"] != "boolean" else ("true", "false")}
    pools |= {name: ("0", "1") if plain else draw(_few(TYPES[types[name]])) for name in names[2:]}
    cells = {name: st.sampled_from(pools[name] if plain else (None, *pools[name])) for name in names}
    cells["a"] = st.sampled_from(pools["a"])
    rows = draw(st.lists(st.tuples(*(cells[name] for name in names)), min_size=int(plain), max_size=9))
    columns = [OUTCOME, TREATMENT]
    maps: dict[str, ColumnMap] = {}
    for name in names[2:]:
        asked = draw(st.sampled_from(ASKED))
        mapped = draw(st.sampled_from(MAPS[:3] if plain else MAPS))
        columns.append(Column(**{**vars(asked), "name": name}))
        theirs = name if mapped.column == "x" else mapped.column
        maps[name] = ColumnMap(**{**vars(mapped), "column": theirs})
    return silo(rows, types, maps), Schema(tuple(columns))


def _few(pool: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    """Some of the values, so that many columns have no defect."""
    return st.lists(st.sampled_from(pool), min_size=1, max_size=3).map(tuple)


def silo(
    rows: list[tuple[str | None, ...]], types: Mapping[str, str], maps: Mapping[str, ColumnMap]
) -> SiloFile:
    def cell(value: str | None, kind: str) -> str:
        return f"null::{kind}" if value is None else "'" + value.replace("'", "''") + f"'::{kind}"

    lines = [
        ", ".join(cell(v, k) for v, k in zip(row, types.values(), strict=True))
        for row in (*rows, (None,) * len(types))
    ]
    selects = " union all ".join(f"select {', '.join([line, str(k)])}" for k, line in enumerate(lines))
    table = f"with t({', '.join(types)}, place) as ({selects})"
    query = f"{table} select * from t where place < {len(rows)} order by place -- a comment;"
    data = DatabaseQuery(url_env="CHECKED_DB", query=query)
    return SiloFile(
        path=Path("silo.toml"), name="silo", data=data, columns=maps, policy=Policy(), stream=True
    )


counted = Premise("the rows are counted in the database", at_least=0.7)
defective = Premise("the table has a defect in a column", at_least=0.3)
sound = Premise("the table has no defect", at_least=0.05)


def compare(given_silo: SiloFile, schema: Schema) -> None:
    loaded: list[str] = []

    def noted(*arguments: object, **named: object) -> object:
        loaded.append("read")
        return load(*arguments, **named)  # type: ignore[arg-type]  # as they came

    def outcome_of(call: object) -> tuple[object, ...]:
        try:
            table = call()  # type: ignore[operator]  # one of the two below
        except DataErrors as errors:
            return ("defects", Counter(errors.defects))
        if isinstance(table, StreamedTable):
            (table,) = table.blocks()
        if isinstance(table, Table):
            known, factor = ~np.isnan(table.numeric["y"]), table.factors["a"]
            arms = {arm: int((known & (factor.codes == k)).sum()) for k, arm in enumerate(factor.levels)}
            return (table.n_rows, arms)
        return (table.n_rows, dict(table.known))

    read = outcome_of(lambda: load(replace(given_silo, stream=False), schema, silo="silo"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedtmle.data.counted.load", noted)
        checked = outcome_of(lambda: check(given_silo, schema, silo="silo", outcome="y", treatment="a"))
    assert checked == read
    counted.holds(not loaded)
    defective.holds(read[0] == "defects")
    sound.holds(read[0] != "defects")


@counted
@defective
@sound
@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(silos())
def test_the_database_finds_what_reading_finds(drawn: tuple[SiloFile, Schema]) -> None:
    compare(*drawn)


@pytest.mark.slow
@counted
@defective
@sound
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(silos())
def test_the_database_finds_what_reading_finds_in_many_tables(drawn: tuple[SiloFile, Schema]) -> None:
    compare(*drawn)


def with_query(made: SiloFile, **changes: object) -> SiloFile:
    assert isinstance(made.data, DatabaseQuery)
    return replace(made, data=replace(made.data, **changes))  # type: ignore[arg-type]  # fields of it


ROWS: list[tuple[str | None, ...]] = [("0.5", "1", "3"), (None, "1", "4"), ("0.1", "0", "5")]
THREE = {"y": "double precision", "a": "integer", "x": "double precision"}
WIDE = Schema((OUTCOME, TREATMENT, Column(name="x", kind=Kind.NUMERIC, bounds=(0.0, 1e308))))


def test_known_outcomes_are_counted_by_arm() -> None:
    table = check(silo(ROWS, THREE, {}), WIDE, silo="silo", outcome="y", treatment="a")
    assert table == CountedTable(n_rows=3, n_known=2, known={"0": 1, "1": 1})


def test_more_rows_than_allowed() -> None:
    made = with_query(silo(ROWS, THREE, {}), max_rows=2)
    with pytest.raises(DataErrors, match="more than 2 rows"):
        check(made, WIDE, silo="silo", outcome="y", treatment="a")


@pytest.mark.parametrize("how", ["overflow", "identifiers", "many values", "snapshot"])
def test_rows_are_read_where_the_database_cannot_count(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, schema = silo(ROWS, THREE, {}), WIDE
    if how == "overflow":  # an error in PostgreSQL, infinite here
        made = silo([("0.5", "1", "1e300")], THREE, {"x": ColumnMap(column="x", scale=1e100)})
        with pytest.raises(DataErrors, match="is infinite"):
            check(made, schema, silo="silo", outcome="y", treatment="a")
        return
    if how == "identifiers":
        schema = Schema((OUTCOME, TREATMENT, Column(name="x", kind=Kind.FACTOR)))
    elif how == "many values":
        monkeypatch.setattr("fedtmle.data.counted.MOST_VALUES", 1)
    else:
        made = with_query(made, snapshot=tmp_path / "x.parquet")
    table = check(made, schema, silo="silo", outcome="y", treatment="a")
    assert isinstance(table, StreamedTable)
    assert table.n_rows == 3
    assert isinstance(
        check(replace(made, stream=False), schema, silo="silo", outcome="y", treatment="a"), Table
    )


def test_a_hostile_name_of_a_column_is_quoted() -> None:
    name = 'x"); drop table "t'
    quoted = '"' + name.replace('"', '""') + '"'
    made = silo(ROWS, {"y": "double precision", "a": "integer", quoted: "double precision"}, {})
    asked = Schema((OUTCOME, TREATMENT, Column(name=name, kind=Kind.NUMERIC, bounds=(0.0, 4.0))))
    with pytest.raises(DataErrors) as caught:
        check(made, asked, silo="silo", outcome="y", treatment="a")
    assert [(defect.column, defect.rows) for defect in caught.value.defects] == [(name, 1)]
