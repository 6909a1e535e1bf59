"""Small invented data for the golden runs; nothing here depends on another test's helpers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedtmle as ft

Columns = dict[str, np.ndarray]
SILOS = ("a", "b", "c")
SIZES = (120, 90, 70)


def expit(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def people(n: int, seed: int, *, arms: int = 2, missing: bool = False) -> Columns:
    """Return covariates, a factor, an arm, outcomes of three kinds, a weight, clusters and predictions."""
    rng = np.random.default_rng([n, seed])
    w, z = rng.normal(size=n), rng.uniform(-1, 1, size=n)
    site = rng.integers(0, 3, size=n)
    scores = np.stack([np.zeros(n), *(0.4 * w - 0.3 * arm * z for arm in range(1, arms))])
    chances = np.exp(scores) / np.exp(scores).sum(axis=0)
    arm = (rng.random(n) > np.cumsum(chances, axis=0)).sum(axis=0).clip(0, arms - 1)
    score = 0.5 * w + 0.4 * arm + 0.3 * z + 0.2 * (site == 2)
    y = 10 * rng.beta(4 * expit(score), 4 * expit(-score))
    event = (rng.random(n) < expit(score - 0.5)).astype(float)
    visits = rng.poisson(np.exp(0.3 * score)).clip(0, 20).astype(float)
    if missing:
        lost = rng.random(n) < 0.2 + 0.1 * (arm == 1) * (w > 0)
        y, event, visits = (np.where(lost, np.nan, column) for column in (y, event, visits))
    return {
        "w": w,
        "z": z,
        "site": np.array(["north", "south", "east"])[site],
        "old": np.where(w > 0.3, "yes", "no"),
        "arm": arm,
        "y": y,
        "event": event,
        "visits": visits,
        "weight": rng.uniform(0.5, 2.0, size=n),
        "family": np.char.add(f"{seed}-", (np.arange(n) // 3).astype(str)),  # each in one silo
        "clinic": rng.integers(0, 4, size=n),  # each in every silo
        "q0": 10 * expit(0.4 * w),
        "q1": 10 * expit(0.4 * w + 0.3),
        "g": expit(0.3 * w),
        "pi": np.full(n, 0.8),
    }


VARIABLES = ft.Variables(
    {
        "w": {"kind": "number", "range": (-8, 8)},
        "z": {"kind": "number", "range": (-1, 1)},
        "site": {"kind": "category", "levels": ["east", "north", "south"]},
        "old": {"kind": "category", "levels": ["no", "yes"]},
        "arm": {"kind": "binary"},
        "y": {"kind": "number", "range": (0, 10)},
        "event": {"kind": "binary"},
        "visits": {"kind": "count", "range": (0, 20)},
        "weight": {"kind": "number", "range": (0.25, 2)},
        "family": {"kind": "identifier"},
        "clinic": {"kind": "identifier"},
    }
)


def cohort(*, arms: int = 2, missing: bool = False, scale: float = 1.0) -> dict[str, Columns]:
    """Return three silos of unequal sizes."""
    return {
        name: people(int(scale * size), seed, arms=arms, missing=missing)
        for seed, (name, size) in enumerate(zip(SILOS, SIZES, strict=True))
    }


def mixture(n: int, seed: int) -> np.ndarray:
    """Return ``n`` draws of a mixture of two normal laws in the plane, shape (n, 2)."""
    rng = np.random.default_rng([n, seed])
    centres = np.array([[-1.0, 0.5], [1.5, -0.5]])
    return np.asarray(centres[rng.integers(0, 2, size=n)] + 0.8 * rng.normal(size=(n, 2)))


def silo_file(
    folder: Path,
    name: str,
    columns: Columns,
    *,
    policy: Mapping[str, Any] | None = None,
    stream: bool = False,
    extra: str = "",
) -> Path:
    """Write a silo's table and its silo file; return the path of the file."""
    if stream:
        pd.DataFrame(columns).to_parquet(folder / f"{name}.parquet")
    else:
        pd.DataFrame(columns).to_csv(folder / f"{name}.csv", index=False)
    lines = ["[silo]", f'name = "{name}"', "[data]"]
    lines += [f'path = "{name}.parquet"', "stream = true"] if stream else [f'path = "{name}.csv"']
    if policy is not None:
        lines += ["[policy]", *(f"{key} = {str(value).lower()}" for key, value in policy.items())]
    path = folder / f"{name}.toml"
    path.write_text("\n".join([*lines, extra]) + "\n", encoding="utf-8")
    return path
