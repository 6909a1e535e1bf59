"""A silo's end of the line: who may ask what, and what is said when it may not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import typing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.cli.silo import titles
from fedtmle.deploy.parties import came_to, words
from fedtmle.engine import frames
from fedtmle.engine.frames import Answer, Declined, Ready, Reply, Waiting
from fedtmle.engine.runs import server_key, site_name, sites
from fedtmle.engine.site import Endpoint, _lock, open_endpoint
from fedtmle.errors import DecodeError, InputError
from fedtmle.protocol import messages
from fedtmle.protocol.messages import Open, Opened
from fedtmle.runtime import ledger
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from tests.damage import damaged
from tests.engine.lines import approve, endpoint, kit_of, opened, pinned, study_of
from tests.homes import home_at
from tests.premise import Premise

H1 = "hospital 1"


@pytest.fixture
def study(tmp_path: Path) -> StudyFile:
    return study_of(tmp_path)


def opening_of(kit: Path, site: str, text: bytes, plan: bytes) -> Endpoint:
    return opened(open_endpoint(kit, site, text, plan))


def ask(end: Endpoint, frame: bytes = frames.HELLO) -> Answer:
    """The answer, once the data have been read."""
    for _ in range(100):
        answer = frames.read_answer(end.step(frame))
        if answer is not Waiting.DATA:
            return answer
    raise AssertionError("still reading")


def opening(study: StudyFile) -> bytes:
    plan = file_plan(study).digest
    return messages.encode(Open(messages.WIRE_FORMAT, plan[:16], plan))


ANSWERS: list[Answer] = [Reply(b""), Reply(b"x"), Ready(), Ready(release=True), *Waiting, *Declined]
FRAMES = [frames.request(b""), frames.request(b"x"), frames.HELLO, *map(frames.answer, ANSWERS)]
is_read = Premise("the bytes are a frame", at_least=0.05)


@is_read
@given(st.sampled_from(FRAMES), st.data())
@settings(max_examples=300)
def test_any_frame_is_read_or_refused(frame: bytes, data: st.DataObject) -> None:
    bytes_ = data.draw(damaged(frame))
    read = []
    for decode in (frames.read_request, frames.read_answer):
        with contextlib.suppress(DecodeError):
            read.append(decode(bytes_))
    if is_read.holds(read):
        (found,) = read  # no frame is both a request and an answer
        if isinstance(found, bytes):
            assert frames.request(found) == bytes_
        else:
            assert (frames.HELLO if found is None else frames.answer(found)) == bytes_


def test_every_kind_of_answer_has_an_example() -> None:
    assert {type(answer) for answer in ANSWERS} == set(typing.get_args(Answer))


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_come_back(answer: Answer) -> None:
    assert frames.read_answer(frames.answer(answer)) == answer


def test_names_on_the_network_are_unique() -> None:
    assert site_name("St. Mary's, North") == "st-mary-s-north"
    assert sites(["hospital 1", "hospital 2"]) == {"hospital 1": "hospital-1", "hospital 2": "hospital-2"}
    for taken in (["a b", "a-b"], ["Server"], ["..."]):
        with pytest.raises(InputError, match="choose another name"):
            sites(taken)


def test_nothing_is_answered_before_the_owner_says_yes(tmp_path: Path, study: StudyFile) -> None:
    end = endpoint(tmp_path, study, H1)
    assert ask(end) is Waiting.APPROVAL
    assert ask(end, frames.request(opening(study))) is Waiting.APPROVAL
    approve(study, H1)
    assert ask(end) == Ready()
    answer = ask(end, frames.request(opening(study)))
    assert isinstance(answer, Reply)
    assert isinstance(messages.decode_reply(answer.data), Opened)


def test_an_owner_can_say_no_and_can_take_a_yes_back(tmp_path: Path, study: StudyFile) -> None:
    approve(study, H1, approved=False)
    assert ask(endpoint(tmp_path, study, H1)) is Declined.REJECTED
    approve(study, H1)
    end = endpoint(tmp_path, study, H1)
    assert ask(end) == Ready()
    approve(study, H1, approved=False)
    answer = ask(end, frames.request(opening(study)))
    assert isinstance(answer, Reply)
    assert messages.decode_reply(answer.data) == messages.Refused(messages.Reason.NOT_APPROVED)


def test_an_owner_may_want_signed_requests(tmp_path: Path, study: StudyFile) -> None:
    approve(study)
    path = study.silos[H1]
    path.write_text(path.read_text() + "\n[policy]\nallow_unsigned = false\n")
    assert ask(endpoint(tmp_path, study, H1)) is Declined.NO_SERVER_KEY
    study = pinned(tmp_path, study)
    approve(study)
    end = endpoint(tmp_path, study, H1)
    assert ask(end) is Declined.UNSIGNED
    assert isinstance(ask(end, frames.sealed(frames.HELLO, file_plan(study), server_key(tmp_path))), Ready)


def test_a_tampered_plan_is_refused(tmp_path: Path, study: StudyFile) -> None:
    approve(study, H1)
    kit, text, plan = kit_of(tmp_path, study, H1), study.path.read_bytes(), file_plan(study).digest
    changed = text.replace(b"range = [40, 160]", b"range = [40, 161]")
    assert ask(opening_of(kit, "hospital-1", changed, plan)) is Declined.PLAN
    study.path.write_bytes(changed)
    other = file_plan(read_study(study.path)).digest
    # Announced truly, it is a plan that nobody approved.
    assert ask(opening_of(kit, "hospital-1", changed, other)) is Waiting.APPROVAL


def test_a_silo_that_the_plan_does_not_know_declines(tmp_path: Path, study: StudyFile) -> None:
    approve(study)
    text, plan = study.path.read_bytes(), file_plan(study).digest
    own = kit_of(tmp_path, study, H1)
    assert ask(opening_of(own, "hospital-9", text, plan)) is Declined.ROSTER
    assert ask(opening_of(own, "hospital-2", text, plan)) is Declined.ROSTER  # another silo's name


LONG_KEY = b"a" + b".a" * 30_000 + b" = 1\n"  # 60 kB, for which tomllib takes minutes and gigabytes
DEEP_ARRAY = b"x = " + b"[" * 30_000


@pytest.mark.parametrize(
    "text",
    [b"\xff", b"not toml", b"[target]\nkind = 'ATE'\n", b"#" * ((64 << 10) + 1), LONG_KEY, DEEP_ARRAY],
)
def test_what_is_no_study_is_declined(tmp_path: Path, study: StudyFile, text: bytes) -> None:
    kit = kit_of(tmp_path, study, H1)
    began = time.monotonic()
    assert ask(opening_of(kit, "hospital-1", text, b"")) is Declined.STUDY
    assert time.monotonic() - began < 2.0


def test_no_exception_leaves_the_opening_of_an_endpoint(
    tmp_path: Path, study: StudyFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine would send its text to the server."""

    def fails(*_: object, **__: object) -> None:
        raise RecursionError("secret 7654.321")

    monkeypatch.setattr("fedtmle.engine.site.read_study", fails)
    kit, text = kit_of(tmp_path, study, H1), study.path.read_bytes()
    assert ask(opening_of(kit, "hospital-1", text, b"")) is Declined.FAULT
    assert "secret" in caplog.text


def test_a_study_is_kept_under_its_whole_digest_and_never_replaced(tmp_path: Path, study: StudyFile) -> None:
    endpoint(tmp_path, study, H1)
    (kept,) = (home_at(study.silos[H1]).folder / "studies").iterdir()
    assert kept.name == f"{file_plan(study).digest.hex()}.toml"
    first = f"{study.path.read_text()}# as it came first\n"  # the same plan
    kept.write_text(first)
    endpoint(tmp_path, study, H1)
    assert kept.read_text() == first
    assert list(kept.parent.iterdir()) == [kept]


def test_what_came_under_the_digest_of_another_study_gives_way_to_that_study(
    tmp_path: Path, study: StudyFile
) -> None:
    """The post stores what a server announces, and a server may announce a text as another plan."""
    endpoint(tmp_path, study, H1)
    (kept,) = (home_at(study.silos[H1]).folder / "studies").iterdir()
    ours = kept.read_text()
    for other in ("not a study", ours.replace("[algorithm]", "[options]\nseed = 77\n\n[algorithm]")):
        assert other != ours
        kept.write_text(other)
        assert titles(kept.parent.parent) == {}
        endpoint(tmp_path, study, H1)
        assert kept.read_text() == ours
        assert list(titles(kept.parent.parent)) == [file_plan(study).digest.hex()]


def test_a_silo_without_its_file_declines(tmp_path: Path, study: StudyFile) -> None:
    kit = kit_of(tmp_path, study, H1)
    text, plan = study.path.read_bytes(), file_plan(study).digest
    (kit / "silo.json").write_text(json.dumps({"silo_file": str(tmp_path / "gone.toml")}))
    assert ask(opening_of(kit, "hospital-1", text, plan)) is Declined.CONFIGURATION
    (kit / "silo.json").unlink()
    assert ask(opening_of(kit, "hospital-1", text, plan)) is Declined.CONFIGURATION


def test_data_that_do_not_fit_are_declined_without_a_word_of_them(
    tmp_path: Path, study: StudyFile, caplog: pytest.LogCaptureFixture
) -> None:
    approve(study, H1)
    records = study.silos[H1].parent / "infants.csv"
    records.write_text(records.read_text().replace("\n", "\n7654.321,", 1))
    end = endpoint(tmp_path, study, H1)
    assert ask(end) is Declined.DATA
    assert ask(end, frames.request(opening(study))) is Declined.DATA
    assert "infants.csv" in caplog.text
    assert "7654" not in caplog.text


def test_data_that_changed_since_the_approval_need_a_new_one(tmp_path: Path, study: StudyFile) -> None:
    """The approval holds for the rows that the owner had; restoring them, or approving again, mends it."""
    path = study.silos[H1]
    home, plan = home_at(path), file_plan(study)
    home.approvals.decide(plan.digest, approved=True, data=home.data_digest(plan))
    records = path.parent / "infants.csv"
    before = records.read_text()
    records.write_text("\n".join(before.splitlines()[:-1]) + "\n")  # one record less
    changed = endpoint(tmp_path, study, H1)
    assert ask(changed) is Declined.CHANGED
    changed.close()
    (found,) = came_to(home)
    assert "but the data changed since: approve it again" in words(found, home, None)
    records.write_text(before)
    assert words(found, home, None).startswith("approved ")
    assert "    Study: " in words(found, home, None)
    assert "closed" not in words(replace(found, begun=False), home, [found.plan])
    assert "then closed by the coordinator; nothing was asked" in words(replace(found, begun=False), home, [])
    assert "closed" not in words(replace(found, begun=True), home, [])
    assert "changed" not in words(found, home, None)
    again = endpoint(tmp_path, study, H1)
    assert ask(again) == Ready()
    assert isinstance(ask(again, frames.request(opening(study))), Reply)
    again.close()
    refused, line = ledger.read(home.ledger_path)
    assert (refused["decision"], refused["reason"]) == ("refused", Declined.CHANGED.value)
    assert refused["plan"] == line["plan"] == plan.digest.hex()
    assert line["data"] == home.data_digest(plan).hex()


def test_data_that_changed_can_be_approved_again(tmp_path: Path, study: StudyFile) -> None:
    path = study.silos[H1]
    home, plan = home_at(path), file_plan(study)
    home.approvals.decide(plan.digest, approved=True, data=home.data_digest(plan))
    records = path.parent / "infants.csv"
    records.write_text("\n".join(records.read_text().splitlines()[:-1]) + "\n")
    changed = endpoint(tmp_path, study, H1)
    assert ask(changed) is Declined.CHANGED
    changed.close()
    home.approvals.decide(plan.digest, approved=True, data=home.data_digest(plan))
    assert ask(endpoint(tmp_path, study, H1)) == Ready()


def test_a_journal_that_is_gone_is_said_to_be(
    tmp_path: Path, study: StudyFile, caplog: pytest.LogCaptureFixture
) -> None:
    """The silo has answered: with an empty journal it would answer the same plan again."""
    approve(study, H1)
    end = endpoint(tmp_path, study, H1)
    assert ask(end) == Ready()
    assert isinstance(ask(end, frames.request(opening(study))), Reply)
    end.close()
    (journal,) = home_at(study.silos[H1]).folder.glob("*.journal")
    kept = journal.read_bytes()
    journal.unlink()
    lost = endpoint(tmp_path, study, H1)
    assert ask(lost) is Declined.JOURNAL
    lost.close()
    assert "the journal of this plan is gone, and the ledger holds answers" in caplog.text
    journal.write_bytes(kept)  # the documented repair
    assert ask(endpoint(tmp_path, study, H1)) == Ready()


def test_a_job_that_ends_while_a_request_is_on_its_way_declines_nothing(
    tmp_path: Path, study: StudyFile
) -> None:
    """The engine ends a job at all silos when it loses one silo's process; the run goes on in another job."""
    approve(study, H1)
    end = endpoint(tmp_path, study, H1)
    assert ask(end) == Ready()
    end.close()
    assert ask(end, frames.request(opening(study))) is Waiting.END
    assert ask(end) is Waiting.END


def test_the_digest_of_the_data_is_signed_with_the_approval(study: StudyFile) -> None:
    home, plan = home_at(study.silos[H1]), file_plan(study)
    made = home.approvals.decide(plan.digest, approved=True, data=home.data_digest(plan))
    text = home.approvals.path.read_text()
    home.approvals.path.write_text(text.replace(made.data, "00" * 32))
    assert not home.approvals.approves(plan.digest)


def test_a_damaged_journal_is_declined(tmp_path: Path, study: StudyFile) -> None:
    approve(study, H1)
    end = endpoint(tmp_path, study, H1)
    assert ask(end) == Ready()
    assert isinstance(ask(end, frames.request(opening(study))), Reply)
    end.close()
    (journal,) = home_at(study.silos[H1]).folder.glob("*.journal")
    data = bytearray(journal.read_bytes())
    data[40] ^= 1
    journal.write_bytes(data)
    assert ask(endpoint(tmp_path, study, H1)) is Declined.JOURNAL


def test_one_process_per_plan(tmp_path: Path, study: StudyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle.engine.site.LOCK_WAIT", 0.3)
    approve(study, H1)
    first, second = endpoint(tmp_path, study, H1), endpoint(tmp_path, study, H1)
    assert ask(first) == Ready()
    assert ask(second) is Declined.JOURNAL


def test_the_process_of_an_earlier_job_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage the engine may keep it for minutes, and it holds the journal."""
    monkeypatch.setattr("fedtmle.engine.site.LOCK_GRACE", 0.1)
    path = tmp_path / "plan.lock"
    text = "import sys, time; from pathlib import Path; from fedtmle.engine import site\n"
    text += "site._lock(Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    earlier = subprocess.Popen([sys.executable, "-c", text, str(path)], stdout=subprocess.PIPE)  # noqa: S603
    with earlier:
        assert earlier.stdout is not None
        earlier.stdout.readline()
        os.close(_lock(path))
        assert earlier.wait(10) == -signal.SIGKILL


def test_a_fault_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("secret 7654.321")

    end = Endpoint(fails, lambda: None)
    assert end.step(frames.HELLO) == frames.answer(Declined.FAULT)
    assert "secret" in caplog.text  # in the silo's own log
    assert frames.read_answer(end.step(b"nonsense")) is Declined.FAULT
