"""Results of every kind, small and real, for the tests of what shows them."""

from __future__ import annotations

from functools import cache

import numpy as np

import fedtmle as ft
from fedtmle.results.result import StudyResult
from tests.declare import declare
from tests.estimands import example

ALGORITHMS = {
    "coded": ft.Coded(),
    "switching": ft.Adaptive(),
    "one step": ft.OneStep(),
    "gradient": ft.Gradient(optimizer=ft.Newton()),
    "descent": ft.Gradient(optimizer=ft.GradientDescent(step=ft.Backtracking()), tolerance="negligible"),
    "local": ft.LocalAverage(max_updates=3),
    "personal": ft.Personalized(lattice=1e-4, max_updates=5),
    "central": ft.Central(tolerance=1e-8),
    "unfinished": ft.Coded(max_rounds=2),
}
TARGETS = {
    **{kind.__name__: example(kind) for kind in ft.ESTIMANDS},
    "strata": ft.ATE(outcome="y", treatment="a", strata="s"),
}


VARIABLES = declare(x=(-8, 8), a="binary", y="binary", s=["high", "low"])


def silos(count: int = 3, rows: int = 120) -> dict[str, dict[str, np.ndarray]]:
    """A binary outcome with one confounder."""
    rng = np.random.default_rng(count)
    found = {}
    for m in range(count):
        x = rng.normal(size=rows)
        a = rng.binomial(1, 1 / (1 + np.exp(-0.5 * x)))
        y = rng.binomial(1, 1 / (1 + np.exp(-(0.3 * x + 0.6 * a - 0.2))))
        found[f"silo {m}"] = {"x": x, "a": a, "y": y.astype(float), "s": np.where(x > 0, "high", "low")}
    return found


@cache
def result(
    algorithm: str = "coded", target: str = "ATE", *, release: int = 2, observe: bool = False
) -> StudyResult:
    data = silos()
    treated = TARGETS[target].treatment is not None
    study = ft.Study(
        target=TARGETS[target],
        outcome_model=ft.GLM("C(a) + x" if treated else "x"),
        treatment_model=ft.GLM("x") if treated else None,
        algorithm=ALGORITHMS[algorithm],
        variables=VARIABLES,
    )
    return ft.run(study, data, release=tuple(data)[:release], observe=observe)
