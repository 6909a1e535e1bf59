"""The post between a silo and the server: letters, and a silo's desk."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.engine.post import (
    LONGEST_STUDY,
    MAX_STUDIES,
    Desk,
    Notice,
    SiloReport,
    Standing,
    last_contact,
    read_notice,
    read_report,
    write_letter,
)
from fedtmle.errors import DecodeError
from fedtmle.studyfile.file import StudyFile, file_plan
from tests.damage import damaged
from tests.engine.lines import approve, kit_of, study_of
from tests.homes import home_at

H1 = "hospital 1"
PLAN = "ab" * 32
REPORT = SiloReport(version="1", standings={PLAN: Standing.APPROVAL})
NOTICE = Notice(time=1e9, version="1", open=[PLAN], texts={PLAN: b"[target]"})


@pytest.fixture
def study(tmp_path: Path) -> StudyFile:
    return study_of(tmp_path)


def notice_of(study: StudyFile, *, time: float = 1e9) -> Notice:
    plan = file_plan(study).digest.hex()
    return Notice(time=time, version="1", open=[plan], texts={plan: study.path.read_bytes()})


@given(st.sampled_from([write_letter(REPORT), write_letter(NOTICE)]), st.data())
@settings(max_examples=200)
def test_any_bytes_are_a_letter_or_refused(letter: bytes, data: st.DataObject) -> None:
    bytes_ = data.draw(damaged(letter))
    for read in (read_report, read_notice):
        with contextlib.suppress(DecodeError):
            read(bytes_)


def test_letters_come_back() -> None:
    assert read_report(write_letter(REPORT)) == REPORT
    assert read_notice(memoryview(write_letter(NOTICE))) == NOTICE  # as the engine hands it over


@pytest.mark.parametrize(
    "notice",
    [
        Notice(time=0, version="1", open=["../../etc/passwd"]),
        Notice(time=0, version="1", open=[], texts={"x": b""}),
        Notice(time=0, version="1", open=[PLAN] * (MAX_STUDIES + 1)),
        Notice(time=0, version="1", open=[PLAN], texts={PLAN: b"x" * (LONGEST_STUDY + 1)}),
    ],
)
def test_a_server_can_neither_name_a_path_nor_fill_a_disk(notice: Notice) -> None:
    with pytest.raises(DecodeError, match="a notice of the server"):
        read_notice(write_letter(notice))


def test_a_study_that_came_waits_for_its_owner(tmp_path: Path, study: StudyFile) -> None:
    plan = file_plan(study).digest.hex()
    desk = Desk(kit_of(tmp_path, study, H1), version="1")
    assert desk.report().standings == {}
    (path,) = desk.take(notice_of(study))
    assert path.name == f"{plan}.toml"
    assert path.read_text() == study.path.read_text()
    assert desk.report().standings == {plan: Standing.APPROVAL}
    approve(study, H1)
    assert desk.report().standings == {plan: Standing.READY}
    approve(study, H1, approved=False)
    assert desk.report().standings == {plan: Standing.REJECTED}
    # A silo that was restarted knows it before it hears the server again.
    restarted = Desk(kit_of(tmp_path, study, H1), version="1").report()
    assert restarted.standings == desk.report().standings
    assert restarted.engine != desk.report().engine
    assert desk.take(Notice(time=0, version="1", open=[])) == []
    assert desk.report().standings == {}  # the server closed it


def test_a_study_that_came_is_never_replaced(tmp_path: Path, study: StudyFile) -> None:
    plan = file_plan(study).digest.hex()
    desk = Desk(kit_of(tmp_path, study, H1), version="1")
    (path,) = desk.take(notice_of(study))
    assert desk.take(Notice(time=0, version="1", open=[plan], texts={plan: b"something else"})) == []
    assert path.read_text() == study.path.read_text()


def test_a_silo_notes_since_when_it_hears_the_server_and_its_clock(tmp_path: Path, study: StudyFile) -> None:
    kit, now = kit_of(tmp_path, study, H1), [1000.0]
    desk = Desk(kit, version="1", clock=lambda: now[0])
    assert last_contact(kit) == {}
    for now[0] in (1000.0, 1005.0, 1010.0):
        desk.take(notice_of(study, time=now[0] - 7))
    assert last_contact(kit)["since"] == 1000.0
    assert last_contact(kit)["heard"] == 1010.0
    assert last_contact(kit)["ahead"] == pytest.approx(7.0)
    now[0] = 1100.0  # silence in between
    desk.take(notice_of(study, time=now[0]))
    assert last_contact(kit)["since"] == 1100.0


@pytest.mark.parametrize("harm", ["no silo file", "damaged approvals"])
def test_a_silo_that_cannot_tell_says_so(tmp_path: Path, study: StudyFile, harm: str) -> None:
    plan = file_plan(study).digest.hex()
    kit = kit_of(tmp_path, study, H1)
    desk = Desk(kit, version="1")
    desk.take(notice_of(study))
    if harm == "no silo file":
        (kit / "silo.json").unlink()
    else:
        home_at(study.silos[H1]).folder.joinpath("approvals.jsonl").write_text("{}\n")
    assert desk.report().standings == {plan: Standing.CONFIGURATION}
