"""Responses are on the unit scale, as nuisance models and fluctuations declare them to the guard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, Part
from tests.effects.studies import VARIABLES, cut, finish, population

OUTCOMES = ("y", "event")


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"link": "linear"}, {"weights": "weight"}, {"folds": 2}, {"clever": "weight"}]
)
def test_no_response_goes_beyond_what_is_declared(
    outcome: str, missing: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    declared: list[float] = []
    sums = GeneralisedLinear.sums

    def watched(self: GeneralisedLinear, eps: Array, parts: Part) -> Sums:
        if self.y is not None and self.y_largest is not None:
            declared.append(self.y_largest)
            assert np.abs(self.y).max(initial=0.0) <= self.y_largest
        return sums(self, eps, parts)

    monkeypatch.setattr(GeneralisedLinear, "sums", watched)
    study = ft.Study(
        target=ft.ATE(outcome=outcome, treatment="a"),
        outcome_model=ft.GLM("a + w + C(site)"),
        treatment_model=ft.GLM("w"),
        missingness_model=ft.GLM("a + w") if missing else None,
        variables=VARIABLES,
        **options,
    )
    data = population(600, seed=7, missing=missing)
    finish(study, cut(data, np.array_split(np.arange(600), 2)))
    assert declared
