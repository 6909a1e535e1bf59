"""The one-step estimate is AIPW: written out longhand, and beside DoubleML's and Stata's."""

from __future__ import annotations

import csv
from importlib import resources
from statistics import NormalDist

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.datasets import ihdp_variables
from fedtmle.demo import ihdp_silos
from fedtmle.errors import InputError
from tests.cases import targets
from tests.declare import declare
from tests.effects.studies import VARIABLES, cut, population


@pytest.mark.parametrize("outcome", ["event", "y"])
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


def test_predictions_of_a_linear_model_are_not_truncated() -> None:
    # Of the 800 predictions above for each arm, some are beyond the declared range of y.
    data = population(800, 3)
    X = np.column_stack([np.ones(800), np.ones(800), data["w"], data["z"]])
    factual = np.column_stack([np.ones(800), data["a"], data["w"], data["z"]])
    assert (X @ _fit(factual, data["y"], binary=False)).max() > 10.0


def test_it_is_that_of_doubleml() -> None:
    # DoubleML 0.11.4, IRM without cross-fitting: LinearRegression for each arm,
    # LogisticRegression(C=inf, tol=1e-14, solver="newton-cholesky"), set_sample_splitting([(rows, rows)])
    # on the infants with an IQ score.
    names = "bw + nnhealth + momage + b_marr + mom_lths"
    study = ft.Study(
        target=ft.ATE(outcome="iqsb_36", treatment="treat"),
        outcome_model=ft.GLM(f"treat * ({names})"),
        treatment_model=ft.GLM(names),
        algorithm=ft.OneStep(),
        variables=ihdp_variables(),
        g_bounds=None,
    )
    found = ft.run(study, ihdp_silos(complete=True))
    (row,) = found.document["estimates"]
    assert found.document["n"] == 908
    assert row["estimate"] == pytest.approx(9.8409149260, abs=1e-6 * 1.204)
    # Its variance has the divisor n.
    assert row["std_error"] == pytest.approx(1.2040542481 * np.sqrt(908 / 907), rel=2e-6)


def test_it_is_that_of_stata() -> None:
    # teffects aipw (bweight prenatal1 mmarried mage fbaby)
    #     (mbsmoke mmarried c.mage##c.mage fbaby medu, probit)
    # from the manual: ATE -230.9892. All digits are those in the tests of statsmodels.
    pytest.importorskip("statsmodels.treatment")
    folder = resources.files("statsmodels.treatment.tests.results")
    header, *rows = csv.reader(folder.joinpath("cataneo2.csv").read_text().splitlines())
    table = dict(zip(header, zip(*rows, strict=True), strict=True))
    names = {"y": "bweight", "a": "mbsmoke_", "married": "mmarried_", "age": "mage", "school": "medu"}
    names |= {"first": "fbaby_", "early": "prenatal1_"}
    data = {name: np.array(table[column], dtype=float) for name, column in names.items()}
    n = len(data["y"])
    design = [data["married"], data["age"], data["age"] ** 2, data["first"], data["school"]]
    data["g"] = _probit(np.column_stack([np.ones(n), *design]), data["a"])
    data["a"] = data["a"].astype(int)
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a * (early + married + age + first)"),
        treatment_model=ft.Supplied("g"),
        algorithm=ft.OneStep(),
        variables=declare(
            y=(0, 6000),
            a="binary",
            married=(0, 1),
            age=(10, 50),
            first=(0, 1),
            early=(0, 1),
            g=(0, 1),
        ),
        g_bounds=None,
    )
    found = ft.run(study, cut(data, np.array_split(np.arange(n), 5)))
    (row,) = found.document["estimates"]
    assert n == 4642
    assert row["estimate"] == pytest.approx(-230.98920111, abs=2e-6 * 26.2)
    assert found.document["psi"][0] == pytest.approx(3403.35525, abs=1e-5)
    # Stata's standard error (26.21) is that of the stacked equations of the models and the effect, not of the
    # EIF (25.39), so that the two are not compared.


def _probit(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the fitted probabilities of a probit model, by Fisher scoring in plain numpy."""
    beta, law = np.zeros(X.shape[1]), NormalDist()
    for _ in range(30):
        eta = X @ beta
        p, density = (np.array(list(map(f, eta))) for f in (law.cdf, law.pdf))
        weight = density**2 / (p * (1 - p))
        beta = beta + np.linalg.solve((X.T * weight) @ X, X.T @ (density * (y - p) / (p * (1 - p))))
    return np.array([law.cdf(value) for value in X @ beta])


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
