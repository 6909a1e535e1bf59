"""Fits over questions beside the package's own engine, on the demonstration, and beside statsmodels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm

from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.estimation.fit import fit
from fedtmle.estimation.flow import run_open
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.nuisances import regressions
from fedtmle.estimation.people import People
from fedtmle.estimation.planned import plan_of
from fedtmle.estimation.regression import Record, Regression
from fedtmle.initial.glm import FittedGLM
from fedtmle.programs.flow import StudyDetails
from fedtmle.protocol.outcome import Targeted
from fedtmle_core.admit import Judged, admit
from fedtmle_core.evaluate import Workspace
from fedtmle_core.leaves import Level, Number
from fedtmle_core.plan import Question
from fedtmle_core.types import Family
from tests.effects.studies import finish
from tests.estimation.cohort import cohort
from tests.estimation.over_questions import sheets_of

SILOS = ihdp_silos()
EXACT = replace(IHDP, sums="exact", diagnostics=False)
DECLARED = Declared(EXACT)
SHEETS = [Workspace(sheet) for sheet in sheets_of(DECLARED, SILOS)]
PLAN = plan_of(DECLARED, (), study=b"", author="test")
ROLES = ("treatment", "missingness", "outcome")


def demonstration() -> dict[str, Regression]:
    return regressions(DECLARED, People.of(EXACT, DECLARED.dictionary))


@pytest.fixture(scope="module")
def before() -> dict[str, tuple[float, ...]]:
    """Return the coefficients of the package's engine."""
    finished, _ = finish(EXACT, SILOS)
    outcome = finished.outcome
    assert isinstance(outcome, Targeted)
    assert isinstance(outcome.details, StudyDetails)
    found = {}
    for role, (fitted,) in outcome.details.nuisances.items():
        assert isinstance(fitted, FittedGLM)
        found[role] = fitted.coefficients
    return found


def test_exact_coefficients_are_those_of_the_package(before: dict[str, tuple[float, ...]]) -> None:
    models = demonstration()
    assert tuple(models) == ROLES
    ran = run_open(fit(list(models.values()), n=985), SHEETS, PLAN)
    for role, fitted in zip(models, ran.result, strict=True):
        np.testing.assert_allclose(fitted.coefficients[0], before[role], rtol=1e-9, atol=1e-9)
    assert ran.rounds <= 8


def test_rounded_coefficients_are_within_their_share_of_a_standard_error(
    before: dict[str, tuple[float, ...]],
) -> None:
    models = demonstration()
    near = run_open(fit(list(models.values()), n=985, accuracy=1e-3), SHEETS, PLAN)
    for role, fitted in zip(models, near.result, strict=True):
        design = fitted.regression.design
        eta = [
            np.concatenate([c for each in SHEETS for c in each.columns([design.predictor(row)])])
            for row in (fitted.coefficients[0], before[role])
        ]
        unit = 1.0 if fitted.regression.family is Family.LOGISTIC else 1.0 / 16.0
        assert np.sqrt(np.mean((eta[0] - eta[1]) ** 2) * 985) / unit <= fitted.error * 1.01 <= 1.01e-3, role
    assert near.rounds <= 6  # five after the matrix; 77 infants are lost, and their model is the last


@pytest.mark.parametrize("accuracy", [None, 1e-3])
def test_a_core_admits_all_that_fits_ask_for(accuracy: float | None) -> None:
    seen: list[Question] = []
    flow = fit(list(demonstration().values()), n=985, accuracy=accuracy)
    run_open(flow, SHEETS, PLAN, seen=seen)
    judged = Judged.of(PLAN)
    for question in seen:
        admit(question, judged)


def test_fits_are_those_of_statsmodels() -> None:
    people = cohort(800, seed=9)
    data = people.columns
    design = people.vocabulary.design("treat + age + bmi + C(site) + treat:age")
    site = data["site"]
    X = np.column_stack(
        [np.ones(800), data["treat"], data["age"], data["bmi"], *(np.equal(site, k) * 1.0 for k in (1, 2, 3))]
    )
    X = np.column_stack([X, data["treat"] * data["age"]])
    models = [
        (Family.LOGISTIC, Number("y", 0), data["y"], sm.families.Binomial()),
        (Family.POISSON, Number("visits", 6) * 64.0, data["visits"], sm.families.Poisson()),
        (Family.GAUSSIAN, Number("score", 7) * 1.28, data["score"] / 100, sm.families.Gaussian()),
        (Family.LOGISTIC, Level("sex", 1), data["sex"], sm.families.Binomial()),
    ]
    asked = [
        Regression(
            label="model",
            family=family,
            design=design,
            records=(Record(y=y, w=Number("weight", 2) * 4.0),),
        )
        for family, y, _, _ in models
    ]
    found = people.run(fit(asked, n=800)).result
    order = [design.names.index(n) for n in ("1", "treat", "age", "bmi")]
    order += [j for j, name in enumerate(design.names) if name.startswith("C(site)")]
    order += [design.names.index("treat:age")]
    for fitted, (_, _, y, family) in zip(found, models, strict=True):
        theirs = sm.GLM(y, X, family=family, freq_weights=data["weight"]).fit(tol=1e-14, maxiter=100)
        np.testing.assert_allclose(
            np.array(fitted.coefficients[0])[order], theirs.params, rtol=1e-8, atol=1e-9
        )
