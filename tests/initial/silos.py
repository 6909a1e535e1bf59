"""Small silos of one simulated trial, and a study run over them in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.errors import RefusedError
from fedtmle.initial.glm import GLM
from fedtmle.model.table import Factor, Table
from fedtmle.programs.study import Study
from fedtmle.protocol.plan import roster
from fedtmle.runtime.session import Finished, InProcess, Progress, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.targets.effects.estimands import ATE
from tests.declare import declare

LEVELS = {"site": ("a", "b", "c")}
VARIABLES = declare(
    y=(-8, 8),
    a="binary",
    x=(-1, 1),
    z=(-1, 1),
    w=(0, 2),
    fold=(0, 3),
    site=["a", "b", "c"],
    family="identifier",
)


def pooled_table(n: int, seed: int, *, binary: bool = False) -> Table:
    """y depends on treatment a, x and z linearly; the effect of a is 1, or 1 on the log-odds."""
    rng = np.random.default_rng(seed)
    x, z = rng.uniform(-1, 1, n), rng.uniform(-1, 1, n)
    site = rng.integers(0, 3, n)
    a = (rng.uniform(size=n) < 1 / (1 + np.exp(-0.5 * x))).astype(float)
    mean = a + 2 * x - z + 0.5 * (site == 1)
    y = (rng.uniform(size=n) < 1 / (1 + np.exp(-mean))).astype(float) if binary else mean + rng.normal(size=n)
    numeric = {"y": y, "a": a, "x": x, "z": z, "w": rng.uniform(0.5, 2, n), "fold": np.arange(n) % 4.0}
    factors = {"site": Factor(site, LEVELS["site"]), "a": Factor(a.astype(np.int64), ("0", "1"))}
    return Table(n_rows=n, numeric=numeric, factors=factors)


def split(table: Table, silos: int, seed: int = 0) -> dict[str, Table]:
    """The rows dealt to silos of unequal sizes."""
    order = np.random.default_rng(seed).permutation(table.n_rows)
    cuts = (table.n_rows * np.cumsum(np.arange(1, silos + 1)) / (silos * (silos + 1) / 2)).astype(int)
    return {f"s{m}": table.take(rows) for m, rows in enumerate(np.split(order, cuts[:-1]))}


def trial(outcome_model: Any, *, binary: bool = False, **options: Any) -> Study:
    """The study of the effect of a on y."""
    settings: dict[str, Any] = {
        "treatment_model": GLM("x"),
        "algorithm": ft.Gradient(tolerance=1e-9, optimizer=ft.Newton()),
        "variables": declare(VARIABLES, y="binary") if binary else VARIABLES,
    }
    return Study(
        target=ATE(outcome="y", treatment="a"),
        outcome_model=outcome_model,
        **(settings | options),
    )


def run(study: Study, tables: Mapping[str, Table], progress: Progress | None = None) -> Finished:
    """The whole study; an error at a silo is raised as it was there."""
    plan = study_plan(study, roster(list(tables)))
    silos = [Silo(name, plan, table) for name, table in tables.items()]
    try:
        return Session(plan, InProcess(silos), progress=progress).run()
    except RefusedError:
        for silo in silos:
            if silo.error is not None:
                raise silo.error from None
        raise
