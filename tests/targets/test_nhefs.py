"""Published numbers: NHEFS, smoking cessation and weight change, GLM nuisances fitted longhand here.

Reference values: two-covariate logistic fluctuation, no truncation, outcome scaled by its range:
ATE 3.4450687011, SE 0.4870586364 (computed with zEpid's model formulas, outcome not clipped).
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

import fedtmle as ft
from fedtmle_paper.two_arm import TwoArm

ATE, SE = 3.4450687011, 0.4870586364


def nhefs() -> dict[str, np.ndarray]:
    with (Path(__file__).parents[1] / "data" / "nhefs.csv").open() as lines:
        header, *rows = csv.reader(lines)
    return dict(zip(header, np.array(rows, dtype=float).T, strict=True))


def supplied() -> tuple[TwoArm, dict[str, np.ndarray]]:
    """Q by least squares, g by Newton's logistic regression, on the pooled rows."""
    data = nhefs()

    def dummies(name: str) -> list[np.ndarray]:
        return [(data[name] == level).astype(float) for level in np.unique(data[name])[1:]]

    def square(name: str) -> list[np.ndarray]:
        return [data[name], data[name] ** 2]

    W = np.column_stack(
        [
            np.ones(len(data["qsmk"])),
            data["sex"],
            data["race"],
            *square("age"),
            *dummies("education"),
            *square("smokeintensity"),
            *square("smokeyrs"),
            *dummies("exercise"),
            *dummies("active"),
            *square("wt71"),
        ]
    )
    a, y = data["qsmk"], data["wt82_71"]
    W = W / np.abs(W).max(axis=0)
    design = np.column_stack([W, a])
    beta, *_ = np.linalg.lstsq(design, y, rcond=None)
    alpha = np.zeros(W.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-W @ alpha))
        alpha += np.linalg.solve(W.T @ (W * (p * (1 - p))[:, None]), W.T @ (a - p))
    base = W @ beta[:-1]
    rows = {
        "outcome": y,
        "treatment": a,
        "Q1": base + beta[-1],
        "Q0": base,
        "g": 1 / (1 + np.exp(-W @ alpha)),
    }
    return TwoArm(outcome_bounds=(float(y.min()), float(y.max())), weight_ceiling=64.0), rows


@pytest.mark.parametrize("silos", [1, 10])
def test_the_reference_effect_to_1e8(silos: int) -> None:
    problem, rows = supplied()
    parts = np.array_split(np.random.default_rng(0).permutation(len(rows["g"])), silos)
    federated = {f"silo {m}": {k: v[part] for k, v in rows.items()} for m, part in enumerate(parts)}
    newton = ft.Gradient(tolerance=1e-10, optimizer=ft.Newton())
    effect, error = ft.solve(problem, problem.start(), federated, newton).contrast((1, -1))
    assert effect == pytest.approx(ATE, abs=1e-8)
    assert error == pytest.approx(SE, abs=1e-8)
    coded = ft.solve(problem, problem.start(), federated, ft.Coded(tolerance=1e-6))
    assert coded.contrast((1, -1))[0] == pytest.approx(effect, abs=2 * coded.certificate.residual_bound)
