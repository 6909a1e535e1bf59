"""Effects over questions are the effects of the package: the same estimates and standard errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from tests.effects.studies import NEWTON, change, cut
from tests.effects.test_pooled import OPTIONS, TARGETS, partitions, people, study_of
from tests.estimation.over_questions import run_over_questions

ALGORITHMS = {"newton": NEWTON, "coded": ft.Coded(), "one step": ft.OneStep()}
FURTHER: dict[str, dict[str, Any]] = {
    "folds": {"folds": 3},
    "weight": {"clever": "weight"},
    "contrast": {"submodel": "contrast"},
    "linear": {"link": "linear"},
    "a bound": {"g_bounds": 0.1},
    "no bound": {"g_bounds": None},
}


def assert_same(study: ft.Study, silos: dict[str, Any], share: float) -> None:
    """Assert that both differ by less than a share of a standard error."""
    outcome = run_over_questions(study, silos).result
    before = ft.run(change(study, diagnostics=False), silos).run
    assert before.psi is not None
    assert before.std_error is not None
    assert outcome.status is before.status
    np.testing.assert_allclose(outcome.estimate.psi, before.psi, rtol=0, atol=share * before.std_error.min())
    errors = np.sqrt(np.diag(outcome.estimate.covariance))
    np.testing.assert_allclose(errors, before.std_error, rtol=share)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_every_effect_is_that_of_the_package(name: str, option: str, algorithm: str) -> None:
    study = change(study_of(TARGETS[name], **OPTIONS[option]), algorithm=ALGORITHMS[algorithm])
    data = people(study, 400, seed=5 + len(name))
    assert_same(study, cut(data, partitions(data, 3)["random"]), 1e-8 if algorithm == "newton" else 1e-5)


@pytest.mark.parametrize("option", FURTHER)
def test_options_are_those_of_the_package(option: str) -> None:
    study = change(study_of(TARGETS["ATE"], **OPTIONS["missing"]), **FURTHER[option])
    data = people(study, 400, seed=5)
    assert_same(study, cut(data, partitions(data, 3)["random"]), 1e-8)
