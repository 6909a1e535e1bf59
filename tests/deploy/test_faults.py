"""What goes wrong in a deployment ends in a clear status within a deadline, or resumes to the same bytes.

A plan runs once, so each test has a seed, and thereby a plan, of its own; all share one deployment.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

import fedtmle as ft
from fedtmle.deploy import processes
from fedtmle.deploy.demo import write_example
from fedtmle.deploy.doctor import examine
from fedtmle.deploy.kits import Deployment, Role, read_kit
from fedtmle.deploy.launch import follow, new_run, resume
from fedtmle.deploy.local import approve_everywhere, await_silos, local_deployment, silo_kit
from fedtmle.deploy.parties import start_silo
from fedtmle.deploy.provision import provision
from fedtmle.engine.runs import RunFolder, RunState, RunStatus
from fedtmle.errors import ProtocolError
from fedtmle.runtime import ledger
from fedtmle.studies.home import Home
from fedtmle.studyfile.file import StudyFile, read_study
from tests.deploy import faults
from tests.deploy.proxy import Proxy
from tests.engine.lines import ALGORITHMS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DEADLINE = 20.0
KILLS = 10


@dataclass(frozen=True)
class Rig:
    made: Deployment
    study: StudyFile
    faults: Path
    proxy: Proxy

    def plan(self, seed: int, algorithm: str = "Coded") -> StudyFile:
        """The same study with another seed: another plan."""
        text = self.study.path.read_text()
        text = re.sub(r"\[algorithm\]\n[^\[]*", f"[algorithm]\n{ALGORITHMS[algorithm]}\n\n", text)
        path = self.study.path.with_name(f"study-{seed}.toml")
        path.write_text(f"[options]\nseed = {seed}\n\n{text}")
        made = read_study(path)
        approve_everywhere(made)
        return made

    def start(self, study: StudyFile, deadline: float = DEADLINE) -> RunFolder:
        return new_run(self.made, study, deadline=deadline, patience=60.0)

    def attempt(self, run: RunFolder) -> RunStatus:
        """One command: `fedtmle run` or `fedtmle resume`."""
        resume(run)
        until, last = time.monotonic() + 180, None
        for last in follow(self.made, run):
            assert time.monotonic() < until, last
        assert last is not None
        return last


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("faults")
    study = read_study(write_example(folder / "hospitals", 3))
    ft.run(study.study, study.silos)  # compiles the kernels, for the silos too
    orders = folder / "orders"
    orders.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTMLE_FAULTS", str(orders))
        patch.setenv("PYTHONPATH", str(faults.write_hook(folder / "hook")), prepend=os.pathsep)
        with local_deployment(folder / "consortium", study, spare=("stranger",)) as made:
            proxy = Proxy(made.port)
            _behind(made, "hospital 3", proxy.port)
            yield Rig(made, study, orders, proxy)
            proxy.close()
    left = [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]
    assert left == []


def _behind(made: Deployment, silo: str, port: int) -> None:
    """Puts a silo behind the proxy and starts it again."""
    kit = silo_kit(made, silo)
    config = kit.path / "startup" / "fed_client.json"
    config.write_text(config.read_text().replace(f"localhost:{made.port}", f"localhost:{port}"))
    processes.stop(kit)
    start_silo(kit, None)
    await_silos(made, list(made.sites)[:3])


def same(study: StudyFile, run: RunFolder, scratch: Path) -> None:
    """The run's result and messages are those of one process; no silo told two things to one request."""
    here = ft.run(study.study, study.silos)
    assert here.run is not None
    here.run.transcript.save(scratch / "transcript")
    assert run.result.read_text() == here.to_json() + "\n"
    assert run.transcript.read_bytes() == (scratch / "transcript").read_bytes()
    for path in study.silos.values():
        told: dict[str, str] = {}
        for entry in ledger.read(Home.of(path).ledger_path):
            if entry["decision"] != "refused":
                assert told.setdefault(entry["asked"], entry["replied"]) == entry["replied"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_the_bytes_of_one_process(rig: Rig, tmp_path: Path, algorithm: str) -> None:
    study = rig.plan(1, algorithm)
    run = rig.start(study)
    last = rig.attempt(run)
    assert last.state is RunState.DONE, last.why
    same(study, run, tmp_path)


@pytest.mark.parametrize("party", ["server", "hospital-2"])
def test_killed_at_ten_random_rounds_and_resumed_each_time(rig: Rig, tmp_path: Path, party: str) -> None:
    draw = random.Random(f"kill {party}")  # noqa: S311 - which rounds, not a secret
    study = rig.plan(2 if party == "server" else 3)
    run = rig.start(study, deadline=8.0)
    kills = 0
    # A run has about 37 exchanges: ten kills are each 0 to 2 exchanges after the resumption.
    for kills in range(1, KILLS + 1):
        faults.order(rig.faults, party, at=draw.randint(0, 2), what=draw.choice(["kill", "kill-after"]))
        last = rig.attempt(run)
        assert last.state is RunState.STOPPED, f"kill {kills}: {last}"
    last = rig.attempt(run)
    assert last.state is RunState.DONE, last.why
    assert kills == KILLS
    same(study, run, tmp_path)


def test_a_silo_whose_machine_is_gone_stops_the_run_until_it_is_back(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(4)
    run = rig.start(study, deadline=8.0)
    faults.order(rig.faults, "hospital-1", at=8, what="slow", seconds=4.0)
    kit = silo_kit(rig.made, "hospital 1")

    def unplug() -> None:
        processes.wait_until(lambda: not (rig.faults / "hospital-1.json").exists(), 60)
        processes.stop(kit)

    gone = threading.Thread(target=unplug)
    gone.start()
    last = rig.attempt(run)
    gone.join()
    assert last.state is RunState.STOPPED
    assert "hospital 1" in last.why or "disconnected" in last.why
    start_silo(kit, None)
    assert rig.attempt(run).state is RunState.DONE
    same(study, run, tmp_path)


@pytest.mark.parametrize(("seconds", "ends"), [(3.0, RunState.DONE), (30.0, RunState.STOPPED)])
def test_a_slow_silo_is_waited_for_until_the_deadline(
    rig: Rig, tmp_path: Path, seconds: float, ends: RunState
) -> None:
    study = rig.plan(5 if ends is RunState.DONE else 6)
    run = rig.start(study, deadline=10.0)
    faults.order(rig.faults, "hospital-1", at=5, what="slow", seconds=seconds)
    last = rig.attempt(run)
    assert last.state is ends, last.why
    if ends is RunState.STOPPED:
        assert "no answer from 'hospital 1' within 10 s" in last.why
        assert rig.attempt(run).state is RunState.DONE
    same(study, run, tmp_path)


@pytest.mark.parametrize(("seconds", "ends"), [(2.0, RunState.DONE), (60.0, RunState.STOPPED)])
def test_a_cut_network_heals_or_stops_the_run(
    rig: Rig, tmp_path: Path, seconds: float, ends: RunState
) -> None:
    study = rig.plan(7 if ends is RunState.DONE else 8)
    run = rig.start(study, deadline=60.0 if ends is RunState.DONE else 10.0)
    faults.order(rig.faults, "hospital-3", at=6, what="slow", seconds=1.0)

    def cut() -> None:
        processes.wait_until(lambda: not (rig.faults / "hospital-3.json").exists(), 60)
        rig.proxy.cut()
        if ends is RunState.DONE:
            time.sleep(seconds)
            rig.proxy.mend()

    scissors = threading.Thread(target=cut)
    scissors.start()
    last = rig.attempt(run)
    scissors.join()
    if ends is RunState.STOPPED or last.state is RunState.STOPPED:
        assert last.state is RunState.STOPPED
        assert "hospital 3" in last.why or "disconnected" in last.why
        rig.proxy.mend()
        await_silos(rig.made, list(study.silos), seconds=90)
        last = rig.attempt(run)
    assert last.state is RunState.DONE, last.why
    same(study, run, tmp_path)


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


def test_a_wrong_clock_is_told_and_changes_nothing(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(10)
    kit = silo_kit(rig.made, "hospital 2")
    faults.order(rig.faults, "hospital-2-clock", at=0, what="clock", seconds=7200.0)
    processes.stop(kit)
    start_silo(kit, None)
    await_silos(rig.made, list(study.silos))
    run = rig.start(study)
    assert rig.attempt(run).state is RunState.DONE
    same(study, run, tmp_path)
    findings = {finding.item: finding for finding in examine(kit)}
    assert not findings["clock"].ok
    assert "ahead of the server's" in findings["clock"].detail
    (rig.faults / "hospital-2-clock.json").unlink()
    processes.stop(kit)
    start_silo(kit, None)
    await_silos(rig.made, list(study.silos))


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
    assert not (kit.home / "clock.json").exists()  # no hello reached it
    assert not list(tmp_path.glob("silo.fedtmle/studies/*"))


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
