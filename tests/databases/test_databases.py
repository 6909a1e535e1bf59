"""Database sources without a server: silo files, SQLite, the owner's SQL, and drivers of others."""

from __future__ import annotations

import gc
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedtmle as ft
from fedtmle.data import Database, DatabaseQuery, DataErrors, check_readable, load, read_silo_file
from fedtmle.data.database import identifier, statement, statement_defect
from fedtmle.data.drivers import Trouble
from fedtmle.demo import IHDP
from fedtmle.model.table import StreamedTable, Table
from fedtmle.protocol.plan import roster
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import InProcess, Session
from fedtmle.studies.home import open_party
from fedtmle.studyfile.file import study_plan
from tests.data_layer.asking import defect, factor, labels, numeric, schema
from tests.databases.infants import HOSPITALS, as_csv, as_sqlite, silo_file
from tests.homes import home_at

AGE = schema(numeric("age", may_be_missing=True))
URL = "postgresql://me:hunter2@db.hospital/records"


def sqlite_file(folder: Path, *statements: str, name: str = "rows.sqlite") -> Path:
    connection = sqlite3.connect(folder / name)
    with connection:
        for each in statements:
            connection.execute(each)
    connection.close()
    return folder / name


def defects(folder: Path, data: str) -> list[str]:
    """What is wrong with a silo file that has these keys in [data]; never the URL."""
    with pytest.raises(DataErrors) as caught:
        read_silo_file(silo_file(folder, "north", data))
    assert "hunter2" not in repr(caught.value)
    return [f"{found.message}; {found.fix}" for found in caught.value.defects]


# Silo files.


def test_a_silo_file_names_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cohort.sql").write_text("-- the cohort\nselect * from patients;\n")
    data = 'database = {url_env = "HOSPITAL_DB", timeout = 5, max_rows = 10}\nquery_file = "cohort.sql"'
    path = silo_file(tmp_path, "north", data, stream=True)
    monkeypatch.setenv("HOSPITAL_DB", URL)
    before = read_silo_file(path).data
    assert isinstance(before, DatabaseQuery)
    assert before.folder == tmp_path / "north.copies"  # it has no home yet
    folder = home_at(path).folder
    file = read_silo_file(path)
    assert isinstance(file.data, DatabaseQuery)
    assert file.data.timeout == 5
    assert file.data.max_rows == 10
    assert file.data.folder == folder
    assert file.data.sql == "-- the cohort\nselect * from patients"
    assert "hunter2" not in repr(file)
    assert file.stream


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (f'database = "{URL}"\ntable = "t"', "this is a URL, which a silo file must not hold"),
        (
            f'database = {{url_env = "{URL}"}}\ntable = "t"',
            "url_env is not the name of an environment variable",
        ),
        ('database = {url_file = "db.url"}\ntable = "t"', "inside the folder of the silo file"),
        (
            'database = {url_env = "A", url_file = "/b"}\ntable = "t"',
            "exactly one of url_env, url_file, path",
        ),
        ('database = {url = "A"}\ntable = "t"', "the keys of database are url_env"),
        ('database = {url_env = "A", timeout = 0}\ntable = "t"', "timeout is not a valid number of seconds"),
        ('database = {url_env = "A", max_rows = 1.5}\ntable = "t"', "max_rows is not a valid number of rows"),
        ('database = {url_env = "A"}', "exactly one of query, query_file and table"),
        ('database = {url_env = "A"}\ntable = "t"\nquery = "select 1"', "exactly one of query"),
        ('database = {url_env = "A"}\nquery_file = "gone.sql"', "the file with the query cannot be read"),
        ('database = {url_env = "A"}\nquery = "select 1; select 2"', "more than one statement"),
        ('database = {url_env = "A"}\nquery = "delete from t"', "is not a SELECT"),
        ('database = {url_env = "A"}\nquery = "-- nothing"', "the query is empty"),
        ('database = {url_env = "A"}\ntable = "a..b"', "not the name of a table"),
        ('database = {url_env = "A"}\ntable = "t"\nsnapshot = "x.csv"', "not the path of a .parquet file"),
        ('database = {url_env = "A"}\ntable = "t"\npassword = "hunter2"', "unknown key"),
        ('query_file = "a.sql"', "does not say where the database is"),
    ],
)
def test_mistakes_in_a_silo_file(tmp_path: Path, data: str, words: str) -> None:
    assert any(words in defect for defect in defects(tmp_path, data))


def test_the_url_is_in_a_variable_or_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSPITAL_DB", raising=False)
    found = defect(DatabaseQuery(url_env="HOSPITAL_DB", table="t"), AGE)
    assert found.message.startswith("the environment variable HOSPITAL_DB")
    assert "set it" in found.fix
    rows = sqlite_file(tmp_path, "create table t as select 40 as age")
    file = tmp_path / "url"
    query = DatabaseQuery(url_file=file, table="t")
    assert "cannot be read" in defect(query, AGE).message
    file.write_text("\n")
    file.chmod(0o600)
    assert "is empty" in defect(query, AGE).message
    file.write_text(f"sqlite:{rows}\n")
    assert load(query, AGE, silo="north").n_rows == 1
    file.chmod(0o640)
    found = defect(query, AGE)
    assert found.message == "other accounts can read the file with the database's URL"
    assert "chmod 600" in found.fix


@pytest.mark.parametrize("url", ["oracle://me:hunter2@db/x", "hunter2", "mysql:x", "://"])
def test_an_unknown_scheme(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HOSPITAL_DB", url)
    found = defect(DatabaseQuery(url_env="HOSPITAL_DB", table="t"), AGE)
    assert (found.message, found.fix) == Trouble.UNKNOWN_SCHEME.value


@pytest.mark.parametrize("scheme", ["postgresql", "sqlite"])
def test_a_driver_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    rows = sqlite_file(tmp_path, "create table t as select 40 as age")
    for module in [name for name in sys.modules if name.startswith("adbc_driver_")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, f"adbc_driver_{scheme}", None)
    monkeypatch.setenv("HOSPITAL_DB", URL if scheme == "postgresql" else f"sqlite:{rows}")
    found = defect(DatabaseQuery(url_env="HOSPITAL_DB", table="t"), AGE)
    assert (found.message, found.fix) == Trouble.NO_DRIVER.value
    assert "pip install 'fedtmle[databases]'" in found.fix


def test_nothing_answers_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSPITAL_DB", "postgresql://me:hunter2@127.0.0.1:1/records")
    found = defect(DatabaseQuery(url_env="HOSPITAL_DB", table="t"), AGE)
    assert (found.message, found.fix) == Trouble.DOWN.value


@pytest.mark.parametrize("key", ["database", "query", "query_file", "url_env", "snapshot"])
@pytest.mark.parametrize("section", ["", "[data]\n", "[target]\n", "[silos.north]\n"])
def test_a_study_cannot_name_a_database_or_bring_sql(tmp_path: Path, key: str, section: str) -> None:
    from fedtmle.studyfile.template import write_template

    write_template(tmp_path, force=False)
    text = (tmp_path / "study.toml").read_text()
    line = f'{key} = "select 1"\n'
    if section == "[target]\n":
        text = text.replace(section, section + line, 1)
    elif section:
        text += f"\n{section}{line}"
    else:
        text = line + text
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(ft.InputError):
        ft.read_study(tmp_path / "study.toml")


# One statement that reads.


@pytest.mark.parametrize(
    "sql",
    [
        "select 1",
        "  (select 1) union all (select 2) ;  -- done; really\n/* ; */",
        "with a as (select ';' as x, \"b;c\" from t) select * from a;",
        "select $tag$ ; $tag$, $$;$$, E'it\\'s;' from t",
        "values (1), (2)",
        "SELECT 'it''s; fine' /* ; \n */ FROM t",
    ],
)
def test_one_statement(sql: str) -> None:
    assert statement_defect(sql) is None
    assert not statement(sql).rstrip().endswith(";")


@pytest.mark.parametrize(
    "sql",
    [
        "select 1; delete from t",
        "select 'a'; -- x\n drop table t",
        "select 1;;select 2",
        "delete from t",
        "/* select */ drop table t",
        "copy t to program 'sh'",
        "attach 'x' as y",
        "pragma writable_schema = 1",
        "set role postgres",
        "explain analyze delete from t",
        "; select 1",
        "select 'unclosed",
        "select 1\0",
        "",
        ";",
    ],
)
def test_anything_else_is_refused(sql: str) -> None:
    assert statement_defect(sql) is not None
    with pytest.raises(ft.InputError, match="query"):
        DatabaseQuery(url_env="A", query=sql)


@given(name=st.text(min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_an_identifier_is_one_token(name: str) -> None:
    quoted = identifier(name)
    assert quoted[0] == quoted[-1] == '"'
    assert quoted[1:-1].replace('""', "").count('"') == 0
    assert quoted[1:-1].replace('""', '"') == name


# SQLite.


def test_sqlite_gives_the_bytes_of_the_csv_run(tmp_path: Path) -> None:
    plan = study_plan(IHDP, roster(list(HOSPITALS)))
    transcripts = []
    for write in (as_csv, as_sqlite):
        for stream in (False, True) if write is as_sqlite else (False,):
            silos = []
            for name, rows in HOSPITALS.items():
                (tmp_path / f"{name}.sqlite").unlink(missing_ok=True)
                path = silo_file(tmp_path, name, write(tmp_path, name, rows), stream=stream)
                silos.append(open_party(plan, name, path, keeper=Keeper(policy=UNGUARDED)))
            transcripts.append(Session(plan, InProcess(silos)).run().transcript)
    assert transcripts[0] == transcripts[1] == transcripts[2]


def test_columns_that_hold_several_types(tmp_path: Path) -> None:
    rows = ", ".join(["(null, null, null, null)"] * 70_000)  # more than a batch without a type
    path = sqlite_file(
        tmp_path,
        "create table t (a, age, s, k)",
        f"insert into t values {rows}",
        "insert into t values (1, 1, 'x', 1), (2.5, 0.1, 2.123456789, 2), (null, 3, 'y', 10)",
    )
    asked = schema(
        numeric("a", may_be_missing=True),
        numeric("age", may_be_missing=True),
        factor("s", may_be_missing=True),
        factor("k", may_be_missing=True),
    )
    for stream in (False, True):
        file = silo_file(tmp_path, "north", 'database = "rows.sqlite"\ntable = "t"', stream=stream)
        table = load(file, asked, silo="north")
        assert table.n_rows == 70_003
        last = table if isinstance(table, Table) else list(table.read())[-1]
        np.testing.assert_array_equal(last.numeric["a"][-3:], [1.0, 2.5, np.nan])
        np.testing.assert_array_equal(last.numeric["age"][-3:], [1.0, 0.1, 3.0])
        assert labels(last.factors["s"])[-3:] == ["x", "2.123456789", "y"]
        assert labels(last.factors["k"])[-3:] == ["1", "2", "10"]
    assert isinstance(table, StreamedTable)
    found = defect(Database(path=path, query="select s as age from t where s is not null"), AGE)
    assert found.message == "is text where a number is expected"
    assert found.rows == 2


def test_the_order_of_the_query_is_kept(tmp_path: Path) -> None:
    path = sqlite_file(
        tmp_path, "create table t (age)", f"insert into t values {', '.join(f'({i})' for i in range(5000))}"
    )
    query = DatabaseQuery(path=path, query="select age from t order by (age * 7919) % 5000, age -- stable")
    table = load(query, AGE, silo="north")
    assert isinstance(table, Table)
    np.testing.assert_array_equal(
        table.numeric["age"], sorted(range(5000), key=lambda i: ((i * 7919) % 5000, i))
    )


@pytest.mark.parametrize(
    ("sql", "trouble"),
    [
        ("select agee from t", Trouble.NO_COLUMN),
        ("select age from tt", Trouble.NO_TABLE),
        ("select age from t where", Trouble.SYNTAX),
        ("with x as (select 1) delete from t", Trouble.WRITES),
        ("with x as (select 1) insert into t values (1)", Trouble.WRITES),
    ],
)
def test_wrong_queries_of_sqlite(tmp_path: Path, sql: str, trouble: Trouble) -> None:
    path = sqlite_file(tmp_path, "create table t as select 40 as age")
    before = path.read_bytes()
    found = defect(DatabaseQuery(path=path, query=sql), AGE)
    assert found.message.startswith(trouble.value[0].partition("{")[0])
    assert path.read_bytes() == before


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    sqlite_file(tmp_path, "create table t as select 40 as age", name="rows.db")
    path = silo_file(tmp_path, "north", 'database = "rows.db"\ntable = "t"', stream=True)
    folder = home_at(path).folder
    file = read_silo_file(path)
    assert isinstance(file.data, DatabaseQuery)
    check_readable(file)
    table = load(file, AGE, silo="north")
    assert table.n_rows == 1
    assert len(list(folder.glob("*.parquet"))) == 1
    assert load(Database(path=tmp_path / "rows.db", table="t"), AGE, silo="north").n_rows == 1


def test_files_that_are_no_database(tmp_path: Path) -> None:
    (tmp_path / "rows.sqlite").write_text("not one " * 1000)
    query = DatabaseQuery(path=tmp_path / "rows.sqlite", table="t")
    assert defect(query, AGE).message == Trouble.NOT_A_DATABASE.value[0]
    gone = DatabaseQuery(path=tmp_path / "gone.sqlite", table="t")
    assert defect(gone, AGE).message == Trouble.NO_FILE.value[0]
    assert not (tmp_path / "gone.sqlite").exists()


def test_a_locked_database_and_a_slow_query(tmp_path: Path) -> None:
    path = sqlite_file(tmp_path, "create table t as select 40 as age")
    lock = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); "
    lock += "c.execute('begin exclusive'); print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", lock, str(path)]  # locks are between processes
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        found = defect(DatabaseQuery(path=path, table="t", timeout=0.5), AGE)
        holder.communicate()
    assert found.message in (Trouble.LOCKED.value[0], "the database did not send all rows within 0.5 seconds")
    endless = "with recursive n(age) as (select 1 union all select age + 1 from n where age < 20000000) "
    slow = DatabaseQuery(path=path, query=endless + "select count(*) as age from n", timeout=0.2)
    assert defect(slow, AGE).message == "the database did not send all rows within 0.2 seconds"


def test_the_command_line_can_check_that_a_database_opens(tmp_path: Path) -> None:
    sqlite_file(tmp_path, "create table t as select 40 as age")
    check_readable(read_silo_file(silo_file(tmp_path, "n", 'database = "rows.sqlite"\ntable = "t"')))
    wrong = read_silo_file(silo_file(tmp_path, "n", 'database = "rows.sqlite"\ntable = "u"'))
    with pytest.raises(DataErrors, match="the database has no table 'u'"):
        check_readable(wrong)


@given(name=st.text(min_size=1, max_size=20))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_name_of_a_sqlite_table_or_column_is_run(tmp_path: Path, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    path = sqlite_file(tmp_path, "create table if not exists canary (age)", name="canary.sqlite")
    try:
        query = DatabaseQuery(path=path, table=name)
    except ft.InputError:
        assert "\0" in name
        return
    if name.lower() != "canary":
        with pytest.raises(DataErrors):
            load(query, AGE, silo=name)
    if "\0" not in name and name.lower() != "age":
        (tmp_path / "named.sqlite").unlink(missing_ok=True)
        column = identifier(name)
        create = f"create table t (age, {column})", "insert into t values (40, 'x')"
        path = sqlite_file(tmp_path, *create, name="named.sqlite")
        asked = schema(numeric("age"), factor("label"))
        table = load(DatabaseQuery(path=path, table="t"), asked, silo="n", mapping={"label": name})
        assert isinstance(table, Table)
        assert labels(table.factors["label"]) == ["x"]


# Drivers of others: one function that gives Arrow batches.


@contextmanager
def counting(url: str, query: str, *, timeout: float) -> Iterator[pa.RecordBatchReader]:
    """The smallest driver: the URL says how many rows."""
    assert timeout > 0
    assert query == 'SELECT * FROM "t"'
    count = int(url.partition(":")[2])
    table = pa.table(
        {
            "age": pa.array(range(count), pa.int16()),
            "sex": pa.array(["f", "m"] * (count // 2)).dictionary_encode(),
        }
    )
    yield table.to_reader(max_chunksize=3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_driver_of_another_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    point = EntryPoint("rows", f"{__name__}:counting", "fedtmle.databases")
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda **chosen: EntryPoints([point]).select(**chosen)
    )
    monkeypatch.setenv("HOSPITAL_DB", "rows:10")
    file = silo_file(tmp_path, "north", 'database = {url_env = "HOSPITAL_DB"}\ntable = "t"', stream=stream)
    table = load(file, schema(numeric("age"), factor("sex")), silo="north")
    assert table.n_rows == 10
    assert table.counts("sex") == (5, 5) if isinstance(table, StreamedTable) else table.factors["sex"].counts


def test_the_documentations_driver_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for arrow-odbc that notes its arguments."""
    pages = (Path(__file__).parents[2] / "docs" / "databases.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", pages, flags=re.DOTALL)
    asked: dict[str, object] = {}

    def read_arrow_batches_from_odbc(**arguments: object) -> pa.RecordBatchReader:
        asked.update(arguments)
        return pa.table({"age": [40.5, None]}).to_reader()

    package = ModuleType("arrow_odbc")
    package.read_arrow_batches_from_odbc = read_arrow_batches_from_odbc  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "arrow_odbc", package)
    driver = ModuleType("hospital_odbc")
    exec(compile(example, "databases.md", "exec"), vars(driver))  # noqa: S102 - the documentation's own text
    monkeypatch.setenv("HOSPITAL_DB", "odbc:Driver={SQL Server};PWD=hunter2")
    query = DatabaseQuery(url_env="HOSPITAL_DB", query="select age from t", timeout=30, driver=driver.connect)
    assert load(query, AGE, silo="north").n_rows == 2
    assert asked == {
        "query": "select age from t",
        "connection_string": "Driver={SQL Server};PWD=hunter2",
        "batch_size": 65536,
        "query_timeout_sec": 30,
    }


def test_a_copy_that_cannot_be_written_and_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_file(tmp_path, "create table t as select 40 as age")
    file = silo_file(tmp_path, "north", 'database = "rows.sqlite"\ntable = "t"', stream=True)
    folder = home_at(file).folder

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.ParquetWriter.write_batch", full)
        with pytest.raises(DataErrors, match="the copy of the database's rows cannot be written; make room"):
            load(file, AGE, silo="north")
    gc.collect()
    assert not list(folder.glob("*.parquet"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where a source without a silo file is copied
    (tmp_path / "copied-rows-of-mine.parquet").write_bytes(b"mine")
    source = read_silo_file(file)
    assert isinstance(source.data, DatabaseQuery)
    table = load(replace(source, data=replace(source.data, folder=None)), AGE, silo="north")
    assert table.n_rows == 1
    assert (tmp_path / "copied-rows-of-mine.parquet").read_bytes() == b"mine"


@pytest.mark.parametrize("connecting", [True, False])
def test_nothing_of_a_drivers_exception_is_told(connecting: bool) -> None:
    @contextmanager
    def failing(url: str, query: str, *, timeout: float) -> Iterator[pa.RecordBatchReader]:
        if connecting:
            raise RuntimeError(f"cannot connect to {url} for {query} within {timeout}")
        schema = pa.schema([("age", pa.int64())])

        def batches() -> Iterator[pa.RecordBatch]:
            yield from ()
            raise RuntimeError("record of Mrs. hunter2")

        yield pa.RecordBatchReader.from_batches(schema, batches())

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOSPITAL_DB", URL)
        with pytest.raises(DataErrors) as caught:
            load(DatabaseQuery(url_env="HOSPITAL_DB", table="t", driver=failing), AGE, silo="north")
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__context__ is None or "hunter2" not in repr(caught.value.__context__)
    (found,) = caught.value.defects
    assert found.message == (Trouble.REFUSED if connecting else Trouble.FAILED).value[0]
