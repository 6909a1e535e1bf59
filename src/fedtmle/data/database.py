"""The silo owner's query and the place of its database: the part of `[data]` that names a server.

[data]
database = {url_env = "HOSPITAL_DB"}   # or {url_file = "/etc/fedtmle/url"}, or {path = "rows.sqlite"}
query = "select ... order by id"       # or query_file = "cohort.sql", or table = "schema.name"
stream = true                          # optional, as for files
snapshot = "extract.parquet"           # optional: read the database once, then only this copy

`database` may also hold `timeout` (seconds) and `max_rows`. The URL may have a password in it, so it is in an
environment variable or in a file that only its owner can read, and never in a silo file. A study file has
none of these keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

from fedtmle.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

TIMEOUT = 600.0  # seconds, from the connection to the last row
MAX_ROWS = 20_000_000
SQLITE_MAGIC = b"SQLite format 3\0"

_KEYS = ("database", "query", "query_file", "table", "stream", "snapshot")
_PLACES = ("url_env", "url_file", "path")
_DATABASE_KEYS = (*_PLACES, "timeout", "max_rows")
_SQLITE_ENDINGS = (".sqlite", ".sqlite3")
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*:(?=.*[/=@])")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ArrowRows(Protocol):
    """The rows of a query as Arrow record batches; `pyarrow.RecordBatchReader` is one."""

    @property
    def schema(self) -> pa.Schema: ...

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...


class Driver(Protocol):
    """Opens a connection that only reads, and gives the rows of one query.

    ``timeout`` is in seconds. The connection is closed when the context ends. A distribution adds a driver by
    an entry point in the group ``fedtmle.databases``, whose name is the scheme of the driver's URLs.
    """

    def __call__(self, url: str, query: str, *, timeout: float) -> AbstractContextManager[ArrowRows]: ...


@dataclass(frozen=True, kw_only=True)
class DatabaseQuery:
    """One SELECT in a database, and the limits under which a silo runs it.

    Exactly one of ``url_env`` (the environment variable that holds the URL), ``url_file`` (a file that holds
    it) and ``path`` (a SQLite file) says where the database is, and one of ``query`` and ``table`` what to
    read. ``timeout`` is in seconds and counts from the connection to the last row. Without ``snapshot`` every
    load reads the database; with it, the first load writes that Parquet file and later ones read it.
    ``folder`` is where a streamed table is copied for as long as it is used.
    """

    query: str | None = None
    table: str | None = None
    url_env: str | None = None
    url_file: Path | None = None
    path: Path | None = None
    timeout: float = TIMEOUT
    max_rows: int = MAX_ROWS
    snapshot: Path | None = None
    folder: Path | None = field(default=None, compare=False)
    driver: Driver | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.url_env, self.url_file, self.path)) != 1:
            raise InputError("a database query needs exactly one of url_env, url_file and path")
        if (self.table is None) == (self.query is None):
            raise InputError("a database query needs a table or a query, and not both")
        if not 0 < self.timeout <= 86_400:
            raise InputError(f"timeout must be more than 0 and at most 86400 seconds, got {self.timeout:g}")
        if self.max_rows < 1:
            raise InputError(f"max_rows must be at least 1, got {self.max_rows}")
        defect = statement_defect(self.sql)
        if defect is not None:
            raise InputError(f"query: {defect[0]}; {defect[1]}")

    @property
    def sql(self) -> str:
        """The statement, without its semicolon and the comments after it."""
        if self.table is not None:
            name = ".".join(identifier(part) for part in self.table.split("."))
            return f"SELECT * FROM {name}"  # noqa: S608 - a quoted name
        return statement(str(self.query))

    @property
    def place(self) -> str:
        """The database's place in words that hold no secret."""
        if self.url_env is not None:
            return f"the environment variable {self.url_env}"
        return f"the file '{self.url_file or self.path}'"

    @classmethod
    def parse(
        cls, section: Mapping[str, object], folder: Path
    ) -> tuple[DatabaseQuery | None, dict[str, tuple[str, str]]]:
        """Return the query that section [data] describes, and by key what is wrong and what to do."""
        defects = {
            key: ("unknown key", f"with a database the keys of [data] are {', '.join(_KEYS)}")
            for key in section
            if key not in _KEYS
        }
        place, defect = parse_place(section.get("database"), folder)
        if defect is not None:
            defects["database"] = defect
        text = _parse_query(section, folder, defects)
        snapshot = section.get("snapshot")
        if snapshot is not None and not (isinstance(snapshot, str) and snapshot.endswith(".parquet")):
            defects["snapshot"] = (
                "this is not the path of a .parquet file",
                'write a path such as "extract.parquet"',
            )
        if defects:
            return None, defects
        extract = folder / str(snapshot) if snapshot is not None else None
        return cls(**place, **text, snapshot=extract), {}  # type: ignore[arg-type] # checked above


def names_database(section: Mapping[str, object]) -> bool:
    """Whether `[data]` names a server, a SQLite file or a URL, rather than a DuckDB file."""
    database = section.get("database")
    if isinstance(database, str):
        return bool(_URL.match(database)) or Path(database).suffix.lower() in _SQLITE_ENDINGS
    return database is not None or bool({"query_file", "snapshot"} & section.keys())


def sqlite_query(path: Path, table: str | None, query: str | None) -> DatabaseQuery | None:
    """Return the query of a SQLite file, or None if the file is not a SQLite database."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(SQLITE_MAGIC))
    except OSError:
        return None
    return DatabaseQuery(path=path, table=table, query=query) if magic == SQLITE_MAGIC else None


class Place(TypedDict, total=False):
    """Where a database is, and the limits of a query in it: fields of `DatabaseQuery`."""

    url_env: str
    url_file: Path
    path: Path
    timeout: float
    max_rows: int


def parse_place(  # noqa: PLR0911 - one return per defect
    database: object, folder: Path
) -> tuple[Place, tuple[str, str] | None]:
    """Return the place and limits that the key `database` gives, by field name.

    The second value says what is wrong and what to do, or is None. It never quotes a URL.
    """
    if isinstance(database, str) and not _URL.match(database):
        database = {"path": database}
    if isinstance(database, str):
        return {}, (
            "this is a URL, which a silo file must not hold because it may have a password in it",
            'put the URL into an environment variable and write database = {url_env = "ITS_NAME"}',
        )
    if not isinstance(database, dict):
        return {}, (
            "this does not say where the database is",
            'write database = {url_env = "NAME"} or {url_file = "path"}, or the path of a file',
        )
    if any(key not in _DATABASE_KEYS for key in database):
        return {}, ("unknown key", f"the keys of database are {', '.join(_DATABASE_KEYS)}")
    places = [key for key in _PLACES if key in database]
    if len(places) != 1 or not (isinstance(database[places[0]], str) and database[places[0]]):
        return {}, (
            "this does not say where the database is",
            f"give exactly one of {', '.join(_PLACES)}, in quotes",
        )
    (key,) = places
    if key == "url_env" and not _VARIABLE.fullmatch(database[key]):
        # It may be the URL itself, so it is not quoted.
        return {}, (
            "url_env is not the name of an environment variable",
            'write the name of the variable that holds the URL, such as "HOSPITAL_DB"',
        )
    if key == "url_file" and (folder / database[key]).resolve().is_relative_to(folder.resolve()):
        return {}, (
            "url_file is inside the folder of the silo file, which is copied and shared",
            "keep the file with the URL elsewhere, such as in /etc/fedtmle",
        )
    timeout, max_rows = database.get("timeout", TIMEOUT), database.get("max_rows", MAX_ROWS)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 86_400:
        return {}, ("timeout is not a valid number of seconds", "give more than 0 and at most 86400")
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
        return {}, ("max_rows is not a valid number of rows", "give an integer of at least 1")
    place = Place(timeout=timeout, max_rows=max_rows)
    if key == "url_env":
        place["url_env"] = database[key]
    elif key == "url_file":
        place["url_file"] = folder / database[key]
    else:
        place["path"] = folder / database[key]
    return place, None


def _parse_query(
    section: Mapping[str, object], folder: Path, defects: dict[str, tuple[str, str]]
) -> dict[str, str]:
    """Return the table or the query, read from its file if it has one."""
    given = [key for key in ("query", "query_file", "table") if key in section]
    if len(given) != 1:
        defects["query"] = (
            "this does not say what to read in the database",
            "give exactly one of query, query_file and table",
        )
        return {}
    (key,) = given
    text = section[key]
    if not isinstance(text, str) or not text:
        defects[key] = ("this is not text", "write it in quotes")
        return {}
    if key == "query_file":
        try:
            text = (folder / text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            defects[key] = ("the file with the query cannot be read", "check its path, and that it is UTF-8")
            return {}
    if key == "table":
        if "\0" in text or not all(text.split(".")):
            defects[key] = ("this is not the name of a table", 'write "name" or "schema.name"')
        return {"table": text}
    defect = statement_defect(text)
    if defect is not None:
        defects[key] = defect
    return {"query": text}


# The owner's SQL: one statement that reads. The database enforces both again (`drivers.py`).


_SKIPPED = re.compile(
    r"""--[^\n]*                                     # a comment
      | /\*.*?(?:\*/|\Z)
      | (?<![A-Za-z0-9_])[eE]'(?:[^'\\]|\\.|'')*'     # PostgreSQL's strings with escapes
      | '(?:[^']|'')*'
      | "(?:[^"]|"")*"
      | `[^`]*`
      | \$(?P<tag>[A-Za-z_]?[A-Za-z0-9_]*)\$.*?\$(?P=tag)\$""",
    re.DOTALL | re.VERBOSE,
)
_READING = {"select", "with", "values", "table"}


def identifier(name: str) -> str:
    """Return a name as an SQL identifier, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def statement(sql: str) -> str:
    """Return ``sql`` without the semicolon that ends it and the comments after it."""
    end = _blank(sql).rstrip()
    return sql[: len(end.rstrip(";").rstrip())] if end.endswith(";") else sql


def statement_defect(sql: str) -> tuple[str, str] | None:
    """Return what is wrong with a query and what to do, or None if it is one statement that reads."""
    text = _blank(statement(sql))
    words = re.findall(r"[A-Za-z]+", text)
    if "\0" in sql:
        return "the query has a NUL character", "remove it"
    if not text.strip():
        return "the query is empty", "write one SELECT that yields the table"
    if ";" in text:
        return "the query is more than one statement", "write one SELECT; it may use WITH"
    if "'" in text or '"' in text:
        return "the query has an unclosed quote", "close it"
    if not words or words[0].lower() not in _READING or not re.match(r"[\s(]*[A-Za-z]", text):
        return "the query is not a SELECT", "write one SELECT that yields the table"
    return None


def _blank(sql: str) -> str:
    """Return ``sql`` with comments and quoted text replaced by as many blanks."""
    return _SKIPPED.sub(lambda match: " " * len(match[0]), sql)


def read_url(query: DatabaseQuery) -> tuple[str | None, tuple[str, str] | None]:
    """Return the database's URL, or None with what is wrong and what to do.

    The URL must not be kept, logged or quoted.
    """
    if query.path is not None:
        return f"sqlite:{query.path}", None
    if query.url_env is not None:
        url = os.environ.get(query.url_env, "").strip()
        if url:
            return url, None
        message = (
            f"the environment variable {query.url_env}, which should hold the database's URL, is not set"
        )
        return None, (message, "set it for the account that runs fedtmle, and run the same command again")
    return _url_in(Path(str(query.url_file)))


def _url_in(file: Path) -> tuple[str | None, tuple[str, str] | None]:
    """Return the URL that a file holds, if only its owner can read it."""
    try:
        shared = os.name == "posix" and bool(file.stat().st_mode & 0o077)
        url = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None, ("the file with the database's URL cannot be read", "check url_file in the silo file")
    if shared:
        message = "other accounts can read the file with the database's URL"
        return None, (message, f"take their permissions away: chmod 600 {file}")
    if not url:
        return None, ("the file with the database's URL is empty", "write the URL into it, on one line")
    return url, None
