"""Coverage over 2,000 replications: seeds, sizes and limits were fixed before the first run.

With both nuisances right, nominal 95 % intervals cover in [93.5 %, 96.5 %] and the mean standard error
is within 5 % of the empirical one; with one nuisance wrong the bias stays within three Monte Carlo
standard errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.results.inference import table_rows
from tests.declare import declare
from tests.effects.studies import NEWTON, Columns, change, expit

REPLICATIONS = 2_000
N = 500
SEED = 20_261_115

GRID = np.linspace(-np.sqrt(3), np.sqrt(3), 4_001)[:-1] + np.sqrt(3) / 4_000  # midpoints: w is uniform


def chances(w: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """g, pi in the arm taken, Q1 and Q0."""
    g = expit(0.1 + 0.5 * w - 0.4 * b)
    return g, expit(1.4 + 0.4 * w), expit(-0.4 + 0.5 + 0.7 * w + 0.5 * b), expit(-0.4 + 0.7 * w + 0.5 * b)


def draw(seed: int) -> Columns:
    rng = np.random.default_rng([SEED, seed])
    w, b = rng.uniform(-np.sqrt(3), np.sqrt(3), N), rng.integers(0, 2, N).astype(float)
    g, pi, q1, q0 = chances(w, b)
    a = (rng.random(N) < g).astype(int)
    y = (rng.random(N) < np.where(a == 1, q1, q0)).astype(float)
    seen = rng.random(N) < pi
    return {"w": w, "b": b, "a": a, "y": y, "partly": np.where(seen, y, np.nan)}


def truth() -> dict[str, float]:
    """By midpoints over w and both values of b."""
    w, b = (np.concatenate(x) for x in zip(*((GRID, np.full(4_000, b)) for b in (0.0, 1.0)), strict=True))
    g, _, q1, q0 = chances(w, b)
    return {
        "ATE": (q1 - q0).mean(),
        "RR": q1.mean() / q0.mean(),
        "ATT": (g * (q1 - q0)).mean() / g.mean(),
        "missing": (q1 - q0).mean(),
    }


RUNS = {
    "whole": ft.ATE(outcome="y", treatment="a"),
    "treated": ft.ATT(outcome="y", treatment="a"),
    "partly": ft.ATE(outcome="partly", treatment="a"),
}
# The estimands read off each run; RR is made of the same two means as ATE.
ESTIMANDS = {
    "whole": {"ATE": RUNS["whole"], "RR": ft.RR(outcome="y", treatment="a")},
    "treated": {"ATT": RUNS["treated"]},
    "partly": {"missing": RUNS["partly"]},
}
MODELS = {
    "both right": ("a + w + b", "w + b", "w"),
    "outcome model wrong": ("a", "w + b", "w"),
    "treatment model wrong": ("a + w + b", "1", "1"),
}


def replicate(run: str, models: str) -> dict[str, np.ndarray]:
    """estimate, std_error, conf_low, conf_high of each replication, by estimand; shape (4, replications)."""
    outcome, treatment, missingness = MODELS[models]
    study = ft.Study(
        target=RUNS[run],
        outcome_model=ft.GLM(outcome),
        treatment_model=ft.GLM(treatment),
        missingness_model=ft.GLM(missingness) if run == "partly" else None,
        algorithm=NEWTON,
        variables=declare(w=(-2, 2), b="binary", a="binary", y="binary", partly="binary"),
    )
    components = study.target.components(())
    rows: dict[str, list[list[float]]] = {name: [] for name in ESTIMANDS[run]}
    for seed in range(REPLICATIONS):
        result = ft.run(study, {"all": draw(seed)}).run
        for name, target in ESTIMANDS[run].items():
            (row,), _ = table_rows(change(study, target=target), components, result.psi, result.covariance)
            rows[name].append([row.estimate, row.std_error, row.conf_low, row.conf_high])
    return {name: np.array(found).T for name, found in rows.items()}


@pytest.mark.slow
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize(("run", "models"), list(itertools.product(RUNS, MODELS)))
def test_coverage(run: str, models: str) -> None:
    for name, (estimate, error, low, high) in replicate(run, models).items():
        value = truth()[name]
        covered = float(((low <= value) & (value <= high)).mean())
        spread = float(estimate.std(ddof=1))
        if models == "both right":
            assert 0.935 <= covered <= 0.965, name
            assert 0.95 <= float(error.mean()) / spread <= 1.05, name
        else:
            # A ratio of unbiased means is biased by O(1/n); its logarithm, to second order, is not.
            bias = np.log(estimate) - np.log(value) if name == "RR" else estimate - value
            assert abs(bias.mean()) < 3 * bias.std(ddof=1) / np.sqrt(REPLICATIONS), name


# Overlap weights, and more than two arms with a multinomial treatment model.

LIMITS = (0.93, 0.97)


def softmax_chances(w: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """g and Q of three arms, shape (3, N) each."""
    powers = np.exp(np.stack([np.zeros_like(w), 0.2 + 0.6 * w - 0.5 * b, -0.3 - 0.4 * w + 0.7 * b]))
    q = np.stack([expit(-0.4 + shift + 0.7 * w + 0.5 * b) for shift in (0.0, 0.5, -0.4)])
    return powers / powers.sum(axis=0), q


def draw_arms(seed: int) -> Columns:
    rng = np.random.default_rng([SEED, 3, seed])
    w, b = rng.uniform(-np.sqrt(3), np.sqrt(3), N), rng.integers(0, 2, N).astype(float)
    g, q = softmax_chances(w, b)
    a = (rng.random(N) > np.cumsum(g, axis=0)).sum(axis=0).clip(0, 2)
    return {"w": w, "b": b, "a": a, "y": (rng.random(N) < q[a, np.arange(N)]).astype(float)}


def true_means(kind: type, arms: int) -> np.ndarray:
    """The effects of arms 1.. against arm 0, by midpoints."""
    w, b = (np.concatenate(x) for x in zip(*((GRID, np.full(4_000, b)) for b in (0.0, 1.0)), strict=True))
    if arms == 3:
        g, q = softmax_chances(w, b)
    else:
        one, _, q1, q0 = chances(w, b)
        g, q = np.stack([1 - one, one]), np.stack([q0, q1])
    h = 1 / (1 / g).sum(axis=0) if kind is ft.ATO else np.ones_like(w)
    return ((q[1:] - q[0]) * h).mean(axis=1) / h.mean()


ARMS = {2: declare(y="binary", w=(-2, 2), b="binary", a="binary")}
ARMS[3] = declare(y="binary", w=(-2, 2), b="binary", a=["0", "1", "2"])


@pytest.mark.slow
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("outcome", ["C(a) + w + b", "C(a)"], ids=["both right", "outcome model wrong"])
@pytest.mark.parametrize(("kind", "arms"), [(ft.ATO, 2), (ft.ATE, 3), (ft.ATO, 3)])
def test_coverage_of_overlap_weights_and_several_arms(
    kind: type, arms: int, outcome: str, record_property: Callable[[str, object], None]
) -> None:
    study = ft.Study(
        target=kind(outcome="y", treatment="a"),
        outcome_model=ft.GLM(outcome),
        treatment_model=ft.GLM("w + b"),
        algorithm=NEWTON,
        diagnostics=False,
        variables=ARMS[arms],
    )
    rows = []
    for seed in range(REPLICATIONS):
        data = draw_arms(seed) if arms == 3 else {k: v for k, v in draw(seed).items() if k != "partly"}
        table = ft.run(study, {"all": data}).document["estimates"]
        rows.append([[row["estimate"], row["std_error"], row["conf_low"], row["conf_high"]] for row in table])
    found = np.array(rows)  # (replications, arms - 1, 4)
    for k, value in enumerate(true_means(kind, arms)):
        estimate, error, low, high = found[:, k].T
        covered = float(((low <= value) & (value <= high)).mean())
        ratio = float(error.mean() / estimate.std(ddof=1))
        bias = float((estimate - value).mean() / (estimate.std(ddof=1) / np.sqrt(REPLICATIONS)))
        record_property(
            f"arm {k + 1}", f"coverage {covered:.4f}, SE ratio {ratio:.3f}, bias {bias:.2f} MC SE"
        )
        assert abs(bias) < 3.5
        if outcome != "C(a)":
            assert LIMITS[0] <= covered <= LIMITS[1]
            assert 0.95 <= ratio <= 1.05
