"""Intervals under regimes cover the truth, with covariate-dependent censoring in every period."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from tests.regimes.law import draw, expit, study

N, PERIODS = 800, 3
RULE = ft.Threshold("l", 0.2, arm="1", otherwise="0")
QUIET: dict[str, Any] = {"algorithm": ft.Gradient(optimizer=ft.Newton()), "diagnostics": False}


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


@dataclass(frozen=True)
class Design:
    study: ft.Study
    truth: float
    survival: bool = False
    is_right: bool = True  # whether the models of treatment and censoring are right: then intervals cover


def designs() -> dict[str, Design]:
    def dynamic(level: Any) -> Any:
        return (level >= 0.2).astype(float)

    def always(level: Any) -> Any:
        return np.ones_like(level)

    one = (ft.Static("1"),)
    return {
        "dynamic rule": Design(study(periods=PERIODS, rules=(RULE,), **QUIET), truth(dynamic, "b")),
        "dynamic rule, event": Design(
            study(periods=PERIODS, rules=(RULE,), survival=True, **QUIET), truth(dynamic, "event"), True
        ),
        "outcome wrong": Design(
            study(periods=PERIODS, rules=(RULE,), **QUIET, outcome_model=ft.GLM("1")), truth(dynamic, "b")
        ),
        "treatment and censoring wrong": Design(
            study(
                periods=PERIODS,
                rules=one,
                outcome="y",
                **QUIET,
                treatment_model=ft.GLM("1"),
                censoring_model=ft.GLM("1"),
            ),
            truth(always, "y"),
            is_right=False,
        ),
    }


@dataclass(frozen=True)
class Figures:
    """Over the replications: coverage, mean SE over sd, and the bias in its own Monte Carlo errors."""

    coverage: float
    ratio: float
    bias: float


def replicate(design: Design, replications: int, first: int = 0) -> Figures:
    """Return the figures of the replications with seeds from ``first`` on."""
    rows = []
    for seed in range(first, first + replications):
        records = draw(N, PERIODS, seed, survival=design.survival)
        table = ft.run(design.study, {"one": records[: N // 3], "two": records[N // 3 :]}).table()
        rows.append(table[["estimate", "std_error", "conf_low", "conf_high"]].to_numpy()[0])
    estimate, error, low, high = np.array(rows).T
    sd = estimate.std(ddof=1)
    return Figures(
        coverage=float(((low <= design.truth) & (design.truth <= high)).mean()),
        ratio=float(error.mean() / sd),
        bias=float((estimate.mean() - design.truth) / (sd / np.sqrt(replications))),
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", designs())
def test_coverage(name: str) -> None:
    """500 replications: the standard error of a coverage is 1 %, that of SE / sd 3 %."""
    design = designs()[name]
    found = replicate(design, 500)
    assert abs(found.bias) < 3.5
    if design.is_right:
        assert 0.925 < found.coverage < 0.975
        assert abs(found.ratio - 1) < 0.1
