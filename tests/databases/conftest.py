"""One PostgreSQL server for all tests of databases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.databases.server import Server, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running_server() as started:
        yield started
