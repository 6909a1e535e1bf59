"""Intervals of time-to-event estimands cover the truth, with covariate-dependent censoring."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from tests.coverage import QUICK, Design, check
from tests.time.law import WRONG, Law, study

RULE = ft.Threshold("x", 0.0, arm="1", otherwise="0")
N = 1000


def designs() -> dict[str, Design]:
    one, two = Law(1), Law(2)
    difference = one.incidence(np.ones_like) - one.incidence(np.zeros_like)
    both = two.incidence(np.ones_like) - two.incidence(np.zeros_like)
    ruled = one.incidence(lambda x: (x >= 0).astype(float))
    risks = tuple(difference[0, [1, 3]])

    def of(kind: Any, truth: Any, law: Law = one, *, is_right: bool = True, **options: Any) -> Design:
        asked = study(kind, law.causes, **(QUICK | options))
        return Design(asked, partial(law.draw, N), tuple(map(float, truth)), is_right)

    risk = partial(of, ft.RiskDifference, risks, horizons=(2, 4))
    return {
        "risk difference": risk(),
        "RMST difference": of(ft.RMSTDifference, [-difference[0, :3].sum()]),
        "two causes": of(ft.RiskDifference, both[:, 3], two),
        "rule": of(ft.PolicyRisk, ruled[0, 3:], target={"rules": (RULE,)}),
        "hazard wrong": risk(is_right=False, hazard_model=ft.GLM(WRONG)),
        "treatment and censoring wrong": risk(
            is_right=False, treatment_model=ft.GLM("1"), censoring_model=None
        ),
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", designs())
def test_coverage(name: str) -> None:
    check(designs()[name])
