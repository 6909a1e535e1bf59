"""Studies and tables that use much of what a study can."""

from __future__ import annotations

from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.model.table import Table
from fedtmle.programs.study import Study
from fedtmle.studyfile.schema import schema_of
from tests.declare import declare
from tests.narrow import load_all

VARIABLES = declare(
    y=(-20, 40),
    arm="binary",
    third=["a", "b", "c"],
    age=(30, 80),
    dose=(0.5, 8.5),
    w=(0.25, 2),
    sex=["f", "m"],
    family="identifier",
)


def study_with_everything(kind: str) -> Study:  # noqa: PLR0911 - one return per kind
    common: dict[str, Any] = {
        "outcome_model": ft.GLM("C(arm) + spline(age, knots=[40, 55, 70]) + I(dose**2 / age) + log(dose)"),
        "treatment_model": ft.GLM("age + bs(dose, knots=[2, 4], low=0, high=9)"),
        "missingness_model": ft.GLM("age + sqrt(dose)"),
        "algorithm": ft.Gradient(optimizer=ft.Newton(), tolerance=1e-8),
        "variables": VARIABLES,
    }
    columns: dict[str, Any] = {"outcome": "y", "treatment": "arm"}
    if kind == "everything":
        return Study(target=ft.ATE(**columns, strata="sex"), weights="w", **common)
    if kind == "weighted":
        return Study(target=ft.ATE(**columns), clever="weight", **common)
    if kind == "linear":
        return Study(target=ft.TSM(**columns), link="linear", cluster="family", **common)
    if kind == "ATT":
        return Study(target=ft.ATT(**columns), **{**common, "algorithm": ft.Coded(tolerance=1e-4)})
    if kind == "overlap":
        return Study(target=ft.ATO(**columns), weights="w", **common)
    if kind == "three arms":
        three = {**columns, "treatment": "third", "arms": ("a", "b", "c")}
        outcome_model = ft.GLM("C(third) + age + log(dose)")
        return Study(target=ft.ATT(**three), weights="w", **{**common, "outcome_model": outcome_model})
    return Study(target=ft.ATE(**columns), submodel="contrast", **{**common, "algorithm": ft.LocalAverage()})


def frame(n: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    age, dose = rng.uniform(30, 80, size=n), rng.uniform(0.5, 8.5, size=n)
    arm = (rng.random(n) < 1 / (1 + np.exp(-0.02 * (age - 55)))).astype(int)
    y = 5 + 2 * arm + 0.1 * age + np.log(dose) + rng.normal(size=n)
    y[rng.random(n) < 0.1] = np.nan
    return {
        "y": y,
        "arm": arm.astype(str),
        "third": np.where(arm == 1, "a", np.where(dose + 9 * rng.random(n) < 9, "b", "c")),
        "age": age,
        "dose": dose,
        "w": rng.uniform(0.5, 2.0, size=n),
        "sex": np.where(rng.random(n) < 0.5, "f", "m"),
        "family": (np.arange(n) // 3).astype(str),
    }


def table_of(study: Study, n: int, seed: int = 0) -> Table:
    return load_all({"s": frame(n, seed)}, schema_of(study))["s"]
