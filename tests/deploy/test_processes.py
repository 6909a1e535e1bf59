"""Any process may stand still for a while or be killed: nobody gives a command, no byte differs."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from fedtmle.deploy import processes
from fedtmle.deploy.demo import await_silos, silo_kit
from fedtmle.deploy.kits import read_kit
from fedtmle.deploy.parties import start_server, start_silo
from tests.deploy.rig import Rig, process_of, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
WHOSE = {"server": "the server's", "hospital 2": "a silo's"}
WHICH = {"supervisor": "supervisor", "engine": "engine", "job": "process for the run"}
RECOVERY = 60.0  # seconds
SLACK = 60.0  # seconds more, on a machine that does other things


@pytest.mark.parametrize("seconds", [40.0])
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("party", WHOSE)
def test_a_process_that_stands_still_goes_on(
    rig: Rig, tmp_path: Path, party: str, which: str, seconds: float
) -> None:
    """SIGSTOP: a machine that is suspended, or swaps. 40 s are longer than the engine's own patience."""
    study = rig.plan(1000 + 100 * list(WHOSE).index(party) + 10 * list(WHICH).index(which))
    kit = read_kit(rig.made.server) if party == "server" else silo_kit(rig.made, party)
    run = rig.start(study, deadline=300.0)
    rig.at_round(run, "hospital-1")
    process = process_of(kit, which)
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGCONT)
    took = rig.finish(run, within=RECOVERY + SLACK)
    same(study, run, tmp_path)
    rig.note(f"SIGSTOP of {WHOSE[party]} {WHICH[which]} for {seconds:g} s", run, took)
    await_silos(rig.made, list(study.silos))


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("party", WHOSE)
def test_a_process_that_is_killed_is_replaced(rig: Rig, tmp_path: Path, party: str, which: str) -> None:
    study = rig.plan(2000 + 100 * list(WHOSE).index(party) + 10 * list(WHICH).index(which))
    kit = read_kit(rig.made.server) if party == "server" else silo_kit(rig.made, party)
    run = rig.start(study, deadline=30.0)
    rig.at_round(run, "hospital-1", seconds=2.0)
    before = process_of(kit, "engine")
    process_of(kit, which).kill()
    if which == "supervisor":  # its service manager starts it again, as `Restart=always` says
        assert processes.wait_until(lambda: processes.running(kit) is None, 10)
        start_server(kit) if party == "server" else start_silo(kit, None)
        # There are never two engines.
        assert not before.is_running() or before.status() == psutil.STATUS_ZOMBIE
    took = rig.finish(run, within=RECOVERY + SLACK)
    same(study, run, tmp_path)
    rig.note(f"kill -9 of {WHOSE[party]} {WHICH[which]}", run, took)
    await_silos(rig.made, list(study.silos))
