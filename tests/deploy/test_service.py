"""Parties as services: the systemd unit, the foreground commands, and what keeps their folders small."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.deploy.kits import Deployment, Kit, Role, read_kit
from fedtmle.deploy.parties import unit
from fedtmle.deploy.processes import record_of, running, wait_until
from fedtmle.deploy.provision import provision
from fedtmle.engine.process import KEPT_DAYS, LONGEST_LOG, Process, tidy
from fedtmle.errors import InputError
from tests.homes import home_at

ANALYZE = shutil.which("systemd-analyze")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    return provision(
        tmp_path_factory.mktemp("service") / "consortium", silos=["north"], host="localhost", port=1
    )


@pytest.fixture
def silo(made: Deployment, tmp_path: Path) -> Kit:
    kit = read_kit(made.kit("north"), Role.SILO)
    silo_file = tmp_path / "silo.toml"
    silo_file.write_text('[silo]\nname = "north"\nhome = "home"\n\n[data]\npath = "none.csv"\n')
    home_at(silo_file)
    (kit.home / "silo.json").write_text(json.dumps({"silo_file": str(silo_file)}))
    return kit


def test_a_unit_runs_the_party_in_the_foreground_and_writes_its_own_folders_only(
    silo: Kit, tmp_path: Path
) -> None:
    text = unit(silo, user="fedtmle")
    keys = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert keys["ExecStart"] == f"{sys.executable} -m fedtmle silo run {silo.path}"
    assert keys["ReadWritePaths"].split() == [str(silo.path), str(tmp_path / "home")]
    assert keys["ProtectSystem"] == "strict"
    assert keys["NoNewPrivileges"] == "true"


@pytest.mark.skipif(ANALYZE is None, reason="there is no systemd here")
@pytest.mark.parametrize("role", [Role.SERVER, Role.SILO])
def test_systemd_finds_no_fault_and_few_rights(
    made: Deployment, silo: Kit, tmp_path: Path, role: Role
) -> None:
    kit = silo if role is Role.SILO else read_kit(made.server, Role.SERVER)
    path = tmp_path / f"fedtmle-{role}.service"
    path.write_text(unit(kit, user="fedtmle"))
    assert ANALYZE is not None
    verified = subprocess.run([ANALYZE, "verify", path], capture_output=True, text=True, check=False)  # noqa: S603
    assert verified.returncode == 0, verified.stderr
    assert path.name not in verified.stderr  # nothing is said of it
    secure = [ANALYZE, "security", "--offline=true", str(path)]
    judged = subprocess.run(secure, capture_output=True, text=True, check=False)  # noqa: S603
    found = re.search(r"exposure level for \S+: ([0-9.]+) (\w+)", judged.stdout)
    assert found, judged.stdout + judged.stderr
    assert found[2] in ("OK", "SAFE", "MEDIUM")
    assert float(found[1]) < 5.0


@pytest.mark.parametrize("user", ["root", "", "a b", "x;y"])
def test_a_party_runs_under_an_account_of_its_own(silo: Kit, user: str) -> None:
    with pytest.raises(InputError, match="--user"):
        unit(silo, user=user)


def test_a_silo_without_its_file_has_no_unit_yet(made: Deployment) -> None:
    kit = read_kit(made.kit("north"), Role.SILO)
    (kit.home / "silo.json").unlink(missing_ok=True)
    with pytest.raises(InputError, match="silo start"):
        unit(kit, user="fedtmle")


def test_a_party_that_runs_in_the_background_is_to_be_stopped_before_its_unit_starts(
    silo: Kit, tmp_path: Path
) -> None:
    """`silo start` is needed once, before there can be a unit, and a party runs once."""
    arguments = [
        "deploy",
        "service",
        str(silo.path),
        "--user",
        "fedtmle",
        "--out",
        str(tmp_path / "a.service"),
    ]
    stop = f"fedtmle silo stop {silo.path}"
    assert stop not in CliRunner().invoke(app, arguments).output
    record_of(silo).write_text(json.dumps(asdict(Process.here())))
    try:
        shown = CliRunner().invoke(app, arguments).output
    finally:
        record_of(silo).unlink()
    assert shown.index(stop) < shown.index("systemctl enable")


@pytest.mark.slow
def test_a_silo_in_the_foreground_ends_with_everything_it_started(
    silo: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no server: the engine tries to connect until it is asked to end."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # an empty cache, so that the kernels are compiled
    command = [sys.executable, "-m", "fedtmle", "silo", "run", str(silo.path)]
    party = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
    try:
        assert wait_until(lambda: running(silo) is not None, 30)
        found = running(silo)
        assert found is not None
        assert found.pid == party.pid
        assert wait_until(lambda: len(found.children()) > 1, 30)  # the engine, and what compiles ahead
        below = found.children(recursive=True)
        again = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        assert again.returncode == 1
        assert "already running" in again.stderr
    finally:
        party.send_signal(signal.SIGTERM)
    assert party.wait(30) == 0
    assert running(silo) is None
    assert not any(psutil.pid_exists(process.pid) for process in below)


def test_logs_are_rotated_and_old_jobs_deleted(tmp_path: Path) -> None:
    (tmp_path / "fedtmle").mkdir()
    log = tmp_path / "fedtmle" / "engine.log"
    writer = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(writer, b"x" * (LONGEST_LOG + 1))
    small = tmp_path / "audit.log"
    small.write_text("y")
    old, new = (f"{digit * 8}-0000-0000-0000-000000000000" for digit in "01")
    kept = [tmp_path / new, tmp_path / "runs", tmp_path / "a-b-c-d-e"]
    gone = [tmp_path / old, tmp_path / "storage" / "jobs" / old]
    for folder in [*kept, *gone]:
        folder.mkdir(parents=True)
    long_ago = os.stat(log).st_mtime - (KEPT_DAYS + 1) * 86400
    for folder in [*gone, *kept[1:]]:
        os.utime(folder, (long_ago, long_ago))
    tidy(tmp_path)
    os.write(writer, b"z")  # the engine goes on with the file that it has open
    os.close(writer)
    assert log.read_bytes() == b"z"
    assert log.with_name("engine.log.1").stat().st_size == LONGEST_LOG + 1
    assert small.read_text() == "y"
    assert all(folder.exists() for folder in kept)
    assert not any(folder.exists() for folder in gone)
