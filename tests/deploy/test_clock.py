"""A silo whose clock is wrong: `deploy doctor` says so, and the run goes on once the clock is right."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedtmle.deploy import processes
from fedtmle.deploy.kits import Kit
from fedtmle.deploy.local import await_silos, silo_kit
from fedtmle.deploy.parties import start_silo
from tests.deploy.rig import Rig, same

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed (Debian: faketime)"),
]
H2 = "hospital 2"


@pytest.fixture
def clock(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the offset of the second hospital's clock, which its processes read again and again."""
    path = tmp_path / "clock"
    path.write_text("+0")
    monkeypatch.setenv("LD_PRELOAD", str(LIBRARY))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(path))
    monkeypatch.setenv("FAKETIME_CACHE_DURATION", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    monkeypatch.setenv("FAKETIME_DONT_RESET", "1")
    processes.stop(silo_kit(rig.made, H2))
    return path


def doctor(kit: Kit) -> str:
    """What `deploy doctor` prints on the machine with the wrong clock."""
    command = [sys.executable, "-m", "fedtmle", "deploy", "doctor", str(kit.path)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False).stdout  # noqa: S603


@pytest.mark.parametrize(
    ("offset", "seed", "says"),
    [
        (
            "+4000d",
            1,
            ["certificate: expired on", "this machine's clock says", "set the clock if it is"],
        ),
        ("-3d", 2, ["certificate: valid from", "this machine's clock says", "set this machine's clock"]),
    ],
)
def test_a_silo_with_a_clock_outside_its_certificate_connects_when_the_clock_is_right(
    rig: Rig, clock: Path, tmp_path: Path, offset: str, seed: int, says: list[str]
) -> None:
    study = rig.plan(seed)
    kit = silo_kit(rig.made, H2)
    clock.write_text(offset)
    start_silo(kit, None)
    run = rig.start(study)
    time.sleep(45)
    assert run.status().silos[H2] == "not connected"
    told = doctor(kit)
    for words in [*says, "its certificate is not valid at"]:
        assert words in told, told
    clock.write_text("+0")
    took = rig.finish(run, within=120)
    same(study, run, tmp_path)
    rig.note(f"a silo's clock wrong by {offset}, then set right", run, took)


def test_a_clock_within_the_certificates_changes_nothing(rig: Rig, clock: Path, tmp_path: Path) -> None:
    study = rig.plan(3)
    kit = silo_kit(rig.made, H2)
    clock.write_text("+7200")
    start_silo(kit, None)
    await_silos(rig.made, list(study.silos))
    run = rig.start(study)
    took = rig.finish(run, within=120)
    same(study, run, tmp_path)
    told = doctor(kit)
    assert "7200 s ahead of the server's when it was last heard" in told or "7199 s ahead" in told, told
    assert "set this machine's clock (NTP)" in told
    rig.note("a silo's clock two hours ahead", run, took)
