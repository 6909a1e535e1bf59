"""Connections to databases that only read, and one sentence for each way in which they can fail.

A message of a database or its driver may quote a password, a query or a record, so it is not
passed on: the SQLSTATE, or known words of the message, decide which `Trouble` is reported.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from fedtmle.data.convert import UnreadableError
from fedtmle.data.database import ArrowRows, Driver

if TYPE_CHECKING:
    import pyarrow as pa

Cursor: TypeAlias = Any  # the drivers share no type for a cursor of the database API

ENTRY_POINTS = "fedtmle.databases"
CONNECT_TIMEOUT = 10  # seconds; a URL may say connect_timeout itself
BATCH_ROWS = 1 << 16  # rows of a batch from SQLite; batches from PostgreSQL are about 16 MB

_AGAIN = "run the same command again; nothing was sent and nothing is lost"


class WriteAccessWarning(UserWarning):
    """The account that reads a silo's database could also write to it."""


class Trouble(Enum):
    """What can be wrong with a database: the sentence, and what to do."""

    NO_DRIVER = (
        "the driver for this database is not installed",
        "install it at the silo: pip install 'fedtmle[databases]'",
    )
    UNKNOWN_SCHEME = (
        "the database's URL begins with no known scheme",
        "known are postgresql: and sqlite:, and the schemes of installed drivers (see docs/databases.md)",
    )
    DOWN = (
        "the database does not answer",
        f"check that it runs and that its host and port are right, then {_AGAIN}",
    )
    STARTING = ("the database is starting up or shutting down", f"wait a minute, then {_AGAIN}")
    PASSWORD = (
        "the database does not accept the user name or the password, or the password expired",
        f"renew it, put the new URL where the silo file names it, then {_AGAIN}",
    )
    NOT_ALLOWED = (
        "the database does not allow this account to connect from here",
        "ask its administrator (in PostgreSQL: pg_hba.conf and GRANT CONNECT)",
    )
    NO_DATABASE = ("the server has no database of the name in the URL", "correct the URL")
    REFUSED = (
        "the database did not accept the connection",
        "try the URL with the database's own client at the silo to see why",
    )
    LOST = (
        "the connection to the database was lost while its rows were read",
        f"check that the database runs, then {_AGAIN}",
    )
    TIMEOUT = (
        "the database did not send all rows within {seconds:g} seconds",
        f"make the query faster, or raise timeout in the silo file, then {_AGAIN}",
    )
    CANCELLED = ("the database's administrator cancelled the query", f"ask why, then {_AGAIN}")
    TOO_MANY = (
        "the query yields more than {rows} rows",
        "check its joins, or raise max_rows in the silo file",
    )
    WRITES = (
        "the query tries to write, which is not allowed",
        "write one SELECT without INTO, FOR UPDATE or functions that change the database",
    )
    DENIED = (
        "the account may not read what the query names",
        "ask the database's administrator to GRANT SELECT to it",
    )
    NO_COLUMN = ("the query names a column {name}that the database does not have", "{near}correct the query")
    NO_COLUMNS = ("the query yields no columns", "write one SELECT with columns, and without INTO")
    NO_TABLE = ("the database has no table {name}", "correct the name in the silo file")
    SYNTAX = ("the database cannot understand the query", "run it with the database's own client to see why")
    NO_COHORT = (
        "no cohort can be selected in a database of this kind",
        "an OMOP CDM is a PostgreSQL database (postgresql:) or a DuckDB file",
    )
    NOT_A_DATABASE = ("the file is not a SQLite database", "check the path")
    NO_FILE = ("the database's file does not exist or cannot be read", "check the path and its permissions")
    LOCKED = ("another program holds the database locked", f"wait until it is done, then {_AGAIN}")
    FAILED = ("the silo's query failed", "run it with the database's own client at the silo to see why")


class DatabaseError(UnreadableError):
    """A database cannot be read; ``trouble`` says why."""

    def __init__(self, trouble: Trouble, **words: object) -> None:
        message, fix = trouble.value
        super().__init__(message.format(**words), fix.format(**words))
        self.trouble = trouble


def driver_of(url: str) -> Driver:
    """Return the driver for a URL's scheme: PostgreSQL's, SQLite's, or one that a distribution adds."""
    scheme, colon, _ = url.partition(":")
    scheme = scheme.strip().lower()
    if colon and scheme in ("postgresql", "postgres"):
        return postgresql
    if colon and scheme == "sqlite":
        return sqlite
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS, name=scheme) if colon else ():
        added: Driver = point.load()
        return added
    raise DatabaseError(Trouble.UNKNOWN_SCHEME)


def explained(error: BaseException, *, connecting: bool) -> DatabaseError:
    """Return the error that explains a driver's exception, without any of its text.

    ``connecting`` says whether no connection had been made yet.
    """
    if isinstance(error, DatabaseError):
        return error
    if isinstance(error, ImportError):
        return DatabaseError(Trouble.NO_DRIVER)
    state, message = getattr(error, "sqlstate", None) or "", str(error)
    trouble = _BY_STATE.get(state) or _BY_STATE.get(state[:2]) or _by_words(message, connecting=connecting)
    if trouble is Trouble.NO_COLUMN:
        column = re.search(r"column:? \"?([\w.$ -]{1,100}?)\"?(?: does not exist|\n|$)", message)
        near = re.search(r"reference the column \"([^\"\n]{1,100})\"", message)
        return DatabaseError(
            trouble,
            name=f"'{column[1]}' " if column else "",
            near=f"did you mean '{near[1]}'? " if near else "",
        )
    if trouble is Trouble.NO_TABLE:
        table = re.search(r"(?:relation|table:?) \"?([\w.$ -]{1,100}?)\"?(?: does not exist|\n|$)", message)
        return DatabaseError(trouble, name=f"'{table[1]}'" if table else "of that name")
    return DatabaseError(trouble, seconds=0, rows=0)


# PostgreSQL's codes: the whole one first, then its class.
_BY_STATE = {
    "42703": Trouble.NO_COLUMN,
    "42P01": Trouble.NO_TABLE,
    "3F000": Trouble.NO_TABLE,
    "42501": Trouble.DENIED,
    "42601": Trouble.SYNTAX,
    "25006": Trouble.WRITES,
    "25001": Trouble.WRITES,
    "28P01": Trouble.PASSWORD,
    "28000": Trouble.NOT_ALLOWED,
    "3D000": Trouble.NO_DATABASE,
    "57014": Trouble.CANCELLED,
    "57P03": Trouble.STARTING,
    "57P01": Trouble.LOST,
    "57P02": Trouble.LOST,
    "08": Trouble.LOST,
    "22": Trouble.FAILED,
    "42": Trouble.SYNTAX,
    "0A": Trouble.SYNTAX,
}
# Without a code, match the words of an English server. Any other error is REFUSED or FAILED.
_CONNECTING = (
    (r"pg_hba\.conf|not permitted to log in|permission denied for database", Trouble.NOT_ALLOWED),
    (r"password|authentication|SASL|SCRAM", Trouble.PASSWORD),
    (r"starting up|shutting down|recovery mode", Trouble.STARTING),
    (r"database \".*\" does not exist", Trouble.NO_DATABASE),
    (r"role \".*\" does not exist", Trouble.PASSWORD),
    (r"refused|could not translate|No such file|timeout expired|unreachable|timed out", Trouble.DOWN),
)
_READING = (
    (r"due to (?:statement timeout|user request)", Trouble.CANCELLED),
    (r"closed the connection|terminating connection|reset by peer|no connection to the server", Trouble.LOST),
    (r"unexpected EOF|SSL SYSCALL|connection not open|another command is already in progress", Trouble.LOST),
    (r"readonly database|read-only|read-write mode", Trouble.WRITES),
    (r"no such column", Trouble.NO_COLUMN),
    (r"no such table", Trouble.NO_TABLE),
    (r"syntax error|incomplete input", Trouble.SYNTAX),
    (r"not a database|malformed", Trouble.NOT_A_DATABASE),
    (r"database (?:table )?is locked", Trouble.LOCKED),
)


def _by_words(message: str, *, connecting: bool) -> Trouble:
    known: tuple[tuple[str, Trouble], ...] = _READING
    if connecting:
        known = _CONNECTING if "[libpq]" in message else (*_READING, *_CONNECTING)
    for pattern, trouble in known:
        if re.search(pattern, message, re.IGNORECASE):
            return trouble
    return Trouble.REFUSED if connecting else Trouble.FAILED


class QueryRows:
    """The rows of a cursor's query, and a warning for the owner. Iterating over the rows runs the query."""

    def __init__(self, cursor: Cursor, query: str, schema: pa.Schema, warning: str | None = None) -> None:
        self._cursor = cursor
        self._query = query
        self.schema = schema
        self.warning = warning

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self._cursor.execute(self._query)
        return iter(self._cursor.fetch_record_batch())


@contextmanager
def postgresql(url: str, query: str, *, timeout: float) -> Iterator[ArrowRows]:
    """Run a query in PostgreSQL, in one read-only transaction that sees one state of the database."""
    with transaction(url, timeout=timeout) as database:
        yield database.rows(query)


class Transaction:
    """A read-only transaction of PostgreSQL, in which successive queries see one state of the database."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._warning = _write_access(cursor)

    def rows(self, query: str) -> QueryRows:
        """Return the rows of a query. The rows of an earlier query must have been read before."""
        query += "\n"  # a comment at the end must not hide the bracket that the driver adds
        return QueryRows(self._cursor, query, self._cursor.adbc_execute_schema(query), self._warning)


@contextmanager
def transaction(url: str, *, timeout: float, settings: Sequence[str] = ()) -> Iterator[Transaction]:
    """Open a connection to PostgreSQL and a read-only transaction with further ``settings`` for SET LOCAL."""
    dbapi = importlib.import_module("adbc_driver_postgresql.dbapi")
    with dbapi.connect(_with_timeout(url)) as connection, connection.cursor() as cursor:
        # The settings belong to the transaction, so they also hold behind a connection pooler.
        for setting in (
            "TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
            f"LOCAL statement_timeout = {int(timeout * 1000) + 1000}",  # our own time limit ends first
            # The same rows in the same order each time, also for a query without ORDER BY.
            "LOCAL synchronize_seqscans = off",
            "LOCAL max_parallel_workers_per_gather = 0",
            *(f"LOCAL {setting}" for setting in settings),
        ):
            cursor.execute(f"SET {setting}")
        yield Transaction(cursor)


class TwoQueries:
    """A driver that runs a query of ours and then the owner's query, in one transaction.

    ``rows`` has the rows of the first query once the driver has been opened. ``settings`` are for SET LOCAL.
    """

    def __init__(self, first: str, settings: Sequence[str] = ()) -> None:
        self._first, self._settings = first, tuple(settings)
        self.rows: list[tuple[Any, ...]] = []

    @contextmanager
    def __call__(self, url: str, query: str, *, timeout: float) -> Iterator[ArrowRows]:
        if driver_of(url) is not postgresql:
            raise DatabaseError(Trouble.NO_COHORT)
        with transaction(url, timeout=timeout, settings=self._settings) as database:
            failure = self._run(database)
            if failure is not None:
                raise failure
            yield database.rows(query)

    def _run(self, database: Transaction) -> DatabaseError | None:
        """Run the first query; return its error, so that the caller can raise it without the cause."""
        rows: list[tuple[Any, ...]] = []
        try:
            for batch in database.rows(self._first):
                rows += zip(*(column.to_pylist() for column in batch.columns), strict=True)
        except Exception as error:
            return explained(error, connecting=False)
        self.rows = rows
        return None


def _with_timeout(url: str) -> str:
    """Return the URL with limits for the connection, unless it has its own."""
    for option in (f"connect_timeout={CONNECT_TIMEOUT}", "fallback_application_name=fedtmle"):
        if option.partition("=")[0] not in url:
            url += ("&" if "?" in url else "?") + option
    return url


_RIGHTS = """
select r.rolsuper,
  exists (
    select from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.relkind in ('r', 'p', 'v', 'f') and n.nspname <> 'information_schema' and n.nspname !~ '^pg_'
      and pg_catalog.has_schema_privilege(n.oid, 'USAGE')
      and pg_catalog.has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE')
  )
from pg_catalog.pg_roles r where r.rolname = current_user
"""


def _write_access(cursor: Cursor) -> str | None:
    """Return a warning if the account may change a table, although the transaction is read-only."""
    cursor.execute(_RIGHTS)
    for superuser, writes in cursor.fetchall():
        if superuser or writes:
            could = "is a superuser" if superuser else "may write to tables"
            return (
                f"the account that reads the database {could}; "
                "fedtmle reads in a read-only transaction, but an account with GRANT SELECT alone is safer"
            )
    return None


@contextmanager
def sqlite(url: str, query: str, *, timeout: float) -> Iterator[ArrowRows]:
    """Run a query in a SQLite file, opened read-only; the URL is sqlite: followed by the file's path."""
    path = url.partition(":")[2].removeprefix("//")
    if not os.access(path, os.R_OK) or not os.path.isfile(path):
        raise DatabaseError(Trouble.NO_FILE)
    dbapi = importlib.import_module("adbc_driver_sqlite.dbapi")
    with dbapi.connect(f"file:{quote(path)}?mode=ro") as connection, connection.cursor() as cursor:
        cursor.execute("PRAGMA query_only = 1")
        cursor.execute(f"PRAGMA busy_timeout = {int(min(timeout, 60) * 1000)}")
        yield _SQLiteRows(cursor, query)


class _SQLiteRows:
    """The rows of a query in SQLite, where the type of a column may differ from row to row.

    The driver takes a column's type from its first batch, and writes numbers among text with six digits. So
    the types are found first, in a pass of their own; a column of numbers and text is text. A row that has
    a value of the right type in every column is put before the others, and dropped after the driver read it.
    """

    def __init__(self, cursor: Cursor, query: str) -> None:
        import pyarrow as pa

        cursor.execute(query)
        names = cursor.fetch_record_batch().schema.names
        places = [f"c{i}" for i in range(len(names))]
        result = f"WITH q({', '.join(places)}) AS (\n{query}\n) SELECT"
        tests = [
            f"coalesce(max(typeof({place}) = '{kind}'), 0)" for place in places for kind in _SQLITE_TYPES
        ]
        cursor.execute(f"{result} {', '.join(tests)} FROM q")
        (present,) = cursor.fetchall()
        fields, first, cells = [], [], []
        for i, (name, place) in enumerate(zip(names, places, strict=True)):
            here = present[len(_SQLITE_TYPES) * i : len(_SQLITE_TYPES) * (i + 1)]
            widest = [kind for kind, is_there in zip(_SQLITE_TYPES, here, strict=True) if is_there]
            kind, example = _SQLITE_TYPES[widest[-1]] if widest else _SQLITE_TYPES["integer"]
            fields.append(pa.field(name, pa.type_for_alias(kind)))
            first.append(example)
            cells.append(place if len(widest) < 2 else f"CAST({place} AS {widest[-1]})")
        self._cursor = cursor
        rest = f"SELECT {', '.join(cells)} FROM q"  # noqa: S608 - names of our own
        self._query = f"{result} {', '.join(first)} UNION ALL {rest}"
        self.schema = pa.schema(fields)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self._cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": BATCH_ROWS})
        self._cursor.execute(self._query)
        start = 1
        for batch in self._cursor.fetch_record_batch():
            yield batch.slice(start)
            start = 0


# SQLite's types, with Arrow's name and an example. Each can hold the values of those before it.
_SQLITE_TYPES = {
    "integer": ("int64", "0"),
    "real": ("double", "0.0"),
    "text": ("string", "''"),
    "blob": ("binary", "x'00'"),
}
