"""Exact fits against longhand pooled ones: each family, weights, ridge, hazards, classes, folds, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedtmle.errors import FitError
from fedtmle.estimation.fit import cross_fit, fit, folds_of
from fedtmle.estimation.regression import Record, Regression
from fedtmle.estimation.vocabulary import Vocabulary
from fedtmle.estimation.worlds import World
from fedtmle_core.leaves import Level, Number
from fedtmle_core.terms import Apply
from fedtmle_core.types import Family
from tests.estimation.cohort import close, cohort, newton

PEOPLE = cohort()
FORMULA = "treat + age + bmi + C(site)"
AGE, BMI, SITE = PEOPLE.columns["age"], PEOPLE.columns["bmi"], PEOPLE.columns["site"]
X = np.column_stack(
    [np.ones(PEOPLE.n), PEOPLE.columns["treat"], AGE, BMI, *(np.equal(SITE, k) * 1.0 for k in (1, 2, 3))]
)
Y = Number("y", 0)
WEIGHT = Number("weight", 2) * 4.0


def regression(y=Y, family=Family.LOGISTIC, formula=FORMULA, w=None, **more) -> Regression:
    design = PEOPLE.vocabulary.design(formula)
    return Regression(
        label="outcome model", family=family, design=design, records=(Record(y=y, w=w),), **more
    )


def exact(*regressions: Regression, hospitals: int = 3):
    return PEOPLE.run(fit(regressions, n=PEOPLE.n), hospitals).result


@pytest.mark.parametrize(
    ("family", "name", "response", "longhand"),
    [
        (Family.LOGISTIC, "binomial", Y, PEOPLE.columns["y"]),
        (Family.POISSON, "poisson", Number("visits", 6) * 64.0, PEOPLE.columns["visits"]),
        (Family.GAUSSIAN, "gaussian", Number("score", 7) * 1.28, PEOPLE.columns["score"] / 100),
    ],
)
def test_a_fit_is_the_pooled_one(family, name, response, longhand) -> None:
    plain, weighted = exact(regression(response, family), regression(response, family, w=WEIGHT))
    assert close(plain.coefficients[0], newton(X, longhand, name))
    assert close(weighted.coefficients[0], newton(X, longhand, name, PEOPLE.columns["weight"]))


def test_a_fit_has_the_same_bits_in_any_partition() -> None:
    found = {exact(regression(), hospitals=hospitals)[0].coefficients for hospitals in (1, 3, 8)}
    assert len(found) == 1


def test_a_ridge_penalises_all_but_the_intercept_of_unit_columns() -> None:
    found = exact(regression(ridge=0.01))[0].coefficients[0]
    scale = np.array([2.0**-e for e in regression().design.exponents])
    unit, free = X * scale, np.array([0.0, *np.ones(6)])
    eps = np.zeros(7)
    for _ in range(40):
        p = 1 / (1 + np.exp(-unit @ eps))
        gradient = unit.T @ (p - PEOPLE.columns["y"]) / PEOPLE.n + 0.01 * free * eps
        hessian = (unit * (p * (1 - p))[:, None]).T @ unit / PEOPLE.n + 0.01 * np.diag(free)
        eps = eps - np.linalg.solve(hessian, gradient)
    assert close(found, eps * scale)


def test_a_multinomial_fit_is_the_pooled_one() -> None:
    drugs = tuple(Level("drug", code) for code in range(3))
    design = PEOPLE.vocabulary.design("age + C(sex)")
    model = Regression(
        label="drug model",
        family=Family.LOGISTIC,
        design=design,
        records=(Record(y=drugs, w=WEIGHT),),
        classes=("none", "low", "high"),
    )
    found = exact(model)[0]
    sex = PEOPLE.columns["sex"].astype(float)
    Z, w = np.column_stack([np.ones(PEOPLE.n), AGE - 50, sex]), PEOPLE.columns["weight"]
    beta = np.zeros((2, 3))
    codes = PEOPLE.columns["drug"]
    for _ in range(40):
        etas = np.column_stack([np.zeros(PEOPLE.n), Z @ beta[0], Z @ beta[1]])
        p = np.exp(etas) / np.exp(etas).sum(axis=1)[:, None]
        gradient = np.concatenate([Z.T @ (w * (p[:, j] - (codes == j))) for j in (1, 2)])
        hessian = np.block(
            [[(Z * (w * p[:, j] * ((j == k) - p[:, k]))[:, None]).T @ Z for k in (1, 2)] for j in (1, 2)]
        )
        beta = beta - np.linalg.solve(hessian, gradient).reshape(2, 3)
    beta[:, 0] -= 50 * beta[:, 1]
    assert all(close(row, expected, 1e-8) for row, expected in zip(found.coefficients, beta, strict=True))
    columns = PEOPLE.values(found.means())
    assert np.allclose(np.sum(columns, axis=0), 1.0)


def test_the_ridge_of_classes_does_not_depend_on_the_reference() -> None:
    design = PEOPLE.vocabulary.design("age + C(sex)")

    def model(*codes: int) -> Regression:
        drugs = tuple(Level("drug", code) for code in codes)
        names = tuple(str(code) for code in codes)
        return Regression(
            label="drug model",
            family=Family.LOGISTIC,
            design=design,
            records=(Record(y=drugs),),
            classes=names,
            ridge=0.02,
        )

    one, other = exact(model(0, 1, 2), model(2, 0, 1))
    for mine, theirs in zip((0, 1, 2), (1, 2, 0), strict=True):
        columns = PEOPLE.values([one.means()[mine], other.means()[theirs]])
        np.testing.assert_allclose(columns[0], columns[1], rtol=1e-9)
    assert not close(one.coefficients[0], exact(replace(model(0, 1, 2), ridge=0.0))[0].coefficients[0], 1e-3)


def test_the_ridge_of_two_classes_is_that_of_a_logistic_regression() -> None:
    sexes = (Level("sex", 0), Level("sex", 1))
    design = PEOPLE.vocabulary.design("age + bmi")
    classes = Regression(
        label="model",
        family=Family.LOGISTIC,
        design=design,
        records=(Record(y=sexes),),
        classes=("f", "m"),
        ridge=0.02,
    )
    logistic = replace(classes, records=(Record(y=sexes[1]),), classes=())
    one, other = exact(classes, logistic)
    assert close(one.coefficients[0], np.array(other.coefficients[0]))


def test_a_hazard_is_a_logistic_regression_over_person_periods() -> None:
    exits, score = PEOPLE.columns["visits"], PEOPLE.columns["score"]
    vocabulary = Vocabulary.of(
        PEOPLE.dictionary, ranges={"period": (1.0, 4.0)}, levels={"period": tuple("1234")}
    )
    design = vocabulary.design("treat*period + age + C(period):bmi")
    last = Number("visits", 6) * 64.0
    event = Apply("step", Number("score", 7), low=0.375)  # a score of 48 or more
    records = tuple(
        Record(
            y=event * (1.0 - Apply("step", last, low=k + 0.5)),
            w=Apply("step", last, low=k - 0.5),
            world=World.period(k),
        )
        for k in range(1, 5)
    )
    model = Regression(label="hazard", family=Family.LOGISTIC, design=design, records=records)
    (found,) = exact(model)
    rows: list[list[float]] = []
    y: list[float] = []
    for i in range(PEOPLE.n):
        for k in range(1, 5):
            if exits[i] >= k:
                arm = float(PEOPLE.columns["treat"][i])
                by_period = [float(BMI[i]) * (k == level) for level in (1, 2, 3, 4)]
                rows.append([1.0, arm, k, AGE[i], arm * k, *by_period])
                y.append(float(score[i] >= 48 and exits[i] <= k))
    order = [design.names.index(name) for name in ("1", "treat", "period", "age", "treat:period")]
    order += [j for j in range(len(design.names)) if j not in order]
    expected = newton(np.array(rows), np.array(y), "binomial")
    assert close(np.array(found.coefficients[0])[order], expected, 1e-8)
    treat, two = PEOPLE.columns["treat"], np.full(PEOPLE.n, 2.0)
    at_two = np.column_stack([np.ones(PEOPLE.n), treat, two, AGE, 2.0 * treat, 0 * BMI, BMI])
    eta = at_two @ expected[:7]
    (hazards,) = PEOPLE.values([found.mean(World.period(2))])
    assert close(hazards, 1 / (1 + np.exp(-eta)))


def test_a_fold_is_left_out_by_weights() -> None:
    folds = folds_of(3, seed=7)
    (found,) = PEOPLE.run(cross_fit([regression()], folds, n=PEOPLE.n), hospitals=1).result
    for fold, fitted in zip(PEOPLE.values(folds), found.fits, strict=True):
        keep = fold == 0.0
        assert close(fitted.coefficients[0], newton(X[keep], PEOPLE.columns["y"][keep], "binomial"))
    (mean,) = PEOPLE.values([found.mean()])
    by_fold = PEOPLE.values([fit.mean() for fit in found.fits])
    assert np.array_equal(mean, sum(f * m for f, m in zip(PEOPLE.values(folds), by_fold, strict=True)))


@pytest.mark.parametrize(
    ("formula", "response", "message"),
    [
        ("sex + C(sex)", Y, r"outcome model: column\(s\) C\(sex\)\[m\] are determined by the columns before"),
        ("age", Apply("step", Number("age", 7), low=0.4), "perfectly predicted, mostly by age"),
        ("age", Apply("step", Number("age", 7), low=0.0), "the response is the same for everybody"),
    ],
)
def test_a_fit_that_has_no_answer_is_refused_by_name(formula, response, message) -> None:
    with pytest.raises(FitError, match=message):
        exact(regression(response, formula=formula))


def test_a_level_that_nobody_has_gets_the_coefficient_0() -> None:
    nobody = replace(PEOPLE, columns={**PEOPLE.columns, "site": np.minimum(SITE, 2).astype(np.int16)})
    (found,) = nobody.run(fit([regression()], n=nobody.n)).result
    assert found.coefficients[0][-1] == 0.0
    expected = newton(np.column_stack([X[:, :5], X[:, 5] + X[:, 6]]), PEOPLE.columns["y"], "binomial")
    assert close(found.coefficients[0][:-1], expected)
