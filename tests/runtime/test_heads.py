"""Signed heads: what was cut off at the end of a ledger or of the approvals, or written anew, is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.errors import JournalError
from fedtmle.runtime.ledger import Entry, Ledger, verify
from fedtmle.runtime.signing import Approvals, head_path
from fedtmle_core.home import Home
from fedtmle_core.signing import SigningKey

PLAN = bytes(32)


def fill(path: Path, lines: int, key: SigningKey | None) -> None:
    ledger = Ledger(path, sync=False, key=key)
    for k in range(lines):
        ledger.add(Entry(time="2026-01-01T00:00:00+00:00", session="ab", request="ask", round=k))
    ledger.close()


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.at(tmp_path / "key")


@pytest.fixture
def book(tmp_path: Path, key: SigningKey) -> Path:
    path = tmp_path / "ledger.jsonl"
    fill(path, 23, key)
    return path


def test_a_ledger_goes_on_from_its_head(book: Path, key: SigningKey) -> None:
    fill(book, 2, key)
    assert verify(book, key.public)[0] == 25


def test_a_ledger_that_was_chained_anew_is_noticed(book: Path, key: SigningKey) -> None:
    """Of 23 lines 3 are left, with a perfect chain of their own."""
    head = head_path(book).read_bytes()
    book.unlink()
    fill(book, 3, None)
    head_path(book).write_bytes(head)
    assert verify(book, None)[0] == 3  # the chain alone does not tell
    with pytest.raises(JournalError, match="lines were cut off"):
        verify(book, key.public)
    with pytest.raises(JournalError, match="lines were cut off"):
        Ledger(book, key=key)  # nor does the silo add to it


def test_a_ledger_of_the_same_length_is_noticed(book: Path, tmp_path: Path, key: SigningKey) -> None:
    head = head_path(book).read_bytes()
    book.unlink()
    ledger = Ledger(book, sync=False)
    for k in range(23):
        ledger.add(Entry(time="2027-01-01T00:00:00+00:00", session="ab", request="ask", round=k))
    ledger.close()
    head_path(book).write_bytes(head)
    with pytest.raises(JournalError, match="written anew"):
        verify(book, key.public)
    other = SigningKey.at(tmp_path / "another")
    fill(book, 1, None)
    head_path(book).unlink()
    fill(book, 1, other)
    with pytest.raises(JournalError, match="did not sign"):
        verify(book, key.public)


def test_a_crash_between_line_and_head_is_no_change(book: Path, key: SigningKey) -> None:
    head = head_path(book).read_bytes()
    fill(book, 1, key)
    head_path(book).write_bytes(head)  # as if it had not been written
    assert verify(book, key.public)[0] == 24
    fill(book, 1, key)
    assert verify(book, key.public)[0] == 25


def test_a_revocation_cannot_be_cut_off(tmp_path: Path, key: SigningKey) -> None:
    approvals = Approvals(tmp_path / "approvals.jsonl", key)
    approvals.decide(PLAN, approved=True)
    approvals.decide(PLAN, approved=False)
    assert not approvals.approves(PLAN)
    lines = approvals.path.read_bytes().splitlines(keepends=True)
    approvals.path.write_bytes(lines[0])  # each line is signed, and this one says yes
    assert not approvals.approves(PLAN)
    with pytest.raises(JournalError, match="lines were cut off"):
        approvals.decisions()
    approvals.path.unlink()
    with pytest.raises(JournalError, match="the file is gone"):
        approvals.decisions()


def test_decisions_can_be_neither_exchanged_nor_dropped_inside(tmp_path: Path, key: SigningKey) -> None:
    approvals = Approvals(tmp_path / "approvals.jsonl", key)
    for approved in (True, False, True):
        approvals.decide(PLAN, approved=approved)
    lines = approvals.path.read_bytes().splitlines(keepends=True)
    approvals.path.write_bytes(b"".join([lines[0], lines[2], lines[1]]))
    with pytest.raises(JournalError, match="written anew"):
        approvals.decisions()


def test_the_command_says_whether_the_head_is_signed(tmp_path: Path) -> None:
    home = Home.create(tmp_path / "home")
    book = home.records("a silo") / "ledger.jsonl"
    fill(book, 23, home.key("a silo"))
    runner = CliRunner(env={"COLUMNS": "80"})
    assert "no line is missing" in runner.invoke(app, ["ledger", "verify", str(book)]).output
    head = json.loads(head_path(book).read_text())
    head_path(book).write_text(json.dumps({**head, "count": 22}))
    done = runner.invoke(app, ["ledger", "verify", str(book)])
    assert done.exit_code == 1
    assert "did not sign" in done.output
