"""Studies of time to an event that several tests run: published data, and records drawn from a known law."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fedtmle as ft

DATA = Path(__file__).parents[1] / "data"
NEWTON = ft.Gradient(optimizer=ft.Newton(), tolerance=1e-11)
COLON = ft.Variables(
    {
        "time": {"kind": "number", "range": (0, 4000), "unit": "days"},
        "status": {"kind": "binary"},
        "rx": {"kind": "category", "levels": ["Obs", "Lev+5FU"]},
        "age": {"kind": "number", "range": (18, 100), "unit": "years"},
        "node4": {"kind": "binary"},
    }
)
ROSSI = ft.Variables(
    {
        "week": {"kind": "number", "range": (0, 52)},
        "arrest": {"kind": "binary"},
        "fin": {"kind": "binary"},
        "age": {"kind": "number", "range": (15, 60)},
        **{name: {"kind": "binary"} for name in ("race", "wexp", "mar", "paro")},
        "prio": {"kind": "count", "range": (0, 20)},
    }
)
COVARIATES = "age + race + wexp + mar + paro + prio"


def colon() -> pd.DataFrame:
    """Return deaths in two arms of the trial."""
    records = pd.read_csv(DATA / "colon.csv")
    return records[(records.etype == 2) & records.rx.isin(["Obs", "Lev+5FU"])].reset_index(drop=True)


def rossi() -> pd.DataFrame:
    return pd.read_csv(DATA / "rossi.csv")


def colon_study(kind: type[ft.AbstractTimeEffect] = ft.Risk, **options: Any) -> ft.Study:
    """Return a study of death in half-years over five years."""
    target = kind(
        outcome="status",
        time="time",
        treatment="rx",
        arms=("Obs", "Lev+5FU"),
        periods=10,
        period_length=182.625,
        beyond="truncate",
        horizons=options.pop("horizons", ()),
        compare_subperiods=options.pop("compare_subperiods", None),
    )
    defaults: dict[str, Any] = {"treatment_model": ft.GLM("1"), "algorithm": NEWTON}
    return ft.Study(target=target, variables=COLON, **(defaults | options))


def rossi_study(kind: type[ft.AbstractTimeEffect] = ft.Risk, **options: Any) -> ft.Study:
    """Return a study of arrest in periods of four weeks over a year; `PolicyRisk` has a rule by age."""
    rules: dict[str, Any] = {"rules": (ft.Threshold("age", 25.0, arm="1", otherwise="0"),)}
    target = kind(
        **(rules if kind is ft.PolicyRisk else {}),
        outcome="arrest",
        time="week",
        treatment="fin",
        periods=13,
        period_length=4,
        horizons=options.pop("horizons", ()),
    )
    defaults: dict[str, Any] = {
        "hazard_model": ft.GLM(f"fin + {COVARIATES} + period"),
        "treatment_model": ft.GLM(COVARIATES),
        "algorithm": NEWTON,
        "g_bounds": None,
    }
    return ft.Study(target=target, variables=ROSSI, **(defaults | options))


def split(records: pd.DataFrame, parts: int, seed: int = 0) -> dict[str, pd.DataFrame]:
    """Return the records in silos of random sizes."""
    draw = np.random.default_rng(seed)
    silo = draw.choice(parts, size=len(records), p=draw.dirichlet(np.full(parts, 4.0)))
    return {f"silo{m}": records[silo == m] for m in range(parts) if (silo == m).any()}
