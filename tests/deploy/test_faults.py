"""A fault of a deployment that ends needs no command, one that needs a person says so; no byte differs.

A plan runs once, so each test has a seed, and thereby a plan, of its own; all share one deployment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
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
from fedtmle.deploy.kits import Deployment, Kit, Role, read_kit
from fedtmle.deploy.launch import RunsHere, follow
from fedtmle.deploy.local import approve_everywhere, await_silos, local_deployment, silo_kit
from fedtmle.deploy.parties import start_server, start_silo
from fedtmle.deploy.provision import provision
from fedtmle.engine.office import cancel, resume
from fedtmle.engine.runs import RunFolder, RunState, RunStatus
from fedtmle.errors import ProtocolError
from fedtmle.runtime import ledger
from fedtmle.studies.home import Home
from fedtmle.studyfile.file import StudyFile, read_study
from tests.deploy import faults
from tests.deploy.proxy import Proxy
from tests.engine.lines import ALGORITHMS, approve, going_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DEADLINE = 20.0
_log = logging.getLogger(__name__)
KILLS = 3


@dataclass(frozen=True)
class Rig:
    made: Deployment
    study: StudyFile
    faults: Path
    proxy: Proxy

    def plan(self, seed: int, algorithm: str = "Coded", *, approved: bool = True) -> StudyFile:
        """The same study with another seed: another plan."""
        text = self.study.path.read_text()
        text = re.sub(r"\[algorithm\]\n[^\[]*", f"[algorithm]\n{ALGORITHMS[algorithm]}\n\n", text)
        path = self.study.path.with_name(f"study-{seed}.toml")
        path.write_text(f"[options]\nseed = {seed}\n\n{text}")
        made = read_study(path)
        if approved:
            approve_everywhere(made)
        return made

    def start(self, study: StudyFile, deadline: float = DEADLINE) -> RunFolder:
        return RunsHere(self.made).new(study, deadline=deadline, patience=600.0)

    def finish(self, run: RunFolder, *, within: float) -> float:
        """Wait for a run's end without a command; return the seconds that it took."""
        began = time.monotonic()
        assert processes.wait_until(lambda: run.status().state.is_over, within), run.status()
        assert run.status().state is RunState.DONE, run.status().why
        return time.monotonic() - began

    def attempt(self, run: RunFolder) -> RunStatus:
        """One command: `fedtmle run` or `fedtmle resume`."""
        resume(run)
        until, last = time.monotonic() + 180, None
        for last in follow(RunsHere(self.made), run):
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
        _kill(kit)
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
    _log.info("reboot: done %.0f s after it", took)


def _kill(kit: Kit) -> None:
    supervisor = processes.running(kit)
    assert supervisor is not None
    for process in [supervisor, *processes.descendants(supervisor)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


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
    _log.info("%s for %g s: done %.0f s after the link was back", how, seconds, took)


def test_a_run_that_was_cancelled_asks_nothing_more(rig: Rig) -> None:
    study = rig.plan(13)
    run = rig.start(study)
    faults.order(rig.faults, "hospital-1", at=4, what="slow", seconds=5.0)
    assert processes.wait_until(lambda: run.status().round > 1, 90)
    cancel(run)
    process = run.status().process
    assert process is None
    time.sleep(15)
    asked = [sum(1 for _ in ledger.read(Home.of(path).ledger_path)) for path in study.silos.values()]
    time.sleep(10)
    assert asked == [sum(1 for _ in ledger.read(Home.of(path).ledger_path)) for path in study.silos.values()]
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
