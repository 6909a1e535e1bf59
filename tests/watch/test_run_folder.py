"""A deployed run, followed by its folder: who is awaited, and the events of the attempt that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.deploy.launch import copying
from fedtmle.engine.process import Process
from fedtmle.engine.runs import RunFolder, RunState, RunStatus
from fedtmle.studies.progress import EventLog
from fedtmle.watch import RunTail

SILOS = ("north", "south")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "a-run")
    folder.path.mkdir()
    return folder


def begin(run: RunFolder) -> EventLog:
    log = EventLog(run.events)
    log.start(title="a run", question="How much?", algorithm="Coded", plan="ab", silos=SILOS)
    return log


def test_a_run_that_waits_says_for_whom(run: RunFolder) -> None:
    run.write(RunStatus(silos={"north": "ready", "south": "waiting for its owner's approval"}))
    shown = RunTail(run.path).look()
    assert shown["status"] == "waiting"
    assert shown["text"] == "waiting"
    (awaited,) = shown["silos"]
    assert awaited["name"] == "south"
    assert awaited["reason"] == "waiting for its owner's approval"


def test_a_run_in_progress_shows_its_events_and_who_is_awaited(run: RunFolder) -> None:
    begin(run).close()
    here = Process.here()
    run.write(RunStatus(state=RunState.RUNNING, process=here, silos={"south": "no answer yet"}))
    tail = RunTail(run.path)
    shown = tail.look()
    assert shown["status"] == "running"
    assert shown["about"]["question"] == "How much?"
    by_name = {silo["name"]: silo for silo in shown["silos"]}
    assert set(by_name) == set(SILOS)
    assert by_name["south"]["reason"] == "no answer yet"
    assert by_name["north"]["status"] == "waiting"


def test_a_run_whose_process_is_gone_is_not_shown_as_running(run: RunFolder) -> None:
    begin(run).close()
    gone = Process(2**22 + 1, 0.0)
    run.write(RunStatus(state=RunState.RUNNING, process=gone, round=8))
    shown = RunTail(run.path).look()
    assert shown["status"] == "waiting"
    assert "the server's process for this run ended in round 8" in shown["text"]


def test_the_end_of_a_run_is_that_of_its_events(run: RunFolder) -> None:
    log = begin(run)
    log.finished(text="converged", converged=True)
    log.close()
    run.write(RunStatus(state=RunState.DONE))
    shown = RunTail(run.path).look()
    assert (shown["status"], shown["text"]) == ("finished", "converged")


def test_the_command_takes_a_runs_folder(run: RunFolder) -> None:
    run.write(RunStatus(silos={"north": "not connected"}))
    done = CliRunner().invoke(app, ["watch", str(run.path), "--json"])
    assert done.exit_code == 0, done.output
    assert "not connected" in done.output


def test_events_are_copied_as_they_come(run: RunFolder, tmp_path: Path) -> None:
    target = tmp_path / "events.jsonl"
    log = begin(run)
    statuses = copying(iter([RunStatus(), RunStatus(round=1), RunStatus(round=2)]), run.events, target)
    next(statuses)
    next(statuses)
    assert target.read_bytes() == run.events.read_bytes()
    log.finished(text="converged", converged=True)
    log.close()
    assert len(list(statuses)) == 1
    assert target.read_bytes() == run.events.read_bytes()
    assert len(list(copying([RunStatus()], run.events, None))) == 1
