"""FedTMLE-G reproduces the centralised computation to the bit, for any partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from fedtmle.model.linear import newton_direction
from fedtmle_core import kernels
from tests.cases import TARGETS, targets

OPTIMIZERS = {
    "descent": ft.GradientDescent(max_steps=15),
    "fixed step": ft.GradientDescent(step=0.05, max_steps=4),
    "newton": ft.Newton(),
    "sgd": ft.StochasticGradientDescent(batch=50, step=0.02, steps=6, seed=5),
    "sgd, fresh": ft.StochasticGradientDescent(batch=50, step=0.02, steps=6, seed=5, batches="fresh"),
    "sgd, fresh with replacement": ft.StochasticGradientDescent(
        batch=50, step=0.02, steps=6, batches="fresh", replace=True
    ),
}


def bits_of(result: ft.Result) -> tuple[object, ...]:
    """Everything numerical that a run produced, to the bit."""
    points = [(p.eps, p.gradient_norm, p.loss_change) for p in result.trajectory.points]
    return (
        points,
        result.trajectory.accepted,
        result.psi.tobytes(),
        result.covariance.tobytes(),
        result.residual,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("name", TARGETS)
def test_any_partition_gives_the_same_bits(name: str, optimizer: Any) -> None:
    case = targets()[name]
    settings = {"tolerance": case.tolerance, "optimizer": optimizer, "max_updates": 3}
    numbers = np.arange(case.n)
    reference = bits_of(
        ft.solve(
            case.problem,
            case.law,
            {"all": case.take(numbers)},
            ft.Central(**settings),
            index={"all": numbers},
        )
    )
    for count in (1, 2, 7, 40):
        parts = case.split(count, seed=count)
        silos = case.silos(parts)
        index = dict(zip(silos, parts, strict=True))
        order = list(np.random.default_rng(count).permutation(list(silos)))
        result = ft.solve(
            case.problem,
            case.law,
            {silo: silos[silo] for silo in order},
            ft.Gradient(**settings),
            index=index,
        )
        assert bits_of(result) == reference, f"{count} silos"


@pytest.mark.parametrize("name", TARGETS)
def test_backends_give_the_same_bits(name: str) -> None:
    case = targets()[name]
    silos = case.silos(case.split(3))
    algorithm = ft.Gradient(tolerance=case.tolerance, optimizer=ft.Newton(), max_updates=2)
    runs = []
    for backend in ("numba", "numpy"):
        with kernels.using_backend(backend):
            runs.append(ft.solve(case.problem, case.law, silos, algorithm))
    assert runs[0].transcript.exchanges == runs[1].transcript.exchanges


def test_gradient_matches_a_longhand_centralised_newton() -> None:
    """Two arms: logistic fluctuation by textbook IRLS on pooled arrays."""
    case = targets()["two arms"]
    rows = case.take(np.arange(case.n))
    low, width = -10.0, 20.0
    y, a, g = (rows["outcome"] - low) / width, rows["treatment"], rows["g"]
    q1, q0 = ((rows[k] - low) / width for k in ("Q1", "Q0"))
    H = np.stack([a / g, (1 - a) / (1 - g)], axis=1)
    offset = np.where(a == 1, np.log(q1 / (1 - q1)), np.log(q0 / (1 - q0)))
    eps = np.zeros(2)
    for _ in range(50):
        p = 1 / (1 + np.exp(-(offset + H @ eps)))
        eps = eps + np.linalg.solve(H.T @ (H * (p * (1 - p))[:, None]), H.T @ (y - p))
    q1 = 1 / (1 + np.exp(-(np.log(q1 / (1 - q1)) + eps[0] / g)))
    q0 = 1 / (1 + np.exp(-(np.log(q0 / (1 - q0)) + eps[1] / (1 - g))))
    expected = low + width * np.array([q1.mean(), q0.mean()])
    result = ft.solve(
        case.problem,
        case.law,
        case.silos(case.split(5)),
        ft.Gradient(tolerance=1e-10, optimizer=ft.Newton()),
    )
    assert np.allclose(result.psi, expected, rtol=0, atol=1e-11)


def test_origin_check_is_the_first_gradient() -> None:
    """Under full-batch descent, K updates of T fixed steps cost K T + 1 rounds, not K (T + 1) + 1."""
    case = targets()["two arms"]
    optimizer = ft.GradientDescent(step=0.001, max_steps=4)
    result = ft.solve(
        case.problem,
        case.law,
        case.silos(case.split(2)),
        ft.Gradient(tolerance=1e-12, optimizer=optimizer, max_updates=3),
    )
    assert result.rounds == 3 * 4 + 1
    assert result.status is ft.Status.UPDATE_BUDGET


def test_step_selection_queries_are_rounds() -> None:
    case = targets()["two arms"]
    backtracking = ft.Backtracking(first=1e3)  # far too long: many halvings, each a round
    result = ft.solve(
        case.problem,
        case.law,
        case.silos(case.split(2)),
        ft.Gradient(tolerance=1e-4, optimizer=ft.GradientDescent(step=backtracking)),
    )
    assert result.status is ft.Status.CONVERGED
    assert result.rounds == len(result.trajectory.points)
    assert result.rounds > result.steps + result.updates + 1  # some trials were rejected


def test_fresh_sgd_batches_are_pooled_draws() -> None:
    sgd = ft.StochasticGradientDescent(batch=30, step=0.1, batches="fresh", replace=True, seed=9)
    first, again = sgd.draw(50, 0, 0), sgd.draw(50, 0, 0)
    assert (first == again).all()
    assert (first != sgd.draw(50, 0, 1)).any()
    assert len(np.unique(first)) < 30  # a multiset
    without = ft.StochasticGradientDescent(batch=30, step=0.1, batches="fresh", seed=9).draw(50, 2, 3)
    assert len(np.unique(without)) == 30
    counts = np.zeros(20)
    for t in range(2000):
        counts[ft.StochasticGradientDescent(batch=5, step=0.1, batches="fresh").draw(20, 0, t)] += 1
    assert abs(counts / 2000 - 0.25).max() < 0.05  # uniform over the pooled rows


@pytest.mark.parametrize(("n", "batch"), [(50, 50), (50, 49), (50, 20), (53, 7), (8, 1)])
def test_fixed_sgd_batches_are_the_parts_of_one_partition(n: int, batch: int) -> None:
    sgd = ft.StochasticGradientDescent(batch=batch, step=0.1, steps=3, seed=9)
    parts = n // batch
    run = [sgd.draw(n, update, step) for update in range(2 * parts) for step in range(3)]
    assert (np.sort(np.concatenate(run[:parts])) == np.arange(n)).all()
    assert {len(part) for part in run} <= {n // parts, -(-n // parts)}
    for s, part in enumerate(run):
        assert (part == run[s % parts]).all()  # in turn over the whole run, not over one submodel
    other = ft.StochasticGradientDescent(batch=batch, step=0.1, steps=3, seed=10)
    assert parts == 1 or any((other.draw(n, 0, t) != run[t]).any() for t in range(min(3, parts)))


def test_sgd_divides_by_the_size_of_the_part() -> None:
    """Mean, unit curvature: the step from the origin is the mean residual of the 26 or 27 rows drawn."""
    y = np.random.default_rng(4).uniform(size=53)
    problem = ft.Mean()
    sgd = ft.StochasticGradientDescent(batch=20, step=0.5, steps=1, seed=2)
    algorithm = ft.Gradient(tolerance=1e-12, optimizer=sgd, max_updates=1)
    result = ft.solve(problem, problem.start(0.5), {"a": y[:30], "b": y[30:]}, algorithm)
    part = sgd.draw(53, 0, 0)
    assert len(part) in (26, 27)
    assert result.law.mu == pytest.approx(0.5 + 0.5 * (y[part] - 0.5).mean(), abs=1e-14)


def test_newton_direction_of_an_indefinite_hessian_descends() -> None:
    H = np.array([[1.0, 2.0], [2.0, 1.0]])
    g = np.array([1.0, -1.0])
    assert g @ newton_direction(H, g) < 0
    assert np.allclose(newton_direction(np.eye(2) * 4, g), -g / 4, rtol=1e-15)


def test_a_schedule_takes_its_own_steps_in_each_update() -> None:
    """The mean: the gradient at eps is mean(y) - mu + eps, so every step is known longhand."""
    problem, y = ft.Mean(bounds=(0.0, 10.0)), np.array([1.0, 2.0, 3.0, 6.0])
    steps = ((0.5, 0.25), (0.125,))
    algorithm = ft.Gradient(
        tolerance=1e-12, optimizer=ft.GradientDescent(step=ft.Schedule(steps=steps)), max_updates=4
    )
    result = ft.solve(problem, problem.start(7.0), {"a": y[:1], "b": y[1:]}, algorithm)
    mu, expected = 7.0, []
    for k in range(4):
        eps = 0.0
        for step in steps[min(k, 1)]:
            eps -= step * (3.0 - mu + eps)
        expected.append(eps)
        mu -= eps
    assert [eps for (eps,) in result.trajectory.accepted] == pytest.approx(expected, rel=1e-14)
    assert result.steps == 2 + 1 + 1 + 1
    assert result.rounds == 5 + 1  # five EIF checks and one inner query: T_0 = 2
    assert result.status is ft.Status.UPDATE_BUDGET
    for wrong in ((), ((),), ((0.5, -1.0),)):
        with pytest.raises(InputError, match="steps"):
            ft.Schedule(steps=wrong)


@pytest.mark.parametrize("kind", [ft.Gradient, ft.LocalAverage, ft.Central])
def test_a_tolerance_of_zero_tests_for_an_exact_root(kind: Any) -> None:
    problem, y = ft.Mean(bounds=(0.0, 8.0)), np.array([1.0, 2.0, 3.0, 6.0])
    exact = ft.solve(problem, problem.start(3.0), {"a": y[:2], "b": y[2:]}, kind(tolerance=0.0))
    assert exact.status is ft.Status.CONVERGED  # the mean is 3: zero is met at the start
    assert exact.residual == 0.0
    never = ft.solve(
        problem,
        problem.start(4.1),
        {"a": y[:2], "b": np.append(y[2:], 1.1)},
        kind(tolerance=0.0, max_updates=3),
    )
    assert never.residual is not None
    assert never.residual <= 1e-9
    with pytest.raises(InputError, match="tolerance"):
        ft.Coded(tolerance=0.0)  # its lattice is a fraction of the tolerance
