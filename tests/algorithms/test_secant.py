"""Steps with a memory: exact on linear gradients, dropped where they mislead, and fewer rounds for curves."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.coded import GROWTH, Secant
from tests.time.law import Law, study


def solve(jacobian: np.ndarray, start: np.ndarray, rounds: int) -> list[float]:
    """Return the norms of the gradient J x along the steps of the method."""
    secant, x, norms = Secant(), start.astype(np.float64), []
    for _ in range(rounds):
        gradient = np.rint(jacobian @ x)
        norms.append(float(np.linalg.norm(gradient)))
        step = secant.step([int(entry) for entry in gradient])
        secant.take(step)
        x = x + step
    return norms


@pytest.mark.parametrize("seed", range(5))
def test_a_linear_gradient_is_solved_in_as_many_steps_as_dimensions(seed: int) -> None:
    """Gradient steps alone would divide it by less than three in as many steps."""
    rng, d = np.random.default_rng(seed), 4
    jacobian = np.diag([1.0, 0.7, 0.4, 0.1]) + 0.05 * rng.normal(size=(d, d))
    start = rng.integers(10**7, 10**8, size=d)
    norms = solve(jacobian, start, d + 2)
    assert norms[-1] < 1e-5 * norms[0]
    x = start.astype(np.float64)
    for _ in range(d + 1):
        x = x - jacobian @ x
    assert np.linalg.norm(jacobian @ x) > 1e-3 * norms[0]


def test_the_first_step_is_the_gradient_step_and_equal_changes_count_once() -> None:
    secant = Secant()
    first = secant.step((8, -6))
    assert first == (-8, 6)
    secant.take(first)
    # The step left half of the gradient: twice the step is needed.
    assert secant.step((4, -3)) == (-8, 6)
    secant.take((-4, 3))
    assert secant.step((2, -1)) != (-2, 1)
    assert len(secant.changes) == 2


def test_the_memory_is_dropped_when_the_gradient_grows() -> None:
    secant = Secant()
    secant.take(secant.step((8, -6)))
    grown = (int(8 * GROWTH) + 2, -int(6 * GROWTH) - 2)
    assert secant.step(grown) == tuple(-entry for entry in grown)
    assert not secant.changes
    assert not secant.steps


def test_it_needs_fewer_rounds_than_gradient_steps_and_ends_at_the_same_estimate() -> None:
    rows = Law(1).draw(600, seed=5)
    silos = {name: part.reset_index(drop=True) for name, part in rows.groupby("centre")}
    found = {
        inner: ft.run(
            study(ft.Risk, horizons=(1, 2, 3, 4), algorithm=ft.Coded(inner=inner), diagnostics=False), silos
        ).document
        for inner in ("auto", "secant", "step")
    }
    assert found["auto"]["psi"] == found["secant"]["psi"]
    rounds = {inner: each["account"]["rounds"]["targeting"] for inner, each in found.items()}
    assert 4 * rounds["secant"] <= 3 * rounds["step"]
    for inner in found:
        assert found[inner]["converged"]
        assert found[inner]["psi"] == pytest.approx(
            found["step"]["psi"], abs=1e-3 * min(found["step"]["std_error"])
        )
    assert any("earlier gradients" in each for each in found["secant"]["certificate"]["assumptions"])


def test_segments_cannot_certify_it() -> None:
    with pytest.raises(ft.InputError, match=r"inner: 'secant' takes no gradient steps"):
        ft.Coded(inner="secant", smoothness=ft.Certified(along="segments"))
