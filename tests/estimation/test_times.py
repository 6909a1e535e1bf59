"""Time to an event over questions is that of the package: the same estimates and standard errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.errors import FedTMLEError
from fedtmle.initial.glm import FittedGLM
from fedtmle.programs.time import TimeDetails
from fedtmle.results.over_time import time_document
from tests.effects.studies import finish
from tests.estimation.over_questions import run_over_questions
from tests.narrow import targeted
from tests.time.law import VARIABLES, Law, study
from tests.time.studies import NEWTON, colon, colon_study, rossi, rossi_study, split

ONE, TWO = Law(1).draw(400, seed=3), Law(2).draw(400, seed=3)
TIGHT: dict[str, Any] = {"algorithm": NEWTON}
COLON_MODELS: dict[str, Any] = {
    "hazard_model": ft.GLM("C(period)*C(rx) + age + node4"),
    "censoring_model": ft.GLM("C(rx) + age"),
    "treatment_model": ft.GLM("age + node4"),
}
PAIRS = ONE.assign(pair=(np.arange(len(ONE)) // 2).astype(str))
LATE = ONE.assign(entry=2.0, t=ONE.t + 2.0)
ENTERED = ft.Variables(
    {
        **VARIABLES,
        "what": {"kind": "category", "levels": ["none", "first"]},
        "t": {"kind": "number", "range": (0, 6)},
        "entry": {"kind": "number", "range": (0, 2)},
    }
)
STUDIES: dict[str, tuple[ft.Study, pd.DataFrame]] = {
    "rossi": (rossi_study(ft.RiskDifference), rossi()),
    "survival": (rossi_study(ft.Survival, horizons=(4, 13)), rossi()),
    "rules": (rossi_study(ft.PolicyRisk), rossi()),
    "colon, counted": (colon_study(ft.Risk, horizons=(3, 10)), colon()),
    "colon": (colon_study(ft.RiskDifference, **COLON_MODELS), colon()),
    "a bound": (colon_study(ft.RMST, **COLON_MODELS, g_bounds=0.4), colon()),
    **{
        f"causes, {kind.__name__}": (study(kind, 2, horizons=(2, 4), **TIGHT), TWO)
        for kind in (ft.Risk, ft.Survival, ft.RMST, ft.TimeLost, ft.RiskRatio)
    },
    "weights": (study(ft.Risk, 2, weights="w", **TIGHT), TWO),
    "counted, weights": (
        study(ft.Risk, 2, weights="w", hazard_model=None, censoring_model=None, **TIGHT),
        TWO,
    ),
    "strata": (study(ft.RiskDifference, target={"strata": "centre"}, horizons=(2, 4), **TIGHT), ONE),
    "clusters": (study(ft.Risk, cluster="pair", cluster_scope="silo", **TIGHT), PAIRS),
    "folds": (study(ft.Risk, 2, folds=3, **TIGHT), TWO),
    "parts of periods": (study(ft.RMST, target={"subperiods": 2}, **TIGHT), ONE),
    "entry": (study(ft.Risk, target={"entry": "entry"}, variables=ENTERED, **TIGHT), LATE),
}


def assert_same(asked: ft.Study, silos: dict[str, pd.DataFrame], share: float) -> None:
    """Assert that both differ by less than a share of a standard error."""
    outcome = run_over_questions(asked, silos).result
    before = ft.run(replace(asked, diagnostics=False), silos).run
    assert before.psi is not None
    assert before.std_error is not None
    assert outcome.status is before.status
    np.testing.assert_allclose(outcome.estimate.psi, before.psi, rtol=0, atol=share * before.std_error.min())
    errors = np.sqrt(np.diag(outcome.estimate.covariance))
    np.testing.assert_allclose(errors, before.std_error, rtol=share)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_that_of_the_package(name: str) -> None:
    asked, records = STUDIES[name]
    parts = 1 if asked.cluster else 3
    assert_same(asked, split(records, parts), 1e-9)


def test_coded_agrees() -> None:
    """Another path ends at another solution of the equation: by far less than a standard error."""
    assert_same(study(ft.Risk, 2, horizons=(2, 4), algorithm=ft.Coded()), split(TWO, 2), 1e-3)


def test_any_partition_gives_the_same_bits() -> None:
    asked = study(ft.Risk, 2, horizons=(2, 4), **TIGHT)
    pooled = run_over_questions(asked, {"all": TWO}).result.estimate
    parts = run_over_questions(asked, split(TWO, 4)).result.estimate
    assert pooled.psi.tolist() == parts.psi.tolist()
    assert pooled.covariance.tolist() == parts.covariance.tolist()


def test_the_details_are_those_of_the_package() -> None:
    """Counts, overlap and curves, as results show them."""
    asked = replace(STUDIES["causes, Risk"][0], diagnostics=False)
    silos = split(TWO, 2)
    outcome, (before, _) = run_over_questions(asked, silos).result, finish(asked, silos)
    details, old = outcome.details, targeted(before).details
    assert isinstance(details, TimeDetails)
    assert isinstance(old, TimeDetails)
    assert details.arm_counts == old.arm_counts
    assert details.event_counts == old.event_counts
    assert details.overlap.truncated == old.overlap.truncated
    np.testing.assert_allclose(details.overlap.effective_sizes, old.overlap.effective_sizes, rtol=1e-4)
    assert details.groups == old.groups
    for fits, others in zip(details.nuisances.values(), old.nuisances.values(), strict=True):
        for fit, other in zip(fits, others, strict=True):
            assert isinstance(fit, FittedGLM)
            assert isinstance(other, FittedGLM)
            np.testing.assert_allclose(fit.coefficients, other.coefficients, rtol=1e-8, atol=1e-10)
    result = ft.run(asked, silos).run
    assert time_document(asked, details, result, 2) == time_document(asked, old, result, 2)


def test_a_finer_grid_is_compared() -> None:
    asked = study(ft.RMST, target={"compare_subperiods": 2}, **TIGHT)
    silos = split(ONE, 2)
    outcome, (before, _) = run_over_questions(asked, silos).result, finish(asked, silos)
    details, old = outcome.details, targeted(before)
    assert isinstance(details, TimeDetails)
    assert details.finer is not None
    for ours, theirs in ((outcome, old), (details.finer, old.details.finer)):
        assert ours.estimate is not None
        np.testing.assert_allclose(ours.estimate.psi, theirs.estimate.psi, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (ONE[ONE.a == 1], "no silo has a record in arm '0'"),
        (ONE[(ONE.a == 1) | (ONE.t < 2)], "nobody in arm '0' is at risk in period 4"),
        (ONE[ONE.what == "none"], "nobody has an event of cause 'first'"),
    ],
)
def test_counts_with_nothing_to_estimate_are_refused(records: pd.DataFrame, message: str) -> None:
    with pytest.raises(FedTMLEError, match=message):
        run_over_questions(study(ft.Risk), {"all": records})


def test_arms_without_overlap_are_refused() -> None:
    """Most people are in one arm, and a quarter of them are censored."""
    records = ONE.assign(a=(np.random.default_rng(1).random(len(ONE)) < 0.6).astype(int))
    with pytest.raises(FedTMLEError, match="no overlap"):
        run_over_questions(study(ft.Risk, g_bounds=0.49), {"all": records})
