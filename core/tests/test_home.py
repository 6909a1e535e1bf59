"""A home: made once, never anew; its memory survives crashes, and what was cut off or changed is noticed."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedtmle_core import memory as memory_module
from fedtmle_core.errors import InputError, JournalError
from fedtmle_core.home import MOST_REFUSALS, YEAR, Home, Standing, is_home, key_beside
from fedtmle_core.memory import Study, Totals
from fedtmle_core.people import PERSON, Basis, Census, Conflict, Refusal, Snapshot

NOW = datetime(2026, 11, 19, tzinfo=UTC)
RECORD: Basis = ("id", "y")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.create(tmp_path / "home")


def census(people: Iterator[int] | range, shift: int = 0) -> Census:
    digests = np.array(list(people), dtype=np.uint64)
    views = {PERSON: digests, RECORD: digests + np.uint64(1000 + shift)}
    return Census(views=views, own=(PERSON, RECORD), reads=frozenset({"y"}))


def study(plan: str, hospital: str = "north") -> Study:
    return Study(plan=plan, hospital=hospital, author="a", time="2026-11-19")


def answer(home: Home, plan: str, people: range, hospital: str = "north") -> Snapshot | Refusal:
    """Judge and remember a study in one step, as a core does."""
    with home.held() as opened:
        today = census(people)
        verdict = opened.memory.judge(plan, hospital, today, least=5)
        if isinstance(verdict, Snapshot):
            opened.memory.remember(study(plan, hospital), today.keep(verdict.kept))
        return verdict


# The folder and its key.


def test_a_home_is_for_its_owner_alone_and_keeps_its_keys(home: Home) -> None:
    assert home.folder.stat().st_mode & 0o777 == 0o700
    assert (home.folder / "key").stat().st_mode & 0o777 == 0o600
    again = Home.open(home.folder)
    assert again.key("north").public == home.key("north").public
    assert home.key("north").public != home.key("south").public
    assert home.digester.of_people([b"1"]).tolist() == again.digester.of_people([b"1"]).tolist()


def test_a_home_is_made_by_create_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no home here; restore it from a backup, or make it once"):
        Home.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(InputError, match="not empty"):
        Home.create(tmp_path / "other")
    with pytest.raises(InputError, match="there is no home here"):
        Home.open(tmp_path / "other")


@pytest.mark.parametrize("lost", ["key", "home"])
def test_what_is_lost_is_to_be_restored_and_is_never_made_anew(home: Home, lost: str) -> None:
    (home.folder / lost).unlink()
    (home.folder / "people").mkdir()
    assert is_home(home.folder)
    with pytest.raises(JournalError, match="restore"):
        Home.open(home.folder)
    with pytest.raises(InputError, match="not empty"):
        Home.create(home.folder)
    assert not (home.folder / lost).exists()


@pytest.mark.parametrize("text", ["", "00", "zz" * 32, "é" * 64, "00" * 32 + "00"])
def test_a_key_that_is_no_key_is_to_be_restored(home: Home, text: str) -> None:
    (home.folder / "key").write_text(text, encoding="utf-8")
    with pytest.raises(JournalError, match="this is not a home's key"):
        Home.open(home.folder)


def test_the_key_of_another_home_is_noticed(home: Home, tmp_path: Path) -> None:
    other = Home.create(tmp_path / "other")
    shutil.copy(other.folder / "key", home.folder / "key")
    with pytest.raises(JournalError, match="key of another home"):
        Home.open(home.folder)


def test_a_key_that_others_can_read_is_refused(home: Home) -> None:
    (home.folder / "key").chmod(0o640)
    with pytest.raises(InputError, match="others can read"):
        Home.open(home.folder)


def test_a_creation_that_a_crash_interrupted_goes_on_with_its_key(home: Home) -> None:
    (home.folder / "home").unlink()
    (home.folder / "home.new").touch()
    assert Home.create(home.folder).key("north").public == home.key("north").public


def test_records_alone_are_a_home_that_lost_its_key(home: Home) -> None:
    home.records("north")
    for name in ("home", "key"):
        (home.folder / name).unlink()
    with pytest.raises(JournalError, match="restore"):
        Home.open(home.folder)


def test_the_key_of_a_record_is_that_of_its_hospital(home: Home, tmp_path: Path) -> None:
    names = ("north", "../north")
    for name in names:
        found = key_beside(home.records(name) / "ledger.jsonl")
        assert found is not None
        assert found.public == home.key(name).public
    assert set(home.hospitals) == set(names)
    assert key_beside(tmp_path / "a" / "ledger.jsonl") is None


def test_a_name_that_is_no_plain_word_stays_inside_the_home(home: Home) -> None:
    folders = {home.records(name) for name in ("north", "../north", "a/b", "", "Universität", "x" * 200)}
    assert len(folders) == 6
    assert {folder.parent for folder in folders} == {home.folder / "hospitals"}


# The memory.


def test_studies_of_any_table_and_hospital_are_held_against_each_other(home: Home) -> None:
    assert isinstance(answer(home, "first", range(50)), Snapshot)
    verdict = answer(Home.open(home.folder), "second", range(1, 50), hospital="south")
    assert isinstance(verdict, Refusal)
    assert verdict.conflict is Conflict.LEFT
    cut = answer(home, "third", range(52))
    assert isinstance(cut, Snapshot)
    assert cut.left_out == 2
    with home.held() as opened:
        assert opened.memory.plans == {("first", "north"), ("third", "north")}
        sets = {each.views for each in opened.memory.studies}
        assert len(sets) == 1  # the same people: each set is stored once
        assert len(list((home.folder / "people" / "sets").iterdir())) == 2


def test_a_study_goes_on_from_the_people_with_whom_it_began(home: Home) -> None:
    answer(home, "first", range(50))
    resumed = answer(home, "first", range(80))
    assert isinstance(resumed, Snapshot)
    assert resumed.kept.tolist() == [True] * 50 + [False] * 30
    assert isinstance(answer(home, "first", range(20)), Refusal)
    with home.held() as opened:
        corrected = opened.memory.judge("first", "north", census(range(50), shift=9), least=5)
        assert isinstance(corrected, Refusal)
        assert corrected.basis == RECORD
        without = Census(views={PERSON: np.arange(50, dtype=np.uint64)}, own=(PERSON,), reads=frozenset("y"))
        assert isinstance(opened.memory.judge("first", "north", without, least=5), Refusal)
        assert len(opened.memory.studies) == 1


def test_two_hospitals_of_one_home_may_be_in_one_study(home: Home) -> None:
    assert isinstance(answer(home, "first", range(50)), Snapshot)
    other = answer(home, "first", range(49), hospital="south")
    assert isinstance(other, Snapshot)
    assert other.kept.all()


def test_bases_are_those_that_share_a_column(home: Home) -> None:
    answer(home, "first", range(50))
    with home.held() as opened:
        assert opened.memory.bases(frozenset({"y", "z"})) == [PERSON, RECORD]
        assert opened.memory.bases(frozenset({"z"})) == [PERSON]


def test_what_was_asked_about_the_same_person_is_added_up(home: Home) -> None:
    with home.held() as opened:
        assert opened.memory.totals({}) == Totals(studies=0, numbers=0)
    for plan, people in (("a", range(50)), ("b", range(50)), ("c", range(40, 90)), ("d", range(200, 300))):
        assert isinstance(answer(home, plan, people), Snapshot)
    with home.held() as opened:
        numbers = {"a": 10, "b": 20, "c": 5, "d": 34}
        assert opened.memory.totals(numbers) == Totals(studies=3, numbers=35)
        assert opened.memory.totals({**numbers, "d": 99}) == Totals(studies=1, numbers=99)


def test_records_that_were_cut_off_or_changed_are_noticed(home: Home) -> None:
    people = home.folder / "people"
    sizes = []
    for plan in ("a", "b", "c"):
        answer(home, plan, range(50))
        sizes.append((people / "studies.journal").stat().st_size)
    whole, head = (people / "studies.journal").read_bytes(), (people / "studies.head").read_bytes()
    for size in sizes[:2]:
        (people / "studies.journal").write_bytes(whole[:size])
        with pytest.raises(JournalError, match="head says 3"), home.held():
            pass
    (people / "studies.journal").unlink()
    with pytest.raises(JournalError, match="head says 3"), home.held():
        pass
    (people / "studies.journal").write_bytes(whole)
    (people / "studies.head").unlink()
    with pytest.raises(JournalError, match="head of the memory is gone"), home.held():
        pass
    for broken in (b"", b"\x00", head[:-1] + bytes([head[-1] ^ 1])):
        (people / "studies.head").write_bytes(broken)
        with pytest.raises(JournalError, match="head"), home.held():
            pass
    (people / "studies.head").write_bytes(head)
    with home.held() as opened:
        assert len(opened.memory.studies) == 3


def test_a_memory_written_anew_is_noticed(home: Home, tmp_path: Path) -> None:
    """Its chain is right, as anybody can compute it; its head needs the home's key."""
    answer(home, "a", range(50))
    other = Home.create(tmp_path / "other")
    answer(other, "a", range(60))
    shutil.rmtree(home.folder / "people")
    shutil.copytree(other.folder / "people", home.folder / "people")
    with pytest.raises(JournalError, match="written anew"), home.held():
        pass


@pytest.mark.parametrize("harm", ["lost", "changed"])
def test_a_set_that_is_lost_or_changed_is_noticed(home: Home, harm: str) -> None:
    answer(home, "a", range(50))
    for path in (home.folder / "people" / "sets").iterdir():
        if harm == "lost":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(JournalError, match="a set of people"):
        answer(home, "b", range(50))


def test_a_record_that_is_not_in_its_one_form_is_refused(home: Home) -> None:
    with home.held() as opened:
        fields = msgspec.structs.asdict(study("a"))
        reverse = dict(reversed(fields.items()))
        opened.memory._journal.append(msgspec.msgpack.encode(reverse))
    with pytest.raises(JournalError, match="one form"), home.held():
        pass


def test_a_crash_between_any_two_writes_loses_no_study(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study is remembered, or it is as if it had never come; then it can come again."""
    outcomes = set()
    for crash in range(8):
        plan = f"plan {crash}"
        count = 0

        def step(_: int, crash: int = crash) -> None:
            nonlocal count
            count += 1
            if count > crash:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", step)
        people = range(100 * crash, 100 * crash + 50)
        try:
            answer(home, plan, people)
            outcomes.add("done")
        except KeyboardInterrupt:
            monkeypatch.setattr(os, "fsync", lambda _: None)
            with home.held() as opened:
                known = opened.memory.find(plan, "north") is not None
                outcomes.add("remembered" if known else "forgotten")
        monkeypatch.setattr(os, "fsync", lambda _: None)
        assert isinstance(answer(home, plan, people), Snapshot)
    with home.held() as opened:
        assert len(opened.memory.studies) == 8
    assert outcomes >= {"remembered", "forgotten"}, outcomes


def _answer_in_process(folder: Path, number: int, gate: multiprocessing.synchronize.Barrier) -> bool:
    gate.wait()
    return isinstance(answer(Home.open(folder), f"plan {number}", range(number, 50)), Snapshot)


def _work(folder: Path, number: int, gate: object, out: object) -> None:
    out.put(_answer_in_process(folder, number, gate))  # type: ignore[attr-defined,arg-type]


def test_of_studies_that_differ_by_one_person_and_come_at_once_one_is_answered(home: Home) -> None:
    """Judging and remembering are one step: else each is judged before the other is remembered."""
    context = multiprocessing.get_context("fork")
    gate, out = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_work, args=(home.folder, k, gate, out)) for k in range(4)]
    for worker in workers:
        worker.start()
    answered = [out.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    # Whoever came first has most people; a later one lacks some of them, or is cut back to them.
    with home.held() as opened:
        sets = {each.views for each in opened.memory.studies}
    assert len(sets) == 1
    assert any(answered)


# Charges.


def test_five_refusals_a_year_exhaust_an_account(home: Home) -> None:
    with home.held() as opened:
        charges = opened.charges
        for number in range(MOST_REFUSALS):
            assert charges.standing("a", f"plan {number}", NOW) is Standing.OPEN
            charges.add("a", f"plan {number}", NOW + timedelta(days=number))
            assert charges.standing("a", f"plan {number}", NOW) is Standing.REFUSED
    with home.held() as opened:  # they last
        charges, later = opened.charges, NOW + timedelta(days=10)
        assert charges.standing("a", "new", later) is Standing.EXHAUSTED
        assert charges.standing("b", "new", later) is Standing.OPEN
        assert charges.standing("a", "new", NOW + YEAR) is Standing.OPEN  # the first has expired
        assert charges.standing("a", "plan 0", NOW + YEAR) is Standing.OPEN
        charges.pardon("b", later)
        assert charges.standing("a", "new", later) is Standing.EXHAUSTED
        charges.pardon("a", later)
        assert charges.standing("a", "new", later) is Standing.OPEN
        assert charges.standing("a", "plan 1", later) is Standing.OPEN
        charges.add("a", "again", later)
        assert [each.plan for each in charges.of("a", later)] == ["again"]


def test_charges_that_cannot_be_read_stop_the_home(home: Home) -> None:
    with home.held() as opened:
        opened.charges._journal.append(b"\xc1")
    with pytest.raises(JournalError, match="restore"), home.held():
        pass


def test_a_file_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    memory_module.replace_file(path, b"old")

    def fail(_: int) -> None:
        raise OSError

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):  # noqa: PT011 - the injected one
        memory_module.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert path.stat().st_mode & 0o777 == 0o600
