"""A real PostgreSQL. Where it is not installed the tests are skipped, unless they are required.

`make postgres` installs it; `.ci/run` does, and sets FEDTMLE_POSTGRES=required.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.databases.server import REQUIRED, Server, missing_programs


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
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
