"""A silo's account of each study, from a ledger in which two sessions take turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.runtime.ledger import Entry, Ledger, read, studies
from fedtmle.text.approval import render_accounts
from fedtmle.watch import LedgerTail

PLANS = ("aa" * 32, "bb" * 32)


def answered(study: int, k: int, *, numbers: int, bits: int, **more: Any) -> Entry:
    """The k-th answer of a study; ``numbers`` and ``bits`` are the session's totals so far."""
    return Entry(
        time=f"2026-01-01T00:00:{10 * k + study:02d}+00:00",
        session=f"0{study}",
        request="ask",
        round=k,
        query="GradientQuery",
        phase="targeting",
        functionals=numbers,
        bits=bits,
        plan=PLANS[study],
        explanation=more.pop("explanation", "sums of the gradient"),
        **more,
    )


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Two studies, line by line in turns: 384 bits of the first, 3,000 of the second."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, sync=False)
    for k in range(1, 4):
        ledger.add(answered(0, k, numbers=2 * k, bits=128 * k))
        ledger.add(answered(1, k, numbers=50 * k, bits=1000 * k, explanation=f"kind {k}"))
    refused: dict[str, Any] = {"decision": "refused", "reason": "policy", "key": "min_people"}
    ledger.add(
        Entry(
            time="2026-01-01T00:01:00+00:00", session="01", request="ask", round=4, plan=PLANS[1], **refused
        )
    )
    ledger.add(
        Entry(time="2026-01-01T00:01:01+00:00", session="00", request="compare", round=4, plan=PLANS[0])
    )
    ledger.close()
    return path


def test_each_study_has_its_own_totals(book: Path) -> None:
    first, second = studies(read(book))
    assert (first.plan, second.plan) == PLANS
    assert (first.answers, first.numbers, first.bits) == (3, 6, 384)
    assert (second.answers, second.numbers, second.bits) == (3, 150, 3000)
    assert [kind.words for kind in first.kinds.values()] == ["sums of the gradient"]
    assert [kind.words for kind in second.kinds.values()] == ["kind 1", "kind 2", "kind 3"]
    assert first.closed
    assert not second.closed
    assert [refusal.key for refusal in second.refusals] == ["min_people"]


def test_the_live_view_has_the_same_totals(book: Path) -> None:
    shown = LedgerTail(book).look()
    assert shown["bits"]["up"] == 3384
    by_study: dict[str, int] = {}
    for kind in shown["sent"]:
        by_study[kind["message"][:14]] = by_study.get(kind["message"][:14], 0) + kind["bits"]
    assert by_study == {"study aaaaaaaa": 384, "study bbbbbbbb": 3000}
    assert shown["status"] != "finished"  # the second study is not closed


def test_the_owner_reads_it_by_study(book: Path) -> None:
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
    printed = runner.invoke(app, ["ledger", "studies", str(book)]).output
    assert "3 answers, 6 numbers, 384 bit" in printed
    assert "by your key min_people" in printed
    assert "GradientQuery" not in printed
    assert max(map(len, printed.splitlines())) <= 80
    told = json.loads(runner.invoke(app, ["ledger", "studies", str(book), "--json"]).output)
    assert [study["plan"] for study in told["studies"]] == list(PLANS)


def test_the_title_of_a_study_passes_for_no_line_of_its_account(book: Path) -> None:
    found = studies(read(book))
    forged = render_accounts(
        found, {PLANS[0]: f"{'x' * 70} Plan 0000000000000000, closed", PLANS[1]: "Plan 0000"}
    )
    assert [line[:9] for line in forged.splitlines() if line.startswith("Plan")] == ["Plan aaaa", "Plan bbbb"]
    assert "Study: Plan 0000" in forged
