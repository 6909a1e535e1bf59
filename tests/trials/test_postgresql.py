"""A PostgreSQL CDM on bad days: nothing is written, and errors tell neither records nor passwords."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fedtmle as ft
from fedtmle.trials.cohort import Cdm, _open, read_cohort
from fedtmle.trials.compile import CdmLayout
from tests.trials.conftest import cursor
from tests.trials.test_compile import BASE


@pytest.fixture
def cdm(postgresql: str, monkeypatch: pytest.MonkeyPatch) -> Cdm:
    monkeypatch.setenv("A_CDM", postgresql)
    return Cdm(
        name="north", connection_variable="A_CDM", layout=CdmLayout(schema="invented"), timeout_seconds=1.0
    )


def test_the_transaction_is_read_only(cdm: Cdm, postgresql: str) -> None:
    with pytest.raises(ft.DataError, match="the cohort cannot be read"), _open(cdm) as database:
        database.columns("CREATE TABLE public.written AS SELECT 1 AS x")
    with cursor(postgresql) as target:
        target.execute("SELECT count(*) FROM pg_tables WHERE tablename = 'written'")
        assert target.fetch_arrow_table().column(0).to_pylist() == [0]


def test_one_statement_at_a_time(cdm: Cdm) -> None:
    with pytest.raises(ft.DataError, match="the cohort cannot be read"), _open(cdm) as database:
        database.columns("SELECT 1 AS x; SELECT 2 AS x")


def test_a_slow_statement_is_stopped(cdm: Cdm) -> None:
    with pytest.raises(ft.DataError, match="longer than timeout_seconds"), _open(cdm) as database:
        database.columns("SELECT 1 AS x FROM pg_sleep(30)")


@pytest.mark.parametrize(
    ("schema", "message"),
    [("nowhere", "a table of the CDM is missing"), ("half", "a column of the CDM is missing")],
)
def test_a_cdm_that_is_not_whole(cdm: Cdm, postgresql: str, schema: str, message: str) -> None:
    with cursor(postgresql) as target:
        target.execute("CREATE SCHEMA IF NOT EXISTS half")
        target.execute("CREATE TABLE IF NOT EXISTS half.person (subject INTEGER)")
    broken = replace(cdm, layout=CdmLayout(schema=schema))
    with pytest.raises(ft.DataError, match=message) as caught:
        read_cohort(BASE, broken)
    assert caught.value.__context__ is None


def test_a_value_of_another_type_is_not_quoted(cdm: Cdm) -> None:
    with pytest.raises(ft.DataError, match="holds values of another type") as caught, _open(cdm) as database:
        database.columns("SELECT CAST('a secret' AS INTEGER) AS x")
    assert "secret" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_server_that_is_down_is_told_without_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("adbc_driver_postgresql")
    uri = f"postgresql://reader:hunter2@/cdm?host={tmp_path}"
    monkeypatch.setenv("A_CDM", uri)
    (tmp_path / "uri").write_text(f"{uri}\n", encoding="utf-8")
    for where in (
        Cdm(name="north", connection_variable="A_CDM"),
        Cdm(name="north", connection_file=tmp_path / "uri"),
    ):
        with pytest.raises(ft.DataError, match="cannot be reached") as caught:
            read_cohort(BASE, where)
        assert "hunter2" not in str(caught.value)
        assert caught.value.__context__ is None
        assert "hunter2" not in repr(where)
    with pytest.raises(ft.InputError, match="cannot be read"):
        read_cohort(BASE, Cdm(name="north", connection_file=tmp_path / "absent"))
