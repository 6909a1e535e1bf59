"""A law of time to an event whose covariates are missing at random, and studies that impute them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

import fedtmle as ft
from tests.time.law import expit

PERIODS = 4
VARIABLES: dict[str, Any] = {
    "t": {"kind": "count", "range": (0, PERIODS)},
    "died": {"kind": "binary"},
    "a": {"kind": "binary"},
    "x": {"kind": "number", "range": (-4, 4)},
    "z": {"kind": "binary"},
    "k": {"kind": "category", "levels": ["p", "q", "r"]},
}


def hazard(t: int, a: Any, x: Any, z: Any) -> Any:
    return expit(-2.2 + 0.15 * t - 0.6 * a + 0.6 * x + 1.0 * z)


def draw(n: int, seed: int, *, holed: bool = True) -> pd.DataFrame:
    """Return records. Of x and z about a quarter is missing, by arm, event and time."""
    rng = np.random.default_rng([11, seed])
    x = rng.normal(size=n).clip(-4, 4)
    z = (rng.random(n) < expit(0.5 * x)).astype(float)
    k = rng.choice(["p", "q", "r"], size=n, p=[0.5, 0.3, 0.2])
    a = (rng.random(n) < expit(0.3 + 0.5 * x - 0.9 * z)).astype(int)
    last, died, inside = np.full(n, PERIODS), np.zeros(n, dtype=int), np.ones(n, dtype=bool)
    for t in range(1, PERIODS + 1):
        now = inside & (rng.random(n) < hazard(t, a, x, z))
        last[now], died[now], inside = t, 1, inside & ~now
        lost = inside & (rng.random(n) < expit(-2.6 + 0.4 * x + 0.4 * a))
        last[lost], inside = t, inside & ~lost
    if holed:
        x[rng.random(n) < expit(-2.0 + 1.2 * died + 0.5 * a)] = np.nan
        z[rng.random(n) < expit(-2.4 + 2.0 * died * a + 0.2 * last)] = np.nan
    return pd.DataFrame({"t": last, "died": died, "a": a, "x": x, "z": z, "k": k})


def truth() -> float:
    """Return the risk difference at the last period, by quadrature over x and z."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    x = nodes.clip(-4, 4)
    risks = []
    for a in (0, 1):
        total = 0.0
        for z, share in ((0, 1 - expit(0.5 * x)), (1, expit(0.5 * x))):
            survival = np.prod([1 - hazard(t, a, x, z) for t in range(1, PERIODS + 1)], axis=0)
            total += float((share * (1 - survival)) @ weights / weights.sum())
        risks.append(total)
    return risks[1] - risks[0]


def study(
    kind: type[ft.AbstractTimeEffect] = ft.RiskDifference,
    how: str = "impute",
    covariates: str = "x + z",
    **options: Any,
) -> ft.Study:
    """Return a study of the law in which x, z and k are handled in one way where they are missing."""
    target = kind(
        outcome="died",
        time="t",
        treatment="a",
        periods=PERIODS,
        horizons=options.pop("horizons", ()),
        **options.pop("target", {}),
    )
    declared = {name: {**VARIABLES[name], "missing": how} for name in ("x", "z", "k")}
    defaults: dict[str, Any] = {
        "hazard_model": ft.GLM(f"a + {covariates} + period"),
        "treatment_model": ft.GLM(covariates),
        "censoring_model": ft.GLM("a + x"),
        "algorithm": ft.Gradient(optimizer=ft.Newton(), tolerance=1e-10),
        "variables": ft.Variables({**VARIABLES, **declared}),
        "imputation_sweeps": 2,
        "diagnostics": False,
    }
    return ft.Study(target=target, **(defaults | options))


def cut(records: pd.DataFrame, ends: list[int]) -> dict[str, pd.DataFrame]:
    """Return consecutive records in silos."""
    edges = [0, *ends, len(records)]
    return {f"s{m}": records[edges[m] : edges[m + 1]] for m in range(len(edges) - 1)}
