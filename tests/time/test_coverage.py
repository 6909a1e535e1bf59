"""Intervals of time-to-event estimands cover the truth, with covariate-dependent censoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from tests.time.law import WRONG, Law, study

RULE = ft.Threshold("x", 0.0, arm="1", otherwise="0")
N = 600


@dataclass(frozen=True)
class Design:
    """A study of the law, and the true values of what it reports."""

    law: Law
    study: ft.Study
    truth: tuple[float, ...]
    is_right: bool = True  # whether all models are right: then the interval must cover


def incidences(law: Law) -> tuple[np.ndarray, np.ndarray]:
    return law.incidence(np.zeros_like), law.incidence(np.ones_like)


def designs() -> dict[str, Design]:
    one, two = Law(1), Law(2)
    (control, treated), (control2, treated2) = incidences(one), incidences(two)
    difference = treated - control
    risks = tuple(difference[0, [1, 3]])
    quiet: dict[str, Any] = {"diagnostics": False}
    return {
        "risk difference": Design(one, study(ft.RiskDifference, horizons=(2, 4), **quiet), risks),
        "RMST difference": Design(one, study(ft.RMSTDifference, **quiet), (-float(difference[0, :3].sum()),)),
        "two causes": Design(two, study(ft.RiskDifference, 2, **quiet), tuple((treated2 - control2)[:, 3])),
        "dynamic regime": Design(
            one,
            study(ft.PolicyRisk, target={"rules": (RULE,)}, **quiet),
            tuple(one.incidence(lambda x: (x >= 0).astype(float))[0, 3:]),
        ),
        "hazard wrong": Design(
            one,
            study(ft.RiskDifference, horizons=(2, 4), **quiet, hazard_model=ft.GLM(WRONG)),
            risks,
            is_right=False,
        ),
        "treatment and censoring wrong": Design(
            one,
            study(
                ft.RiskDifference, horizons=(2, 4), **quiet, treatment_model=ft.GLM("1"), censoring_model=None
            ),
            risks,
            is_right=False,
        ),
    }


@dataclass(frozen=True)
class Figures:
    """Over the replications: coverage, mean SE over sd, and the bias in its own Monte Carlo errors."""

    coverage: np.ndarray
    ratio: np.ndarray
    bias: np.ndarray


def replicate(design: Design, replications: int, first: int = 0) -> Figures:
    """Return the figures of the replications with seeds from ``first`` on."""
    rows = []
    for seed in range(first, first + replications):
        records = design.law.draw(N, seed)
        table = ft.run(design.study, {"one": records[: N // 3], "two": records[N // 3 :]}).table()
        rows.append(table[["estimate", "std_error", "conf_low", "conf_high"]].to_numpy().T)
    estimate, error, low, high = np.array(rows).transpose(1, 0, 2)
    truth = np.array(design.truth)
    sd = estimate.std(axis=0, ddof=1)
    return Figures(
        coverage=((low <= truth) & (truth <= high)).mean(axis=0),
        ratio=error.mean(axis=0) / sd,
        bias=(estimate.mean(axis=0) - truth) / (sd / np.sqrt(replications)),
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", designs())
def test_coverage(name: str) -> None:
    """500 replications: the standard error of a coverage is 1 %, that of SE / sd 3 %."""
    design = designs()[name]
    found = replicate(design, 500)
    assert (np.abs(found.bias) < 3.5).all()
    if design.is_right:
        assert (found.coverage > 0.925).all()
        assert (found.coverage < 0.975).all()
        assert (np.abs(found.ratio - 1) < 0.1).all()
