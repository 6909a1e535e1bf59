"""Seeded faults in a study with privacy: nobody ever sees two draws of noise for one question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import fedtmle as ft
from fedtmle.protocol.plan import Plan, roster
from fedtmle.runtime import silo
from fedtmle.studyfile.file import study_plan
from fedtmle_core.noise import discrete_gaussian
from tests.initial.silos import pooled_table, split, trial
from tests.premise import Premise
from tests.runtime.faults import PASSING, keeper_without_ledger
from tests.runtime.simulator import Kind, run_until_done
from tests.runtime.test_faults import silo_writes_late

SCHEDULES = 10
LANES = 4 * 5 // 2 + 2 * (2 + 3) + (1 + 1 + 2)  # of the Gram matrix, two gradients and the closing sums


def case() -> tuple[Plan, Mapping[str, Any]]:
    tables = split(pooled_table(300, 1, binary=True), 3)
    privacy = ft.Privacy(epsilon=1.0, server="trusted")
    study = trial(ft.GLM("a + x"), binary=True, algorithm=ft.OneStep(), privacy=privacy)
    return study_plan(study, roster(list(tables))), tables


def two_draws(seed: int) -> tuple[bool, bool]:
    """Return whether two answers to one question left a silo, and whether a silo crashed."""
    plan, rows = case()
    run = run_until_done(plan, rows, seed, keeper=keeper_without_ledger)
    is_told_twice = any(len(replies - PASSING) > 1 for replies in run.network.told.values())
    crashed = any(run.counts[kind] for kind in Kind if "crash" in str(kind).lower())
    return is_told_twice, crashed


def test_no_question_gets_two_draws_of_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = 0

    def counted(variance: Any, below: Any) -> int:
        nonlocal drawn
        drawn += 1
        return discrete_gaussian(variance, below)

    monkeypatch.setattr(silo, "discrete_gaussian", counted)
    with Premise("a silo crashed", at_least=0.3) as crashes:
        for seed in range(SCHEDULES):
            is_told_twice, crashed = two_draws(seed)
            crashes.holds(crashed)
            assert not is_told_twice
    # A draw whose answer was lost before it was recorded is made again, and was never sent.
    assert drawn > 0.7 * SCHEDULES * 3 * LANES


def test_a_journal_written_late_gives_two_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    silo_writes_late(monkeypatch)
    assert any(two_draws(seed)[0] for seed in range(SCHEDULES))
