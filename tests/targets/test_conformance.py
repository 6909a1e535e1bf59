"""Every shipped target passes the conformance suite that we ask of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.protocol.outcome import Targeted
from tests.cases import TARGETS, targets
from tests.effects.studies import NEWTON, VARIABLES, finish, population


@pytest.mark.parametrize("moved", [False, True], ids=["start", "moved"])
@pytest.mark.parametrize("name", TARGETS)
def test_targets_hold_together(name: str, moved: bool) -> None:
    case = targets()[name]
    law = case.law
    if moved:
        law = case.problem.move(law, np.full(case.problem.dim, 0.003))
    report = ft.check_problem(case.problem, law, case.take(np.arange(200)))
    report.raise_if_failed()


ARMS: dict[str, Any] = {"outcome": "y", "treatment": "a"}

EFFECTS: dict[str, tuple[type[ft.AbstractEffect], dict[str, Any]]] = {
    "means": (ft.TSM, {}),
    "in the treated": (ft.ATT, {}),
    "overlap weights": (ft.ATO, {}),
    "strata, in blocks": (ft.ATE, {"strata": "old"}),
    "linear link": (ft.ATE, {"link": "linear"}),
    "covariate as weight": (ft.ATE, {"clever": "weight"}),
    "contrast": (ft.ATE, {"submodel": "contrast"}),
    "sampling weights": (ft.ATE, {"weights": "weight", "weight_ceiling": 4.0}),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_hold_together(name: str) -> None:
    kind, options = EFFECTS[name]
    strata = {key: options[key] for key in options if key == "strata"}
    study = ft.Study(
        target=kind(**ARMS, **strata),
        outcome_model=ft.GLM("C(a) + w"),
        treatment_model=ft.GLM("w"),
        algorithm=NEWTON,
        variables=VARIABLES,
        **{key: value for key, value in options.items() if key != "strata"},
    )
    finished, tables = finish(study, {"all rows": population(150, 3)})
    outcome = finished.outcome
    assert isinstance(outcome, Targeted)
    problem: Any = outcome.problem
    for law in (problem.start(), outcome.law):
        report = ft.check_problem(problem, law, tables["all rows"])
        report.raise_if_failed()
