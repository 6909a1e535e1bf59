"""Points of a fit that a silo declines: the fit goes on elsewhere, and the silo declines a few times only."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import RefusedError
from fedtmle.model import leverage
from fedtmle.privacy.answers import single
from fedtmle.programs.flow import StudyProgram
from fedtmle.protocol import guard as guards
from fedtmle.protocol.guard import MOST_DECLINED, Guard, RefusalError, declined
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.query import AnsweredQuery
from fedtmle.protocol.regression import FitGradientQuery
from fedtmle.runtime.certificate import heard_rounds, overhear, replay
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle_core.journal import MemoryJournal
from tests.attacks.honest import FLOORS, honest

PASSES = 877  # the path to the fit passes a point where one person has 0.835 of a combination


def _plan(seed: int, sums: Literal["rounded", "exact"] = "rounded") -> tuple[Plan, dict[str, Any]]:
    plan, rows = honest(seed, kinds=("study",))
    assert isinstance(plan.program, StudyProgram)
    study = dataclasses.replace(plan.program.study, algorithm=ft.Coded(), sums=sums)
    return study_plan(study, plan.roster), rows


def _silos(plan: Plan, rows: dict[str, Any], **keeping: Any) -> list[Silo]:
    return [Silo(name, plan, own, keeper=Keeper(policy=FLOORS, **keeping)) for name, own in rows.items()]


def _run(plan: Plan, rows: dict[str, Any]) -> Finished:
    return Session(plan, InProcess(_silos(plan, rows))).run()


def _declined(plan: Plan, finished: Finished) -> int:
    rounds = heard_rounds(plan, finished.transcript, finished.sizes)
    return sum(len(declined(each.query, answer)) for each in rounds for answer in each.answers.values())


@pytest.mark.parametrize("seed", [PASSES, 1656])
def test_a_study_finishes_though_its_path_passes_a_point_that_a_silo_declines(seed: int) -> None:
    plan, rows = _plan(seed)
    finished, exact = _run(plan, rows), _run(*_plan(seed, "exact"))
    assert 1 <= _declined(plan, finished) <= MOST_DECLINED
    assert isinstance(finished.outcome, Targeted)
    assert isinstance(exact.outcome, Targeted)
    errors = np.sqrt(np.diag(exact.outcome.estimate.covariance))
    gaps = np.abs(finished.outcome.estimate.psi - exact.outcome.estimate.psi) / errors
    assert gaps.max() < 1e-6
    assert sum(finished.account.rounds.values()) <= 1.2 * sum(exact.account.rounds.values())


def test_after_a_few_declined_points_the_study_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, rows = _plan(64)  # at its fit too one person stands out
    silos = _silos(plan, rows)
    with pytest.raises(RefusedError):
        Session(plan, InProcess(silos)).run()
    refusing = [silo for silo in silos if silo.refused_by]
    assert [silo.refused_by for silo in refusing] == ["min_people"]
    assert refusing[0]._guard.declined == MOST_DECLINED
    monkeypatch.setattr(guards, "MOST_DECLINED", 0)
    plan, rows = _plan(PASSES)
    with pytest.raises(RefusedError):
        _run(plan, rows)


@pytest.fixture(scope="module", autouse=True)
def _residuals_alone() -> Iterator[None]:
    """Judge gaussian rows by their residuals alone: then the paths of these studies pass a refused point."""
    with mock.patch.object(leverage, "spread", return_value=0.0):
        yield


class _Point:
    """The round in which a silo declined, and its rows."""

    def __init__(self) -> None:
        self.plan, self.rows = _plan(PASSES)
        self.finished = _run(self.plan, self.rows)
        pairs = [(silo, asked) for silo in self.rows for asked in self.overheard(silo)]
        ((self.silo, asked),) = [(s, a) for s, a in pairs if declined(a.query, a.answer)]
        self.query = asked.query
        read = self.plan.program.at(self.silo, self.rows[self.silo])
        self.local = LocalRows(self.silo, read, self.plan.program.count(read), None)

    def overheard(self, silo: str) -> tuple[AnsweredQuery, ...]:
        return overhear(self.plan, self.finished.transcript, silo)


@pytest.fixture(scope="module")
def point() -> _Point:
    return _Point()


def test_neither_under_masks_nor_of_other_queries_is_a_point_declined(point: _Point) -> None:
    """Under masks, totals without the silo would be told."""
    Guard(FLOORS).examine(point.query, point.local)
    with pytest.raises(RefusalError, match="min_people"):
        Guard(FLOORS, is_masked=True).examine(point.query, point.local)
    gradients = [member for member in point.query.members if isinstance(member, FitGradientQuery)]
    refused = 0
    for member in gradients:
        try:
            Guard(FLOORS).examine(dataclasses.replace(member, declinable=False), point.local)
        except RefusalError:
            refused += 1
    assert 0 < refused < len(gradients)  # the model of treatment may be told there


def test_a_declined_answer_is_replayed_and_tells_an_audit_nothing(point: _Point) -> None:
    own, transcript = point.rows[point.silo], point.finished.transcript
    replayed = replay(point.plan, own, transcript, point.silo, policy=FLOORS)
    assert [a.answer for a in replayed.answered] == [a.answer for a in point.overheard(point.silo)]
    told = single(replayed.answered)
    assert None not in [asked.answer for asked in told]
    assert len(told) == sum(len(asked.query.members) for asked in replayed.answered) - 1


def test_a_silo_that_restarts_knows_how_often_it_has_declined(point: _Point) -> None:
    journal = MemoryJournal()
    others = [silo for silo in _silos(point.plan, point.rows) if silo.name != point.silo]
    own = point.rows[point.silo]
    silo = Silo(point.silo, point.plan, own, keeper=Keeper(policy=FLOORS, journal=journal))
    Session(point.plan, InProcess([*others, silo])).run()
    again = Silo(point.silo, point.plan, own, keeper=Keeper(policy=FLOORS, journal=journal))
    assert again._guard.declined == silo._guard.declined == 1


def test_where_a_silo_declines_nothing_is_pooled_and_the_next_point_is_halfway(point: _Point) -> None:
    heard = list(heard_rounds(point.plan, point.finished.transcript, point.finished.sizes))
    found = 0
    for each, after in itertools.pairwise(heard):
        later = {m.stream: m for m in after.query.members if isinstance(m, FitGradientQuery)}
        for member, pooled in zip(each.query.members, each.query.split(each.pooled), strict=True):
            if isinstance(member, FitGradientQuery) and pooled is None:
                found += 1  # of this model the last point was zero
                np.testing.assert_allclose(later[member.stream].eps, member.eps / 2, rtol=1e-12)
    assert found == 1
