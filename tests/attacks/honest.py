"""Random honest studies: targets, algorithms and silos with no fewer rows than the default floors ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import AbstractAlgorithm, TargetingProgram
from fedtmle.data import load_all
from fedtmle.errors import FedTMLEError, RefusedError
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.rows import read_rows
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.solver import embedded_keys
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle_paper.benchmark import gaussian_mixture
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.two_arm import TwoArm
from tests.effects.studies import VARIABLES, cut, population

FLOORS = Policy(allow_targets=("fedtmle-paper",))  # its two arms
Rng = np.random.Generator


def honest(
    seed: int, *, kinds: tuple[str, ...] = ("mean", "two arms", "study")
) -> tuple[Plan, dict[str, Any]]:
    """A plan and each silo's rows."""
    rng = np.random.default_rng([seed, 2026])
    return KINDS[kinds[int(rng.integers(len(kinds)))]](rng)


def run_honest(plan: Plan, rows: Mapping[str, Any], policy: Policy = FLOORS) -> tuple[str, str]:
    """How a guarded run ended: "finished", "refused" or "failed", and the key or error."""
    ended, why, _ = run_advised(plan, rows, policy)
    return ended, why


def run_advised(
    plan: Plan, rows: Mapping[str, Any], policy: Policy = FLOORS
) -> tuple[str, str, tuple[str, ...]]:
    """How a guarded run ended, as `run_honest` says, and what the owners who refused read."""
    mask_keys = embedded_keys(rows) if plan.is_masked else {}
    silos = [
        Silo(name, plan, own, keeper=Keeper(policy=policy, mask_key=mask_keys.get(name)))
        for name, own in rows.items()
    ]
    try:
        Session(plan, InProcess(silos)).run()
    except RefusedError as error:
        keys = [silo.refused_by for silo in silos if silo.refused_by]
        if keys:
            return "refused", keys[0], tuple(silo.advice for silo in silos if silo.refused_by)
        failed = next((silo.error for silo in silos if silo.error is not None), None)
        return ("failed", type(failed).__name__, ()) if failed else ("refused", str(error), ("",))
    except FedTMLEError as error:  # a bad fit or no overlap, found by the server as well
        return "failed", type(error).__name__, ()
    return "finished", "", ()


def sizes(rng: Rng, least: int = FLOORS.min_rows) -> list[int]:
    """Rows of 2 to 6 silos, often no more than the floor."""
    count = int(rng.integers(2, 7))
    return [least if rng.random() < 0.2 else int(least * 4 ** rng.random()) for _ in range(count)]


def algorithm(rng: Rng, rows: list[int], tolerance: float) -> AbstractAlgorithm:
    """Every algorithm and inner optimiser, with budgets that a small run needs."""
    n = sum(rows)
    choices: list[Callable[[], AbstractAlgorithm]] = [
        lambda: ft.Gradient(tolerance=tolerance),
        lambda: ft.Gradient(tolerance="practical", optimizer=ft.Newton()),
        lambda: ft.Gradient(tolerance=tolerance, optimizer=_sgd(rng, n, min(rows)), max_updates=2),
        lambda: ft.LocalAverage(tolerance=tolerance, max_updates=4),
        lambda: ft.LocalAverage(tolerance=tolerance, weights="uniform", max_updates=4),
        lambda: ft.Coded(tolerance=tolerance),
        ft.Coded,
        lambda: ft.Coded(tolerance=tolerance, coordinates="raw", max_rounds=200),
        lambda: ft.Coded(tolerance=tolerance, smoothness=ft.Certified(), max_rounds=100),
        lambda: ft.Personalized(lattice=0.05, max_updates=5),
        lambda: ft.Personalized(noise=0.5, weights="uniform", max_updates=5),
        lambda: ft.Adaptive(tolerance=tolerance),
    ]
    return choices[int(rng.integers(len(choices)))]()


def _sgd(rng: Rng, n: int, smallest: int) -> ft.StochasticGradientDescent:
    """Batches so large that the smallest silo has enough rows in each, by a wide margin, or one batch."""
    parts = max(1, smallest // (3 * FLOORS.min_batch))
    return ft.StochasticGradientDescent(batch=n // parts, step=0.01, steps=4, seed=int(rng.integers(1000)))


def _plan(
    problem: Any, law: Any, how: AbstractAlgorithm, silos: Mapping[str, object]
) -> tuple[Plan, dict[str, Any]]:
    rows = {name: read_rows(problem, name, own) for name, own in silos.items()}
    return Plan(
        program=TargetingProgram(problem=problem, law=law, algorithm=how), roster=roster(list(rows))
    ), rows


def mean(rng: Rng) -> tuple[Plan, dict[str, Any]]:
    size = sizes(rng)
    shape = rng.choice(["gamma", "uniform", "binary", "normal"])
    draw = {
        "gamma": lambda n: np.clip(rng.gamma(2.0, 1.0, n), 0, 20),
        "uniform": lambda n: rng.uniform(0, 20, n),
        "binary": lambda n: 20.0 * (rng.random(n) < 0.3),
        "normal": lambda n: np.clip(rng.normal(10, 2, n), 0, 20),
    }[str(shape)]
    problem = ft.Mean(bounds=(0.0, 20.0))
    silos = {f"silo {m}": draw(n) for m, n in enumerate(size)}
    return _plan(problem, problem.start(float(rng.uniform(1, 19))), algorithm(rng, size, 1e-4), silos)


def two_arms(rng: Rng) -> tuple[Plan, dict[str, Any]]:
    size = sizes(rng)
    confounding, binary = float(rng.uniform(0, 0.8)), rng.random() < 0.5
    silos = {}
    for m, n in enumerate(size):
        while True:
            w = rng.normal(size=n)
            g = 1 / (1 + np.exp(-confounding * w))
            a = (rng.random(n) < g).astype(float)
            if FLOORS.min_arm_rows <= a.sum() <= n - FLOORS.min_arm_rows:
                break
        mean = 1 / (1 + np.exp(-(0.4 * a + 0.5 * w - 0.2)))
        y = (rng.random(n) < mean).astype(float) if binary else rng.beta(4 * mean, 4 * (1 - mean))
        q1, q0 = (1 / (1 + np.exp(-(c + 0.4 * w))) for c in (0.3, -0.1))
        silos[f"silo {m}"] = {"outcome": y, "treatment": a, "Q1": q1, "Q0": q0, "g": g}
    problem = TwoArm(outcome_bounds=(0.0, 1.0), weight_ceiling=64.0)
    return _plan(problem, problem.start(), algorithm(rng, size, 1e-4), silos)


def transport(rng: Rng) -> tuple[Plan, dict[str, Any]]:
    size = sizes(rng)
    problem = OptimalTransport()
    law = problem.start(gaussian_mixture(200, rng))
    rows = np.split(gaussian_mixture(sum(size), rng), np.cumsum(size)[:-1])
    silos = {f"silo {m}": own for m, own in enumerate(rows)}
    return _plan(problem, law, algorithm(rng, size, 3e-2), silos)


def study(rng: Rng) -> tuple[Plan, dict[str, Any]]:
    """Effects with fitted nuisances; a draw whose arms, strata or labels are below a floor is drawn again."""
    folds = int(rng.integers(2, 5)) if rng.random() < 0.2 else None
    size = sizes(rng, least=40 if folds is None else 100)
    missing, binary = rng.random() < 0.3, rng.random() < 0.5
    while True:
        data = population(sum(size), int(rng.integers(2**32)), missing=missing)
        silos = cut(data, np.split(np.arange(sum(size)), np.cumsum(size)[:-1]))
        if all(_above_floors(own) for own in silos.values()):
            break
    kind = rng.choice(["ATE", "TSM", "ATT", "ATC", "RR", "OR"] if binary else ["ATE", "TSM", "ATT", "ATC"])
    target = getattr(ft, str(kind))(outcome="event" if binary else "y", treatment="a")
    formulas = ["a + w", "a + w + z", "a * w + z", *(["a + w + C(site)"] if folds is None else [])]
    how = algorithm(rng, size, 1e-3)
    asked = ft.Study(
        target=target,
        outcome_model=ft.GLM(str(rng.choice(formulas))),
        treatment_model=ft.GLM(str(rng.choice(["1", "w", "w + z"]))),
        missingness_model=ft.GLM(str(rng.choice(["1", "a + w"]))) if missing else None,
        algorithm=how,
        folds=folds,
        weights="weight" if rng.random() < 0.2 else None,
        cluster="family" if rng.random() < 0.2 else None,
        cluster_scope="silo",
        seed=int(rng.integers(1000)),
        variables=VARIABLES,
    )
    return study_plan(asked, roster(list(silos))), dict(load_all(silos, schema_of(asked)))


def _above_floors(rows: Mapping[str, np.ndarray]) -> bool:
    seen = ~np.isnan(rows["y"])
    arms = [int(np.count_nonzero(seen & (rows["a"] == a))) for a in (0, 1)]
    sites = [int(np.count_nonzero(seen & (rows["site"] == site))) for site in np.unique(rows["site"])]
    return min(arms) >= FLOORS.min_arm_rows and min(sites) >= FLOORS.min_support


KINDS: dict[str, Callable[[Rng], tuple[Plan, dict[str, Any]]]] = {
    "mean": mean,
    "two arms": two_arms,
    "transport": transport,
    "study": study,
}
