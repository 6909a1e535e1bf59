"""Person-periods against loops over people and periods, and hazards that are kept for one table only."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.model.table import Factor, Table
from fedtmle.targets.effects.components import Everyone, Static
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.time.followup import PERIOD, FollowUp
from fedtmle.targets.time.problem import RegimeGroup
from fedtmle.targets.time.statistics import AbstractPeriodResponse, CensoringResponse, EventResponse
from fedtmle_core.types import Part
from tests.time.test_eif import Tree, law_of, problem_of, table_of, target_of

EDGES = (1.0, 2.5, 4.0)
TIMES = [0.0, 1.0, 1.1, 2.5, 2.6, 4.0, 9.0, 3.0, 0.5, 2.0]
EVENTS = ["a", "b", "none", "b", "a", "none", "a", "none", "b", "a"]
COLUMNS = EffectColumns(
    outcome="event",
    outcome_bounds=(0.0, 1.0),
    treatment=None,
    arms=("all",),
    strata=None,
    strata_levels=(),
    weights="w",
    weight_ceiling=64.0,
    cluster=None,
    largest_cluster=1,
)
FOLLOW_UP = FollowUp(
    time="time", event="event", edges=EDGES, causes=("a", "b"), censored="none", truncate=True
)


def table() -> Table:
    levels = ("a", "b", "none")
    codes = np.array([levels.index(event) for event in EVENTS])
    return Table(
        n_rows=len(TIMES),
        numeric={"time": np.array(TIMES), "w": np.arange(1.0, len(TIMES) + 1)},
        factors={"event": Factor(codes, levels)},
    )


def longhand(what: str) -> list[tuple[int, int, float]]:
    """Return (person, period, response) of everyone at risk, by the definitions."""
    rows = []
    for person, (time, event) in enumerate(zip(TIMES, EVENTS, strict=True)):
        for period, (start, end) in enumerate(zip((-1.0, *EDGES[:-1]), EDGES, strict=True), start=1):
            if time <= start:
                continue  # not at risk any more
            happens = event if start < time <= end else "later"
            if what == "censoring":
                if period < len(EDGES) and happens in ("none", "later"):
                    rows.append((person, period, float(happens == "none")))
            elif not (what == "b" and happens == "a"):  # a comes before b within a period
                rows.append((person, period, float(happens == what)))
    return rows


@pytest.mark.parametrize("what", ["a", "b", "censoring"])
def test_person_periods_are_those_at_risk(what: str) -> None:
    response: AbstractPeriodResponse
    if what == "censoring":
        response = CensoringResponse(columns=COLUMNS, follow_up=FOLLOW_UP, weight_mean=2.0)
    else:
        cause = 1 if what == "a" else 2
        response = EventResponse(columns=COLUMNS, follow_up=FOLLOW_UP, weight_mean=2.0, cause=cause)
    long, counts = response.expand(table())
    person = np.repeat(np.arange(len(TIMES)), counts)
    y, w = response.of(long)
    period = (long.factors[PERIOD].codes + 1).tolist()
    assert list(zip(person.tolist(), period, y.tolist(), strict=True)) == longhand(what)
    assert (long.numeric[PERIOD] == long.factors[PERIOD].codes + 1).all()
    assert w == pytest.approx((person + 1) / 2.0)


def test_hazards_are_kept_for_each_table_apart() -> None:
    """The rows of another table are evaluated anew, at the same law too."""
    tree = Tree(2)
    groups = [RegimeGroup(Static(arm), Everyone(), 1.0) for arm in ("0", "1")]
    target = target_of(ft.Risk, 2)
    problem, fresh = (problem_of(tree, law_of(tree), target, groups) for _ in range(2))
    whole = table_of(tree)
    part, other = whole.take(np.arange(0, 24)), whole.take(np.arange(24, 48))
    law = problem.move(problem.start(), np.full(problem.dim, 0.05))
    eps = np.zeros(problem.dim)
    problem.submodel(law, part).sums(eps, Part.GRADIENT)
    assert problem.submodel(law, other).sums(eps, Part.GRADIENT) == fresh.submodel(law, other).sums(
        eps, Part.GRADIENT
    )


@pytest.mark.parametrize("kept", [0, 10, 48], ids=["none", "some", "all"])
def test_hazards_that_are_not_kept_are_the_same(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two moves the sums have the same bits, whatever number of people is kept."""
    tree = Tree(2)
    groups = [RegimeGroup(Static(arm), Everyone(), 1.0) for arm in ("0", "1")]
    problem, fresh = (problem_of(tree, law_of(tree), target_of(ft.Risk, 2), groups) for _ in range(2))
    rows, eps = table_of(tree).take(np.arange(48)), np.zeros(problem.dim)
    law = problem.start()
    for move in (0.05, -0.02):
        law = problem.move(law, np.full(problem.dim, move))
        wanted = fresh.submodel(law, rows).sums(eps, Part.GRADIENT)
        with monkeypatch.context() as patch:
            patch.setattr(Table, "nbytes", 8 * problem.terms * kept)
            patch.setattr("fedtmle.targets.time.problem.people_slices", slices_of_four)
            assert problem.submodel(law, rows).sums(eps, Part.GRADIENT) == wanted
    assert problem._own(law, rows).logits.shape[-1] == kept


def slices_of_four(n_rows: int, periods: int) -> list[slice]:
    del periods
    return [slice(start, min(start + 4, n_rows)) for start in range(0, n_rows, 4)]
