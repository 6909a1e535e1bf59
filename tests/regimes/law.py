"""A known law of treatment over time, with censoring in every period, and studies of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

import fedtmle as ft

NEWTON = ft.Gradient(optimizer=ft.Newton(), tolerance=1e-11)
RULES: tuple[Any, ...] = (
    ft.Static("0"),
    ft.Static("1"),
    ft.Threshold("l", 0.2, arm="1", otherwise="0"),
    ft.Onset("l", 0.5, arm="1", otherwise="0"),
    ft.Stochastic((0.3, 0.7)),
)
OUTCOME, TREATMENT, CENSORING = "w + l + a + lag1_a", "w + l + lag1_a", "l + a"


def expit(value: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-value))


def draw(
    n: int, periods: int, seed: int, *, survival: bool = False, censors: bool = True, dose: bool = False
) -> pd.DataFrame:
    """Return wide records. Columns are missing once a person is censored or has the event."""
    rng = np.random.default_rng(seed)
    records: dict[str, Any] = {"w": rng.normal(size=n).clip(-3, 3)}
    here, before, level = np.ones(n, dtype=bool), np.zeros(n), records["w"]
    for t in range(1, periods + 1):
        level = (0.4 * records["w"] + 0.4 * level - 0.4 * before + 0.7 * rng.normal(size=n)).clip(-4, 4)
        a = (rng.random(n) < expit(0.3 * level + 0.8 * before - 0.3)).astype(float)
        if dose:
            a = (0.3 * level + 0.3 * before + rng.normal(size=n)).clip(-5, 5)
        c = (rng.random(n) < expit(-2.6 + 0.4 * level - 0.3 * a)).astype(float) * censors
        y = (rng.random(n) < expit(-2.0 + 0.5 * level - 0.6 * a)).astype(float)
        for name, values in (("l", level), ("a", a), ("c", c)):
            records[f"{name}{t}"] = np.where(here, values, np.nan)
        here = here & (c == 0)
        if survival:
            records[f"y{t}"] = np.where(here, y, np.nan)
            here = here & (y == 0)
        before = a
    if not survival:
        outcome = 0.7 * level - 0.8 * before + 0.3 * records["w"]
        records["b"] = np.where(here, rng.random(n) < expit(outcome - 0.5), np.nan)
        records["y"] = np.where(here, (outcome + rng.normal(size=n)).clip(-8, 8), np.nan)
    records["weight"] = rng.uniform(0.5, 2.0, n)
    records["pair"] = [f"p{k // 2}" for k in range(n)]
    frame = pd.DataFrame(records)
    if not dose:
        arms = [f"a{t}" for t in range(1, periods + 1)]
        frame[arms] = frame[arms].astype("Int64")
    return frame


def study(
    kind: type[ft.AbstractRegimeEffect] = ft.RegimeMean,
    *,
    periods: int,
    rules: tuple[Any, ...] = RULES,
    survival: bool = False,
    censors: bool = True,
    dose: bool = False,
    outcome: str = "b",
    horizons: tuple[int, ...] = (),
    **options: Any,
) -> ft.Study:
    """Return a study of the law; options replace parts."""
    outcome = "y" if survival else outcome
    names = ("l", "a", *(("c",) if censors else ()), *(("y",) if survival else ()))
    target = kind(
        outcome=outcome,
        treatment="a",
        over_time={name: tuple(f"{name}{t}" for t in range(1, periods + 1)) for name in names},
        censoring="c" if censors else None,
        rules=rules,
        horizons=horizons,
    )
    variables: dict[str, Any] = {
        "w": {"kind": "number", "range": (-3, 3)},
        "l": {"kind": "number", "range": (-4, 4)},
        "a": {"kind": "number", "range": (-5, 5)} if dose else {"kind": "binary"},
        "c": {"kind": "binary"},
        "b": {"kind": "binary"},
        "y": {"kind": "binary"} if survival else {"kind": "number", "range": (-8, 8)},
        "weight": {"kind": "number", "range": (0, 4)},
        "pair": {"kind": "identifier"},
    }
    defaults: dict[str, Any] = {
        "outcome_model": ft.GLM(OUTCOME),
        "treatment_model": ft.GLM(f"{TREATMENT} + a + a:l + I(a**2)" if dose else TREATMENT),
        "censoring_model": ft.GLM(CENSORING) if censors else None,
        "algorithm": NEWTON,
        "diagnostics": False,
        "variables": variables,
    }
    return ft.Study(target=target, **(defaults | options))
