"""Flows in one process: side by side, attempted, and counted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fedtmle.errors import FitError
from fedtmle.estimation.flow import Flow, ask, attempted, both, run_open, together
from fedtmle_core.blocks import Cells, Moments
from fedtmle_core.evaluate import Workspace
from fedtmle_core.leaves import Level, Number
from fedtmle_core.plan import Question
from fedtmle_core.terms import ONE, Kept
from tests.estimation.cohort import cohort

PEOPLE = cohort(100)
COUNT, AGE = Moments.of([ONE]), Moments.of([Number("age", 7)])


def counted(rounds: int) -> Flow[list[float]]:
    """Return the number of people, asked in each of some rounds."""
    found = []
    for _ in range(rounds):
        ((n,),) = yield from ask(COUNT)
        found.append(float(n))
    return found


def failing() -> Flow[list[float]]:
    yield from ask(AGE)
    raise FitError("arm", "nobody")


def test_totals_are_over_all_hospitals() -> None:
    cells = Cells(of=Number("age", 7), edges=(0.25, 0.5), groups=(Level("sex", 1),), sums=(ONE,))
    ages = PEOPLE.columns["age"]
    for hospitals in (1, 4):
        ran = PEOPLE.run(ask(COUNT, AGE, cells), hospitals)
        (n,), (age,), by_bin = ran.result
        assert (n, ran.rounds, ran.numbers) == (100, 1, 8)
        assert age == pytest.approx(ages.sum() / 128)
        men = PEOPLE.columns["sex"] == 1
        edges = (-np.inf, 32, 64, np.inf)
        inside = [(men & (ages >= a) & (ages < b)).sum() for a, b in pairwise(edges)]
        assert by_bin.tolist() == np.repeat(inside, 2).tolist()


def test_flows_side_by_side_share_rounds_and_equal_blocks() -> None:
    seen: list[Question] = []
    ran = PEOPLE.run(together([counted(2), counted(3), counted(0)]), seen=seen)
    assert ran.result == [[100.0] * 2, [100.0] * 3, []]
    assert (ran.rounds, ran.numbers) == (3, 3)
    assert all(question.blocks == (COUNT,) for question in seen)
    ran = PEOPLE.run(both(counted(2), ask(AGE, COUNT)))
    assert (ran.rounds, ran.numbers) == (2, 3)
    assert ran.result[0] == [100.0, 100.0]
    assert ran.result[1][1] == [100.0]


def test_nothing_is_asked_for_no_blocks() -> None:
    ran = PEOPLE.run(ask())
    assert (ran.result, ran.rounds) == ([], 0)
    assert PEOPLE.run(together([])).rounds == 0


def test_a_flow_that_fails_ends_alone_if_it_is_attempted() -> None:
    ran = PEOPLE.run(together([attempted(failing()), attempted(counted(2))]))
    error, found = ran.result
    assert isinstance(error, FitError)
    assert found == [100.0, 100.0]
    with pytest.raises(FitError):
        PEOPLE.run(together([counted(2), failing()]))


def test_workspaces_keep_their_columns_for_the_next_flow() -> None:
    spaces = [Workspace(sheet) for sheet in PEOPLE.sheets(2)]
    term = Kept(Number("age", 7))
    for _ in range(2):
        run_open(ask(Moments.of([term])), spaces, PEOPLE.plan)
        assert all(term in space.kept for space in spaces)
