"""A PostgreSQL CDM on bad days: nothing is written, and errors tell neither records nor passwords."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import fedtmle as ft
from fedtmle.data.convert import Numbers, UnreadableError
from fedtmle.data.drivers import WriteAccessWarning
from fedtmle.trials.cohort import Cdm, _read_postgresql, read_cohort
from tests.trials.conftest import Urls, cursor
from tests.trials.test_compile import BASE

COUNTS = "SELECT 0 AS step, 1 AS people"


@pytest.fixture
def cdm(postgresql: str, monkeypatch: pytest.MonkeyPatch) -> Cdm:
    monkeypatch.setenv("A_CDM", postgresql)
    return Cdm(name="north", url_env="A_CDM", schema="invented", timeout=2.0)


@pytest.mark.parametrize("place", ["counts", "table"])
@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("SELECT nextval('numbers') AS x", "tries to write"),
        ("SELECT 1 AS x FROM pg_sleep(30)", "did not send all rows within 2 seconds"),
        ("SELECT CAST('a secret' AS INTEGER) AS x", "query failed"),
    ],
)
def test_bad_statements(cdm: Cdm, urls: Urls, place: str, statement: str, message: str) -> None:
    """The first statement of the transaction is guarded as the second one is."""
    with cursor(urls.admin) as target:
        target.execute("CREATE SEQUENCE IF NOT EXISTS numbers")
        target.execute("GRANT USAGE ON SEQUENCE numbers TO reader")
    counts, table = (statement, "SELECT 1 AS x") if place == "counts" else (COUNTS, statement)
    with pytest.raises(UnreadableError, match=message) as caught:
        _read_postgresql(cdm, counts, table, ("x",))
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


def test_both_statements_see_one_state(cdm: Cdm, urls: Urls) -> None:
    """A person who is added between the statements is in neither."""
    with cursor(urls.admin) as target:
        target.execute("DROP TABLE IF EXISTS entries")
        target.execute("CREATE TABLE entries (x INTEGER)")
        target.execute("GRANT SELECT ON entries TO reader")
        with ThreadPoolExecutor() as pool:
            counts = "SELECT 0 AS step, count(*) AS people FROM entries, pg_sleep(0.6)"
            table = "SELECT count(*) AS x FROM entries, pg_sleep(0.3)"
            reading = pool.submit(_read_postgresql, cdm, counts, table, ("x",))
            time.sleep(0.4)
            target.execute("INSERT INTO entries VALUES (1)")
            people, cells = reading.result()
        target.execute("SELECT count(*) FROM entries")
        assert target.fetch_arrow_table().column(0).to_pylist() == [1]
    assert people == (0,)
    assert isinstance(cells["x"], Numbers)
    assert cells["x"].values.tolist() == [0.0]


def test_an_account_that_may_write_is_warned_of(
    cdm: Cdm, urls: Urls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_CDM", urls.admin)
    with pytest.warns(WriteAccessWarning, match="is a superuser"):
        assert read_cohort(BASE, replace(cdm, timeout=60.0)).n_rows > 30


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("nowhere", "has no table 'nowhere.person'; check schema"),
        ("half", "names a column 'p.person_id' that the database does not have; check that the tables"),
        ("closed", "may not read what the query names; ask the database's administrator"),
    ],
)
def test_a_cdm_that_is_not_whole(cdm: Cdm, urls: Urls, schema: str, message: str) -> None:
    with cursor(urls.admin) as target:
        for name in ("half", "closed"):
            target.execute(f"CREATE SCHEMA IF NOT EXISTS {name}")
            target.execute(f"CREATE TABLE IF NOT EXISTS {name}.person (subject INTEGER)")
        target.execute("GRANT USAGE ON SCHEMA half TO reader")
        target.execute("GRANT SELECT ON half.person TO reader")
    with pytest.raises(ft.DataError, match=message) as caught:
        read_cohort(BASE, replace(cdm, schema=schema))
    assert caught.value.__context__ is None


def test_more_people_than_the_owner_allows(cdm: Cdm) -> None:
    with pytest.raises(ft.DataError, match="more than 30 rows; raise max_rows"):
        read_cohort(BASE, replace(cdm, timeout=60.0, max_rows=30))


def test_only_postgresql_and_duckdb_hold_a_cdm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_CDM", f"sqlite:{tmp_path}/cdm.sqlite")
    with pytest.raises(ft.DataError, match="no cohort can be selected in a database of this kind"):
        read_cohort(BASE, Cdm(name="north", url_env="A_CDM"))


def test_a_server_that_is_down_is_told_without_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("adbc_driver_postgresql")
    url = f"postgresql://reader:hunter2@/cdm?host={tmp_path}"
    monkeypatch.setenv("A_CDM", url)
    (tmp_path / "url").write_text(f"{url}\n", encoding="utf-8")
    (tmp_path / "url").chmod(0o600)
    for where in (Cdm(name="north", url_env="A_CDM"), Cdm(name="north", url_file=tmp_path / "url")):
        with pytest.raises(ft.DataError, match="the database does not answer") as caught:
            read_cohort(BASE, where)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__context__ is None
        assert "hunter2" not in repr(where)
    (tmp_path / "url").chmod(0o644)
    for file, message in (("absent", "cannot be read"), ("url", "other accounts can read")):
        with pytest.raises(ft.DataError, match=message):
            read_cohort(BASE, Cdm(name="north", url_file=tmp_path / file))
