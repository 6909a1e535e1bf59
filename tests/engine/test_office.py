"""The server's office over runs on disk: who may ask what, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedtmle.engine.office import (
    COORDINATOR,
    PIECE,
    Cancel,
    Denied,
    Fetch,
    LookAt,
    Office,
    OfficeReply,
    OfficeRequest,
    Piece,
    Resume,
    RunNews,
    Submit,
    read_reply,
    read_request,
    write_message,
)
from fedtmle.engine.post import LONGEST_STUDY, MAX_STUDIES
from fedtmle.engine.process import Process
from fedtmle.engine.runs import Move, RunFolder, RunState, RunStatus
from fedtmle.errors import DecodeError
from fedtmle.studyfile.file import StudyFile, file_plan
from tests.engine.lines import study_of

ALICE, BOB = "alice@fedtmle.org", "bob@fedtmle.org"


class Desk:
    """A server's folder with an office, and a study to post."""

    def __init__(self, folder: Path) -> None:
        self.server = folder / "server"
        (self.server / "fedtmle").mkdir(parents=True)
        self.study: StudyFile = study_of(folder)
        self.office = Office(self.server, version="1")

    def ask(self, request: OfficeRequest, sender: str = ALICE) -> OfficeReply:
        return read_reply(write_message(self.office.answer(sender, write_message(request))))

    def submit(self, sender: str = ALICE, **other: Any) -> OfficeReply:
        fields: dict[str, Any] = {
            "name": "study",
            "text": self.study.path.read_bytes(),
            "plan": file_plan(self.study).digest.hex(),
            "version": "1",
            "deadline": 60.0,
            "patience": 60.0,
        }
        return self.ask(Submit(**(fields | other)), sender)

    def post(self, sender: str = ALICE) -> RunFolder:
        news = self.submit(sender)
        assert isinstance(news, RunNews), news
        return RunFolder.named(self.server / "runs", news.run)

    def denied(self, request: OfficeRequest, sender: str = ALICE) -> str:
        reply = self.ask(request, sender)
        assert isinstance(reply, Denied), reply
        return reply.message


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_study_that_was_posted_is_a_run_that_waits(desk: Desk) -> None:
    run = desk.post()
    assert (run.path / "study.toml").read_bytes() == desk.study.path.read_bytes()
    assert run.status().state is RunState.WAITING
    assert run.terms().owner == ALICE
    assert run.terms().plan == file_plan(desk.study).digest.hex()
    news = desk.ask(LookAt(run=run.name))
    assert isinstance(news, RunNews)
    assert news.status.state is RunState.WAITING


def test_the_status_has_nothing_of_the_servers_processes(desk: Desk) -> None:
    run = desk.post()
    run.move(Move.START)
    run.move(Move.ARRIVE, by=Process.here())
    run.move(Move.NOTE, by=Process.here(), job="a-job", round=3)
    news = desk.ask(LookAt(run=run.name))
    assert isinstance(news, RunNews)
    assert (news.status.process, news.status.job, news.status.round) == (None, "", 3)


def test_a_run_exists_for_who_posted_it_and_for_the_coordinator(desk: Desk) -> None:
    run = desk.post()
    requests: list[OfficeRequest] = [
        LookAt(run=run.name),
        Fetch(run=run.name, file="result", offset=0),
        Resume(run=run.name),
        Cancel(run=run.name),
    ]
    for request in requests:
        assert desk.denied(request, BOB) == f"the server has no run '{run.name}' of yours"
    assert desk.denied(LookAt(run="none"), BOB) == "the server has no run 'none' of yours"
    assert isinstance(desk.ask(LookAt(run=run.name), COORDINATOR), RunNews)
    here = RunFolder.new(desk.server / "runs", desk.study, run.terms())
    (here.path / "terms.json").write_text(json.dumps({**_terms(run), "owner": ""}))
    assert "no run" in desk.denied(LookAt(run=here.name))  # made at the server: the coordinator's


def _terms(run: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.path / "terms.json").read_text())
    return found


@pytest.mark.parametrize("sender", ["hospital-1", "server", "", "None"])
def test_a_silo_cannot_use_the_office(desk: Desk, sender: str) -> None:
    reply = desk.submit(sender)
    assert isinstance(reply, Denied)
    assert not list(RunFolder.every(desk.server / "runs"))


def test_a_plan_is_posted_once_and_another_owner_learns_no_name_of_it(desk: Desk) -> None:
    run = desk.post()
    again = desk.submit()
    assert isinstance(again, Denied)
    assert "started already" in again.message
    assert run.name in again.message
    other = desk.submit(BOB)
    assert isinstance(other, Denied)
    assert "somebody else has posted this plan" in other.message
    assert run.name not in other.message


def test_another_version_is_told_before_anything_is_made(desk: Desk) -> None:
    reply = desk.submit(plan="0" * 64, version="0.1")
    assert isinstance(reply, Denied)
    assert "fedtmle 1, reads another plan" in reply.message
    assert "install the same version" in reply.message
    assert not list(RunFolder.every(desk.server / "runs"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"not toml = = [", "study"),
        (b"a" * (LONGEST_STUDY + 1), "64 KiB"),
        (b"[" * 60000, "study"),
        (b"\xff\xfe", "study"),
    ],
)
def test_a_text_that_is_no_study_is_denied_without_a_path_of_the_server(
    desk: Desk, text: bytes, match: str
) -> None:
    reply = desk.submit(text=text)
    assert isinstance(reply, Denied)
    assert match in reply.message
    assert "/tmp" not in reply.message  # noqa: S108 - where the server would read it


def test_a_name_cannot_point_outside_the_folder_of_runs(desk: Desk) -> None:
    run = desk.post()
    for name in (f"../runs/{run.name}", ".", "", "a/b", "x" * 100):
        assert "has no run" in desk.denied(LookAt(run=name))
    made = desk.submit(name="../../etc/x", text=desk.study.path.read_bytes() + b"\n", plan="0" * 64)
    assert isinstance(made, Denied)  # the same plan; what matters is that nothing was written elsewhere
    assert sorted(path.name for path in desk.server.iterdir()) == ["fedtmle", "runs"]


def test_an_unknown_silo_is_named_when_the_server_knows_its_silos(desk: Desk) -> None:
    (desk.server / "fedtmle" / "sites.json").write_text('{"hospital 1": "hospital-1"}')
    reply = desk.submit()
    assert isinstance(reply, Denied)
    assert "has no silo 'hospital 2' or 'hospital 3'; it has 'hospital 1'" in reply.message


def test_a_result_comes_in_pieces_and_messages_of_silos_never(desk: Desk) -> None:
    run = desk.post()
    assert desk.ask(Fetch(run=run.name, file="result", offset=0)) == Piece(data=b"", size=0)
    data = bytes(range(256)) * (PIECE // 128)
    run.result.write_bytes(data)
    got = b""
    while len(got) < len(data):
        piece = desk.ask(Fetch(run=run.name, file="result", offset=len(got)))
        assert isinstance(piece, Piece)
        assert piece.size == len(data)
        assert 0 < len(piece.data) <= PIECE
        got += piece.data
    assert got == data
    run.transcript.write_bytes(b"secret")
    with pytest.raises(DecodeError):
        read_request(b'{"type":"fetch","run":"%s","file":"transcript","offset":0}' % run.name.encode())


def test_a_run_is_cancelled_and_resumed_from_elsewhere(desk: Desk) -> None:
    run = desk.post()
    run.move(Move.FAIL, why="a disk was full")
    news = desk.ask(Resume(run=run.name))
    assert isinstance(news, RunNews)
    assert news.status.state is RunState.WAITING
    assert isinstance(desk.ask(Cancel(run=run.name)), RunNews)
    assert run.status().state is RunState.CANCELLED
    assert "cancelled already" in desk.denied(Cancel(run=run.name))
    assert "was cancelled" in desk.denied(Resume(run=run.name))


@pytest.mark.parametrize("data", [None, 7, b"", b"{}", b"[]" * 9, b'{"type":"look"}', b"\xff", b"[" * 100000])
def test_bytes_that_are_no_request_are_denied(desk: Desk, data: object) -> None:
    assert isinstance(desk.office.answer(ALICE, data), Denied)
    with pytest.raises(DecodeError):
        read_reply(data)


def test_a_server_full_of_runs_takes_no_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle.engine.office.MAX_STUDIES", 1)
    assert MAX_STUDIES > 1
    run = desk.post()
    (run.path / "terms.json").write_text(json.dumps({**_terms(run), "plan": "1" * 64}))
    reply = desk.submit()
    assert isinstance(reply, Denied)
    assert "1 runs that are not over" in reply.message
    run.write(RunStatus(state=RunState.DONE))
    assert isinstance(desk.submit(), RunNews)
