"""PostgreSQL as a source: the bytes of the CSV run, limits, and bad days."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedtmle as ft
from fedtmle.data import ColumnMap, DatabaseQuery, DataErrors, Defect, load, read_silo_file
from fedtmle.data.database import identifier
from fedtmle.data.drivers import Trouble, WriteAccessWarning
from fedtmle.demo import IHDP
from fedtmle.errors import JournalError
from fedtmle.model.table import StreamedTable, Table
from fedtmle.protocol.plan import roster
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import Finished, InProcess, Journalled, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import open_party
from fedtmle.studies.validate import validate
from fedtmle.studyfile.file import study_plan
from fedtmle_core.journal import FileJournal
from tests.data_layer.asking import binary, factor, labels, numeric, schema
from tests.databases.infants import HOSPITALS, as_csv, as_postgres, silo_file
from tests.databases.server import Server
from tests.homes import home_at

READER = "only reads"
AGE = schema(numeric("age", may_be_missing=True))


@pytest.fixture(scope="module", autouse=True)
def hospital(server: Server) -> None:
    server.execute("drop database if exists hospital with (force)", "create database hospital")
    if not server.execute("select 1 from pg_roles where rolname = 'reader'"):
        server.execute(f"create role reader login password '{READER}'")


@pytest.fixture
def url(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment variable with the URL of an empty database, for an account that only reads."""
    make(
        server,
        "drop schema public cascade",
        "create schema public",
        "grant usage on schema public to reader",
        "alter default privileges grant select on tables to reader",
    )
    monkeypatch.setenv("HOSPITAL_DB", server.url("hospital", user="reader", password=READER))
    return "HOSPITAL_DB"


def make(server: Server, *statements: str) -> None:
    server.execute(*statements, database="hospital")


def ages(server: Server, rows: int = 5) -> None:
    make(
        server, f"create table patients as select g as id, 40.5 + g as age from generate_series(1, {rows}) g"
    )


def defect_of(query: DatabaseQuery, **options: object) -> Defect:
    with pytest.raises(DataErrors) as caught:
        load(query, AGE, silo="north", **options)  # type: ignore[arg-type]
    text = "".join(map(repr, _links(caught.value)))
    for secret in (READER, quote(READER, safe=""), Server.password, "postgresql://", "hunter2"):
        assert secret not in text
    (defect,) = caught.value.defects
    return defect


def _links(error: BaseException | None) -> Iterator[object]:
    while error is not None:
        yield from (error, error.args, vars(error))
        error = error.__cause__ or error.__context__


def is_about(defect: Defect, trouble: Trouble) -> bool:
    return defect.message.startswith(trouble.value[0].partition("{")[0])


# The same bytes.

PLAN = study_plan(IHDP, roster(list(HOSPITALS)))


def parties(files: Mapping[str, Path], *, journals: ExitStack | None = None) -> list[Silo]:
    """The hospitals' silos; with ``journals`` each keeps one on disk until that closes."""
    silos = []
    for name, path in files.items():
        journal = None
        if journals is not None:
            journal = journals.enter_context(closing(FileJournal(path.with_suffix(".journal"))))
        keeper = Keeper(policy=UNGUARDED, journal=journal)
        silos.append(open_party(PLAN, name, path, keeper=keeper))
    return silos


@pytest.fixture(scope="module")
def hospitals(server: Server) -> Iterator[Mapping[str, str]]:
    """The eight hospitals' databases: their silos, and the environment variable of each."""
    variables = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, columns in HOSPITALS.items():
            as_postgres(server, name, columns)
            variables[name] = name.replace(" ", "_").upper() + "_DB"
            patch.setenv(variables[name], server.url(name, user="reader", password=READER))
        yield variables


def silo_files(folder: Path, variables: Mapping[str, str], *, stream: bool = False) -> dict[str, Path]:
    return {
        name: silo_file(folder, name, f'database = {{url_env = "{at}"}}\ntable = "infants"', stream=stream)
        for name, at in variables.items()
    }


@pytest.fixture(scope="module")
def csv_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("csv")
    files = {n: silo_file(folder, n, as_csv(folder, n, rows)) for n, rows in HOSPITALS.items()}
    return Session(PLAN, InProcess(parties(files))).run()


@pytest.mark.parametrize("stream", [False, True])
def test_eight_databases_give_the_bytes_of_the_csv_run(
    tmp_path: Path, hospitals: Mapping[str, str], csv_run: Finished, stream: bool
) -> None:
    silos = parties(silo_files(tmp_path, hospitals, stream=stream))
    finished = Session(PLAN, InProcess(silos)).run()
    assert len(HOSPITALS) == 8
    assert finished.transcript == csv_run.transcript
    assert len(list(tmp_path.rglob("*.parquet"))) == (8 if stream else 0)
    del silos, finished
    gc.collect()
    assert not list(tmp_path.rglob("*.parquet"))  # a copy goes with the run


class Interrupted(InProcess):
    """Does something between two rounds."""

    def __init__(self, silos: list[Silo], at: int, act: Callable[[], None]) -> None:
        super().__init__(silos)
        self._left, self._act = at, act

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        self._left -= 1
        if self._left == 0:
            self._act()
        return super().exchange(requests)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_killed_between_rounds_changes_nothing(
    tmp_path: Path, server: Server, hospitals: Mapping[str, str], csv_run: Finished, stream: bool
) -> None:
    silos = parties(silo_files(tmp_path, hospitals, stream=stream))
    try:
        finished = Session(PLAN, Interrupted(silos, 5, server.kill)).run()
    finally:
        server.start()
    assert finished.transcript == csv_run.transcript


class CrashError(Exception):
    """The process ended."""


def crash() -> None:
    raise CrashError


@pytest.mark.parametrize("stream", [False, True])
def test_a_silo_resumes_after_a_crash_once_the_database_is_back(
    tmp_path: Path, server: Server, hospitals: Mapping[str, str], csv_run: Finished, stream: bool
) -> None:
    files = silo_files(tmp_path, hospitals, stream=stream)
    crashed = FileJournal(tmp_path / "server.journal")
    with ExitStack() as stack, closing(crashed):
        silos = parties(files, journals=stack)
        session = Session(PLAN, Journalled(Interrupted(silos, 5, crash), crashed, plan=PLAN))
        with pytest.raises(CrashError):
            session.run()
    server.kill()
    try:
        with ExitStack() as stack, pytest.raises(DataErrors) as caught:
            parties(files, journals=stack)
        assert is_about(caught.value.defects[0], Trouble.DOWN)
        assert "nothing is lost" in str(caught.value)
    finally:
        server.start()
    with ExitStack() as stack, closing(FileJournal(tmp_path / "server.journal")) as journal:
        silos = parties(files, journals=stack)
        finished = Session(PLAN, Journalled(InProcess(silos), journal, plan=PLAN)).run()
    assert finished.transcript == csv_run.transcript


@pytest.mark.parametrize("stream", [False, True])
def test_data_that_changed_under_a_run_are_refused(
    tmp_path: Path, server: Server, url: str, stream: bool
) -> None:
    name, rows = next(iter(HOSPITALS.items()))
    plan = study_plan(IHDP, roster([name]))
    open_keeper = partial(Keeper, policy=UNGUARDED)
    as_postgres(server, "hospital", rows)
    make(server, "grant usage on schema public to reader")
    path = silo_file(tmp_path, name, f'database = {{url_env = "{url}"}}\ntable = "infants"', stream=stream)
    with closing(FileJournal(tmp_path / "journal")) as journal:
        silo = open_party(plan, name, path, keeper=open_keeper(journal=journal))
        with pytest.raises(CrashError):
            Session(plan, Interrupted([silo], 3, crash)).run()
    make(server, "update infants set momage = momage + 1 where ctid = (select min(ctid) from infants)")
    with (
        closing(FileJournal(tmp_path / "journal")) as journal,
        pytest.raises(JournalError, match="the data, or the plan, changed"),
    ):
        open_party(plan, name, path, keeper=open_keeper(journal=journal))


# Types.


def test_every_type_is_read_as_csv_would_be_or_refused_by_name(server: Server, url: str) -> None:
    make(
        server,
        "create type mood as enum ('low', 'high')",
        """create table patients (
             "Small" smallint, "small" bigint, r real, d double precision, n numeric, f numeric(8, 2),
             b boolean, t text, c char(4), v varchar(5), e mood, u uuid, day date, at timestamptz,
             span interval, clock time, price money, raw bytea, doc jsonb, list int[])""",
        """insert into patients values
             (1, 9007199254740991, 0.5, 0.1, 123456789.123456789, 1.10, true, 'a', 'ab', 'v', 'low',
              'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '2020-01-01', now(), '1 day', '10:00', 3, 'x', '{}',
              '{1}'),
             (null, null, null, null, 'NaN', null, false, '', 'abcd', null, 'high', null, null, null, null,
              null, null, null, null, null)""",
    )
    numbers = ["Small", "small", "r", "d", "n", "f"]
    texts = ["t", "c", "v", "e", "u"]
    asked = schema(
        *(numeric(name, may_be_missing=True) for name in numbers),
        binary("b"),
        *(factor(name, may_be_missing=True) for name in texts),
    )
    query = DatabaseQuery(url_env=url, table="patients")
    table = load(query, asked, silo="north")
    assert isinstance(table, Table)
    first = {name: table.numeric[name][0] for name in numbers}
    assert first == {"Small": 1, "small": 2**53 - 1, "r": 0.5, "d": 0.1, "n": 123456789.123456789, "f": 1.1}
    assert all(np.isnan(table.numeric[name][1]) for name in numbers)
    assert table.numeric["b"].tolist() == [1.0, 0.0]
    assert [labels(table.factors[name])[0] for name in texts] == [
        "a",
        "ab",
        "v",
        "low",
        "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
    ]
    assert labels(table.factors["t"])[1] == ""
    refused = {"day": "dates", "at": "dates", "span": "dates", "clock": "dates"}
    refused |= dict.fromkeys(("price", "raw", "doc", "list"), "neither numbers nor text")
    with pytest.raises(DataErrors) as caught:
        load(query, schema(*(numeric(name, may_be_missing=True) for name in refused)), silo="north")
    words = {defect.column: defect.message for defect in caught.value.defects}
    assert words.keys() == refused.keys()
    assert all(refused[name] in what for name, what in words.items())


def test_problems_with_the_data_are_told_as_of_a_csv(server: Server, url: str, tmp_path: Path) -> None:
    make(
        server,
        "create table patients (age text, sex text, dose int)",
        "insert into patients values ('40', 'm', 1), ('old', 'x', -5), (null, 'f', 2)",
    )
    (tmp_path / "rows.csv").write_text("age,sex,dose\n40,m,1\nold,x,-5\n,f,2\n")
    asked = schema(
        numeric("age"), factor("sex", levels=("f", "m")), numeric("dose", bounds=(0, 9)), numeric("doze")
    )
    told = []
    for source in (tmp_path / "rows.csv", DatabaseQuery(url_env=url, table="patients")):
        with pytest.raises(DataErrors) as caught:
            load(source, asked, silo="north")
        told.append([(p.column, p.message, p.fix, p.rows) for p in caught.value.defects])
    assert told[0] == told[1]
    assert "did you mean 'dose'?" in str(caught.value)
    assert len(told[0]) >= 4


def test_units_codes_and_clusters_are_mapped(server: Server, url: str) -> None:
    make(
        server,
        "create table patients (wt_lb numeric, s char(1), fam int)",
        "insert into patients values (100, 'M', 1), (200, 'F', 2), (999, 'F', 2)",
    )
    mapping = {
        "weight": ColumnMap(column="wt_lb", scale=0.5, missing=("999",)),
        "sex": ColumnMap(column="s", levels={"M": "male", "F": "female"}),
        "family": ColumnMap(column="fam", secret="words of the hospitals"),
    }
    asked = schema(numeric("weight", may_be_missing=True), factor("sex"), factor("family"))
    table = load(DatabaseQuery(url_env=url, table="patients"), asked, silo="north", mapping=mapping)
    assert isinstance(table, Table)
    np.testing.assert_array_equal(table.numeric["weight"], [50.0, 100.0, np.nan])
    assert labels(table.factors["sex"]) == ["male", "female", "female"]
    assert len(table.factors["family"].levels) == 2
    assert not {"1", "2"} & set(table.factors["family"].levels)


# Limits, and bad days. Each is one defect, in known words, without the password.


def test_a_slow_query_ends_at_the_timeout(server: Server, url: str) -> None:
    ages(server)
    slow = DatabaseQuery(url_env=url, query="select age, pg_sleep(60)::text as s from patients", timeout=0.5)
    defect = defect_of(slow)
    assert defect.message == "the database did not send all rows within 0.5 seconds"
    assert "raise timeout" in defect.fix


def test_a_frozen_server_ends_at_the_timeout(server: Server, url: str) -> None:
    ages(server)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        defect = defect_of(DatabaseQuery(url_env=url, table="patients", timeout=1.0))
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert is_about(defect, Trouble.TIMEOUT)


def test_too_many_rows(server: Server, url: str, tmp_path: Path) -> None:
    ages(server, 1000)
    query = DatabaseQuery(url_env=url, table="patients", max_rows=999)
    assert defect_of(query).message == "the query yields more than 999 rows"
    path = silo_file(
        tmp_path, "silo", f'database = {{url_env = "{url}", max_rows = 999}}\ntable = "patients"', stream=True
    )
    folder = home_at(path).folder
    with pytest.raises(DataErrors, match="more than 999 rows"):
        load(path, AGE, silo="silo")
    assert not list(folder.glob("*.parquet"))
    assert load(DatabaseQuery(url_env=url, table="patients", max_rows=1000), AGE, silo="n").n_rows == 1000


def test_the_database_is_down(server: Server, url: str) -> None:
    ages(server)
    query = DatabaseQuery(url_env=url, table="patients")
    server.stop()
    try:
        defect = defect_of(query)
    finally:
        server.start()
    assert is_about(defect, Trouble.DOWN)
    assert "run the same command again; nothing was sent and nothing is lost" in defect.fix
    assert load(query, AGE, silo="north").n_rows == 5


def test_a_database_that_goes_down_while_it_is_read(server: Server, url: str, tmp_path: Path) -> None:
    make(
        server,
        "create table patients as select g as id, g::float8 as age, repeat('x', 500) as t "
        "from generate_series(1, 300000) g",
    )
    read = 0

    def killing(address: str, query: str, *, timeout: float) -> object:
        from fedtmle.data.drivers import postgresql

        class Rows:
            def __init__(self, rows: object) -> None:
                self.rows, self.schema = rows, rows.schema  # type: ignore[attr-defined]

            def __iter__(self) -> Iterator[object]:
                nonlocal read
                for batch in self.rows:  # type: ignore[attr-defined]
                    yield batch
                    read += batch.num_rows
                    if server.running:
                        server.kill()

        from contextlib import contextmanager

        @contextmanager
        def opened() -> Iterator[Rows]:
            with postgresql(address, query, timeout=timeout) as rows:
                yield Rows(rows)

        return opened()

    query = DatabaseQuery(url_env=url, table="patients", driver=killing, folder=tmp_path)  # type: ignore[arg-type]
    try:
        defect = defect_of(query)
    finally:
        server.start()
    assert 0 < read < 300_000
    assert is_about(defect, Trouble.LOST)
    assert not list(tmp_path.iterdir())
    assert load(DatabaseQuery(url_env=url, table="patients"), AGE, silo="n").n_rows == 300_000


@pytest.mark.parametrize(
    ("address", "trouble"),
    [
        ({"password": "hunter2"}, Trouble.PASSWORD),
        ({"user": "nobody"}, Trouble.PASSWORD),
        ({"database": "no such one"}, Trouble.NO_DATABASE),
        ({"host": "/nonexistent"}, Trouble.DOWN),
    ],
)
def test_a_wrong_url(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch, address: dict[str, str], trouble: Trouble
) -> None:
    right = {"database": "hospital", "user": "reader", "password": READER}
    monkeypatch.setenv(url, server.url(**(right | address)))
    assert is_about(defect_of(DatabaseQuery(url_env=url, table="patients")), trouble)


def test_an_expired_password_and_its_renewal(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages(server)
    server.execute("create role temp login password 'hunter2' valid until '2020-01-01'")
    server.execute("grant pg_read_all_data to temp")
    try:
        monkeypatch.setenv(url, server.url("hospital", user="temp", password="hunter2"))
        query = DatabaseQuery(url_env=url, table="patients")
        defect = defect_of(query)
        assert is_about(defect, Trouble.PASSWORD)
        assert "renew it" in defect.fix
        server.execute("alter role temp password 'another' valid until 'infinity'")
        monkeypatch.setenv(url, server.url("hospital", user="temp", password="another"))
        assert load(query, AGE, silo="north").n_rows == 5
    finally:
        server.execute("drop role temp")


def test_an_account_without_rights(server: Server, url: str) -> None:
    ages(server)
    make(server, "revoke all on patients from reader")
    assert is_about(defect_of(DatabaseQuery(url_env=url, table="patients")), Trouble.DENIED)


def test_a_renamed_column(server: Server, url: str) -> None:
    ages(server)
    query = DatabaseQuery(url_env=url, query="select id, age from patients order by id")
    assert load(query, AGE, silo="north").n_rows == 5
    make(server, "alter table patients rename age to ages")
    defect = defect_of(query)
    assert defect.message == "the query names a column 'age' that the database does not have"
    assert defect.fix == "did you mean 'patients.ages'? correct the query"
    whole = defect_of(DatabaseQuery(url_env=url, table="patients"))
    assert whole.message == "the table has no column 'age'"
    assert "did you mean 'ages'?" in whole.fix


@pytest.mark.parametrize(
    ("sql", "trouble"),
    [
        ("select * from patient", Trouble.NO_TABLE),
        ("select * from none.patients", Trouble.NO_TABLE),
        ("select age from patients where", Trouble.SYNTAX),
        ("select age / (id - 1) as age from patients", Trouble.FAILED),
        ("with gone as (delete from patients returning age) select age from gone", Trouble.WRITES),
        ("select age from patients for update", Trouble.WRITES),
        ("select age, set_config('transaction_read_only', 'off', false) from patients", Trouble.WRITES),
        ("select age, nextval('numbers') from patients", Trouble.WRITES),
        ("select age into copied from patients", Trouble.NO_COLUMNS),
    ],
)
def test_a_wrong_query(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch, sql: str, trouble: Trouble
) -> None:
    ages(server)
    make(server, "create sequence numbers")
    monkeypatch.setenv(
        url, server.url("hospital")
    )  # a superuser, whom only the transaction keeps from writing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WriteAccessWarning)
        assert is_about(defect_of(DatabaseQuery(url_env=url, query=sql)), trouble)
    assert server.execute("select count(*) from patients", database="hospital") == [(5,)]


# Accounts that may write.


@pytest.mark.parametrize("grant", ["insert", "update", "delete", "truncate"])
def test_an_account_that_may_write_is_warned_of(server: Server, url: str, grant: str) -> None:
    ages(server)
    query = DatabaseQuery(url_env=url, table="patients")
    load(query, AGE, silo="north")  # no warning: it would be an error here
    make(server, f"grant {grant} on patients to reader")
    with pytest.warns(WriteAccessWarning, match=r"HOSPITAL_DB: .* may write to tables") as warned:
        load(query, AGE, silo="north")
    assert READER not in str(warned[0].message)
    with pytest.raises(WriteAccessWarning):  # where warnings are errors, the connection is closed
        load(query, AGE, silo="north")
    others = "select count(*) from pg_stat_activity where usename = 'reader'"
    assert server.execute(others) == [(0,)]


def test_a_superuser_is_warned_of_and_validate_says_so(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from fedtmle.cli import app

    runner = CliRunner()
    assert runner.invoke(app, ["init", str(tmp_path), "--all-keys"]).exit_code == 0
    source = read_silo_file(tmp_path / "north.toml")
    assert isinstance(source.data, Path)
    frame = pd.read_csv(source.data)
    kinds = {name: "numeric" if frame[name].dtype.kind in "if" else "text" for name in frame}
    cells = [["null" if pd.isna(v) else f"'{v}'" for v in row] for row in frame.itertuples(index=False)]
    values = ", ".join(f"({', '.join(row)})" for row in cells)
    make(
        server,
        f"create table patients ({', '.join(f'{identifier(name)} {kind}' for name, kind in kinds.items())})",
        f"insert into patients values {values}",
    )
    text = (tmp_path / "north.toml").read_text()
    named = text.replace(
        f'path = "{source.data.name}"', f'database = {{url_env = "{url}"}}\ntable = "patients"'
    )
    assert named != text
    (tmp_path / "north.toml").write_text(named)
    monkeypatch.setenv(url, server.url("hospital"))
    checked = validate(tmp_path / "study.toml")
    assert not checked.defects
    assert "is a superuser" in str(checked.warnings[0])
    assert checked.warnings[0].silo == "north"
    for command in ("validate", "run"):
        with warnings.catch_warnings():
            warnings.simplefilter("default", WriteAccessWarning)  # elsewhere in these tests it is an error
            printed = runner.invoke(app, [command, str(tmp_path / "study.toml")])
        assert printed.exit_code == 0, printed.output
        assert "HOSPITAL_DB: the account that reads the database is a superuser" in printed.stderr
        assert "drivers.py" not in printed.output
    server.stop()
    try:
        printed = runner.invoke(app, ["run", str(tmp_path / "study.toml")])
    finally:
        server.start()
    assert printed.exit_code == 1
    assert "silo 'north': the database does not answer; check that it runs" in printed.stderr


# Names cannot become SQL.

NASTY = st.text(min_size=1, max_size=20) | st.sampled_from(
    [
        '"; drop table canary; --',
        "'; drop table canary; --",
        'canary" union select * from canary --',
        "x) TO PROGRAM 'touch /tmp/x' --",
        "$$; drop table canary; $$",
        'a"."b',
        "age\\'; drop table canary; --",
    ]
)
SLOWLY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(name=NASTY)
@SLOWLY
def test_no_name_of_a_table_is_run(server: Server, url: str, name: str) -> None:
    make(server, "create table if not exists canary (age int)")
    try:
        query = DatabaseQuery(url_env=url, table=name)
    except ft.InputError:
        return
    with pytest.raises(DataErrors):
        load(query, AGE, silo="north")
    assert server.execute("select count(*) from canary", database="hospital") == [(0,)]


@given(name=NASTY.filter(lambda name: "\0" not in name and len(name.encode(errors="ignore")) < 60))
@SLOWLY
def test_a_column_and_a_label_may_have_any_name(server: Server, url: str, tmp_path: Path, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    literal = "'" + name.replace("'", "''") + "'"
    make(
        server,
        "create table if not exists canary (age int)",
        "drop table if exists patients",
        f"create table patients (age int, {identifier(name if name != 'age' else 'Age')} text)",
        f"insert into patients values (1, {literal}), (2, 'b')",
    )
    theirs = name if name != "age" else "Age"
    asked = schema(numeric("age"), factor(name + "?"))
    query = DatabaseQuery(url_env=url, table="patients", folder=tmp_path)
    mapping = {name + "?": theirs}
    table = load(query, asked, silo=name, mapping=mapping)
    assert isinstance(table, Table)
    assert labels(table.factors[name + "?"]) == [name, "b"]
    silo = silo_file(tmp_path, "silo", f'database = {{url_env = "{url}"}}\ntable = "patients"', stream=True)
    import dataclasses

    streamed = load(
        dataclasses.replace(read_silo_file(silo), columns={name + "?": ColumnMap(column=theirs)}),
        asked,
        silo=name,
    )
    assert isinstance(streamed, StreamedTable)
    (block,) = streamed.blocks()
    assert labels(block.factors[name + "?"]) == [name, "b"]
    assert server.execute("select count(*) from canary", database="hospital") == [(0,)]


# The owner's extract.


def test_an_extract_holds_the_rows_still(server: Server, url: str, tmp_path: Path) -> None:
    ages(server)
    text = f'database = {{url_env = "{url}"}}\nquery = "select * from patients"\nsnapshot = "extract.parquet"'
    for stream in (False, True):
        path = silo_file(tmp_path, "north", text, stream=stream)
        table = load(path, AGE, silo="north")
        assert table.n_rows == 5
    extract = tmp_path / "extract.parquet"
    assert extract.stat().st_mode & 0o077 == 0
    make(server, "update patients set age = 0", "alter table patients rename age to ages")
    assert load(path, AGE, silo="north").n_rows == 5
    server.stop()
    try:
        again = load(path, AGE, silo="north")
    finally:
        server.start()
    assert isinstance(again, StreamedTable)
    assert isinstance(table, StreamedTable)
    assert again.digest == table.digest
    silo_file(tmp_path, "north", text.replace("patients", "patients where id > 1"))
    with pytest.raises(DataErrors, match="made by a query other than"):
        load(path, AGE, silo="north")
    silo_file(tmp_path, "north", text)
    data = bytearray(extract.read_bytes())
    data[len(data) // 2] ^= 1
    extract.write_bytes(data)
    with pytest.raises(DataErrors, match="was changed since it was written"):
        load(path, AGE, silo="north")


def test_a_copy_of_a_killed_process_is_removed_by_the_next(server: Server, url: str, tmp_path: Path) -> None:
    ages(server)
    path = silo_file(tmp_path, "north", f'database = {{url_env = "{url}"}}\ntable = "patients"', stream=True)
    folder = home_at(path).folder
    (folder / "copied-rows-abandoned.parquet").write_bytes(b"records")
    table = load(path, AGE, silo="north")
    (copy,) = folder.glob("*.parquet")
    assert copy.name != "copied-rows-abandoned.parquet"
    assert copy.stat().st_mode & 0o077 == 0
    other = load(path, AGE, silo="north")  # while the first still uses its own
    assert len(list(folder.glob("*.parquet"))) == 2
    assert sum(block.n_rows for block in table.blocks()) == other.n_rows
    del table, other
    gc.collect()
    assert not list(folder.glob("*.parquet"))


def test_many_silos_at_once(server: Server, url: str) -> None:
    ages(server, 10_000)
    counts: list[int] = []
    query = DatabaseQuery(url_env=url, table="patients")
    work = [
        threading.Thread(target=lambda: counts.append(load(query, AGE, silo="n").n_rows)) for _ in range(8)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert counts == [10_000] * 8


# The documentation.


def test_the_documentations_example_works_as_it_stands(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages = Path(__file__).parents[2] / "docs" / "databases.md"
    blocks = re.findall(r"```(sql|toml|sh)\n(.*?)```", pages.read_text(encoding="utf-8"), flags=re.DOTALL)
    sql = next(text for kind, text in blocks if kind == "sql")
    toml = next(text for kind, text in blocks if kind == "toml" and "[silo]" in text)
    (exported,) = (text for kind, text in blocks if kind == "sh" and "export" in text)
    server.execute("drop role if exists fedtmle")
    make(
        server,
        "drop schema if exists research cascade",
        "create table records (id int, treat int, bw int, momage int, iq numeric, consent boolean)",
        "insert into records values (2, 1, 900, 30, 101.5, true), (1, 0, 800, 20, null, true)",
        "insert into records values (3, 0, 1, 1, 1, false)",
        *(line for line in sql.split(";\n") if line.strip()),
    )
    where = re.search(r"postgresql://(\w+):(\S+?)@", exported)
    assert where is not None
    monkeypatch.setenv(url, server.url("hospital", user=where[1], password=unquote(where[2])))
    (tmp_path / "silo.toml").write_text(toml)
    asked = schema(binary("treat"), numeric("bw"), numeric("momage"), numeric("iqsb_36", may_be_missing=True))
    table = load(tmp_path / "silo.toml", asked, silo="north")  # an account that only reads: no warning
    assert isinstance(table, Table)
    np.testing.assert_array_equal(table.numeric["iqsb_36"], [np.nan, 101.5])
    make(server, "drop schema research cascade")
    server.execute("drop role fedtmle")


def test_the_documentation_quotes_what_is_said() -> None:
    pages = (Path(__file__).parents[2] / "docs" / "databases.md").read_text(encoding="utf-8")
    for trouble in Trouble:
        if trouble not in ELSEWHERE:
            assert trouble.value[0].partition("{")[0].strip() in pages, trouble


ELSEWHERE = {  # seen by reading them
    Trouble.UNKNOWN_SCHEME,
    Trouble.NO_DATABASE,
    Trouble.REFUSED,
    Trouble.CANCELLED,
    Trouble.NO_COLUMNS,
    Trouble.NO_COHORT,
    Trouble.NO_TABLE,
    Trouble.SYNTAX,
    Trouble.NOT_A_DATABASE,
    Trouble.NO_FILE,
    Trouble.LOCKED,
    Trouble.FAILED,
}
