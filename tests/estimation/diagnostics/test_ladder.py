"""The estimates under other bounds equal the present package's, and longhand numbers."""

from __future__ import annotations

import numpy as np
import pytest

from fedtmle.estimation.diagnostics.ladder import ESTIMATE_ERROR, BoundLadder, Scores
from fedtmle_core.terms import ONE, product
from tests.estimation.diagnostics.supplied import Supplied, ran


def ladder_of(outcome, rows: Supplied) -> BoundLadder:
    problem, prepare = outcome.problem, outcome.problem.prepare
    overall = prepare.overall
    k = min(overall, problem.dim)
    u, m = rows.terms("u")[:overall], rows.terms("m")[:overall]
    return BoundLadder(
        pool=rows.pool,
        scores=(Scores(tuple(a - b for a, b in zip(u, m, strict=True)), rows.term("denominator")),),
        m=m,
        t=rows.term("t 0"),
        L=tuple(row[:overall] for row in problem.combination[:k]),
        floor=prepare.g_floor,
        bounds=tuple(rung.bound for rung in outcome.details.diagnostics.ladder),
        groups=tuple(product(taken, rows.term("observed")) for taken in rows.terms("taken")),
        width=problem.width,
        cluster=prepare.columns.cluster and "cluster",
    )


def same_ladder(outcome, rows: Supplied) -> BoundLadder:
    expected, asked = outcome.details.diagnostics.ladder, ladder_of(outcome, rows)
    found = rows.ask(asked)
    low = outcome.problem.outcome_bounds[0] * np.array(outcome.problem.combination).sum(axis=1)
    assert len(found) == len(expected) > 0
    for new, old in zip(found, expected, strict=True):
        assert new.bound == old.bound
        error = 2 * ESTIMATE_ERROR / np.sqrt(rows.n) * outcome.problem.width
        psi, covariance = new.estimate(low[: len(new.mean)])
        psi_old, covariance_old = old.estimate(low[: len(new.mean)])
        np.testing.assert_allclose(psi, psi_old, atol=error)
        np.testing.assert_allclose(np.sqrt(np.diag(covariance)), np.sqrt(np.diag(covariance_old)), rtol=2e-3)
        assert error < np.sqrt(np.diag(covariance)).min() / 40
    return asked


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name in ("ATE", "three arms", "ATT", "strata", "rules")
        for option in ("plain", "missing", "weights, clusters", "all")
    ],
)
def test_the_ladder_is_that_of_the_present_package(name: str, option: str) -> None:
    _, outcome, rows = ran(name, option)
    same_ladder(outcome, rows)


def test_the_ladder_of_the_demonstration(demonstration) -> None:
    _, outcome, rows = demonstration
    assert rows.numbers(same_ladder(outcome, rows)) == 4 * (2 + 3 + 2 * 2)


def test_at_the_studys_own_bound_it_is_the_estimate() -> None:
    _, outcome, rows = ran("ATE", "all")
    asked = ladder_of(outcome, rows)
    at_own = BoundLadder(**{**vars(asked), "bounds": (asked.floor,)})
    (rung,) = rows.ask(at_own)
    low = outcome.problem.outcome_bounds[0] * np.array(outcome.problem.combination).sum(axis=1)
    psi, covariance = rung.estimate(low)
    error = np.sqrt(np.diag(outcome.estimate.covariance))
    np.testing.assert_allclose(psi, outcome.estimate.psi, atol=error.min() / 50)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), error, rtol=2e-3)


SMALL = {
    "score": np.array([0.5, -0.25, 1.0, 0.0]),
    "later": np.array([0.25, 0.5, 0.0, -1.0]),
    "m": np.array([0.5, 0.25, 0.75, 0.5]),
    "g": np.array([0.05, 0.3, 0.15, 0.6]),
    "h": np.array([0.04, 0.3, 0.05, 0.06]),
    "taken": np.array([1.0, 1.0, 0.0, 1.0]),
}


@pytest.mark.parametrize("parts", [([0, 1, 2, 3],), ([0, 3], [1], [2])])
def test_two_periods_by_hand_in_any_partition(parts) -> None:
    rows = Supplied.of([{name: column[part] for name, column in SMALL.items()} for part in parts])
    looser, rung = rows.ask(
        BoundLadder(
            pool=rows.pool,
            scores=(
                Scores((rows.term("score"),), rows.term("g")),
                Scores((rows.term("later"),), rows.term("h")),
            ),
            m=(rows.term("m"),),
            t=ONE,
            L=((1.0,),),
            floor=0.1,
            bounds=(0.04, 0.2),
            groups=(rows.term("taken"),),
            width=2.0,
        )
    )
    U = SMALL["m"] + SMALL["score"] * [0.5, 1.0, 0.75, 1.0] + SMALL["later"] * [0.5, 1.0, 0.5, 0.5]
    assert rung.mean == pytest.approx([U.mean()], abs=1e-3)
    assert rung.products == pytest.approx(np.array([[(U * U).mean()]]), abs=1e-3)
    assert rung.with_t == pytest.approx([U.mean()], abs=1e-3)
    assert rung.people == (2,)  # the first is below it in both periods, the last in the second one
    _, covariance = rung.estimate(np.zeros(1))
    assert covariance[0, 0] == pytest.approx(U.var(ddof=1) / 4, rel=1e-2)
    # Below the study's own bound weights grow, where g is below it too.
    U = SMALL["m"] + SMALL["score"] * [2.0, 1.0, 1.0, 1.0] + SMALL["later"] * [2.5, 1.0, 2.0, 5 / 3]
    assert looser.mean == pytest.approx([U.mean()], abs=1e-3)
    assert looser.people == (0,)
