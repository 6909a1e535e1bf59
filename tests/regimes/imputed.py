"""Records of treatment over time whose covariates are missing at random, and studies that impute them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

import fedtmle as ft
from tests.regimes.law import draw, expit
from tests.regimes.law import study as complete_study

STATIC = (ft.Static("0"), ft.Static("1"))


def holed(records: pd.DataFrame, periods: int, seed: int) -> pd.DataFrame:
    """Return the records, in which w and l of each period are missing by treatment and outcome.

    Those who left before a period have no l there in any case.
    """
    rng, records = np.random.default_rng([13, seed]), records.copy()
    n = len(records)
    bad = np.nan_to_num(records["b"].to_numpy(dtype=float)) if "b" in records else np.zeros(n)
    first = records["a1"].to_numpy(dtype=float)
    records.loc[rng.random(n) < expit(-2.0 + 1.0 * bad + 0.6 * first), "w"] = np.nan
    for t in range(1, periods + 1):
        now = np.nan_to_num(records[f"a{t}"].to_numpy(dtype=float, na_value=np.nan))
        records.loc[rng.random(n) < expit(-2.4 + 1.8 * bad * now), f"l{t}"] = np.nan
    return records


def study(
    kind: type[ft.AbstractRegimeEffect] = ft.RegimeDifference, how: str = "impute", **options: Any
) -> ft.Study:
    """Return a study of the law in which w and l are handled in one way where they are missing."""
    asked = complete_study(kind, **{"periods": 2, "rules": STATIC, "imputation_sweeps": 2, **options})
    declared = {
        "w": {"kind": "number", "range": (-3, 3), "missing": how},
        "l": {"kind": "number", "range": (-4, 4), "missing": how},
    }
    return replace(asked, variables=ft.Variables({**asked.variables, **declared}))


def cut(records: pd.DataFrame, ends: list[int]) -> dict[str, pd.DataFrame]:
    """Return consecutive records in silos."""
    edges = [0, *ends, len(records)]
    return {f"s{m}": records[edges[m] : edges[m + 1]] for m in range(len(edges) - 1)}


__all__ = ["STATIC", "cut", "draw", "holed", "study"]
