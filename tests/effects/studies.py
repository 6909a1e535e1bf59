"""Random studies, ways to cut them into silos, and runs that keep what the tests look into."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.model.table import Table
from fedtmle.protocol.plan import roster
from fedtmle.runtime.session import Finished, run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from tests.declare import declare
from tests.narrow import load_all

Columns = dict[str, np.ndarray]

NEWTON = ft.Gradient(tolerance=1e-10, optimizer=ft.Newton())
VARIABLES = declare(
    w=(-8, 8),
    z=(-1, 1),
    site=["east", "north", "south", "west"],
    old="binary",
    a="binary",
    y=(0, 10),
    event="binary",
    weight=(0, 4),
    family="identifier",
)  # of `population`
CENTRAL = ft.Central(tolerance=1e-10, optimizer=ft.Newton())


def expit(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p) - np.log1p(-p)


def population(n: int, seed: int, *, arms: int = 2, missing: bool = False) -> Columns:
    """Two covariates, a factor, arms that depend on them, a continuous and a binary outcome."""
    rng = np.random.default_rng(seed)
    w, z = rng.normal(size=n), rng.uniform(-1, 1, size=n)
    site = rng.integers(0, 4, size=n)
    scores = np.stack([np.zeros(n), *(0.4 * w - 0.3 * j * z for j in range(1, arms))])
    chances = np.exp(scores) / np.exp(scores).sum(axis=0)
    arm = (rng.random(n) > np.cumsum(chances, axis=0)).sum(axis=0).clip(0, arms - 1)
    score = 0.5 * w + 0.4 * arm + 0.3 * z + 0.2 * (site == 2)
    y = 10 * rng.beta(4 * expit(score), 4 * expit(-score))
    event = (rng.random(n) < expit(score - 0.5)).astype(float)
    if missing:
        lost = rng.random(n) < 0.2 + 0.1 * (arm == 1) * (w > 0)
        y, event = np.where(lost, np.nan, y), np.where(lost, np.nan, event)
    return {
        "w": w,
        "z": z,
        "site": np.array(["north", "south", "east", "west"])[site],
        "old": (w > 0.3).astype(int),
        "a": arm,
        "y": y,
        "event": event,
        "weight": rng.uniform(0.5, 2.0, size=n),
        "family": np.repeat(np.arange(n // 2 + 1), 2)[:n],
    }


def cut(data: Columns, parts: list[np.ndarray]) -> dict[str, Columns]:
    return {
        f"silo {m}": {name: column[part] for name, column in data.items()} for m, part in enumerate(parts)
    }


def change(study: ft.Study, **changes: Any) -> ft.Study:
    return dataclasses.replace(study, **changes)


def finish(study: ft.Study, silos: Mapping[str, object]) -> tuple[Finished, dict[str, Table]]:
    """The run as the server knows it, and the tables that only silos have."""
    tables = load_all(silos, schema_of(study))
    plan = study_plan(study, roster(list(tables)))
    parties = [Silo(name, plan, table) for name, table in tables.items()]
    return run_embedded(plan, parties, threads=1, progress=None), tables
