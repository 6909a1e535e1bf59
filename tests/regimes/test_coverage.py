"""Intervals under regimes cover the truth, with covariate-dependent censoring in every period."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from tests.coverage import QUICK, Design, check
from tests.regimes.law import draw, expit, study

N, PERIODS = 1000, 3
RULE = ft.Threshold("l", 0.2, arm="1", otherwise="0")


@cache
def truth(rule: Any, outcome: str, size: int = 4_000_000) -> float:
    """Return the mean under a rule by simulation: the mean of what is expected of the outcome given history.

    Its own error is below 1e-4.
    """
    rng = np.random.default_rng(99)
    total, done = 0.0, 0
    while done < size:
        n = 500_000
        w, before = rng.normal(size=n).clip(-3, 3), np.zeros(n)
        level, alive = w, np.ones(n)
        risk = np.zeros(n)
        for _ in range(PERIODS):
            level = (0.4 * w + 0.4 * level - 0.4 * before + 0.7 * rng.normal(size=n)).clip(-4, 4)
            before = rule(level)
            hazard = expit(-2.0 + 0.5 * level - 0.6 * before)
            risk, alive = risk + alive * hazard, alive * (1 - hazard)
        end = 0.7 * level - 0.8 * before + 0.3 * w
        total += float({"b": expit(end - 0.5), "y": end, "event": risk}[outcome].sum())
        done += n
    return total / done


def dynamic(level: Any) -> Any:
    return (level >= 0.2).astype(float)


@cache
def designs() -> dict[str, Design]:
    def of(*, is_right: bool = True, survival: bool = False, rule: Any = dynamic, **options: Any) -> Design:
        asked = study(periods=PERIODS, survival=survival, **({"rules": (RULE,)} | QUICK | options))
        drawn = partial(draw, N, PERIODS, survival=survival)
        return Design(
            asked, drawn, (truth(rule, options.get("outcome", "event" if survival else "b")),), is_right
        )

    wrong: dict[str, Any] = {"treatment_model": ft.GLM("1"), "censoring_model": ft.GLM("1")}
    return {
        "dynamic rule": of(),
        "dynamic rule, event": of(survival=True),
        "outcome wrong": of(is_right=False, outcome_model=ft.GLM("1")),
        "treatment and censoring wrong": of(
            is_right=False, rule=np.ones_like, rules=(ft.Static("1"),), outcome="y", **wrong
        ),
    }


NAMES = ("dynamic rule", "dynamic rule, event", "outcome wrong", "treatment and censoring wrong")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_coverage(name: str) -> None:
    check(designs()[name])
