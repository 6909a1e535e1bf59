"""The dispatcher over runs on disk, with a fake engine and a clock that the test moves."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from fedtmle.engine import runs
from fedtmle.engine.flare_server import packed_job
from fedtmle.engine.post import LONGEST_STUDY, SiloReport, Standing
from fedtmle.engine.process import Process
from fedtmle.engine.runs import (
    FRESH,
    MAX_LOST,
    NOT_CONNECTED,
    START_LIMIT,
    TRANSITIONS,
    Dispatcher,
    Move,
    MoveError,
    RunFolder,
    RunState,
    RunStatus,
    Terms,
    sites,
)
from fedtmle.studyfile.file import StudyFile, file_plan
from tests.engine.lines import going_on, study_of

GONE = Process(2**22 + 1, 0.0)  # no such process


@dataclass
class FakeJobs:
    """An engine that does what the test says."""

    submitted: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    over: dict[str, str] = field(default_factory=dict)
    refuses: bool = False

    def submit(self, run: RunFolder) -> str:
        if self.refuses:
            raise OSError("no")
        self.submitted.append(run.name)
        return f"job-{len(self.submitted)}"

    def ended(self, job: str) -> str:
        return self.over.get(job, "")

    def stop(self, job: str) -> None:
        self.stopped.append(job)


@dataclass
class Bench:
    """A server with one run of a study of three silos."""

    study: StudyFile
    run: RunFolder
    jobs: FakeJobs
    time: float = 1e9
    dispatcher: Dispatcher = field(init=False)

    def __post_init__(self) -> None:
        self.reboot()

    def reboot(self) -> None:
        """A new dispatcher, which knows only the disk."""
        self.dispatcher = Dispatcher(
            self.run.path.parent, self.jobs, version="1", clock=lambda: self.time, now=lambda: self.time
        )

    def hear(
        self,
        standing: Standing | None = Standing.READY,
        *silos: str,
        version: str = "1",
        engine: str = "first",
    ) -> None:
        plan = file_plan(self.study).digest.hex()
        standings = {} if standing is None else {plan: standing}
        for silo in silos or self.study.silos:
            report = SiloReport(version=version, engine=engine, standings=standings)
            self.dispatcher.hear(sites(self.study.silos)[silo], report)

    def turn(self, seconds: float = 1.0) -> RunStatus:
        self.time += seconds
        self.dispatcher.turn()
        return self.run.status()


PATIENCE = 86400.0


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return bench_of(study_of(tmp_path), tmp_path, monkeypatch)


@pytest.fixture
def open_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The study goes on without silos that refuse or are absent."""
    return bench_of(going_on(study_of(tmp_path)), tmp_path, monkeypatch)


def bench_of(study: StudyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    terms = Terms(
        plan=file_plan(study).digest.hex(),
        sites=sites(study.silos),
        deadline=5.0,
        patience=PATIENCE,
        goes_on=study.study.on_refusal == "go on",
    )
    made = Bench(study, RunFolder.new(tmp_path / "runs", study, terms), FakeJobs())
    monkeypatch.setattr("fedtmle.engine.runs.time.time", lambda: made.time)
    made.run.write(RunStatus(since=made.time))
    return made


def arrived(bench: Bench, process: Process) -> None:
    """The job's process claims the run and reaches a round."""
    bench.run.move(Move.ARRIVE, by=process)
    bench.run.move(Move.RUN, by=process)
    bench.run.move(Move.NOTE, by=process, round=4)


def test_a_run_waits_without_a_job_until_every_silo_is_there_and_has_approved(bench: Bench) -> None:
    assert set(bench.turn().silos.values()) == {NOT_CONNECTED}
    bench.hear(None)
    assert set(bench.turn().silos.values()) == {"connected, and the study is on its way"}
    bench.hear(Standing.APPROVAL, "hospital 2")
    bench.hear(Standing.READY, "hospital 1", "hospital 3")
    assert bench.turn().silos["hospital 2"] == "waiting for its owner's approval"
    assert bench.jobs.submitted == []
    bench.hear(Standing.READY, "hospital 2")
    status = bench.turn()
    assert status.state is RunState.STARTING
    assert status.job == "job-1"
    assert bench.jobs.submitted == [bench.run.name]
    assert bench.turn().job == "job-1"  # once


def test_a_silo_that_falls_silent_is_not_connected(bench: Bench) -> None:
    bench.hear(Standing.READY, "hospital 1", "hospital 2")
    assert bench.turn().silos["hospital 1"] == "ready"
    assert set(bench.dispatcher.presence()) == {"hospital-1", "hospital-2"}
    assert set(bench.turn(FRESH + 1).silos.values()) == {NOT_CONNECTED}
    assert bench.dispatcher.presence() == {}


def test_two_versions_are_both_named(bench: Bench) -> None:
    bench.hear()
    bench.hear(Standing.READY, "hospital 3", version="0.9")
    status = bench.turn()
    assert status.state is RunState.WAITING
    assert "has fedtmle 0.9, the server has 1" in status.silos["hospital 3"]


def test_a_rejection_stops_the_run_and_it_can_be_resumed(bench: Bench) -> None:
    bench.hear()
    bench.hear(Standing.REJECTED, "hospital 2")
    status = bench.turn()
    assert status.state is RunState.STOPPED
    assert status.refused
    assert status.why == "silo 'hospital 2' refused: its owner rejected the plan"
    bench.hear()
    assert bench.turn().state is RunState.STOPPED  # until a person says so
    bench.run.move(Move.RESUME)
    assert bench.turn().state is RunState.STARTING


def test_patience_ends_with_who_did_not_approve(bench: Bench) -> None:
    """Weeks of waiting cost no job; the message says who was not connected and who had not approved."""
    bench.turn()
    bench.time += 86400.0
    bench.hear(Standing.APPROVAL, "hospital 1")
    bench.hear(Standing.READY, "hospital 2")
    status = bench.turn()
    assert status.state is RunState.STOPPED
    assert "'hospital 1': waiting for its owner's approval; 'hospital 3': not connected" in status.why
    assert "24 hours" in status.why
    assert bench.jobs.submitted == []


def test_patience_does_not_end_while_the_server_was_off(bench: Bench) -> None:
    """After a long weekend without power the silos have a minute to connect."""
    bench.time += 3 * 86400.0
    bench.reboot()
    assert bench.turn(10.0).state is RunState.WAITING
    bench.hear()
    assert bench.turn().state is RunState.STARTING


def test_a_run_goes_on_by_itself_after_a_reboot(bench: Bench) -> None:
    bench.hear()
    bench.turn()
    arrived(bench, GONE)  # the process that the reboot ended
    assert bench.run.status().state is RunState.RUNNING
    seen = bench.run.look()  # whoever looks is told the truth before the server does anything
    assert seen.state is RunState.WAITING
    assert "the server's process for this run ended in round 4" in seen.why
    bench.reboot()
    status = bench.turn()
    assert status.state is RunState.WAITING
    assert set(bench.turn().silos.values()) == {NOT_CONNECTED}
    bench.hear()
    status = bench.turn(5.0)
    assert status.state is RunState.STARTING
    assert status.attempt == 2
    assert bench.jobs.stopped == ["job-1"]  # what the engine still lists


def test_a_process_with_the_same_pid_is_another_one(bench: Bench) -> None:
    """After a reboot the recorded pid may belong to any process, as here to this one."""
    bench.hear()
    bench.turn()
    arrived(bench, Process(os.getpid(), psutil.Process().create_time() - 100))
    assert bench.turn().state is RunState.WAITING


def test_a_run_whose_process_lives_is_left_alone(bench: Bench) -> None:
    bench.hear()
    bench.turn()
    arrived(bench, Process.here())
    bench.jobs.over["job-1"] = "abnormal"
    assert bench.turn(10 * START_LIMIT).state is RunState.RUNNING


def test_a_silo_that_was_restarted_has_lost_its_part_of_the_job(bench: Bench) -> None:
    """The run does not wait for the deadline; the old process is ended, for it holds the run's journal."""
    bench.hear()
    bench.turn()
    old = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    arrived(bench, Process.of(old.pid))
    bench.hear()
    assert bench.turn().state is RunState.RUNNING
    bench.hear(Standing.READY, "hospital 2", engine="second")
    status = bench.turn()
    assert status.state is RunState.WAITING
    assert "silo 'hospital 2' was restarted" in status.why
    assert old.wait(10) == -signal.SIGKILL
    assert bench.turn(5.0).state is RunState.STARTING
    assert bench.turn().state is RunState.STARTING


@pytest.mark.parametrize("how", ["ended", "late", "refused"])
def test_a_job_that_never_starts_is_started_again(bench: Bench, how: str) -> None:
    bench.hear()
    bench.jobs.refuses = how == "refused"
    bench.turn()
    bench.jobs.refuses = False
    if how == "ended":
        bench.jobs.over["job-1"] = "can_not_schedule"
        status = bench.turn()
        assert "can_not_schedule" in status.why
    elif how == "late":
        bench.hear()
        status = bench.turn(START_LIMIT + 1)
    assert bench.run.status().state is RunState.WAITING
    bench.hear()
    assert bench.turn(20.0).state is RunState.STARTING


def test_a_run_that_gets_nowhere_stops_for_a_person_to_look_at(bench: Bench) -> None:
    attempts = 0
    while not bench.run.status().state.is_over:
        bench.hear()
        if bench.turn(16.0).state is RunState.STARTING:
            attempts += 1
            arrived(bench, GONE)
    assert attempts == MAX_LOST + 1
    assert f"tried {MAX_LOST + 1} times in round 4" in bench.run.status().why


def test_a_cancelled_run_is_never_started_and_a_running_one_is_ended(bench: Bench) -> None:
    bench.hear()
    bench.turn()
    own = Process.here()
    arrived(bench, own)
    bench.turn()
    bench.run.move(Move.CANCEL)
    bench.turn()
    assert bench.jobs.stopped == ["job-1"]
    with pytest.raises(MoveError, match="is cancelled: it cannot note"):
        bench.run.move(Move.NOTE, by=own)
    with pytest.raises(MoveError):
        bench.run.move(Move.RESUME)
    bench.hear()
    assert bench.turn().state is RunState.CANCELLED
    assert bench.dispatcher.hear("hospital-1", SiloReport(version="1", standings={})).open == []


def test_a_silo_that_was_removed_ends_the_runs_that_need_it(bench: Bench) -> None:
    bench.hear()
    bench.turn()
    arrived(bench, Process.here())
    bench.dispatcher.revoked = frozenset({"hospital-2"})
    status = bench.turn()
    assert status.state is RunState.STOPPED
    assert status.why == "silo 'hospital 2' was removed from the deployment"
    assert bench.jobs.stopped == ["job-1"]
    assert "hospital-2" not in bench.dispatcher.presence()
    assert bench.dispatcher.hear("hospital-2", SiloReport(version="1", standings={})).open == []
    assert bench.dispatcher.hear("hospital-1", SiloReport(version="1", standings={})).open != []


def test_an_older_process_cannot_speak_for_a_run_that_another_took_over(bench: Bench) -> None:
    bench.hear()
    bench.turn()
    arrived(bench, Process.here())
    for move in (Move.NOTE, Move.FINISH, Move.LOSE):
        with pytest.raises(MoveError, match="taken over"):
            bench.run.move(move, by=GONE)
    assert bench.run.status().state is RunState.RUNNING


def test_a_damaged_run_does_not_hold_up_the_others(bench: Bench, tmp_path: Path) -> None:
    broken = tmp_path / "runs" / "a-broken-one"
    broken.mkdir()
    (broken / "terms.json").write_text("{")
    (broken / "status.json").write_text("{")
    bench.hear()
    assert bench.turn().state is RunState.STARTING


def test_studies_are_sent_once_to_the_silos_that_take_part(bench: Bench) -> None:
    plan = file_plan(bench.study).digest.hex()
    first = bench.dispatcher.hear("hospital-1", SiloReport(version="1", standings={}))
    assert first.open == [plan]
    assert first.texts == {plan: bench.study.path.read_bytes()}
    held = SiloReport(version="1", standings={plan: Standing.APPROVAL})
    again = bench.dispatcher.hear("hospital-1", held)
    assert again.open == [plan]
    assert again.texts == {}
    assert bench.dispatcher.hear("stranger", SiloReport(version="1", standings={})).open == []
    (bench.run.path / "study.toml").write_text("#" * (LONGEST_STUDY + 1))
    assert bench.dispatcher.hear("hospital-1", SiloReport(version="1", standings={})).texts == {}


def test_a_job_is_one_that_the_engine_accepts_and_json_alone(bench: Bench) -> None:
    from nvflare.private.fed.server.job_meta_validator import JobMetaValidator

    packed = packed_job(bench.run)
    is_valid, error, meta = JobMetaValidator().validate(bench.run.name, packed)
    assert is_valid, error
    assert meta["mandatory_clients"] == list(sites(bench.study.silos).values())
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/")]
    assert len(files) == 3
    assert all(name.endswith(".json") for name in files)


def test_every_state_can_be_left_or_is_an_end() -> None:
    left = {state for state, _ in TRANSITIONS}
    assert left == set(RunState) - {RunState.DONE, RunState.CANCELLED}
    assert {move for _, move in TRANSITIONS} == set(Move)
    assert set(TRANSITIONS.values()) == set(RunState)
    for state in left:
        assert (state, Move.CANCEL) in TRANSITIONS


# A study that goes on without the silos that refuse or are absent when it opens.


def job_sites(run: RunFolder) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(packed_job(run))) as archive:
        meta = json.loads(archive.read(f"{run.name}/meta.json"))
    assert meta["min_clients"] == len(meta["mandatory_clients"])
    assert meta["deploy_map"]["silo"] == meta["mandatory_clients"]
    return list(meta["mandatory_clients"])


def test_a_run_goes_on_at_once_without_a_silo_that_rejects(open_bench: Bench) -> None:
    open_bench.hear(Standing.READY, "hospital 1")
    open_bench.hear(Standing.REJECTED, "hospital 2")
    assert open_bench.turn().state is RunState.WAITING  # for the third
    open_bench.hear(Standing.READY, "hospital 3")
    status = open_bench.turn()
    assert status.state is RunState.STARTING
    assert status.absent == {"hospital 2": "its owner rejected the plan"}
    assert job_sites(open_bench.run) == ["hospital-1", "hospital-3"]


def test_a_run_goes_on_at_the_end_of_the_patience_without_the_rest(open_bench: Bench) -> None:
    assert open_bench.turn(PATIENCE - 60.0).state is RunState.WAITING
    open_bench.hear(Standing.READY, "hospital 1")
    open_bench.hear(Standing.APPROVAL, "hospital 2")
    assert open_bench.turn().state is RunState.WAITING
    status = open_bench.turn(70.0)
    assert status.state is RunState.STOPPED  # nobody was heard in this minute, and nobody is ready
    open_bench.run.move(Move.RESUME)
    open_bench.turn(PATIENCE)
    open_bench.hear(Standing.READY, "hospital 1")
    open_bench.hear(Standing.APPROVAL, "hospital 2")
    status = open_bench.turn()
    assert status.state is RunState.STARTING
    assert status.absent == {"hospital 2": "waiting for its owner's approval", "hospital 3": NOT_CONNECTED}
    assert job_sites(open_bench.run) == ["hospital-1"]


def test_a_silo_that_comes_before_the_run_has_opened_takes_part(open_bench: Bench) -> None:
    """An attempt that was lost before it opened does not wait again for those that it was made without."""
    open_bench.turn(PATIENCE)
    open_bench.hear(Standing.READY, "hospital 1", "hospital 3")
    assert list(open_bench.turn().absent) == ["hospital 2"]
    open_bench.jobs.over["job-1"] = "can_not_schedule"
    assert open_bench.turn().state is RunState.WAITING
    open_bench.hear(Standing.READY, "hospital 1", "hospital 3")
    status = open_bench.turn(5.0)
    assert status.state is RunState.STARTING
    assert list(status.absent) == ["hospital 2"]
    open_bench.jobs.over["job-2"] = "can_not_schedule"
    open_bench.turn()
    open_bench.hear()
    status = open_bench.turn(10.0)
    assert status.state is RunState.STARTING
    assert status.absent == {}
    assert len(job_sites(open_bench.run)) == 3


def test_from_the_opening_on_no_silo_joins_or_is_left_out(open_bench: Bench) -> None:
    open_bench.hear(Standing.READY, "hospital 1", "hospital 3")
    open_bench.hear(Standing.REJECTED, "hospital 2")
    open_bench.turn()
    open_bench.run.move(Move.ARRIVE, by=GONE)
    open_bench.run.move(Move.RUN, by=GONE, has_opened=True)
    assert open_bench.turn().state is RunState.WAITING
    open_bench.hear(Standing.READY, "hospital 2", "hospital 3")
    assert open_bench.turn(FRESH + 1.0).state is RunState.WAITING  # for the first
    open_bench.hear()
    status = open_bench.turn()
    assert status.state is RunState.STARTING
    assert status.absent == {"hospital 2": "its owner rejected the plan"}
    open_bench.run.move(Move.ARRIVE, by=GONE)
    open_bench.turn()
    open_bench.hear(Standing.REJECTED, "hospital 3")
    status = open_bench.turn()
    assert status.state is RunState.STOPPED
    assert "'hospital 3' refused" in status.why


def test_a_run_goes_on_without_a_removed_silo_and_not_without_all(open_bench: Bench) -> None:
    open_bench.hear()
    open_bench.dispatcher.revoked = frozenset({"hospital-2"})
    assert open_bench.turn().absent == {"hospital 2": "removed from the deployment"}
    open_bench.dispatcher.revoked = frozenset({"hospital-2", "hospital-3"})
    status = open_bench.turn()
    assert status.state is RunState.STOPPED
    assert "'hospital 3' was removed" in status.why
    open_bench.run.move(Move.RESUME)
    open_bench.hear(Standing.REJECTED)
    status = open_bench.turn()
    assert status.state is RunState.STOPPED
    assert status.refused
    assert status.why == "silo 'hospital 1' refused: its owner rejected the plan"


def test_no_run_is_started_on_a_full_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be lost at once, twenty times, and then need a person."""
    with monkeypatch.context() as patch:
        patch.setattr(runs, "LEAST_ROOM", 1 << 62)
        for _ in range(3):
            bench.hear()
            assert bench.turn().state is RunState.WAITING
    assert bench.turn().state is RunState.STARTING
