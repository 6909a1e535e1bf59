"""A run at the server over endpoints with approvals, journals and policies, without an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import fedtmle as ft
from fedtmle.deploy.demo import run_here, write_example
from fedtmle.engine import frames
from fedtmle.engine.coordinate import Coordination, Seal
from fedtmle.engine.frames import Declined
from fedtmle.engine.runs import Move, RunFolder, RunState, RunStatus
from fedtmle.errors import DeadlineError, InputError
from fedtmle.protocol.messages import Reason
from fedtmle.runtime import ledger
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from fedtmle.text.result import render
from fedtmle_core.signing import SigningKey
from tests.engine.lines import (
    ALGORITHMS,
    DirectLine,
    approve,
    going_on,
    line,
    new_folder,
    pinned,
    study_of,
)
from tests.homes import home_at


def carry_out(folder: Path, study: StudyFile, run: RunFolder) -> RunStatus:
    Coordination(run.path.parent, run.name).carry_out(
        lambda sites, _deadline, _awaited, seal: line(folder, study, sites, seal)
    )
    return run.status()


def same_as_here(study: StudyFile, run: RunFolder, scratch: Path) -> bool:
    here = ft.run(study.study, study.silos)
    assert here.run is not None
    here.run.transcript.save(scratch)
    return (
        run.result.read_text() == here.to_json() + "\n"
        and run.transcript.read_bytes() == scratch.read_bytes()
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_the_bytes_of_one_process(tmp_path: Path, algorithm: str) -> None:
    study = study_of(tmp_path, algorithm)
    approve(study)
    run = new_folder(tmp_path, study)
    status = carry_out(tmp_path, study, run)
    assert status.state is RunState.DONE, status.why
    assert len(status.seconds) == status.round
    assert same_as_here(study, run, tmp_path / "transcript")
    owns = list((tmp_path / "hospitals").glob("*/home/hospitals/*/*.own.json"))
    assert len(owns) == (3 if algorithm == "Personalized" else 0)


def test_a_masked_study_gives_the_bytes_of_one_process(tmp_path: Path) -> None:
    """The keys in the study file are those of the silos' homes: sums are masked, signed and relayed."""
    study = read_study(write_example(tmp_path / "hospitals", 3, keys=True))
    assert file_plan(study).relays
    approve(study)
    run = new_folder(tmp_path, study)
    status = carry_out(tmp_path, study, run)
    assert status.state is RunState.DONE, status.why
    here = run_here(study)
    assert here.run is not None
    assert run.result.read_text() == here.published(5).to_json() + "\n"
    assert ft.load(run.result).document["published"] == {"floor": 5}
    rounds = [
        event
        for line in run.events.read_text().splitlines()
        if (event := json.loads(line))["event"] == "round"
    ]
    assert len(rounds) > 10
    assert {(each["norm"], each["tolerance"]) for each in rounds} == {(None, None)}
    assert run.transcript.read_bytes() == here.run.transcript.encode()
    assert set(here.document["sizes"].values()) == {None}
    plain = ft.run(study.study, study.silos)
    assert plain.document["estimates"] == here.document["estimates"]


class Crowded(DirectLine):
    """A line on which somebody else sends 1,100 frames before the server's second exchange."""

    def __init__(self, line: DirectLine, forge: Callable[[bytes], bytes]) -> None:
        super().__init__(line.endpoints, line.seal)
        self.forge, self.exchanges, self.heard = forge, 0, set[bytes]()

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        self.exchanges += 1
        if self.exchanges == 2:
            forged = self.forge(frames.request(requests["hospital 1"]))
            self.heard |= {self.endpoints["hospital 1"].step(forged) for _ in range(1_100)}
            self.heard.add(self.endpoints["hospital 1"].step(self.forge(frames.HELLO)))
        return super().exchange(requests)


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "unsigned": lambda frame: frame[:1] + b"stray",
    "an honest request, unsigned": lambda frame: frame,
    "another key": lambda frame: b"+" + SigningKey(b"x" * 32).sign(frame) + frame,
    "cut": lambda _: b"+",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_silo_answers_nobody_but_the_server_whose_key_the_plan_has(tmp_path: Path, forgery: str) -> None:
    """1,100 frames of somebody else do not end the study, and its bytes are those of one process."""
    study = pinned(tmp_path, study_of(tmp_path, "Gradient"))
    approve(study)
    run = new_folder(tmp_path, study)
    made: list[Crowded] = []

    def connect(_s: object, _d: object, _a: object, seal: Seal) -> Crowded:
        made.append(Crowded(line(tmp_path, study, seal=seal), FORGERIES[forgery]))
        return made[0]

    Coordination(run.path.parent, run.name).carry_out(connect)
    assert run.status().state is RunState.DONE, run.status().why
    assert made[0].heard == {frames.answer(Declined.UNSIGNED)}
    here = run_here(study)
    assert here.run is not None
    assert run.transcript.read_bytes() == here.run.transcript.encode()
    refused = [line for line in ledger.read(home_at(study.silos["hospital 1"]).ledger_path) if line["reason"]]
    assert refused == []


def test_without_the_servers_key_in_the_plan_somebody_else_can_end_the_study(tmp_path: Path) -> None:
    study = study_of(tmp_path, "Gradient")
    approve(study)
    run = new_folder(tmp_path, study)
    Coordination(run.path.parent, run.name).carry_out(
        lambda _s, _d, _a, seal: Crowded(line(tmp_path, study, seal=seal), FORGERIES["unsigned"])
    )
    assert run.status().state is RunState.STOPPED


def test_a_study_with_the_key_of_another_server_is_not_run(tmp_path: Path) -> None:
    study = pinned(tmp_path / "elsewhere", study_of(tmp_path))
    approve(study)
    status = carry_out(tmp_path, study, new_folder(tmp_path, study))
    assert status.state is RunState.STOPPED
    assert "key of another server" in status.why


class Dies(DirectLine):
    """A line that breaks after ``left`` exchanges, before or after the silos have answered."""

    def __init__(self, line: DirectLine, left: int, *, heard: bool) -> None:
        super().__init__(line.endpoints)
        self._left, self._heard = left, heard

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        self._left -= 1
        if self._left < 0 and not self._heard:
            raise DeadlineError(("hospital 1",), 1.0)
        replies = super().exchange(requests)
        if self._left < 0:
            raise DeadlineError(("hospital 1",), 1.0)
        return replies


@pytest.mark.parametrize("algorithm", ["Coded", "Personalized"])
def test_a_run_that_breaks_at_any_round_resumes_to_the_same_bytes(tmp_path: Path, algorithm: str) -> None:
    """Every other attempt the silos restart, too; each attempt gets a few rounds further."""
    study = study_of(tmp_path, algorithm)
    approve(study)
    run = new_folder(tmp_path, study)
    attempts = 0
    ends = line(tmp_path, study)
    while run.status().state is not RunState.DONE:
        if run.status().state is RunState.WAITING:  # as the dispatcher does
            run.move(Move.START)
        if attempts % 2:
            for end in ends.endpoints.values():
                end.close()
            ends = line(tmp_path, study)
        left, heard = 2 + attempts % 2, attempts % 3 == 0
        dying = Dies(ends, left, heard=heard)
        Coordination(run.path.parent, run.name).carry_out(lambda _s, _d, _a, _seal, dying=dying: dying)  # type: ignore[misc]
        attempts += 1
        assert attempts < 60, run.status().why
    assert attempts > 5
    assert same_as_here(study, run, tmp_path / "transcript")
    for path in study.silos.values():
        told: dict[str, str] = {}
        for entry in ledger.read(home_at(path).ledger_path):
            assert told.setdefault(entry["asked"], entry["replied"]) == entry["replied"]


def test_a_run_waits_for_the_last_approval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(tmp_path)
    approve(study, "hospital 1", "hospital 3")
    run = new_folder(tmp_path, study, patience=60.0)
    waited = {"hospital 1": "ready", "hospital 2": "waiting for its owner's approval", "hospital 3": "ready"}
    seen: list[dict[str, str]] = []
    monkeypatch.setattr("fedtmle.engine.coordinate.POLL", 0.05)
    write = RunFolder.write

    def recorded(self: RunFolder, status: RunStatus) -> None:
        if status.silos == waited and waited not in seen:
            approve(study, "hospital 2")
        seen.append(dict(status.silos))
        write(self, status)

    monkeypatch.setattr(RunFolder, "write", recorded)
    assert carry_out(tmp_path, study, run).state is RunState.DONE
    assert waited in seen


@pytest.mark.parametrize(
    ("decided", "why"),
    [(None, "'hospital 2': waiting for its owner's approval"), (False, "its owner rejected the plan")],
)
def test_a_run_without_an_approval_ends(tmp_path: Path, decided: bool | None, why: str) -> None:
    study = study_of(tmp_path)
    approve(study, "hospital 1", "hospital 3")
    if decided is not None:
        approve(study, "hospital 2", approved=decided)
    status = carry_out(tmp_path, study, new_folder(tmp_path, study, patience=5.0))
    assert status.state is RunState.STOPPED
    assert status.refused is (decided is False)
    assert why in status.why


@pytest.mark.parametrize(
    ("harm", "says"), [("gone", "the journal is gone after round"), ("damaged", "the journal was changed")]
)
def test_a_lost_or_damaged_journal_of_the_server_says_how_to_mend_it(
    tmp_path: Path, harm: str, says: str
) -> None:
    study = study_of(tmp_path)
    approve(study)
    run = new_folder(tmp_path, study)
    ends = line(tmp_path, study)
    dying = Dies(ends, 4, heard=True)
    Coordination(run.path.parent, run.name).carry_out(lambda _s, _d, _a, _seal: dying)
    assert run.status().state is RunState.WAITING  # it goes on by itself
    assert run.status().round > 0
    assert "no estimate was pooled: targeting had not begun" in run.status().why
    kept = run.journal.read_bytes()
    if harm == "gone":
        run.journal.unlink()
    else:
        run.journal.write_bytes(kept[:40] + bytes([kept[40] ^ 1]) + kept[41:])
    run.move(Move.START)
    Coordination(run.path.parent, run.name).carry_out(lambda _s, _d, _a, _seal: ends)
    status = run.status()
    assert status.state is RunState.STOPPED
    assert says in status.why
    assert "restore it from a backup and resume, or cancel the run" in status.why
    assert str(run.journal) in status.why
    run.journal.write_bytes(kept)
    run.move(Move.RESUME)
    run.move(Move.START)
    Coordination(run.path.parent, run.name).carry_out(lambda _s, _d, _a, _seal: ends)
    assert run.status().state is RunState.DONE, run.status().why
    assert same_as_here(study, run, tmp_path / "transcript")


def test_a_study_that_was_changed_at_the_server_is_not_run(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    approve(study)
    run = new_folder(tmp_path, study)
    written = run.path / "study.toml"
    written.write_text(written.read_text().replace("[40, 160]", "[40, 161]"))
    status = carry_out(tmp_path, study, run)
    assert status.state is RunState.STOPPED
    assert "start a new run" in status.why


@pytest.mark.parametrize("name", ["../elsewhere", "", "a/b", "missing"])
def test_a_runs_name_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="there is no run"):
        RunFolder.named(tmp_path, name)


# A study that goes on without the silos that refuse or are absent when it opens.


def without(study: StudyFile, silo: str) -> dict[str, Path]:
    return {name: path for name, path in study.silos.items() if name != silo}


@pytest.mark.parametrize(
    ("decided", "reason"),
    [(None, "waiting for its owner's approval"), (False, "its owner rejected the plan")],
)
def test_a_run_goes_on_without_a_silo_that_does_not_approve(
    tmp_path: Path, decided: bool | None, reason: str
) -> None:
    study = going_on(study_of(tmp_path))
    approve(study, "hospital 1", "hospital 3")
    if decided is not None:
        approve(study, "hospital 2", approved=decided)
    run = new_folder(tmp_path, study, patience=1.0)
    status = carry_out(tmp_path, study, run)
    assert status.state is RunState.DONE, status.why
    assert status.absent == {"hospital 2": reason}
    found = ft.load(run.result).document
    assert found["absent"] == {"hospital 2": reason}
    assert "2 of 3 silos took part" in found["warnings"][0]
    assert "2 of 3 silos" in render(found).splitlines()[1]
    assert found["estimates"] == ft.run(study.study, without(study, "hospital 2")).document["estimates"]
    nobody = new_folder(tmp_path, study, patience=0.1)
    for silo in study.silos:
        approve(study, silo, approved=False)
    assert carry_out(tmp_path, study, nobody).refused


def test_going_on_without_unusable_data_gives_the_bytes_of_one_process(tmp_path: Path) -> None:
    study = going_on(study_of(tmp_path))
    approve(study)
    table = next(study.silos["hospital 2"].parent.glob("*.csv"))
    table.write_text(table.read_text().splitlines()[0] + "\n")
    run = new_folder(tmp_path, study)
    assert carry_out(tmp_path, study, run).state is RunState.DONE
    assert list(ft.load(run.result).document["absent"]) == ["hospital 2"]
    assert same_as_here(study, run, tmp_path / "transcript")


def test_a_silo_that_the_server_started_without_is_not_asked(tmp_path: Path) -> None:
    study = going_on(study_of(tmp_path))
    approve(study, "hospital 1", "hospital 3")
    run = new_folder(tmp_path, study)
    run.move(Move.NOTE, absent={"hospital 2": "not connected"})  # as the dispatcher does
    began = time.monotonic()
    assert carry_out(tmp_path, study, run).state is RunState.DONE
    assert time.monotonic() - began < 30.0  # half the patience
    assert ft.load(run.result).document["absent"] == {"hospital 2": "not connected"}


@pytest.mark.parametrize("how", ["no approval", "a policy that refuses"])
def test_a_resumed_run_has_the_silos_that_opened_it(tmp_path: Path, how: str) -> None:
    """The absent silo is ready after the run has begun: it stays out, and the reason is the first one."""
    study = going_on(study_of(tmp_path))
    approve(study, "hospital 1", "hospital 3")
    path = study.silos["hospital 2"]
    text = path.read_text()
    if how != "no approval":
        approve(study, "hospital 2")
        path.write_text(f"{text}\n[policy]\nmin_rows = 5000\n")
    run = new_folder(tmp_path, study, patience=1.0)
    ends = line(tmp_path, study)
    dying = Dies(ends, 4, heard=True)
    Coordination(run.path.parent, run.name).carry_out(lambda _s, _d, _a, _seal: dying)
    status = run.status()
    assert status.state is RunState.WAITING
    assert status.has_opened
    reason = "waiting for its owner's approval" if how == "no approval" else Reason.POLICY.value
    assert status.absent == {"hospital 2": reason}
    for end in ends.endpoints.values():
        end.close()
    approve(study, "hospital 2")
    path.write_text(text)
    run.move(Move.START)
    assert carry_out(tmp_path, study, run).state is RunState.DONE
    found = ft.load(run.result).document
    assert found["absent"] == {"hospital 2": reason}
    assert found["estimates"] == ft.run(study.study, without(study, "hospital 2")).document["estimates"]
