"""FedTMLE-G reproduces the centralised computation to the bit, for any partition."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.publiclinear import newton_direction
from fedtmle.model import kernels
from tests.cases import TARGETS, targets

OPTIMIZERS = {
    "descent": ft.GradientDescent(max_steps=15),
    "fixed step": ft.GradientDescent(step=0.05, max_steps=4),
    "newton": ft.Newton(),
    "sgd": ft.StochasticGradientDescent(batch=50, step=0.02, steps=6, seed=5),
    "sgd with replacement": ft.StochasticGradientDescent(batch=50, step=0.02, steps=6, replace=True),
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
def test_any_partition_gives_the_same_bits(name: str, optimizer: object) -> None:
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


def test_sgd_batches_are_pooled_draws() -> None:
    sgd = ft.StochasticGradientDescent(batch=30, step=0.1, replace=True, seed=9)
    first, again = sgd.draw(50, 0, 0), sgd.draw(50, 0, 0)
    assert (first == again).all()
    assert (first != sgd.draw(50, 0, 1)).any()
    assert len(np.unique(first)) < 30  # a multiset
    without = ft.StochasticGradientDescent(batch=30, step=0.1, seed=9).draw(50, 2, 3)
    assert len(np.unique(without)) == 30
    counts = np.zeros(20)
    for t in range(2000):
        counts[ft.StochasticGradientDescent(batch=5, step=0.1).draw(20, 0, t)] += 1
    assert abs(counts / 2000 - 0.25).max() < 0.05  # uniform over the pooled rows


def test_newton_direction_of_an_indefinite_hessian_descends() -> None:
    H = np.array([[1.0, 2.0], [2.0, 1.0]])
    g = np.array([1.0, -1.0])
    assert g @ newton_direction(H, g) < 0
    assert np.allclose(newton_direction(np.eye(2) * 4, g), -g / 4, rtol=1e-15)
