"""A silo whose clock is wrong: `deploy doctor` says so, and the run goes on once the clock is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedtmle.deploy import processes
from fedtmle.deploy.doctor import examine
from fedtmle.deploy.kits import Kit
from fedtmle.deploy.local import await_silos, silo_kit
from fedtmle.deploy.parties import start_silo
from tests.deploy import faults
from tests.deploy.rig import Rig, same

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
H2 = "hospital 2"


def restart(kit: Kit) -> None:
    processes.stop(kit)
    start_silo(kit, None)


@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed (Debian: faketime)")
@pytest.mark.parametrize(
    ("offset", "own"),
    [("+4000d", "certificate: expired on"), ("-3d", "certificate: valid from")],
)
def test_the_doctor_shows_the_clock_beside_the_certificates_dates(rig: Rig, offset: str, own: str) -> None:
    kit = silo_kit(rig.made, H2)
    command = [sys.executable, "-m", "fedtmle", "deploy", "doctor", str(kit.path)]
    clock = {"LD_PRELOAD": str(LIBRARY), "FAKETIME": offset}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | clock, check=False)  # noqa: S603
    assert done.returncode == 1
    for words in (own, "this machine's clock says", "set th", "server: ", "its certificate is not valid at"):
        assert words in done.stdout, done.stdout


def test_a_clock_within_the_certificates_dates_changes_nothing(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(2)
    kit = silo_kit(rig.made, H2)
    faults.order(rig.faults, "hospital-2-clock", at=0, what="clock", seconds=7200.0)
    restart(kit)
    await_silos(rig.made, list(study.silos))
    run = rig.start(study)
    rig.finish(run, within=120)
    same(study, run, tmp_path)
    (finding,) = (finding for finding in examine(kit) if finding.item == "clock")
    assert not finding.ok
    assert "ahead of the server's" in finding.detail
    (rig.faults / "hospital-2-clock.json").unlink()
    restart(kit)
    await_silos(rig.made, list(study.silos))
