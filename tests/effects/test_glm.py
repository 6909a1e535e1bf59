"""Federated regressions against plain numpy, and the same bits for any number of silos."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.initial.crossfit import CrossFitted, Folds
from fedtmle.initial.glm import FittedGLM
from fedtmle.model.table import Table
from tests.declare import declare
from tests.effects.longhand import irls, least_squares
from tests.effects.studies import NEWTON, VARIABLES, Columns, cut, finish, population
from tests.narrow import targeted

TARGET = ft.ATE(outcome="y", treatment="a")
EVENT = ft.ATE(outcome="event", treatment="a")


def coefficients(
    study: ft.Study, data: Columns, silos: int, role: str = "outcome"
) -> list[tuple[float, ...]]:
    """Those of each model of a role: one per fold."""
    parts = np.array_split(np.random.default_rng(2).permutation(len(data["w"])), silos)
    finished, _ = finish(study, cut(data, parts))
    found: list[tuple[float, ...]] = []
    for model in targeted(finished).details.nuisances[role]:
        inner: Any = model.models if isinstance(model, CrossFitted) else (model,)
        found += [fitted.coefficients for fitted in inner]
    return found


def study(target: ft.AbstractEffect = TARGET, outcome: Any = None, **options: Any) -> ft.Study:
    model = outcome or ft.GLM("a + w + z")
    return ft.Study(
        target=target,
        outcome_model=model,
        treatment_model=ft.GLM("w + z"),
        algorithm=NEWTON,
        **{"variables": VARIABLES, **options},
    )


def design(data: Columns) -> np.ndarray:
    return np.column_stack([np.ones(len(data["w"])), data["a"], data["w"], data["z"]])


def poisson(X: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    beta = np.r_[np.log(y.mean()), np.zeros(X.shape[1] - 1)]
    for _ in range(60):
        mu = np.exp(X @ beta)
        beta = beta - np.linalg.solve(X.T @ (X * (w * mu)[:, None]), X.T @ (w * (mu - y)))
    return beta


@pytest.mark.parametrize("weights", [None, "weight"])
@pytest.mark.parametrize("family", ["gaussian", "binomial", "poisson"])
def test_the_fit_is_the_pooled_one(family: Any, weights: str | None) -> None:
    data = population(300, seed=8)
    own = study(outcome=ft.GLM("a + w + z", family=family), weights=weights)
    one, seven = (coefficients(own, data, silos) for silos in (1, 7))
    assert one == seven
    w = data["weight"] / data["weight"].mean() if weights else np.ones(300)
    fit = {"gaussian": least_squares, "binomial": irls, "poisson": poisson}[family]
    np.testing.assert_allclose(one[0], fit(design(data), data["y"] / 10, w), atol=1e-10)


def test_auto_is_binomial_for_a_binary_outcome_and_gaussian_else() -> None:
    data, ones = population(300, seed=9), np.ones(300)
    binary = coefficients(study(EVENT), data, 2)
    np.testing.assert_allclose(binary[0], irls(design(data), data["event"], ones), atol=1e-10)
    linear = coefficients(study(), data, 2)
    np.testing.assert_allclose(linear[0], least_squares(design(data), data["y"] / 10, ones), atol=1e-10)


def test_auto_is_poisson_for_a_count() -> None:
    data = population(300, seed=9)
    data["y"] = np.round(data["y"])
    own = study(variables=declare(VARIABLES, y=("count", 10)))
    (fitted,) = coefficients(own, data, 2)
    np.testing.assert_allclose(fitted, poisson(design(data), data["y"] / 10, np.ones(300)), atol=1e-10)


def test_missing_outcomes_are_left_out_of_the_outcome_model_only() -> None:
    data = population(300, seed=10, missing=True)
    own = study(missingness_model=ft.GLM("a + w"))
    seen = ~np.isnan(data["y"])
    (fitted,) = coefficients(own, data, 3)
    kept = {name: column[seen] for name, column in data.items()}
    np.testing.assert_allclose(
        fitted, least_squares(design(kept), kept["y"] / 10, np.ones(seen.sum())), atol=1e-10
    )
    (observed,) = coefficients(own, data, 3, "missingness")
    X = np.column_stack([np.ones(300), data["a"], data["w"]])
    np.testing.assert_allclose(observed, irls(X, seen.astype(float), np.ones(300)), atol=1e-10)
    (treated,) = coefficients(own, data, 3, "treatment")
    X = np.column_stack([np.ones(300), data["w"], data["z"]])
    np.testing.assert_allclose(treated, irls(X, data["a"].astype(float), np.ones(300)), atol=1e-10)


@pytest.mark.parametrize("family", ["gaussian", "binomial"])
def test_ridge_is_on_columns_scaled_by_powers_of_two_and_spares_the_intercept(family: Any) -> None:
    data, n = population(300, seed=12), 300
    data["w"] = 100 * data["w"]
    own = study(
        outcome=ft.GLM("a + w + z", family=family, ridge=0.03),
        variables=declare(VARIABLES, w=(-500, 500), z=(-3, 3)),
    )
    one, seven = (coefficients(own, data, silos) for silos in (1, 7))
    assert one == seven
    X, y = design(data), data["y"] / 10
    scale = 2.0 ** -np.frexp([1, 1, 500, 3])[1]  # of the declared ranges
    penalty = 0.03 * n * np.array([0.0, 1.0, 1.0, 1.0])
    if family == "gaussian":
        Z = X * scale
        expected = np.linalg.solve(Z.T @ Z + np.diag(penalty), Z.T @ y)
    else:
        expected = irls(X * scale, y, np.ones(n), penalty=penalty)
    np.testing.assert_allclose(one[0], expected * scale, atol=1e-10)


def test_a_column_that_is_zero_in_one_silo_changes_no_bit() -> None:
    """Its scale is that of the silos where it is not zero: so are the grid and the ridge."""
    data = population(200, seed=3)
    data["z"] = np.where(np.arange(200) < 60, 0.0, 0.01 * data["z"])
    own = study(outcome=ft.GLM("a + w + z", ridge=0.1))
    parts = [np.arange(60), np.arange(60, 200)]
    apart, _ = finish(own, cut(data, parts))
    together, _ = finish(own, {"all": data})
    assert targeted(apart).details.nuisances["outcome"] == targeted(together).details.nuisances["outcome"]


def test_large_and_small_units_cost_no_digits() -> None:
    data = population(300, seed=14)
    plain = coefficients(study(), data, 3)[0]
    other = study(variables=declare(VARIABLES, w=(-8e9, 8e9), z=(-1e-7, 1e-7)))
    scaled = coefficients(other, {**data, "w": 1e9 * data["w"], "z": 1e-7 * data["z"]}, 3)[0]
    np.testing.assert_allclose(np.array(scaled) * [1, 1, 1e9, 1e-7], plain, atol=1e-10)


# Cross-fitting.


def folds_longhand(n: int, count: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, n])).permutation(n) % count


def test_folds_are_even_drawn_within_silos_and_keep_clusters_together() -> None:
    data = population(101, seed=15)
    table = finish(study(cluster="family"), {"all": data})[1]["all"]
    folds = Folds(count=4, seed=9).of(table)
    np.testing.assert_array_equal(folds, folds_longhand(101, 4, 9))
    assert np.ptp(np.bincount(folds, minlength=4)) <= 1
    together = Folds(count=4, seed=9, cluster="family").of(table)
    assert all(len(set(together[data["family"] == f])) == 1 for f in range(51))


def test_each_row_is_predicted_by_the_fit_without_its_fold() -> None:
    data = population(240, seed=16)
    own = study(folds=3, seed=5)
    parts = [np.arange(90), np.arange(90, 240)]
    finished, tables = finish(own, cut(data, parts))
    fold = np.concatenate([folds_longhand(len(part), 3, 5) for part in parts])
    (model,) = targeted(finished).details.nuisances["outcome"]
    expected = np.empty(240)
    for left_out in range(3):
        beta = least_squares(design(data), data["y"] / 10, (fold != left_out).astype(float))
        np.testing.assert_allclose(model.models[left_out].coefficients, beta, atol=1e-10)
        expected[fold == left_out] = (design(data) @ beta)[fold == left_out]
    predicted = np.concatenate([model.predict(table) for table in tables.values()])
    np.testing.assert_allclose(predicted, expected, atol=1e-10)
    for part, table in zip(parts, tables.values(), strict=True):
        rows = targeted(finished).problem.prepare(table)  # both arms of a row by its own fold's fit
        for arm in (0, 1):
            moved = design({**data, "a": np.full(240, arm)})
            betas = np.array([m.coefficients for m in model.models])[fold]
            np.testing.assert_allclose(rows.q[arm], (moved * betas).sum(axis=1)[part], atol=1e-10)


def test_predictions_do_not_depend_on_the_other_rows() -> None:
    data = population(50, seed=17)
    finished, tables = finish(study(), {"all": data})
    (fitted,) = targeted(finished).details.nuisances["treatment"]
    assert isinstance(fitted, FittedGLM)
    table: Table = tables["all"]
    whole = fitted.predict(table)
    pieces = [fitted.predict(table.take(np.arange(start, start + 10))) for start in range(0, 50, 10)]
    np.testing.assert_array_equal(whole, np.concatenate(pieces))
