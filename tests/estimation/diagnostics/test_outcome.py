"""Fit and calibration of the outcome model equal the present package's, and longhand numbers."""

from __future__ import annotations

import numpy as np
import pytest

from fedtmle.estimation.diagnostics.outcome import (
    DECILES,
    POINT_ERROR,
    SQUARE_ERROR,
    TENTH,
    Prediction,
    PredictionFit,
    PredictionSpread,
    bin_edges,
)
from fedtmle.programs.diagnostics import DECILES as PRESENT_DECILES
from tests.estimation.diagnostics.supplied import STUDIES, Supplied, ran


def prediction(rows: Supplied) -> Prediction:
    return Prediction(**{name: rows.term(name) for name in ("y", "observed", "weight", "before", "after")})


def fit_of(study, rows: Supplied, edges) -> PredictionFit:
    return PredictionFit(
        pool=rows.pool,
        predictions=(prediction(rows),),
        edges=edges,
        is_binary=study.response == "binary",
        has_weights=study.weights is not None,
    )


def same_fit(study, outcome, rows: Supplied) -> None:
    expected = outcome.details.diagnostics.fit
    found = rows.ask(fit_of(study, rows, expected.edges))
    # An error e of means is e / variance in the share that is explained; there are at most four.
    error = 8 * SQUARE_ERROR
    for pair in ("r_squared", "deviance"):
        before = getattr(expected, pair)
        if before is None:
            assert getattr(found, pair) is None
        else:
            assert getattr(found, pair) == pytest.approx(before, abs=error / expected.variance)
    assert found.variance == pytest.approx(expected.variance, abs=error)
    assert found.residual_variance == pytest.approx(expected.residual_variance, abs=error)
    assert len(found.calibration) == len(expected.calibration)
    for new, old in zip(found.calibration, expected.calibration, strict=True):
        assert (new.silos, new.count) == (len(rows.sheets), old.count)
        assert new.sums == pytest.approx(old.sums, abs=2 * POINT_ERROR * TENTH * rows.n)
    spread = rows.ask(PredictionSpread(pool=rows.pool, predictions=(prediction(rows),)))
    assert spread == pytest.approx(outcome.details.overlap.predicted, abs=1e-3)


@pytest.mark.parametrize("name", [*STUDIES, "RR", "ATC"])
def test_the_fit_is_that_of_the_present_package(name: str) -> None:
    same_fit(*ran(*STUDIES.get(name, (name, "all"))))


def test_the_fit_of_the_demonstration(demonstration) -> None:
    study, outcome, rows = demonstration
    same_fit(study, outcome, rows)
    assert rows.numbers(fit_of(study, rows, outcome.details.diagnostics.fit.edges)) == 5 + 10 * 4
    assert rows.numbers(PredictionSpread(pool=rows.pool, predictions=(prediction(rows),))) == 3


def test_edges_are_deciles_and_there_are_none_without_spread() -> None:
    np.testing.assert_allclose(DECILES, PRESENT_DECILES, atol=1e-4)
    assert bin_edges((0.5, 0.1)) == pytest.approx([0.5 + 0.1 * z for z in DECILES])
    assert bin_edges((0.5, 0.0)) == ()
    assert bin_edges((0.5, 1e-300)) == ()


SMALL = {
    "y": np.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0]),
    "observed": np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    "weight": np.array([0.5, 1.5, 1.0, 1.0, 2.0, 1.0]),
    "before": np.array([0.8, 0.3, 0.4, 0.1, 0.9, 0.7]),
    "after": np.array([0.7, 0.2, 0.6, 0.1, 0.8, 0.7]),
}


@pytest.mark.parametrize("parts", [([0, 1, 2, 3, 4, 5],), ([0, 5], [1, 4], [2, 3]), ([4, 2, 5], [0, 1, 3])])
@pytest.mark.parametrize("has_weights", [True, False])
def test_a_small_table_by_hand_in_any_partition(parts, has_weights: bool) -> None:
    held = SMALL if has_weights else {**SMALL, "weight": np.ones(6)}
    rows = Supplied.of([{name: column[part] for name, column in held.items()} for part in parts])
    diagnostic = PredictionFit(
        pool=rows.pool,
        predictions=(prediction(rows),),
        edges=(0.35, 0.85),
        is_binary=True,
        has_weights=has_weights,
    )
    found, w = rows.ask(diagnostic), held["weight"] * held["observed"]
    y, mean = held["y"], float(w @ held["y"] / w.sum())
    null = -w.sum() * (mean * np.log(mean) + (1 - mean) * np.log(1 - mean))
    for k, q in enumerate((held["before"], held["after"])):
        explained = 1 - w @ (y - q) ** 2 / (w @ (y - mean) ** 2)
        assert found.r_squared[k] == pytest.approx(explained, abs=1e-4)
        loss = -w @ np.where(y > 0, np.log(q), np.log(1 - q))
        assert found.deviance[k] == pytest.approx(1 - loss / null, abs=1e-4)
        assert found.residual_variance[k] == pytest.approx(w @ (y - q) ** 2 / w.sum(), abs=1e-4)
    assert found.variance == pytest.approx(w @ (y - mean) ** 2 / w.sum(), abs=1e-4)
    for cell, own in zip(found.calibration, ([1, 3], [0, 2], [4]), strict=True):
        assert cell.count == len(own)
        columns = (np.ones(6), y, held["before"], held["after"])
        assert cell.sums == pytest.approx([w[own] @ column[own] for column in columns], abs=1e-2)


def test_several_periods_are_one_fit() -> None:
    """People are in the first period, and those of even places in a second one too."""
    rng = np.random.default_rng(2)
    n = 300
    columns: dict[str, np.ndarray] = {
        f"{name} {t}": rng.random(n) for name in ("before", "after") for t in (0, 1)
    }
    columns |= {f"y {t}": (rng.random(n) < 0.4) * 1.0 for t in (0, 1)}
    columns |= {"observed 0": np.ones(n), "observed 1": (np.arange(n) % 2 == 0) * 1.0}
    rows = Supplied.of([columns])
    both = PredictionFit(
        pool=rows.pool,
        predictions=tuple(
            Prediction(
                weight=Supplied.of([{"one": np.ones(n)}]).term("one"),
                **{name: rows.term(f"{name} {t}") for name in ("y", "observed", "before", "after")},
            )
            for t in (0, 1)
        ),
        edges=(0.5,),
        is_binary=True,
        has_weights=False,
    )
    later = np.arange(n) % 2 == 0
    stacked = {
        name: np.concatenate([columns[f"{name} 0"], columns[f"{name} 1"][later]])
        for name in ("y", "before", "after")
    }
    stacked |= {"observed": np.ones(n + n // 2), "weight": np.ones(n + n // 2)}
    long = Supplied.of([stacked])
    expected = long.ask(
        PredictionFit(
            pool=rows.pool,
            predictions=(prediction(long),),
            edges=(0.5,),
            is_binary=True,
            has_weights=False,
        )
    )
    found = rows.ask(both)
    assert found.r_squared == pytest.approx(expected.r_squared, abs=1e-5)
    assert found.deviance == pytest.approx(expected.deviance, abs=1e-5)
    assert [cell.count for cell in found.calibration] == [cell.count for cell in expected.calibration]
