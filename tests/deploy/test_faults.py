"""A fault of a deployment that ends needs no command, one that needs a person says so; no byte differs.

A plan runs once, so each test has a seed, and thereby a plan, of its own; all share one deployment.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

import fedtmle as ft
from fedtmle.deploy import processes
from fedtmle.deploy.demo import await_silos, local_deployment, silo_kit, write_example
from fedtmle.deploy.kits import Role, read_kit
from fedtmle.deploy.launch import RunsHere, follow
from fedtmle.deploy.parties import start_server, start_silo
from fedtmle.deploy.provision import provision
from fedtmle.engine.office import cancel
from fedtmle.engine.runs import RunState
from fedtmle.errors import ProtocolError
from fedtmle.runtime import ledger
from fedtmle.studyfile.file import read_study
from tests.deploy import faults
from tests.deploy.rig import DEADLINE, Rig, kill_all, same
from tests.engine.lines import ALGORITHMS, approve, going_on
from tests.homes import home_at

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KILLS = 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_the_bytes_of_one_process(rig: Rig, tmp_path: Path, algorithm: str) -> None:
    study = rig.plan(1, algorithm)
    run = rig.start(study)
    last = rig.attempt(run)
    assert last.state is RunState.DONE, last.why
    same(study, run, tmp_path)


@pytest.mark.parametrize("party", ["server", "hospital-2"])
def test_killed_at_random_rounds_it_goes_on_by_itself_each_time(rig: Rig, tmp_path: Path, party: str) -> None:
    """The engine and its process for the run are killed; nobody gives a command."""
    draw = random.Random(f"kill {party}")  # noqa: S311 - which rounds, not a secret
    study = rig.plan(2 if party == "server" else 3)
    run = rig.start(study, deadline=30.0)
    orders = rig.faults / f"{party}.json"
    for kill in range(1, KILLS + 1):
        faults.order(rig.faults, party, at=draw.randint(0, 2), what=draw.choice(["kill", "kill-after"]))
        assert processes.wait_until(lambda: not orders.exists(), 120), f"kill {kill}: {run.status()}"
    rig.finish(run, within=120)
    assert run.status().attempt > KILLS
    same(study, run, tmp_path)


def test_everything_is_killed_and_started_again_with_runs_waiting_and_running(
    rig: Rig, tmp_path: Path
) -> None:
    """A reboot: both runs go on by themselves, the waiting one when its last owner has approved."""
    going, waiting = rig.plan(4), rig.plan(12, approved=False)
    approve(waiting, "hospital 1", "hospital 2")
    run, later = rig.start(going), rig.start(waiting)
    faults.order(rig.faults, "hospital-1", at=6, what="slow", seconds=30.0)
    assert processes.wait_until(lambda: run.status().round > 3, 90)
    kits = [read_kit(rig.made.server), *(silo_kit(rig.made, silo) for silo in going.silos)]
    for kit in kits:
        kill_all(kit)
    assert run.look().state is RunState.WAITING  # whoever looks is told the truth
    assert "process for this run ended" in run.look().why
    start_server(kits[0])
    for kit in kits[1:]:
        start_silo(kit, None)
    took = rig.finish(run, within=180)
    same(going, run, tmp_path)
    assert later.status().state is RunState.WAITING
    approve(waiting, "hospital 3")
    rig.finish(later, within=120)
    same(waiting, later, tmp_path)
    rig.note("all processes of all parties killed and started again, one run running, one waiting", run, took)


@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_a_slow_silo_is_waited_for(rig: Rig, tmp_path: Path, seconds: float) -> None:
    """30 s are more than the deadline: the round is repeated, and the silo gives the recorded answer."""
    study = rig.plan(5 if seconds < 10 else 6)
    run = rig.start(study, deadline=20.0)
    faults.order(rig.faults, "hospital-1", at=5, what="slow", seconds=seconds)
    rig.finish(run, within=180)
    same(study, run, tmp_path)


@pytest.mark.parametrize("seconds", [5.0, 20.0, 60.0])
@pytest.mark.parametrize("how", ["cut", "hold"])
def test_a_network_that_comes_back_needs_no_command(
    rig: Rig, tmp_path: Path, seconds: float, how: str
) -> None:
    """``cut`` closes the connections; ``hold`` keeps them open and passes nothing, as a dead link does."""
    study = rig.plan(int(100 + seconds) + 100 * (how == "hold"))
    run = rig.start(study, deadline=300.0)
    faults.order(rig.faults, "hospital-3", at=6, what="slow", seconds=1.0)
    order = rig.faults / "hospital-3.json"
    assert processes.wait_until(lambda: not order.exists(), 90)
    getattr(rig.proxy, how)()
    time.sleep(seconds)
    rig.proxy.mend()
    took = rig.finish(run, within=90)
    same(study, run, tmp_path)
    words = {"cut": "connections cut", "hold": "link silent, connections open,"}[how]
    rig.note(f"a silo's {words} for {seconds:g} s", run, took)


def test_a_run_that_was_cancelled_asks_nothing_more(rig: Rig) -> None:
    study = rig.plan(13)
    run = rig.start(study)
    faults.order(rig.faults, "hospital-1", at=4, what="slow", seconds=5.0)
    assert processes.wait_until(lambda: run.status().round > 1, 90)
    cancel(run)
    process = run.status().process
    assert process is None
    time.sleep(15)
    asked = [sum(1 for _ in ledger.read(home_at(path).ledger_path)) for path in study.silos.values()]
    time.sleep(10)
    assert asked == [sum(1 for _ in ledger.read(home_at(path).ledger_path)) for path in study.silos.values()]
    assert run.look().state is RunState.CANCELLED


def test_a_full_disk_at_a_silo_is_told_and_can_be_mended(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(9)
    run = rig.start(study)
    faults.order(rig.faults, "hospital-2", at=7, what="disk")
    last = rig.attempt(run)
    assert last.state is RunState.STOPPED
    assert "'hospital 2'" in last.why
    assert "could not record" in last.why
    assert rig.attempt(run).state is RunState.DONE
    same(study, run, tmp_path)


def test_a_silo_that_is_connected_and_not_in_the_plan_is_asked_nothing(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(11)
    kit = silo_kit(rig.made, "stranger")
    text = study.silos["hospital 1"].read_text().replace("hospital 1", "stranger")
    own = tmp_path / "silo.toml"
    own.write_text(text.replace("infants.csv", str(study.silos["hospital 1"].parent / "infants.csv")))
    start_silo(kit, own)
    try:
        await_silos(rig.made, [*study.silos, "stranger"])
        run = rig.start(study)
        assert rig.attempt(run).state is RunState.DONE
    finally:
        processes.stop(kit)
    assert not list(tmp_path.glob("home/hospitals/*/studies/*"))


def test_a_silo_of_another_consortium_never_connects(rig: Rig, tmp_path: Path) -> None:
    other = provision(tmp_path / "other", silos=["hospital 9"], host="localhost", port=rig.made.port)
    kit = read_kit(other.kit("hospital 9"), Role.SILO)
    own = tmp_path / "silo.toml"
    own.write_text('[silo]\nname = "hospital 9"\n\n[data]\npath = "none.csv"\n')
    start_silo(kit, own)
    try:
        impostor = replace(rig.made, sites={"hospital 9": kit.site})
        with pytest.raises(ProtocolError, match="not connected"):
            await_silos(impostor, ["hospital 9"], seconds=15)
    finally:
        processes.stop(kit)


def test_a_study_goes_on_without_silos_that_reject_or_are_not_connected(tmp_path: Path) -> None:
    """One owner rejects the plan, another hospital's machine is off: the result is that of the others."""
    study = going_on(read_study(write_example(tmp_path / "hospitals", 4)))
    approve(study, "hospital 1", "hospital 3", "hospital 4")
    approve(study, "hospital 2", approved=False)
    with local_deployment(tmp_path / "consortium", study) as made:
        processes.stop(silo_kit(made, "hospital 4"))
        run = RunsHere(made).new(study, deadline=DEADLINE, patience=75.0)  # more than the server's grace
        *_, last = follow(RunsHere(made), run)
        assert last.state is RunState.DONE, last.why
    assert last.absent == {"hospital 2": "its owner rejected the plan", "hospital 4": "not connected"}
    found = ft.load(run.result).document
    assert found["absent"] == last.absent
    rest = {name: study.silos[name] for name in ("hospital 1", "hospital 3")}
    assert found["estimates"] == ft.run(study.study, rest).document["estimates"]
