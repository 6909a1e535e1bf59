"""A PostgreSQL server in a temporary folder, reachable through a Unix socket only.

Where PostgreSQL is not installed its tests are skipped, unless they are required. `make postgres` installs
it; `.ci/run` does, and sets FEDTMLE_POSTGRES=required.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

REQUIRED = os.environ.get("FEDTMLE_POSTGRES") == "required"
_DEBIAN = Path("/usr/lib/postgresql")  # Debian keeps the programs off PATH


def missing_programs() -> str | None:
    """Return why no server can be started here, or None if one can."""
    absent = [name for name in ("initdb", "postgres") if program(name) is None]
    if absent:
        return f"PostgreSQL is not installed ({' and '.join(absent)}): `make postgres` installs it"
    if os.geteuid() == 0 and _unprivileged() is None:
        return "PostgreSQL refuses to run as root, and there is no user 'postgres' or 'nobody'"
    return None


def program(name: str) -> str | None:
    """Return the path of one of PostgreSQL's programs."""
    versions = sorted(_DEBIAN.glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]), reverse=True)
    return shutil.which(name) or next(map(str, versions), None)


def _unprivileged() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


class Server:
    """One cluster of databases; start and stop it as often as wanted, and close it at the end."""

    superuser = "owner"
    password = "s3cret-of-the-owner"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fedtmle-pg-", dir="/tmp"))
        self._process: subprocess.Popen[bytes] | None = None
        self._user = _unprivileged() if os.geteuid() == 0 else None
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        secret = self.folder / "password"
        secret.write_text(self.password)
        secret.chmod(0o644)
        self._run(
            [
                "initdb",
                f"--pgdata={self.folder / 'data'}",
                f"--username={self.superuser}",
                f"--pwfile={secret}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
                "--no-sync",
            ]
        )
        self.start()

    def url(
        self, database: str = "postgres", *, user: str | None = None, password: str | None = None, **more: str
    ) -> str:
        """Return the URL of a database, for the superuser unless told otherwise."""
        who = quote(user or self.superuser, safe="")
        secret = quote(self.password if password is None else password, safe="")
        options = urlencode({"host": str(self.folder), **more})
        return f"postgresql://{who}:{secret}@/{quote(database, safe='')}?{options}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        log = (self.folder / "log").open("ab")
        command = [
            str(program("postgres")),
            "-D",
            str(self.folder / "data"),
            "-k",
            str(self.folder),
            "-c",
            "listen_addresses=",
            "-c",
            "fsync=off",
            "-c",
            "max_connections=60",
        ]
        with log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, **self._as_user()
            )
        for _ in range(600):
            if self._process.poll() is not None:
                raise RuntimeError((self.folder / "log").read_text())
            try:
                self.execute("select 1")
            except Exception:
                time.sleep(0.05)
            else:
                return
        raise RuntimeError("the server does not answer")

    def kill(self) -> None:
        """Stop the server at once, as a loss of power would; what was committed is recovered at the start."""
        self._stop(signal.SIGQUIT)

    def stop(self) -> None:
        """Stop the server and cut every connection."""
        self._stop(signal.SIGINT)

    def _stop(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def running(self) -> bool:
        """Whether the server was started and not stopped."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process number of the running server."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def execute(self, *statements: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run statements as the superuser; return the rows of the last if it has any."""
        from adbc_driver_postgresql import dbapi

        with dbapi.connect(self.url(database), autocommit=True) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, command: Sequence[str]) -> None:
        done = subprocess.run(
            [str(program(command[0])), *command[1:]],
            capture_output=True,
            cwd=self.folder,
            check=False,
            **self._as_user(),
        )
        if done.returncode:
            raise RuntimeError(done.stderr.decode())

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}


@contextmanager
def running_server() -> Iterator[Server]:
    """Run a new server; skip the test, or fail it, if there is none to run."""
    reason = missing_programs()
    if reason is not None:
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    started = Server()
    try:
        yield started
    finally:
        started.close()
