"""Kernels are compiled once for a machine and a version, and silos that share a cache wait for the first."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from fedtmle.deploy import ahead
from fedtmle.deploy.kits import Kit, Role


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """How often the example was run; it takes a while."""
    counted: list[str] = []
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def run() -> None:
        threading.Event().wait(0.3)
        counted.append("run")

    monkeypatch.setattr(ahead, "_run_example", run)
    return counted


def kit(tmp_path: Path) -> Kit:
    path = tmp_path / "kit"
    return Kit(path=path, role=Role.SILO, site="a", silo="a", project="p", host="localhost", port=1)


def test_it_is_done_once_for_a_version(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ahead.is_compiled(kit(tmp_path))
    assert ahead.compile_ahead(kit(tmp_path)) >= 0.3
    assert ahead.is_compiled(kit(tmp_path))
    assert ahead.compile_ahead(kit(tmp_path)) == 0.0
    assert runs == ["run"]
    assert json.loads((tmp_path / "fedtmle-compiled.json").read_text())["numba"]
    monkeypatch.setattr(ahead, "_versions", lambda: {"fedtmle": "another"})
    assert not ahead.is_compiled(kit(tmp_path))
    assert ahead.compile_ahead(kit(tmp_path)) > 0.0


def test_silos_that_share_a_cache_wait_for_the_first(runs: list[str], tmp_path: Path) -> None:
    threads = [threading.Thread(target=ahead.compile_ahead, args=(kit(tmp_path),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert runs == ["run"]


def test_a_cache_that_cannot_be_written_leaves_the_mark_in_the_kit(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "none"))
    kit(tmp_path).home.mkdir(parents=True)
    ahead.compile_ahead(kit(tmp_path))
    assert (kit(tmp_path).home / "fedtmle-compiled.json").is_file()
    assert runs == ["run"]


def test_a_failure_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    def fails() -> None:
        raise RuntimeError

    monkeypatch.setattr(ahead, "_run_example", fails)
    with pytest.raises(RuntimeError):
        ahead.compile_ahead(kit(tmp_path))
    assert (tmp_path / "fedtmle-compiled.json").read_text() == ""
