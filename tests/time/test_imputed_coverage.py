"""Coverage with covariates that are missing at random: 1,000 replications of 500 people.

The studies run on pooled rows: that federated ones give the same is tested elsewhere. Each replication has a
seed of its own, because the draws of a study depend on its seed and on the number of the record alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.programs.flow import StudyProgram, study_details
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import follow_alone
from fedtmle.results.inference import Row, imputed_rows, table_rows
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.schema import schema_of
from tests.effects.studies import change
from tests.time.imputed import draw, study, truth

N, REPLICATIONS = 500, 1000
TRUTH = truth()
QUICK: dict[str, Any] = {"algorithm": ft.Gradient(optimizer=ft.Newton()), "imputation_sweeps": 5}


def estimated(asked: ft.Study, records: pd.DataFrame) -> Row:
    """Return the risk difference of pooled rows, by Rubin's rules if some are imputed."""
    read: Any = StudyProgram.of(asked, ("all",)).at(
        "all", load_all({"all": records}, schema_of(asked))["all"]
    )
    local = LocalRows("all", read, read.n_rows)
    local.place(0)
    outcome = follow_alone(StudyProgram.of(asked, ("all",)).flow(local.n_rows), local)
    details = study_details(outcome)
    assert isinstance(outcome, Targeted)
    if details.imputed:
        return imputed_rows(asked, details.components, details.imputed, local.n_rows)[0][0]
    estimate = outcome.estimate
    return table_rows(asked, details.components, estimate.psi, estimate.covariance)[0][0]


@pytest.mark.slow
@pytest.mark.timeout(3_000)
def test_imputed_intervals_cover(record_property: Callable[[str, object], None]) -> None:
    asked = study(**QUICK)
    rows = [estimated(change(asked, seed=seed), draw(N, seed)) for seed in range(REPLICATIONS)]
    covered = np.mean([row.conf_low < TRUTH < row.conf_high for row in rows])
    estimates = np.array([row.estimate for row in rows])
    errors = np.array([row.std_error for row in rows])
    bias, ratio = (estimates.mean() - TRUTH) / estimates.std(), errors.mean() / estimates.std()
    record_property("found", f"coverage {covered:.4f}, bias {bias:+.3f} sd, SE ratio {ratio:.3f}")
    assert 0.93 <= covered <= 0.97
    assert abs(bias) < 0.1 + 3 / math.sqrt(REPLICATIONS)  # imputation models are approximations
    assert 0.95 < ratio < 1.1


@pytest.mark.slow
@pytest.mark.timeout(3_000)
def test_complete_cases_are_biased(record_property: Callable[[str, object], None]) -> None:
    """The values are missing such that it matters: complete records are off by more than a standard error."""
    asked = study(how="refuse", **QUICK)
    rows = [estimated(asked, draw(N, seed).dropna()) for seed in range(200)]
    estimates = np.array([row.estimate for row in rows])
    covered = np.mean([row.conf_low < TRUTH < row.conf_high for row in rows])
    bias = (estimates.mean() - TRUTH) / estimates.std()
    record_property("found", f"coverage {covered:.4f}, bias {bias:+.3f} sd")
    assert bias < -1.0
    assert covered < 0.8


def test_one_replication() -> None:
    row = estimated(study(**QUICK), draw(N, 1))
    assert abs(row.estimate - TRUTH) < 4 * row.std_error
    assert 0.02 < row.std_error < 0.1
