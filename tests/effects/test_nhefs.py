"""NHEFS by `run`: the reference effects, whether the 1,566 rows are in one silo or ten.

Smoking cessation and weight change; models and reference values as in `tests/targets/test_nhefs.py`.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from tests.declare import declare
from tests.effects.studies import NEWTON, Columns, change, cut

COVARIATES = (
    "sex + race + poly(age, 2) + C(education) + poly(smokeintensity, 2) + poly(smokeyrs, 2) "
    "+ C(exercise) + C(active) + poly(wt71, 2)"
)
VARIABLES = declare(
    qsmk="binary",
    sex="binary",
    race="binary",
    age=(0, 120),
    education=["1", "2", "3", "4", "5"],
    smokeintensity=(0, 100),
    smokeyrs=(0, 100),
    exercise=["0", "1", "2"],
    active=["0", "1", "2"],
    wt71=(20, 300),
)
STANDARD_ERROR = 0.4870586364
REFERENCE: dict[str, tuple[dict[str, str], float]] = {
    "one covariate per arm": ({}, 3.4450687011),
    "the contrast's covariate": ({"submodel": "contrast"}, 3.4449264777),
    "weighted, per arm": ({"clever": "weight"}, 3.4450878877),
    "weighted, the contrast": ({"clever": "weight", "submodel": "contrast"}, 3.4450538554),
}


def nhefs() -> Columns:
    with (Path(__file__).parents[1] / "data" / "nhefs.csv").open() as lines:
        header, *rows = csv.reader(lines)
    return dict(zip(header, np.array(rows, dtype=float).T, strict=True))


def study(data: Columns, **options: Any) -> ft.Study:
    y = data["wt82_71"]
    return ft.Study(
        target=ft.ATE(outcome="wt82_71", treatment="qsmk"),
        outcome_model=ft.GLM(f"qsmk + {COVARIATES}"),
        treatment_model=ft.GLM(COVARIATES),
        g_bounds=None,
        algorithm=NEWTON,
        variables=declare(VARIABLES, wt82_71=(float(y.min()), float(y.max()))),  # as the reference scales y
        **options,
    )


@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_effects_to_1e8(name: str) -> None:
    options, effect = REFERENCE[name]
    data = nhefs()
    own = study(data, **options)
    estimates = []
    for silos in (1, 10):
        parts = np.array_split(np.random.default_rng(0).permutation(len(data["qsmk"])), silos)
        (row,) = ft.run(own, cut(data, parts)).to_dict()["estimates"]
        assert row["estimate"] == pytest.approx(effect, abs=1e-8)
        if not options:
            assert row["std_error"] == pytest.approx(STANDARD_ERROR, abs=1e-8)
        estimates.append((row["estimate"], row["std_error"]))
    assert estimates[0] == estimates[1]


def test_coded_is_within_its_certificate() -> None:
    data = nhefs()
    own = study(data)
    parts = np.array_split(np.random.default_rng(0).permutation(len(data["qsmk"])), 10)
    coded = ft.run(change(own, algorithm=ft.Coded()), cut(data, parts))
    (row,) = coded.to_dict()["estimates"]
    bound = coded.run.certificate.residual_bound
    assert bound <= 2e-6 * STANDARD_ERROR
    assert abs(row["estimate"] - REFERENCE["one covariate per arm"][1]) <= np.sqrt(2) * bound + 1e-10
    assert row["std_error"] == pytest.approx(STANDARD_ERROR, rel=1e-5)
