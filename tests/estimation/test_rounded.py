"""Rounded fits: within the stated share of a standard error of the exact one, in few rounds."""

from __future__ import annotations

import numpy as np
import pytest

from fedtmle.errors import FitError
from fedtmle.estimation.fit import cross_fit, fit, folds_of
from fedtmle.estimation.gram import WITHIN, centred
from fedtmle.estimation.loss import LARGEST_PREDICTOR
from fedtmle.estimation.regression import Fit, Record, Regression
from fedtmle.estimation.rounded import UNITS
from fedtmle.estimation.vocabulary import Vocabulary
from fedtmle.estimation.worlds import World
from fedtmle_core.blocks import Score
from fedtmle_core.leaves import Level, Number
from fedtmle_core.plan import Question
from fedtmle_core.terms import Apply, Term
from fedtmle_core.types import Family, Part
from tests.estimation.cohort import Cohort, cohort

Y = Number("y", 0)
WEIGHT = Number("weight", 2) * 4.0
EVENT = Apply("step", Number("score", 7), low=0.375)
FORMULA = "treat + age + bmi + C(site)"


def regression(
    people: Cohort,
    y: Term | tuple[Term, ...] = Y,
    family: Family = Family.LOGISTIC,
    formula: str = FORMULA,
    w: Term | None = None,
    **more,
) -> Regression:
    design = people.vocabulary.design(formula)
    return Regression(label="model", family=family, design=design, records=(Record(y=y, w=w),), **more)


def hazard(people: Cohort) -> Regression:
    vocabulary = Vocabulary.of(
        people.dictionary, ranges={"period": (1.0, 4.0)}, levels={"period": tuple("1234")}
    )
    last = Number("visits", 6) * 64.0
    records = tuple(
        Record(
            y=EVENT * (1.0 - Apply("step", last, low=k + 0.5)),
            w=Apply("step", last, low=k - 0.5),
            world=World.period(k),
        )
        for k in range(1, 5)
    )
    design = vocabulary.design("treat*period + age + C(period)")
    return Regression(label="hazard", family=Family.LOGISTIC, design=design, records=records)


def models(people: Cohort) -> dict[str, Regression]:
    drugs = tuple(Level("drug", code) for code in range(3))
    return {
        "logistic": regression(people),
        "weighted": regression(people, w=WEIGHT),
        "ridge": regression(people, ridge=0.02, formula="treat*age + C(sex)"),
        "gaussian": regression(people, Number("score", 7) * 1.28, Family.GAUSSIAN),
        "poisson": regression(people, Number("visits", 6) * 64.0, Family.POISSON),
        "no intercept": regression(people, formula="0 + age + C(site)"),
        "spline": regression(people, formula="spline(bmi, knots=[20, 25, 30, 35]) + I(age**2) + C(site)*age"),
        "classes": regression(people, drugs, formula="age + C(sex)", classes=("none", "low", "high")),
        "offset": Regression(
            label="model",
            family=Family.LOGISTIC,
            design=people.vocabulary.design("treat + age"),
            records=(Record(y=Y, offset=Number("bmi", 6)),),
        ),
    }


def distance(people: Cohort, one: Fit, other: Fit) -> float:
    """Return the root mean square difference of two linear predictors."""
    predictors = [
        people.values([fitted.regression.design.predictor(row) for row in fitted.coefficients])
        for fitted in (one, other)
    ]
    return float(np.sqrt(np.mean(np.sum((np.array(predictors[0]) - np.array(predictors[1])) ** 2, axis=0))))


@pytest.mark.parametrize("accuracy", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("n", [300, 2000])
@pytest.mark.parametrize("name", list(models(cohort(10))))
def test_a_fit_is_within_its_share_of_a_standard_error(name: str, n: int, accuracy: float) -> None:
    people = cohort(n, seed=5)
    model = models(people)[name]
    near = people.run(fit([model], n=n, accuracy=accuracy))
    (exact,) = people.run(fit([model], n=n)).result
    (fitted,) = near.result
    apart = distance(people, fitted, exact) * np.sqrt(n) / UNITS[model.family]
    assert 0.0 < apart <= fitted.error <= accuracy
    assert near.rounds <= {1e-1: 6, 1e-3: 7, 1e-6: 10}[accuracy]


def test_a_plain_fit_takes_five_rounds_after_its_matrix() -> None:
    for n, seed in [(500, 1), (3000, 2), (20_000, 3)]:
        people = cohort(n, seed)
        assert people.run(fit([regression(people)], n=n, accuracy=1e-3)).rounds <= 4
        assert people.run(fit([regression(people)], n=n, accuracy=1e-6)).rounds <= 6


def test_regressions_side_by_side_share_rounds_and_matrices() -> None:
    people = cohort(2000)
    plain, small = regression(people), regression(people, Level("treat", 1), formula="age + C(site)")
    seen: list[Question] = []
    both = people.run(fit([plain, small], n=2000, accuracy=1e-3), seen=seen)
    alone = [people.run(fit([each], n=2000, accuracy=1e-3)) for each in (plain, small)]
    assert both.rounds == max(each.rounds for each in alone)
    assert both.numbers < sum(each.numbers for each in alone)
    matrices = [block for block in seen[0].blocks if isinstance(block, Score) and block.part is Part.HESSIAN]
    assert len(matrices) == 1
    assert all(block.lattice for question in seen for block in question.blocks if isinstance(block, Score))


def test_hazards_are_fitted_over_person_periods() -> None:
    people = cohort(2000, seed=5)
    model = hazard(people)
    model = Regression(
        label="hazard",
        family=Family.LOGISTIC,
        design=Vocabulary.of(people.dictionary, ranges={"period": (1.0, 4.0)}).design("treat*period + age"),
        records=model.records,
    )
    (near,) = people.run(fit([model], n=people.n, accuracy=1e-4)).result
    (exact,) = people.run(fit([model], n=people.n)).result
    assert np.allclose(near.coefficients, exact.coefficients, atol=1e-5)
    assert near.coefficients != exact.coefficients


def test_folds_share_one_matrix_and_one_curvature() -> None:
    people = cohort(3000)
    folds = folds_of(4, seed=3)
    seen: list[Question] = []
    ran = people.run(cross_fit([regression(people)], folds, n=people.n, accuracy=1e-3), seen=seen)
    (near,) = ran.result
    assert ran.rounds <= 5
    (exact,) = people.run(cross_fit([regression(people)], folds, n=people.n)).result
    for one, other in zip(near.fits, exact.fits, strict=True):
        assert distance(people, one, other) * np.sqrt(people.n) <= one.error <= 1e-3
    matrices = [
        block
        for question in seen
        for block in question.blocks
        if isinstance(block, Score) and block.part is Part.HESSIAN
    ]
    assert len(matrices) == 2


@pytest.mark.parametrize(
    ("formula", "response", "message"),
    [
        ("sex + C(sex) + age", Y, r"model: column\(s\) C\(sex\)\[m\] are determined by the columns before"),
        ("treat*period + C(period)", Y, r"model: column\(s\) C\(period\)\[4\] are determined by the"),
        ("age + bmi", Apply("step", Number("age", 7), low=0.4), "perfectly predicted, mostly by age"),
        ("age", Apply("step", Number("age", 7), low=0.0), "the response is the same for everybody"),
    ],
)
def test_a_fit_that_has_no_answer_is_refused_by_name(formula: str, response: Term, message: str) -> None:
    people = cohort(1500)
    model = hazard(people) if "period" in formula else regression(people, response, formula=formula)
    model = Regression(label="model", family=model.family, design=model.design, records=model.records)
    with pytest.raises(FitError, match=message):
        people.run(fit([model], n=people.n, accuracy=1e-3))


def test_a_range_away_from_zero_is_centred() -> None:
    """z = A x is as large at both ends of the range, whatever the scale of the intercept's column."""
    people = cohort(10)
    model = regression(people, formula="age + score")
    (age, score), A = ((18.0, 110.0), (0.0, 100.0)), centred(model)
    scales = np.exp2(model.design.exponents)
    low, high = (A @ (np.array([1.0, *ends]) / scales) for ends in zip(age, score, strict=True))
    np.testing.assert_allclose(low, [1.0, -WITHIN, 0.0])
    np.testing.assert_allclose(high, [1.0, WITHIN, WITHIN])


@pytest.mark.parametrize("accuracy", [None, 1e-3])
def test_a_core_may_answer_at_every_point_of_a_runaway_fit(accuracy: float | None) -> None:
    people = cohort(1500)
    model = regression(people, Apply("step", Number("age", 7), low=0.4), formula="age + bmi")
    seen: list[Question] = []
    with pytest.raises(FitError):
        people.run(fit([model], n=people.n, accuracy=accuracy), seen=seen)
    reaches = [
        sum(abs(e * f) for e, f in zip(block.at, layer.factors, strict=True))
        for question in seen
        for block in question.blocks
        if isinstance(block, Score)
        for layer in block.layers
    ]
    assert 50.0 < max(reaches) <= LARGEST_PREDICTOR / 0.85  # ages are at most 110 of 128


def test_a_level_that_nobody_has_costs_no_round() -> None:
    people = cohort(1500)
    sites = np.minimum(people.columns["site"], 2).astype(np.int16)
    nobody = Cohort(dictionary=people.dictionary, columns={**people.columns, "site": sites})
    ran = nobody.run(fit([regression(nobody)], n=nobody.n, accuracy=1e-3))
    (found,) = ran.result
    (exact,) = nobody.run(fit([regression(nobody)], n=nobody.n)).result
    assert found.coefficients[0][-1] == exact.coefficients[0][-1] == 0.0
    assert distance(nobody, found, exact) * np.sqrt(nobody.n) <= 1e-3
    assert ran.rounds <= 5
