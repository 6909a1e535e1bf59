"""One list of targets and one list of algorithms that property tests run over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle_core.types import IntArray
from fedtmle_paper.benchmark import gaussian_mixture
from fedtmle_paper.density.fluctuation import ExponentialTilt, LogisticFluctuation
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.two_arm import TwoArm


@dataclass(frozen=True)
class Case:
    """A small problem with data: ``take(rows)`` gives raw rows by pooled number."""

    name: str
    problem: Any
    law: Any
    take: Callable[[IntArray], Any]
    n: int
    tolerance: float  # a residual that is small for this problem, and quickly reached

    def silos(self, parts: Sequence[IntArray]) -> dict[str, Any]:
        return {f"silo {m}": self.take(part) for m, part in enumerate(parts)}

    def split(self, count: int, seed: int = 0) -> list[IntArray]:
        """A random partition into ``count`` silos of unequal sizes, each row order shuffled."""
        rng = np.random.default_rng(seed)
        cuts = np.sort(rng.choice(np.arange(1, self.n), size=count - 1, replace=False))
        return list(np.split(rng.permutation(self.n), cuts))

    def pooled(self) -> Any:
        return self.problem.read(self.take(np.arange(self.n)))


def mean_case() -> Case:
    rng = np.random.default_rng(11)
    y = rng.gamma(2.0, 1.0, size=400).clip(0, 20)
    problem = ft.Mean(bounds=(0.0, 20.0))
    return Case("mean", problem, problem.start(3.0), lambda rows: y[rows], len(y), 1e-6)


def two_arm_case() -> Case:
    rng = np.random.default_rng(12)
    n = 600
    w = rng.normal(size=n)
    g = 1 / (1 + np.exp(-0.6 * w))
    a = (rng.random(n) < g).astype(float)
    y = np.clip(1.0 + 2.0 * a + w + rng.normal(size=n), -9, 9)
    columns = {
        "outcome": y,
        "treatment": a,
        "Q1": np.clip(2.2 + 0.7 * w, -9, 9),
        "Q0": np.clip(0.8 + 0.7 * w, -9, 9),
        "g": g,
    }
    problem = TwoArm(outcome_bounds=(-10.0, 10.0), weight_ceiling=64.0)

    def take(rows: IntArray) -> object:
        return {name: column[rows] for name, column in columns.items()}

    return Case("two arms", problem, problem.start(), take, n, 1e-5)


def transport_case(fluctuation: Any, name: str) -> Case:
    rng = np.random.default_rng(13)
    problem = OptimalTransport(fluctuation=fluctuation)
    law = problem.start(gaussian_mixture(300, rng))
    rows = gaussian_mixture(500, rng)
    return Case(name, problem, law, lambda part: rows[part], len(rows), 1e-2)


@cache
def targets() -> dict[str, Case]:
    cases = [
        mean_case(),
        two_arm_case(),
        transport_case(LogisticFluctuation(), "transport, logistic"),
        transport_case(ExponentialTilt(), "transport, tilt"),
    ]
    return {case.name: case for case in cases}


TARGETS = ["mean", "two arms", "transport, logistic", "transport, tilt"]

# Each algorithm at a tolerance that suits the case.
ALGORITHMS: dict[str, Callable[[float], AbstractAlgorithm]] = {
    "central exact": lambda tol: ft.Central(tolerance=tol),
    "central newton": lambda tol: ft.Central(tolerance=tol, optimizer=ft.Newton()),
    "gradient descent": lambda tol: ft.Gradient(tolerance=tol),
    "gradient newton": lambda tol: ft.Gradient(tolerance=tol, optimizer=ft.Newton()),
    "gradient sgd": lambda tol: ft.Gradient(
        tolerance=tol,
        optimizer=ft.StochasticGradientDescent(batch=64, step=0.01, steps=5, seed=3),
        max_updates=3,
    ),
    "gradient sgd, fresh": lambda tol: ft.Gradient(
        tolerance=tol,
        optimizer=ft.StochasticGradientDescent(batch=64, step=0.01, steps=5, batches="fresh", seed=3),
        max_updates=3,
    ),
    "local size": lambda tol: ft.LocalAverage(tolerance=tol, max_updates=4),
    "local uniform": lambda tol: ft.LocalAverage(tolerance=tol, weights="uniform", max_updates=4),
    "coded raw": lambda tol: ft.Coded(tolerance=tol, coordinates="raw"),
    "coded whitened": lambda tol: ft.Coded(tolerance=tol),
    "coded adaptive": lambda tol: ft.Coded(tolerance=tol, inner="adaptive"),
    "coded certified": lambda tol: ft.Coded(tolerance=tol, smoothness=ft.Certified(), max_rounds=60),
    "adaptive": lambda tol: ft.Adaptive(tolerance=tol),
    "personalized lattice": lambda _: ft.Personalized(lattice=0.02, max_updates=5),
    "personalized noise": lambda _: ft.Personalized(noise=0.5, weights="uniform", max_updates=5),
}
