"""Short ways to ask for columns and to write the same rows to every kind of source."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest

from fedtmle.data import Column, Database, DatabaseQuery, DataErrors, Defect, Kind, Schema, load
from fedtmle.model.table import Factor


def numeric(name: str, **options: Any) -> Column:
    return Column(name=name, kind=Kind.NUMERIC, **options)


def binary(name: str, **options: Any) -> Column:
    return Column(name=name, kind=Kind.BINARY, **options)


def factor(name: str, **options: Any) -> Column:
    return Column(name=name, kind=Kind.FACTOR, **options)


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


def schema(*columns: Column) -> Schema:
    return Schema(columns)


def labels(column: Factor) -> list[str | None]:
    """The rows' levels, written out."""
    return [column.levels[code] if code >= 0 else None for code in column.codes]


def defects(source: object, asked: Schema, **options: Any) -> tuple[Defect, ...]:
    """What `load` complains of."""
    with pytest.raises(DataErrors) as caught:
        load(source, asked, silo="north", **options)
    return caught.value.defects


def defect(source: object, asked: Schema, **options: Any) -> Defect:
    (only,) = defects(source, asked, **options)
    return only


def as_pandas(frame: pd.DataFrame, folder: Path) -> object:  # noqa: ARG001 (one signature for all)
    return frame


def as_polars(frame: pd.DataFrame, folder: Path) -> object:  # noqa: ARG001
    polars = pytest.importorskip("polars", reason="polars is not installed")
    return polars.from_pandas(frame)


def as_arrays(frame: pd.DataFrame, folder: Path) -> object:  # noqa: ARG001
    return {name: np.asarray(frame[name]) for name in frame.columns}


def as_csv(frame: pd.DataFrame, folder: Path) -> object:
    frame.to_csv(folder / "rows.csv", index=False)
    return folder / "rows.csv"


def as_parquet(frame: pd.DataFrame, folder: Path) -> object:
    with duckdb.connect() as connection:
        connection.register("frame", frame)
        connection.execute(f"COPY frame TO '{folder / 'rows.parquet'}'")
    return str(folder / "rows.parquet")


def make_database(frame: pd.DataFrame, folder: Path) -> Path:
    path = folder / "rows.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.register("frame", frame)
        connection.execute("CREATE TABLE patients AS SELECT * FROM frame")
    return path


def as_table(frame: pd.DataFrame, folder: Path) -> object:
    return Database(path=make_database(frame, folder), table="patients")


def as_query(frame: pd.DataFrame, folder: Path) -> object:
    return Database(path=make_database(frame, folder), query="SELECT * FROM patients;")


def as_sqlite(frame: pd.DataFrame, folder: Path) -> DatabaseQuery:
    path = folder / "rows.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        frame.to_sql("patients", connection, index=False)
        connection.commit()
    return DatabaseQuery(path=path, table="patients")


def as_extract(frame: pd.DataFrame, folder: Path) -> object:
    return replace(as_sqlite(frame, folder), snapshot=folder / "extract.parquet")


SOURCES: list[Callable[[pd.DataFrame, Path], object]] = [
    as_pandas,
    as_polars,
    as_arrays,
    as_csv,
    as_parquet,
    as_table,
    as_query,
]
SERVED = [as_sqlite, as_extract]  # by a database's driver: not every type of a frame is one of SQLite's
