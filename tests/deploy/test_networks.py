"""Outages of ten minutes, and a silo that starts before its server: all end without a command."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fedtmle.deploy import processes
from fedtmle.deploy.demo import silo_kit
from fedtmle.deploy.launch import presence
from fedtmle.deploy.parties import start_silo
from tests.deploy.rig import Rig, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
H3 = "hospital 3"
RECOVERY, SLACK = 60.0, 60.0  # seconds, and more on a machine that does other things


def test_a_silo_may_start_before_its_server_is_there(rig: Rig, tmp_path: Path) -> None:
    """As after a power cut at both, when the silo's machine is the first to be up."""
    study = rig.plan(1)
    kit = silo_kit(rig.made, H3)
    rig.proxy.cut()
    processes.stop(kit)
    start_silo(kit, None)
    run = rig.start(study)
    time.sleep(60)
    assert run.status().silos[H3] == "not connected"
    rig.proxy.mend()
    took = rig.finish(run, within=RECOVERY + SLACK)
    same(study, run, tmp_path)
    rig.note("a silo started 60 s before its server can be reached", run, took)


@pytest.mark.parametrize("how", ["cut", "hold"])
def test_an_outage_of_ten_minutes_needs_no_command(rig: Rig, tmp_path: Path, how: str) -> None:
    """Twice the deadline: the run waits, and the server starts it again when the silo is back."""
    study = rig.plan({"cut": 3, "hold": 4}[how])
    run = rig.start(study, deadline=300.0, patience=3600.0)
    rig.at_round(run, "hospital-3")
    getattr(rig.proxy, how)()
    time.sleep(590)
    assert "no answer from 'hospital 3' within 300 s" in run.status().why
    seen = presence(rig.made.server)
    assert seen is not None
    assert "hospital-3" not in seen.sites
    time.sleep(10)
    rig.proxy.mend()
    took = rig.finish(run, within=RECOVERY + SLACK)
    same(study, run, tmp_path)
    words = {"cut": "connections cut", "hold": "link silent, connections open,"}[how]
    rig.note(f"a silo's {words} for 600 s", run, took)
