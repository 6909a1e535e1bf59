"""More than two arms: one softmax model, the same in any order of the arms, and what replaces it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import DataError, InputError
from tests.declare import declare
from tests.effects.longhand import irls, softmax
from tests.effects.studies import NEWTON, Columns, cut, expit, finish, population
from tests.narrow import targeted

ARMS = ("0", "1", "2")
VARIABLES = ft.Variables(
    {
        "y": {"kind": "number", "range": (0.0, 10.0)},
        "a": {"kind": "category", "levels": ARMS},
        "w": {"kind": "number", "range": (-8.0, 8.0)},
        "z": {"kind": "number", "range": (-1.0, 1.0)},
        "weight": {"kind": "number", "range": (0.0, 2.0)},
        "site": {"kind": "category", "levels": ("east", "north", "south", "west")},
    }
)


def study(kind: type = ft.TSM, arms: tuple[str, ...] = ARMS, **options: Any) -> ft.Study:
    return ft.Study(
        **{
            "target": kind(outcome="y", treatment="a", arms=arms),
            "outcome_model": ft.GLM("C(a) + w + z"),
            "treatment_model": ft.GLM("w + z + C(site)"),
            "algorithm": NEWTON,
            "variables": VARIABLES,
            **options,
        }
    )


def scores(own: ft.Study, data: Columns) -> np.ndarray:
    """The fitted propensity scores, arms by rows."""
    finished, tables = finish(own, {"all": data})
    g, _ = targeted(finished).problem.prepare.propensities(tables["all"])
    return g


def design(data: Columns) -> np.ndarray:
    sites = [(data["site"] == level).astype(float) for level in np.unique(data["site"])[1:]]
    return np.column_stack([np.ones(len(data["w"])), data["w"], data["z"], *sites])


@pytest.mark.parametrize("weights", [None, "weight"])
def test_the_fit_is_the_pooled_one(weights: str | None) -> None:
    data = population(400, seed=13, arms=3)
    parts = np.array_split(np.random.default_rng(2).permutation(400), 7)
    fits = []
    for silos in ({"all": data}, cut(data, parts)):
        finished, _ = finish(study(weights=weights), silos)
        (model,) = targeted(finished).details.nuisances["treatment"]
        fits.append(model.coefficients)
    assert fits[0] == fits[1]
    w = data["weight"] if weights else np.ones(400)
    longhand = softmax(design(data), data["a"], w, 3)
    np.testing.assert_allclose(scores(study(weights=weights), data), longhand, atol=1e-11)


def test_the_fit_is_that_of_statsmodels() -> None:
    discrete = pytest.importorskip("statsmodels.discrete.discrete_model")
    data = population(600, seed=3, arms=4)
    arms = ("0", "1", "2", "3")
    own = study(arms=arms, variables=declare(VARIABLES, a=list(arms)))
    finished, _ = finish(own, {"all": data})
    (model,) = targeted(finished).details.nuisances["treatment"]
    fit = discrete.MNLogit(data["a"], design(data)).fit(method="newton", tol=1e-14, maxiter=100, disp=0)
    np.testing.assert_allclose(np.array(model.coefficients), fit.params.T, atol=1e-8)
    np.testing.assert_allclose(scores(own, data).T, fit.predict(), atol=1e-8)


@pytest.mark.parametrize("ridge", [0.0, 0.05])
@pytest.mark.parametrize("kind", [ft.TSM, ft.ATO])
def test_the_order_of_the_arms_changes_nothing(kind: type, ridge: float) -> None:
    """Estimate and standard error of every arm, and of differences up to their sign."""
    data = population(500, seed=4, arms=3)
    tables = []
    for order in itertools.permutations(ARMS):
        model = ft.GLM("w + z", ridge=ridge)
        finished, _ = finish(study(kind, order, treatment_model=model), {"all": data})
        outcome = targeted(finished)
        place = [order.index(arm) for arm in ARMS]
        covariance = outcome.estimate.covariance[np.ix_(place, place)]
        tables.append(np.concatenate([outcome.estimate.psi[place], covariance.ravel()]))
    for table in tables[1:]:
        np.testing.assert_allclose(table, tables[0], rtol=1e-10, atol=1e-12)


def test_a_ridge_on_two_classes_is_that_of_a_glm() -> None:
    from fedtmle.initial.glm import ClassRidge, Ridge

    eps, free = np.array([0.7, -0.3, 1.1]), np.array([1.0, 0.0, 0.0])
    of_glm, of_classes = Ridge(0.2, free), ClassRidge(0.2, free, 2)
    assert of_classes.value(eps) == pytest.approx(of_glm.value(eps), abs=1e-15)
    np.testing.assert_allclose(of_classes.gradient(eps), of_glm.gradient(eps), atol=1e-15)
    np.testing.assert_allclose(of_classes.hessian(eps), of_glm.hessian(eps), atol=1e-15)


def test_learners_are_fitted_to_each_arm_against_the_rest() -> None:
    data = population(400, seed=5, arms=3)
    model = ft.SuperLearner((ft.GLM("w + z"),), folds=2)
    X = np.column_stack([np.ones(400), data["w"], data["z"]])
    each = [expit(X @ irls(X, (data["a"] == a).astype(float), np.ones(400))) for a in range(3)]
    g = scores(study(treatment_model=model), data)
    np.testing.assert_allclose(g, np.array(each) / np.sum(each, axis=0), atol=1e-10)
    result = ft.run(study(treatment_model=model), {"all": data})
    assert [row["arm"] for row in result.document["learners"]] == ["0", "1", "2"]
    assert "each arm against the rest" in result.document["study"]["models"]["treatment"]


def test_a_pilot_is_fitted_to_each_arm_against_the_rest() -> None:
    data = population(300, seed=6, arms=3)
    silos = cut(data, np.array_split(np.arange(300), 2))
    own = study(treatment_model=ft.Pilot(ft.GLM("w + z"), at="silo 1"))
    finished, tables = finish(own, silos)
    X = np.column_stack([np.ones(300), data["w"], data["z"]])
    here = np.arange(300) >= 150
    each = [expit(X @ irls(X[here], (data["a"] == a)[here].astype(float), np.ones(150))) for a in range(3)]
    g, _ = targeted(finished).problem.prepare.propensities(tables["silo 0"])
    np.testing.assert_allclose(g, (np.array(each) / np.sum(each, axis=0))[:, :150], atol=1e-9)


def supplied(data: Columns, *columns: str) -> tuple[ft.Study, Columns]:
    g = softmax(design(data), data["a"], np.ones(len(data["w"])), 3)
    columns_of = {f"g{a}": share for a, share in enumerate(g)}
    return study(
        treatment_model=ft.Supplied(*columns),
    ), {**data, **columns_of}


@pytest.mark.parametrize("columns", [("g1", "g2"), ("g0", "g1", "g2")])
def test_supplied_probabilities_are_taken_as_they_are(columns: tuple[str, ...]) -> None:
    own, data = supplied(population(200, seed=7, arms=3), *columns)
    np.testing.assert_allclose(scores(own, data), [data["g0"], data["g1"], data["g2"]], atol=1e-14)


def test_supplied_probabilities_that_cannot_be_are_refused() -> None:
    own, data = supplied(population(200, seed=7, arms=3), "g0", "g1", "g2")
    data["g2"][3] += 0.1
    with pytest.raises(DataError, match=r"'g2' is not between 0 and 1, or with 'g0' and 'g1' .* in 1 row"):
        ft.run(own, {"all": data})
    own, data = supplied(population(200, seed=7, arms=3), "g1", "g2")
    data["g1"][5] += 1.0
    with pytest.raises(DataError, match="'g1' is not between 0 and 1 in 1 row"):
        ft.run(own, {"all": data})
    own, data = supplied(population(200, seed=7, arms=3), "g1")
    with pytest.raises(InputError, match=r"expected 2 or 3 supplied column\(s\), not 1"):
        ft.run(own, {"all": data})


def test_cross_fitted_scores_are_those_of_the_other_folds() -> None:
    data = population(300, seed=8, arms=3)
    own = study(folds=3)
    finished, tables = finish(own, {"all": data})
    folds = own.outer_folds.of(tables["all"])
    g, _ = targeted(finished).problem.prepare.propensities(tables["all"])
    X = design(data)
    (cross,) = targeted(finished).details.nuisances["treatment"]
    for v in range(3):
        inside = (folds != v).astype(float)
        eta = np.vstack([np.zeros(300), np.array(cross.models[v].coefficients) @ X.T])
        expected = np.exp(eta) / np.exp(eta).sum(axis=0)
        np.testing.assert_allclose(softmax(X, data["a"], inside, 3), expected, atol=1e-10)
        np.testing.assert_allclose(g[:, folds == v], expected[:, folds == v], atol=1e-12)


def test_an_arm_that_is_perfectly_predicted_is_named() -> None:
    data = population(300, seed=9, arms=3)
    data["z"] = np.where(data["a"] == 2, np.abs(data["z"]), -np.abs(data["z"]))
    with pytest.raises(InputError, match=r"perfectly predicted, mostly by z \(arm 2\)"):
        ft.run(study(treatment_model=ft.GLM("z")), {"all": data})


def test_a_constant_column_is_named() -> None:
    data = population(300, seed=9, arms=3)
    data["z"] = np.full(300, 0.5)
    with pytest.raises(InputError, match=r"treatment model: column\(s\) z are determined"):
        ft.run(study(treatment_model=ft.GLM("w + z"), outcome_model=ft.GLM("w")), {"all": data})
