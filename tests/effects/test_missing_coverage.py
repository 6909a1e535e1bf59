"""Coverage of intervals with missing covariates, and of the silos' own estimates: 2,000 replications each.

The studies run on the pooled rows of four silos: that federated ones give the same is tested elsewhere.

Every replication has a seed of its own. The draws of a study depend on its seed and on the number of the
record, not on the data. Replications with one seed would share the draws of five data sets, and their mean
would be off by the Monte Carlo error of those five (0.07 standard deviations with seed 0).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.model.table import Table
from fedtmle.programs.flow import StudyDetails, StudyProgram, study_details, study_flow
from fedtmle.programs.nuisance import effect_columns
from fedtmle.programs.sites import OwnTMLE
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import follow_alone
from fedtmle.results.inference import Row, imputed_rows, table_rows
from fedtmle.runtime.rows import LocalRows
from fedtmle.studies.run import pool_tables
from fedtmle.studyfile.schema import in_memory, schema_of
from tests.effects import longhand
from tests.effects.studies import change, expit

TRUTH = 0.5
SIZES = (160, 120, 80, 40)
REPLICATIONS = 2000
Silos = dict[str, dict[str, np.ndarray]]


def study(how: str) -> ft.Study:
    return ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + x1 + x2"),
        treatment_model=ft.GLM("x1 + x2"),
        variables=ft.Variables(
            {
                "x1": {"kind": "number", "range": (-6, 6), "missing": how},
                "x2": {"kind": "binary", "missing": how},
                "a": {"kind": "binary"},
                "y": {"kind": "number", "range": (-12, 12)},
            }
        ),
        algorithm=ft.Gradient(optimizer=ft.Newton()),
        diagnostics=False,
    )


def at_random(rng: np.random.Generator, n: int, absent: bool) -> dict[str, np.ndarray]:
    """Values are missing at random, from a law to which the imputation models are approximations."""
    return lose(rng, complete(rng, n, absent), absent)


def congenial(rng: np.random.Generator, n: int, absent: bool) -> dict[str, np.ndarray]:
    """A law whose conditionals of x1 and of x2 are exactly the linear and the logistic imputation model.

    (x1, y) is normal given x2 and a, with means without interactions and one covariance. By Bayes' rule the
    propensity score is logistic in x1 and x2, too.
    """
    x2 = (rng.random(n) < 0.5).astype(float)
    a = (rng.random(n) < expit(0.1 - 0.6 * x2)).astype(int)
    x1 = (rng.normal(size=n) + 0.5 * x2 + 0.5 * a - 0.5).clip(-6, 6)
    y = (TRUTH * a + 0.8 * x1 - 0.7 * x2 + rng.normal(size=n)).clip(-12, 12)
    return lose(rng, {"x1": x1, "x2": x2, "a": a, "y": y}, absent)


def lose(rng: np.random.Generator, whole: dict[str, np.ndarray], absent: bool) -> dict[str, np.ndarray]:
    """About 20 % of x1 and of x2 are missing, by treatment and outcome; x2 is absent at one silo."""
    x1, x2, a, y = whole.values()
    lost1 = rng.random(len(y)) < expit(-1.7 + 0.5 * a + 0.3 * y)
    lost2 = (rng.random(len(y)) < expit(-2.3 + 0.4 * a - 0.3 * y)) | absent
    return {"x1": np.where(lost1, np.nan, x1), "x2": np.where(lost2, np.nan, x2), "a": a, "y": y}


def unrecorded(rng: np.random.Generator, n: int, absent: bool) -> dict[str, np.ndarray]:
    """A value that was not recorded did not affect the treatment, though it affects the outcome."""
    x1 = rng.normal(size=n).clip(-6, 6)
    x2 = (rng.random(n) < expit(0.6 * x1)).astype(float)
    lost1, lost2 = rng.random(n) < 0.2, (rng.random(n) < 0.11) | absent
    score = -0.2 + 0.5 * x1 * ~lost1 - 0.6 * x2 * ~lost2 + 0.4 * lost1 - 0.3 * lost2
    a = (rng.random(n) < expit(score)).astype(int)
    y = (TRUTH * a + 0.8 * x1 - 0.7 * x2 + 0.5 * lost1 + rng.normal(size=n)).clip(-12, 12)
    return {"x1": np.where(lost1, np.nan, x1), "x2": np.where(lost2, np.nan, x2), "a": a, "y": y}


def complete(rng: np.random.Generator, n: int, absent: bool) -> dict[str, np.ndarray]:  # noqa: ARG001 - none is
    x1 = rng.normal(size=n).clip(-6, 6)
    x2 = (rng.random(n) < expit(0.6 * x1)).astype(float)
    a = (rng.random(n) < expit(-0.2 + 0.5 * x1 - 0.6 * x2)).astype(int)
    y = (TRUTH * a + 0.8 * x1 - 0.7 * x2 + rng.normal(size=n)).clip(-12, 12)
    return {"x1": x1, "x2": x2, "a": a, "y": y}


def silos(law: Callable[..., dict[str, np.ndarray]], seed: int) -> Silos:
    rng = np.random.default_rng([7, seed])
    return {f"s{m}": law(rng, n, m == len(SIZES) - 1) for m, n in enumerate(SIZES)}


def rows_of(asked: ft.Study, data: Silos) -> LocalRows:
    table = pool_tables(in_memory(load_all(data, schema_of(asked)), "a test"))
    read: Any = StudyProgram.of(asked, tuple(data)).at("pooled", table)
    local = LocalRows("pooled", read, read.n_rows)
    local.place(0)
    return local


def pooled(asked: ft.Study, data: Silos) -> Row:
    local = rows_of(asked, data)
    outcome = follow_alone(StudyProgram.of(asked, tuple(data)).flow(local.n_rows), local)
    details = study_details(outcome)
    assert isinstance(outcome, Targeted)
    assert isinstance(details, StudyDetails)
    if details.imputed:
        return imputed_rows(asked, details.components, details.imputed, local.n_rows)[0][0]
    estimate = outcome.estimate
    return table_rows(asked, details.components, estimate.psi, estimate.covariance)[0][0]


def own(asked: ft.Study, data: Silos) -> Row:
    """The first silo's own estimate, of 160 records."""
    table = load_all({"s0": data["s0"]}, schema_of(asked))["s0"]
    assert isinstance(table, Table)
    fit = OwnTMLE(
        study=asked, columns=effect_columns(asked), levels={"a": ("0", "1")}, dim=2, flow=study_flow
    )
    found = fit.estimate(LocalRows("s0", table, table.n_rows))
    assert found.psi is not None
    assert found.covariance is not None
    return table_rows(asked, asked.target.components(()), found.psi, found.covariance)[0][0]


CASES: dict[str, tuple[str, Callable[..., dict[str, np.ndarray]], Callable[..., Row]]] = {
    "imputed, missing at random": ("impute", at_random, pooled),
    "imputed, exact models": ("impute", congenial, pooled),
    "indicators, unrecorded values": ("indicator", unrecorded, pooled),
    "a silo's own estimate": ("refuse", complete, own),
}


@pytest.mark.slow
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("case", CASES)
def test_intervals_cover(case: str, record_property: Callable[[str, object], None]) -> None:
    how, law, estimated = CASES[case]
    asked = study(how)
    rows = [estimated(change(asked, seed=seed), silos(law, seed)) for seed in range(REPLICATIONS)]
    covered = np.mean([row.conf_low < TRUTH < row.conf_high for row in rows])
    assert 0.93 <= covered <= 0.97
    estimates = np.array([row.estimate for row in rows])
    errors = np.array([row.std_error for row in rows])
    bias, ratio = (estimates.mean() - TRUTH) / estimates.std(), errors.mean() / estimates.std()
    record_property("found", f"coverage {covered:.4f}, bias {bias:+.3f} sd, SE ratio {ratio:.3f}")
    # Where every model is right the bias is Monte Carlo error alone; the imputation models of `at_random`
    # are approximations.
    assert abs(bias) < (0.1 if law is at_random else 3 / math.sqrt(REPLICATIONS))
    assert 0.95 < ratio < 1.05


@pytest.mark.parametrize("case", CASES)
def test_one_replication(case: str) -> None:
    how, law, estimated = CASES[case]
    row = estimated(study(how), silos(law, 1))
    assert abs(row.estimate - TRUTH) < 5 * row.std_error
    assert 0.05 < row.std_error < 0.4


DATA_SETS = 80


def imputed_by_hand(data: Silos, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One completed data set by chained regressions in numpy: x1 and x2."""
    x1, x2, a, y = (np.concatenate([silo[name] for silo in data.values()]) for name in ("x1", "x2", "a", "y"))
    lost1, lost2, one = np.isnan(x1), np.isnan(x2), np.ones(len(y))
    x1, x2 = np.nan_to_num(x1), np.nan_to_num(x2)
    variables = sorted(((lost1.sum(), "x1"), (lost2.sum(), "x2")))
    for sweep, (_, name) in itertools.product(range(5), variables):
        is_first = sweep == 0 and name == variables[0][1]
        others = [] if is_first else [x2 if name == "x1" else x1]
        X = np.column_stack([one, a, y, *others])
        if name == "x1":
            inverse = np.linalg.inv(X[~lost1].T @ X[~lost1])
            beta = inverse @ X[~lost1].T @ x1[~lost1]
            squares = ((x1 - X @ beta)[~lost1] ** 2).sum()
            variance = squares / rng.chisquare((~lost1).sum() - X.shape[1])
            beta = rng.multivariate_normal(beta, variance * inverse)
            drawn = X @ beta + np.sqrt(variance) * rng.normal(size=len(y))
            x1 = np.where(lost1, drawn.clip(-6, 6), x1)
        else:
            beta = longhand.irls(X[~lost2], x2[~lost2], one[~lost2])
            mean = expit(X[~lost2] @ beta)
            hessian = X[~lost2].T @ (X[~lost2] * (mean * (1 - mean))[:, None])
            beta = rng.multivariate_normal(beta, np.linalg.inv(hessian))
            x2 = np.where(lost2, rng.random(len(y)) < expit(X @ beta), x2)
    return x1, x2


def test_completed_data_are_those_of_an_imputation_by_hand() -> None:
    """On one table: the mean over 80 data sets and the variance between them, package and numpy."""
    data, rng = silos(at_random, 3), np.random.default_rng(8)
    asked = change(study("impute"), imputations=DATA_SETS)
    local = rows_of(asked, data)
    outcome = follow_alone(StudyProgram.of(asked, tuple(data)).flow(local.n_rows), local)
    details = study_details(outcome)
    assert isinstance(details, StudyDetails)
    found = np.array([estimate.psi[1] - estimate.psi[0] for estimate in details.imputed])
    ends = np.cumsum(SIZES)[:-1]
    completed = []
    for _ in range(DATA_SETS):
        x1, x2 = (np.split(column, ends) for column in imputed_by_hand(data, rng))
        whole = {s: {**data[s], "x1": x1[m], "x2": x2[m]} for m, s in enumerate(data)}
        completed.append(pooled(study("refuse"), whole).estimate)
    byhand = np.array(completed)
    error = np.sqrt((found.var(ddof=1) + byhand.var(ddof=1)) / DATA_SETS)
    assert abs(found.mean() - byhand.mean()) < 3.5 * error
    assert 0.5 < found.var(ddof=1) / byhand.var(ddof=1) < 2.0  # F(79, 79): 0.12 % beyond either end
