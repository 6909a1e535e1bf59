"""The IHDP study's eight hospitals, each with its rows in a CSV, a SQLite file or a PostgreSQL database."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np

from fedtmle.demo import ihdp_silos
from fedtmle_core.types import Array
from tests.databases.server import Server

Columns = dict[str, Array]
HOSPITALS: dict[str, Columns] = ihdp_silos()


def silo_file(folder: Path, name: str, data: str, *, stream: bool = False) -> Path:
    """Write the silo file of a hospital whose section [data] is ``data``."""
    path = folder / f"{name.replace(' ', '-')}.toml"
    streamed = "stream = true\n" if stream else ""
    path.write_text(f'[silo]\nname = "{name}"\n[data]\n{data}\n{streamed}')
    return path


def as_csv(folder: Path, name: str, columns: Columns) -> str:
    """Write a hospital's rows; return what its silo file says about them."""
    file = f"{name}.csv"
    lines = [",".join(columns), *(",".join(map(_cell, row)) for row in zip(*columns.values(), strict=True))]
    (folder / file).write_text("\n".join(lines) + "\n")
    return f'path = "{file}"'


def as_sqlite(folder: Path, name: str, columns: Columns) -> str:
    file = f"{name}.sqlite"
    with sqlite3.connect(folder / file) as connection:
        connection.execute(f"create table infants ({', '.join(columns)})")
        holes = ", ".join("?" for _ in columns)
        connection.executemany(f"insert into infants values ({holes})", _rows(columns))
    connection.close()
    return f'database = "{file}"\ntable = "infants"'


def as_postgres(server: Server, database: str, columns: Columns) -> None:
    """Make a database with a hospital's rows and the account `reader`, which may only read."""
    kinds = {name: "integer" if _whole(values) else "numeric" for name, values in columns.items()}
    rows = ", ".join(
        f"({', '.join('null' if v is None else repr(v) for v in row)})" for row in _rows(columns)
    )
    if not server.execute("select 1 from pg_roles where rolname = 'reader'"):
        server.execute("create role reader login password 'only reads'")
    server.execute(f'drop database if exists "{database}" with (force)', f'create database "{database}"')
    server.execute(
        f"create table infants ({', '.join(f'{name} {kind}' for name, kind in kinds.items())})",
        f"insert into infants values {rows}",
        "grant select on infants to reader",
        database=database,
    )


def _rows(columns: Columns) -> list[tuple[float | int | None, ...]]:
    return [
        tuple(None if np.isnan(v) else int(v) if v == int(v) else float(v) for v in row)
        for row in zip(*columns.values(), strict=True)
    ]


def _whole(values: Array) -> bool:
    known = values[~np.isnan(values)]
    return bool((known == known.astype(np.int64)).all())


def _cell(value: float) -> str:
    return "" if np.isnan(value) else repr(int(value) if value == int(value) else float(value))
