"""A core with a home: plans of the same people, whatever runs; charges; crashes between any two writes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hospitals import NAMES, RUN
from runs import LostError, Server, Site, codes, rows, sites, study_plan

from fedtmle_core.errors import JournalError
from fedtmle_core.home import MOST_REFUSALS, YEAR, Home
from fedtmle_core.journal import FileJournal
from fedtmle_core.office import MORE_ROWS, NOT_APPROVED, HomeOffice
from fedtmle_core.people import PERSON, Census
from fedtmle_core.plan import Plan

NOW = datetime(2026, 11, 19, tzinfo=UTC)
ROSTER = b"roster" * 4


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.create(tmp_path / "home")


def census(people: range) -> Census:
    digests = np.array(list(people), dtype=np.uint64)
    return Census(views={PERSON: digests}, own=(PERSON,), reads=frozenset())


def office(home: Home, people: range = range(40), *, approved: bool = True, days: float = 0) -> HomeOffice:
    return HomeOffice(
        home=home,
        hospital="south",
        census=census(people),
        approves=lambda _: approved,
        clock=lambda: NOW + timedelta(days=days),
    )


def numbered(number: int, **changed: object) -> Plan:
    return study_plan(study=b"study %d" % number, **changed)  # type: ignore[arg-type]


def run_with(offices: HomeOffice, plan: Plan, **more: object) -> set[str]:
    """How a run ends in which the southern hospital has a home."""
    each = {name: {"office": offices} if name == "south" else {} for name in NAMES}
    return codes(Server([Site(name, plan=plan, **each[name], **more) for name in NAMES]).go())  # type: ignore[arg-type]


def test_a_plan_that_its_owner_has_not_approved_is_not_opened(home: Home) -> None:
    closed = office(home, approved=False)
    assert closed.refuses(numbered(1)) == NOT_APPROVED
    assert closed.has_withdrawn(numbered(1))
    assert not office(home).has_withdrawn(numbered(1))


def test_a_core_remembers_whom_its_runs_were_about(home: Home) -> None:
    assert run_with(office(home), numbered(1)) == {"Closed"}
    with home.held() as opened:
        (known,) = opened.memory.studies
    assert (known.plan, known.hospital, known.author) == (numbered(1).digest.hex(), "south", "author")
    assert run_with(office(home, range(41)), numbered(2)) == {"Opened", "PLAN"}  # its loader has to cut back
    assert run_with(office(home, range(1, 40)), numbered(3)) == {"Opened", "PLAN"}
    assert run_with(office(home), numbered(4)) == {"Closed"}
    with home.held() as opened:
        assert [each.plan for each in opened.charges.of("author", NOW)] == [numbered(3).digest.hex()]


def test_the_floor_is_the_plans(home: Home) -> None:
    assert office(home).settles(numbered(1), RUN, ROSTER)
    assert office(home, range(46)).refuses(numbered(2)) == ""
    assert office(home, range(46)).refuses(numbered(2, floor=7)) == MORE_ROWS


def test_a_plan_has_one_run_with_one_roster(home: Home) -> None:
    assert office(home).settles(numbered(1), RUN, ROSTER)
    assert office(home).settles(numbered(1), RUN, ROSTER)  # again, after a restart
    assert not office(home).settles(numbered(1), RUN, b"another")
    assert not office(home).settles(numbered(1), b"another", ROSTER)
    assert office(home).settles(numbered(2), RUN, b"another")
    with home.held() as opened:
        assert len(opened.memory.studies) == 2


def test_of_two_plans_that_opened_at_once_the_second_is_judged_again(home: Home) -> None:
    first, second = office(home), office(home, range(1, 40))
    assert first.refuses(numbered(1)) == second.refuses(numbered(2)) == ""
    assert first.settles(numbered(1), RUN, ROSTER)
    assert not second.settles(numbered(2), RUN, ROSTER)
    with home.held() as opened:
        assert len(opened.memory.studies) == 1


def test_a_plan_is_charged_once_and_refused_for_good(home: Home) -> None:
    plan = numbered(1)
    for _ in range(3):
        office(home).charge(plan)
    with home.held() as opened:
        assert len(opened.charges.of("author", NOW)) == 1
    assert "was refused here before" in office(home).refuses(plan)
    assert office(home).refuses(numbered(2)) == ""


def test_an_author_is_refused_after_few_refusals(home: Home) -> None:
    assert office(home).settles(numbered(0), RUN, ROSTER)
    for number in range(1, MOST_REFUSALS + 1):
        why = office(home, range(1, 40)).refuses(numbered(number))
        assert "so few people of an earlier study left" in why
    assert "within a year" in office(home).refuses(numbered(9))
    assert not office(home).settles(numbered(9), RUN, ROSTER)
    assert office(home).refuses(numbered(9, author="another")) == ""
    assert office(home, days=YEAR.days).refuses(numbered(9)) == ""
    assert office(home).settles(numbered(0), RUN, ROSTER)  # a plan that was admitted goes on


def test_a_run_that_a_judgement_refused_is_charged_and_can_be_resumed(home: Home) -> None:
    """Its core goes on to tell the others; a charge must not keep it from its own journal."""
    table, plan = rows("south"), numbered(1)
    table["x"] = np.full(40, 0.001)
    table["x"][7] = 1.0
    nobody = {name: {**rows(name), "x": np.full(40, 0.001)} for name in NAMES}
    each: dict[str, Any] = {"south": {"office": office(home), "rows": table}}
    server = Server([Site(name, plan=plan, **each.get(name, {"rows": nobody[name]})) for name in NAMES])
    assert codes(server.go()) == {"PEOPLE"}
    with home.held() as opened:
        assert len(opened.charges.of("author", NOW)) == 1
    south = NAMES.index("south")
    server.sites[south].restart()
    requests, replies = server.seen[-1]
    assert server.sites[south].exchange(requests[south]) == replies[south]
    with home.held() as opened:
        assert len(opened.charges.of("author", NOW)) == 1


@pytest.mark.parametrize("crash", range(12))
def test_a_crash_between_any_two_writes_loses_no_run(
    home: Home, crash: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0

    def step(_: int) -> None:
        nonlocal count
        count += 1
        if count == crash + 1:
            raise LostError

    monkeypatch.setattr("os.fsync", step)
    try:
        settled = office(home).settles(numbered(1), RUN, ROSTER)
    except LostError:
        settled = office(home).settles(numbered(1), RUN, ROSTER)
    assert settled
    assert not office(home).settles(numbered(1), b"another", ROSTER)
    with home.held() as opened:
        assert len(opened.memory.studies) == 1


def test_runs_that_cannot_be_read_stop_the_hospital(home: Home) -> None:
    journal = FileJournal(home.records("south") / "runs.journal")
    journal.append(b"\xc1")
    journal.close()
    with pytest.raises(JournalError, match="restore its home"):
        office(home).settles(numbered(1), RUN, ROSTER)


def test_the_identity_of_a_hospital_is_the_homes(home: Home) -> None:
    member = home.identity("south").member("south")
    assert Home.open(home.folder).identity("south").member("south") == member
    assert home.identity("north").member("south") != member
    assert member.signing != home.key("south").public
    assert len(sites()) == len(NAMES)
