"""What every test of this folder leaves behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.lines import OPENED


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine goes down in these tests; waiting for the medium is most of their time."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.fixture(autouse=True)
def _close_endpoints() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()
