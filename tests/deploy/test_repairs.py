"""Full disks, damaged files, changed data and mixed versions: the message, the repair, equal bytes."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fedtmle.deploy import processes
from fedtmle.deploy.demo import approve_everywhere, silo_kit
from fedtmle.deploy.doctor import examine
from fedtmle.deploy.launch import server_trouble
from fedtmle.engine.office import resume
from fedtmle.engine.post import Standing
from fedtmle.engine.runs import RunFolder, RunState
from fedtmle.studyfile.file import StudyFile, file_plan
from tests.deploy import faults
from tests.deploy.rig import Rig, same
from tests.homes import home_at

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
H2 = "hospital 2"
MIB = 2**20


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """Put a folder on a file system of its own; skip where this account may not."""
    aside = folder.with_name(f"{folder.name}-aside")
    shutil.copytree(folder, aside)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)  # noqa: S603 - a file system in memory
    if done.returncode:
        pytest.skip("this account may not mount a file system")
    try:
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        yield
    finally:
        shutil.rmtree(aside)
        shutil.copytree(folder, aside)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S603, S607 - as above
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        shutil.rmtree(aside)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave no byte free on the folder's file system."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    try:
        yield
    finally:
        filler.unlink()


def stopped(run: RunFolder) -> str:
    """Wait until a run has stopped, and return why."""
    assert processes.wait_until(lambda: run.look().state.is_over, 180), run.look()
    assert run.status().state is RunState.STOPPED
    return run.status().why


def repaired(rig: Rig, study: StudyFile, run: RunFolder, scratch: Path, fault: str) -> None:
    """One command, `fedtmle resume`, ends the run with the bytes of one process."""
    began = time.monotonic()
    last = rig.attempt(run)
    assert last.state is RunState.DONE, last.why
    same(study, run, scratch)
    rig.note(f"{fault} (resumed)", run, time.monotonic() - began)


def halted(rig: Rig, seed: int, *, party: str = "hospital-2") -> tuple[StudyFile, RunFolder]:
    """A run that stopped after some rounds, by a disk of a silo that takes nothing more for a moment."""
    study = rig.plan(seed)
    run = rig.start(study)
    faults.order(rig.faults, party, at=7, what="disk")
    assert "could not record" in stopped(run)
    return study, run


def test_a_full_disk_at_a_silo_is_told_and_ends_with_one_command(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(1)
    home = home_at(study.silos[H2]).folder
    with small_disk(home, 8):
        run = rig.start(study)
        rig.at_round(run, "hospital-1")
        with filled(home):
            why = stopped(run)
            assert f"'{H2}'" in why
            assert "could not record" in why
        repaired(rig, study, run, tmp_path, "a silo's disk full")


def test_a_full_disk_at_the_server_ends_by_itself_when_there_is_room(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(2)
    runs = rig.made.runs
    runs.mkdir(exist_ok=True)
    with small_disk(runs, 8):
        run = rig.start(study)
        rig.at_round(run, "hospital-1")
        with filled(runs):
            assert processes.wait_until(lambda: "disk" in server_trouble(rig.made.server), 60)
            assert str(runs) in server_trouble(rig.made.server)
            time.sleep(10)
            assert any("disk" in line and str(runs) in line for line in rig.lines(run))
        took = rig.finish(run, within=120)
        same(study, run, tmp_path)
        rig.note("the server's disk full", run, took)


def test_a_lost_journal_of_the_server_is_told_and_can_be_restored(rig: Rig, tmp_path: Path) -> None:
    study, run = halted(rig, 3)
    kept = run.journal.read_bytes()
    run.journal.unlink()
    last = rig.attempt(run)
    assert last.state is RunState.STOPPED
    assert "the journal is gone after round" in last.why
    assert str(run.journal) in last.why
    assert "restore it from a backup" in last.why
    damaged = bytearray(kept)
    damaged[60] ^= 1
    run.journal.write_bytes(damaged)
    last = rig.attempt(run)
    assert last.state is RunState.STOPPED
    assert str(run.journal) in last.why
    run.journal.write_bytes(kept)
    repaired(rig, study, run, tmp_path, "the server's journal lost, then damaged")


def is_told(run: RunFolder, resumed: float) -> bool:
    """Whether the run stopped because of hospital 2, or waits because its post has reported damage first."""
    status = run.status()
    if status.state is RunState.STOPPED:
        return status.since > resumed and f"'{H2}'" in status.why
    return status.silos.get(H2) == Standing.CONFIGURATION


@pytest.mark.parametrize("what", ["journal", "ledger", "approvals"])
def test_a_damaged_record_of_a_silo_is_told_and_can_be_restored(rig: Rig, tmp_path: Path, what: str) -> None:
    study, run = halted(rig, {"journal": 4, "ledger": 5, "approvals": 6}[what])
    home = home_at(study.silos[H2])
    journal = home.journal_path(file_plan(study))
    path = {"journal": journal, "ledger": home.ledger_path, "approvals": home.approvals.path}[what]
    kept = path.read_bytes()
    damaged = bytearray(kept)
    damaged[len(kept) // 2] ^= 1
    path.write_bytes(damaged)
    resume(run)
    rig.watch(run)
    resumed = run.status().since
    assert processes.wait_until(lambda: is_told(run, resumed), 180), run.status()
    findings = [finding for finding in examine(silo_kit(rig.made, H2)) if not finding.ok]
    assert any(path.name in f"{finding.detail} {finding.fix}" for finding in findings), findings
    path.write_bytes(kept)
    repaired(rig, study, run, tmp_path, f"a silo's {what} damaged")


def test_data_that_changed_ask_for_a_new_approval(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(7, approved=False)
    plan = file_plan(study)
    for path in study.silos.values():
        home_at(path).approve(plan)
    table = study.silos[H2].with_name("infants.csv")
    kept = table.read_text()
    table.write_text("\n".join(kept.splitlines()[:-1]) + "\n")
    run = rig.start(study)
    why = stopped(run)
    assert f"'{H2}'" in why
    assert "data changed since its owner approved the plan" in why
    table.write_text(kept)
    approve_everywhere(study)
    repaired(rig, study, run, tmp_path, "a silo's data changed after the approval")


def test_two_versions_wait_for_each_other_and_say_which(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(8)
    skew = rig.faults / "hospital-2-version.json"
    skew.write_text('{"version": "0.0.7"}')
    rig.restart(H2)
    run = rig.start(study)
    assert processes.wait_until(lambda: "0.0.7" in str(run.status().silos.get(H2)), 60), run.status()
    assert "the server has" in run.status().silos[H2]
    skew.unlink()
    rig.restart(H2)  # with the same version as the others
    took = rig.finish(run, within=120)
    same(study, run, tmp_path)
    rig.note("a silo with another version, then the same installed", run, took)
