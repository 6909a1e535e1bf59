"""A query's rows, read once: into memory, or into a Parquet copy that every pass of a streamed run reads.

A streamed run reads the rows in many passes, which must all see the same ones. A database cannot promise
that: rows change, servers restart, and a transaction ends with its connection. Without `snapshot` in the silo
file the copy holds only the columns that the study needs, and is removed when the run ends. With it, the copy
is the owner's extract: it holds all columns of the query, stays, and is read instead of the database.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import queue
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtmle.data.convert import (
    DATES,
    OTHER,
    AbstractReader,
    AbstractStreamReader,
    Cells,
    Reading,
    UnreadableError,
    Unusable,
)
from fedtmle.data.database import DatabaseQuery, Driver, read_url
from fedtmle.data.drivers import DatabaseError, QueryRows, Trouble, WriteAccessWarning, driver_of, explained
from fedtmle.data.files import RelationReader, attempt, connect

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

_READ_ERROR = UnreadableError("the copy of the database's rows cannot be read", "check the disk; start again")


@contextmanager
def open_query(source: DatabaseQuery | Snapshot) -> Iterator[AbstractReader]:
    """Open a reader of a database's query, or of the copy of one."""
    if isinstance(source, DatabaseQuery) and source.snapshot is not None:
        source = _extract(source, source.snapshot)
    if isinstance(source, Snapshot):
        with _open_copy(source) as reader:
            yield reader
    else:
        with _Pull(source) as pull:
            yield QueryReader(pull)


class QueryReader(AbstractReader):
    """Reads the rows of a query, which the database sends only once."""

    def __init__(self, pull: _Pull) -> None:
        self._pull = pull

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._pull.schema.names)

    def kinds(self, names: Sequence[str]) -> dict[str, str | Unusable]:
        """Return what the named columns hold: "number", "boolean", "text" or `Unusable`."""
        import pyarrow as pa

        kinds: dict[str, str | Unusable] = {}
        for name, (_, field) in zip(names, self._columns(names), strict=True):
            kind = _plain_type(field)
            if pa.types.is_temporal(kind) or kind == pa.binary():
                kinds[name] = OTHER if kind == pa.binary() else DATES
            elif pa.types.is_boolean(kind):
                kinds[name] = "boolean"
            else:
                kinds[name] = "text" if str(kind).endswith("string") else "number"
        return kinds

    def read(self, names: Sequence[str]) -> tuple[int, Mapping[str, Cells]]:
        import pyarrow as pa

        columns = self._columns(names)
        table = pa.Table.from_batches(self._pull.batches(columns), plain_schema(columns))
        with connect() as connection:
            return _CopyReader(connection, connection.from_arrow(table), names).read(names)

    def copy(self, names: Sequence[str]) -> Snapshot:
        """Copy the named columns to a file that is deleted with the last reference to the `Snapshot`."""
        source = self._pull.source
        folder = source.folder or Path(tempfile.gettempdir())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if source.folder is not None:  # a folder of the silo's own
            _remove_abandoned(folder)
        handle, path = tempfile.mkstemp(prefix=_PREFIX, suffix=".parquet", dir=folder)  # mode 0600
        snapshot = Snapshot(Path(path), tuple(names))
        weakref.finalize(snapshot, _remove, handle, Path(path))
        _lock(handle)
        self.write(os.dup(handle), names)
        return snapshot

    def write(self, handle: int, names: Sequence[str]) -> int:
        """Write the named columns as Parquet to an open file, and close it; return the number of rows."""
        import pyarrow.parquet as pq

        columns, count = self._columns(names), 0
        schema = plain_schema(columns)
        texts = [field.name for field in schema if str(field.type).endswith("string")]
        try:
            with (
                os.fdopen(handle, "wb") as file,
                pq.ParquetWriter(file, schema, compression="snappy", use_dictionary=texts) as writer,
            ):
                for batch in self._pull.batches(columns):
                    writer.write_batch(batch)
                    count += batch.num_rows
        except OSError:
            count = -1
        if count < 0:
            raise UnreadableError(
                "the copy of the database's rows cannot be written", "make room on the disk"
            )
        return count

    def _columns(self, names: Sequence[str]) -> list[tuple[int, pa.Field]]:
        schema = self._pull.schema
        return [(schema.names.index(name), schema.field(schema.names.index(name))) for name in names]


class _Pull:
    """Reads a query's rows in a thread of its own, so that a silent server leads to a time-out too."""

    def __init__(self, source: DatabaseQuery) -> None:
        self.source = source
        self._results: queue.Queue[object] = queue.Queue(maxsize=2)
        self._goes_on = threading.Event()  # set when the rows are wanted, not only the names
        self._stopped = threading.Event()
        self._deadline = time.monotonic() + source.timeout
        self._warning: str | None = None

    def __enter__(self) -> _Pull:
        url, defect = read_url(self.source)
        if url is None:
            raise UnreadableError(*defect) if defect else DatabaseError(Trouble.REFUSED)
        if find_spec("pyarrow") is None:
            raise DatabaseError(Trouble.NO_DRIVER)
        driver = self.source.driver or driver_of(url)
        self._thread = threading.Thread(target=self._work, args=(driver, url), daemon=True, name="database")
        self._thread.start()
        try:
            self.schema: pa.Schema = self._next()
            if not self.schema.names:
                raise DatabaseError(Trouble.NO_COLUMNS)
            if self._warning is not None:  # raises where warnings are errors
                warnings.warn(f"{self.source.place}: {self._warning}", WriteAccessWarning, stacklevel=2)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def batches(self, columns: Sequence[tuple[int, pa.Field]]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in plain types, at most ``max_rows`` of them."""
        self._goes_on.set()
        schema, count = plain_schema(columns), 0
        while (batch := self._next()) is not None:
            count += batch.num_rows
            if count > self.source.max_rows:
                raise DatabaseError(Trouble.TOO_MANY, rows=self.source.max_rows)
            yield _plain_batch(batch, columns, schema)

    def _next(self) -> Any:
        try:
            result = self._results.get(timeout=max(self._deadline - time.monotonic(), 0.0))
        except queue.Empty:
            result = DatabaseError(Trouble.TIMEOUT, seconds=self.source.timeout)
        if isinstance(result, UnreadableError):
            raise result
        return result

    def _work(self, driver: Driver, url: str) -> None:
        """Put the schema, the batches and None into the queue, or what went wrong."""
        connected = False
        try:
            with driver(url, self.source.sql, timeout=self.source.timeout) as opened:
                connected = True
                self._warning = opened.warning if isinstance(opened, QueryRows) else None
                self._put(opened.schema)
                while not self._goes_on.wait(0.02) and not self._stopped.is_set():
                    pass
                if not self._stopped.is_set():
                    for batch in opened:
                        if not self._put(batch):
                            return
                    self._put(None)
        except BaseException as error:
            self._put(explained(error, connecting=not connected))

    def _put(self, result: object) -> bool:
        """Hand a result over; return False if nobody waits for it any more."""
        while not self._stopped.is_set():
            with suppress(queue.Full):
                self._results.put(result, timeout=0.05)
                return True
        return False

    def _stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5.0)  # a driver that cannot be interrupted is left running


# Arrow's types are converted to the few that a study's table can have.


def plain_schema(columns: Sequence[tuple[int, pa.Field]]) -> pa.Schema:
    """Return the schema of the columns after `plain`."""
    import pyarrow as pa

    return pa.schema([pa.field(field.name, _plain_type(field)) for _, field in columns])


def plain(array: pa.Array, field: pa.Field) -> pa.Array:
    """Return a column as numbers, text or dates; other types become nulls of a marker type."""
    import pyarrow as pa
    import pyarrow.compute as pc

    target = _plain_type(field)
    if target in (pa.time32("s"), pa.binary()):
        return pa.nulls(len(array), target)
    if target == pa.date32():
        return array.cast(target, safe=False)  # a time of the day is left out
    if str(field.type) == "extension<arrow.uuid>":
        return pa.array([None if value is None else str(value) for value in array.to_pylist()], target)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.type != target:
        array = array.cast(target)
    return (
        pc.utf8_rtrim(array, " ") if _postgres_type(field) == "bpchar" else array
    )  # blanks that pad CHAR(n)


def _plain_batch(
    batch: pa.RecordBatch, columns: Sequence[tuple[int, pa.Field]], schema: pa.Schema
) -> pa.RecordBatch:
    """Return the columns of a batch after `plain`; Arrow's errors may quote a value, so they are dropped."""
    import pyarrow as pa

    try:
        arrays = [plain(batch.column(at), field) for at, field in columns]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)
    except (pa.ArrowException, IndexError):
        pass
    raise DatabaseError(Trouble.FAILED)


def _plain_type(field: pa.Field) -> pa.DataType:  # noqa: PLR0911 - one return per kind of type
    import pyarrow as pa

    kind = field.type
    if isinstance(kind, pa.BaseExtensionType):
        if getattr(kind, "type_name", "") == "numeric":  # the driver gives PostgreSQL's numeric type as text
            return pa.float64()
        return pa.string() if str(kind) == "extension<arrow.uuid>" else pa.binary()
    if pa.types.is_dictionary(kind):
        return _plain_type(pa.field(field.name, kind.value_type))
    if _postgres_type(field) == "money":  # the server's locale decides whether it is in cents
        return pa.binary()
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return kind
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return pa.float64()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string() if pa.types.is_large_string(kind) else pa.string()
    if pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz is None):
        return pa.date32()
    return pa.time32("s") if pa.types.is_temporal(kind) else pa.binary()


def _postgres_type(field: pa.Field) -> str:
    return str((field.metadata or {}).get(b"POSTGRESQL:type", b"").decode())


# Copies.


class Snapshot:
    """A Parquet file with the rows of a query, and the names of its columns."""

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self.path = path
        self.names = names

    def settle(self, names: Sequence[str]) -> Reading:
        """Return how to read the named columns in batches."""
        with _open_copy(self) as reader:
            return reader.settle(names)


class _CopyReader(RelationReader):
    """A reader of copied rows, whose columns go by position: DuckDB would rename "age" beside "Age"."""

    def __init__(
        self, connection: DuckDBPyConnection, relation: DuckDBPyRelation, names: Sequence[str]
    ) -> None:
        super().__init__(connection, relation, _READ_ERROR)
        self._names = tuple(names)

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def _kinds(self, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str], dict[str, Unusable]]:
        local = dict(zip(self._names, self._relation.columns, strict=True))
        theirs = {place: name for name, place in local.items()}
        relation = RelationReader(self._connection, self._relation, _READ_ERROR)
        numbers, texts, others = relation._kinds([local[name] for name in names])
        return (
            {theirs[place]: sql for place, sql in numbers.items()},
            {theirs[place]: sql for place, sql in texts.items()},
            {theirs[place]: kind for place, kind in others.items()},
        )


@contextmanager
def _open_copy(snapshot: Snapshot) -> Iterator[AbstractStreamReader]:
    pattern = glob.escape(str(snapshot.path))  # DuckDB takes a path for a glob pattern
    with connect() as connection:
        relation, _ = attempt(lambda: connection.read_parquet(pattern))
        if relation is None:
            raise _READ_ERROR
        yield _CopyReader(connection, relation, snapshot.names)


_PREFIX = "copied-rows-"


def _lock(handle: int) -> bool:
    """Lock a file for this process; return False if another one has locked it."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows: a file that is in use cannot be removed there
        return True
    except OSError:
        return False
    return True


def _remove(handle: int, path: Path) -> None:
    with suppress(OSError):
        path.unlink()
    with suppress(OSError):
        os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Remove copies whose process was killed before it could."""
    for path in folder.glob(f"{_PREFIX}*.parquet"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY)
            if _lock(handle):
                path.unlink()
            os.close(handle)


# The owner's extract: `snapshot` in the silo file.


def _extract(source: DatabaseQuery, path: Path) -> Snapshot:
    """Return the extract at ``path``, which is written now if it is not there.

    An extract that was changed, or made by another query, is refused.
    """
    record = path.with_name(path.name + ".json")
    if not path.exists():
        _write_extract(source, path, record)
    try:
        stated = json.loads(record.read_text(encoding="utf-8"))
        query, digest, names = stated["query"], stated["digest"], tuple(map(str, stated["columns"]))
    except (OSError, ValueError, KeyError, TypeError):
        query, digest, names = None, None, ()
    again = f"delete '{path.name}' and '{record.name}' to read the database again, for new studies only"
    if query is None or digest != _digest_of(path):
        raise UnreadableError(f"the extract '{path.name}' was changed since it was written", again)
    if query != _query_digest(source):
        raise UnreadableError(
            f"the extract '{path.name}' was made by a query other than the one in the silo file", again
        )
    return Snapshot(path, names)


def _write_extract(source: DatabaseQuery, path: Path, record: Path) -> None:
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with _Pull(source) as pull:
            reader = QueryReader(pull)
            repeated = [name for name in reader.names if reader.names.count(name) > 1]
            if repeated:
                raise UnreadableError(f"the query has two columns '{repeated[0]}'", "name them apart with AS")
            rows = reader.write(os.dup(handle), reader.names)
        stated = {
            "taken": datetime.now(UTC).isoformat(timespec="seconds"),
            "rows": rows,
            "columns": list(reader.names),
            "query": _query_digest(source),
            "digest": _digest_of(Path(part)),
        }
        record.write_text(json.dumps(stated, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        os.close(handle)
        with suppress(FileNotFoundError):
            os.unlink(part)


def _query_digest(source: DatabaseQuery) -> str:
    return hashlib.blake2b(source.sql.encode(), digest_size=32).hexdigest()


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
