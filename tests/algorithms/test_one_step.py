"""The one-step estimate is AIPW, written out longhand."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from tests.cases import targets
from tests.effects.studies import VARIABLES, cut, population


@pytest.mark.parametrize("outcome", ["event"])
@pytest.mark.parametrize("sums", ["rounded", "exact"])
def test_it_is_the_augmented_inverse_probability_weighted_estimate(outcome: str, sums: str) -> None:
    data = population(800, 3)
    study = ft.Study(
        target=ft.ATE(outcome=outcome, treatment="a"),
        outcome_model=ft.GLM("a + w + z"),
        treatment_model=ft.GLM("w + z"),
        algorithm=ft.OneStep(),
        variables=VARIABLES,
        g_bounds=None,
        sums=sums,  # type: ignore[arg-type]  # parametrised
    )
    found = ft.run(study, cut(data, np.array_split(np.arange(800), 4)))
    a, y = data["a"].astype(float), data[outcome]
    W = np.column_stack([np.ones(800), data["w"], data["z"]])
    X = np.column_stack([np.ones(800), a, data["w"], data["z"]])
    g = _expit(W @ _fit(W, a, binary=True))
    beta = _fit(X, y, binary=outcome == "event")
    q = [X.copy() for _ in range(2)]
    for arm, design in enumerate(q):
        design[:, 1] = arm
    q0, q1 = (_expit(d @ beta) if outcome == "event" else d @ beta for d in q)
    own = np.where(a == 1, q1, q0)
    score = q1 - q0 + (a / g - (1 - a) / (1 - g)) * (y - own)
    (row,) = found.document["estimates"]
    assert row["estimate"] == pytest.approx(score.mean(), abs=2e-6 * score.std() / np.sqrt(800))
    assert row["std_error"] == pytest.approx(score.std(ddof=1) / np.sqrt(800), rel=1e-5)
    assert found.run.status is ft.Status.ONE_STEP


def _expit(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _fit(X: np.ndarray, y: np.ndarray, *, binary: bool) -> np.ndarray:
    """Newton's method, in plain numpy."""
    beta = np.zeros(X.shape[1])
    for _ in range(30):
        mean = _expit(X @ beta) if binary else X @ beta
        weight = mean * (1 - mean) if binary else np.ones(len(y))
        beta = beta - np.linalg.solve((X.T * weight) @ X, X.T @ (mean - y))
    return beta


def test_it_is_for_effects() -> None:
    case = targets()["two arms"]
    with pytest.raises(InputError, match="OneStep is for effects"):
        ft.solve(case.problem, case.law, case.silos(case.split(2)), ft.OneStep())
