"""Balance of covariates by arm equals the present package's, and longhand numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedtmle.estimation.diagnostics.balance import MEAN_ERROR, CovariateBalance, Measured
from fedtmle.targets.diagnostics import Covariate
from fedtmle_core.terms import Term, product
from tests.estimation.diagnostics.supplied import Supplied, ran


def measured(rows: Supplied, covariate: Covariate) -> Measured:
    """A covariate of a supplied table, which has a column for each level."""
    if covariate.level is not None:
        return Measured(
            covariate=covariate,
            x=rows.term(f"x {covariate.name} {covariate.levels.index(covariate.level)}"),
        )
    width = covariate.high - covariate.low
    return Measured(
        covariate=covariate, x=rows.term(f"x {covariate.name}") * (1 / width) - covariate.low / width
    )


def balance_of(rows: Supplied, covariates) -> CovariateBalance:
    taken = rows.terms("taken")
    weight = rows.term("weight")
    H: list[Term] = [product(weight, each) for each in rows.terms("H")[: len(taken)]]
    return CovariateBalance(
        pool=rows.pool,
        covariates=tuple(measured(rows, covariate) for covariate in covariates),
        arms=taken,
        weights=tuple(H),
        weight=weight,
    )


def same_balance(outcome, rows: Supplied) -> CovariateBalance:
    expected = outcome.details.diagnostics.balance
    asked = balance_of(rows, [line.covariate for line in expected])
    for new, old in zip(rows.ask(asked), expected, strict=True):
        assert new.covariate == old.covariate
        assert new.silos == len(rows.sheets)
        width = old.covariate.high - old.covariate.low
        error = 10 * MEAN_ERROR * width
        for field in ("means", "weighted_means"):
            assert getattr(new, field) == pytest.approx(getattr(old, field), abs=error), field
        least = min(old.sds)
        # The square of a deviation errs by that of a mean of squares, and of the mean itself.
        assert new.sds == pytest.approx(old.sds, abs=width * 2 * error / least)
        for field in ("differences", "weighted_differences"):
            assert getattr(new, field) == pytest.approx(getattr(old, field), abs=3e-3), field
    return asked


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in ("ATE", "three arms", "ATT", "ATO") for option in ("plain", "all")],
)
def test_balance_is_that_of_the_present_package(name: str, option: str) -> None:
    _, outcome, rows = ran(name, option)
    same_balance(outcome, rows)


def test_balance_of_the_demonstration(demonstration) -> None:
    _, outcome, rows = demonstration
    asked = same_balance(outcome, rows)
    lines = len(asked.covariates)
    squares = sum(not each.covariate.is_indicator for each in asked.covariates)
    assert rows.numbers(asked) == 2 * (2 * lines + squares + 2)


SMALL = {
    "x": np.array([0.25, 0.5, 0.0, 1.0, 0.5, 0.75]),
    "level": np.array([0.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
    "known": np.array([1.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
    "taken 0": np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
    "taken 1": np.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0]),
    "H 0": np.array([2.0, 0.0, 1.5, 3.0, 0.0, 0.0]),
    "H 1": np.array([0.0, 1.0, 0.0, 0.0, 2.0, 4.0]),
}


@pytest.mark.parametrize("parts", [([0, 1, 2, 3, 4, 5],), ([0, 5], [1, 4], [2, 3]), ([4, 2, 5], [0, 1, 3])])
def test_a_small_table_by_hand_in_any_partition(parts) -> None:
    rows = Supplied.of([{name: column[part] for name, column in SMALL.items()} for part in parts])
    known = rows.term("known")
    number = Covariate(name="x", low=10.0, high=30.0)
    level = Covariate(name="z", level="b", levels=("a", "b"))
    found = rows.ask(
        CovariateBalance(
            pool=rows.pool,
            covariates=(
                Measured(covariate=number, x=product(known, rows.term("x")), known=known),
                Measured(covariate=level, x=rows.term("level")),
            ),
            arms=rows.terms("taken"),
            weights=rows.terms("H"),
        )
    )
    first, second = ([0, 2], [1, 4, 5]), ([0, 2, 3], [1, 4, 5])
    for line, arms, x in zip(found, (first, second), (SMALL["x"], SMALL["level"]), strict=True):
        low, width = line.covariate.low, line.covariate.high - line.covariate.low
        means = [x[own].mean() for own in arms]
        H = (SMALL["H 0"], SMALL["H 1"])
        weighted = [h[own] @ x[own] / h[own].sum() for own, h in zip(arms, H, strict=True)]
        sds = [x[own].std() for own in arms]
        assert line.means == pytest.approx([low + width * mean for mean in means], rel=1e-4)
        assert line.weighted_means == pytest.approx([low + width * mean for mean in weighted], rel=1e-4)
        assert line.sds == pytest.approx([width * sd for sd in sds], rel=1e-3)
        scale = math.sqrt((sds[0] ** 2 + sds[1] ** 2) / 2)
        assert line.differences == pytest.approx([0.0, (means[1] - means[0]) / scale], abs=1e-3)
        assert line.weighted_differences == pytest.approx(
            [0.0, (weighted[1] - weighted[0]) / scale], abs=1e-3
        )


def test_without_covariates_nothing_is_asked() -> None:
    rows = Supplied.of([SMALL])
    asked = CovariateBalance(pool=rows.pool, covariates=(), arms=rows.terms("taken"), weights=rows.terms("H"))
    assert asked.blocks == ()
    assert rows.ask(asked) == ()
