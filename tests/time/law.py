"""A known law of time to one or two kinds of event, with covariate-dependent censoring, and its truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

import fedtmle as ft

PERIODS = 4
HAZARD, CENSORING, TREATMENT = "C(a) + x + z + period", "C(a) + x", "x + z"
WRONG = "period"  # of hazards: leaves out everything that matters
VARIABLES = ft.Variables(
    {
        "t": {"kind": "count", "range": (0, PERIODS)},
        "what": {"kind": "category", "levels": ["none", "first", "second"]},
        "a": {"kind": "category", "levels": ["0", "1"]},
        "x": {"kind": "number", "range": (-1, 1)},
        "z": {"kind": "binary"},
        "w": {"kind": "number", "range": (0, 4)},
        "pair": {"kind": "identifier"},
        "centre": {"kind": "category", "levels": ["p", "q"]},
    }
)


def expit(value: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-value))


@dataclass(frozen=True)
class Law:
    """Causes happen in their order; with one cause, the second kind of event is not there."""

    causes: int = 1

    def hazard(self, cause: int, t: int, a: Any, x: Any, z: Any) -> Any:
        """Return q_l(t), the hazard among those without an event of an earlier cause in the period."""
        if cause == 1:
            return expit(-2.0 + 0.15 * t - 0.7 * a + 0.8 * x + 0.4 * z)
        return expit(-2.6 + 0.1 * t + 0.5 * a - 0.5 * x + 0.3 * z)

    def draw(self, n: int, seed: int) -> pd.DataFrame:
        rng = np.random.default_rng(seed)
        x, z = rng.uniform(-1, 1, n), rng.integers(0, 2, n)
        a = (rng.random(n) < expit(0.8 * x - 0.4 * z)).astype(int)
        last, what = np.full(n, PERIODS), np.zeros(n, dtype=int)
        inside = np.ones(n, dtype=bool)
        for t in range(1, PERIODS + 1):
            for cause in range(1, self.causes + 1):
                now = inside & (rng.random(n) < self.hazard(cause, t, a, x, z))
                last[now], what[now], inside = t, cause, inside & ~now
            lost = inside & (rng.random(n) < expit(-2.4 + 0.9 * x + 0.5 * a))
            last[lost], inside = t, inside & ~lost
        return pd.DataFrame(
            {
                "t": last,
                "what": np.array(["none", "first", "second"])[what],
                "a": a,
                "x": x,
                "z": z,
                "w": rng.uniform(0.5, 2.0, n),
                "centre": np.where(z > 0, "p", "q"),
            }
        )

    def incidence(self, rule: Any) -> np.ndarray:
        """Return F_j(t) with treatment a = rule(x), shape (causes, periods), by quadrature over x and z."""
        nodes, weights = np.polynomial.legendre.leggauss(200)
        total = np.zeros((self.causes, PERIODS))
        for z in (0, 1):
            a, survival = rule(nodes), np.ones_like(nodes)
            for t in range(1, PERIODS + 1):
                for cause in range(1, self.causes + 1):
                    q = self.hazard(cause, t, a, nodes, z)
                    total[cause - 1, t - 1 :] += (survival * q) @ weights / 4
                    survival = survival * (1 - q)
        return total


def study(kind: type[ft.AbstractTimeEffect], causes: int = 1, **options: Any) -> ft.Study:
    """Return a study of the law with the right models, in which options replace parts."""
    arguments: dict[str, Any] = {
        "outcome": "what",
        "time": "t",
        "treatment": "a",
        "periods": PERIODS,
        "causes": ("first", "second")[:causes],
        "censored": "none",
        "horizons": options.pop("horizons", ()),
        **options.pop("target", {}),
    }
    models: dict[str, Any] = {
        "hazard_model": ft.GLM(HAZARD),
        "censoring_model": ft.GLM(CENSORING),
        "treatment_model": ft.GLM(TREATMENT),
    }
    levels = ["none", "first", "second"][: causes + 1]
    variables = ft.Variables({**VARIABLES, "what": {"kind": "category", "levels": levels}})
    defaults: dict[str, Any] = {
        **models,
        "algorithm": ft.Gradient(optimizer=ft.Newton()),
        "variables": variables,
    }
    return ft.Study(target=kind(**arguments), **(defaults | options))
