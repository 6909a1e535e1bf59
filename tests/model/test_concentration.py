"""How far a gradient rests on single rows: against the definition, with both backends, and stopped early."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.model import kernels
from fedtmle.model.families import Family
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.types import RowBound


def design(n: int, seed: int, *, weighted: bool = True) -> GeneralisedLinear:
    rng = np.random.default_rng(seed)
    return GeneralisedLinear(
        family=Family.LOGISTIC,
        X=rng.normal(size=(3, n)),
        bound=RowBound(gradient=5, curvature=8),
        offset=rng.normal(size=n),
        y=rng.uniform(size=n),
        w=rng.uniform(0.5, 2.0, size=n) if weighted else None,
    )


def contributions(model: GeneralisedLinear, eps: np.ndarray) -> np.ndarray:
    """w (expit(eta) - y) X, longhand."""
    eta = model.offset + eps @ model.X
    w = 1.0 if model.w is None else model.w
    return w * (1 / (1 + np.exp(-eta)) - model.y) * model.X


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("n", [1, 700, 20_000])
def test_the_definition(backend: str, weighted: bool, n: int) -> None:
    model, eps = design(n, 1, weighted=weighted), np.array([0.3, -0.2, 0.1])
    with kernels.using_backend(backend):
        found = model.concentration(eps)
    size = np.abs(contributions(model, eps))
    reach = np.abs(model.X) if model.w is None else model.w * np.abs(model.X)
    np.testing.assert_allclose(found.total, size.sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.squares, (size**2).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.largest, size.max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.reach_total, reach.sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.reach_largest, reach.max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.columns, np.abs(model.X).max(axis=1), rtol=1e-12)
    assert found.share == pytest.approx((size.max(axis=1) / size.sum(axis=1)).max())
    assert found.effective == pytest.approx((size.sum(axis=1) ** 2 / (size**2).sum(axis=1)).min())
    assert found.effective >= 1 / found.share - 1e-9
    assert found.is_whole


@given(st.integers(0, 20), st.lists(st.floats(-2, 2), min_size=3, max_size=3))
@settings(max_examples=40, deadline=None)
def test_bounds_at_another_eps_hold(seed: int, eps: list[float]) -> None:
    model, there = design(50, seed), np.array(eps)
    here = model.concentration(np.zeros(3))
    truth = model.concentration(there)
    assert (here.total_within(there) <= truth.total + 1e-9).all()
    assert here.share_within(there) >= truth.share - 1e-9


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_it_stops_when_the_rows_seen_add_up_to_enough(backend: str) -> None:
    model, eps = design(200_000, 2), np.zeros(3)
    whole = model.concentration(eps)
    with kernels.using_backend(backend):
        found = model.concentration(eps, until=1000.0)
        never = model.concentration(eps, until=1e9)
    assert not found.is_whole
    assert (found.total >= 1000.0).all()
    assert (found.total < whole.total / 2).all()
    assert never.is_whole
    np.testing.assert_allclose(never.total, whole.total, rtol=1e-12)


def test_a_coordinate_to_which_no_row_contributes_does_not_stop_it_early() -> None:
    model = design(100_000, 3)
    model.X[1] = 0.0
    found = model.concentration(np.zeros(3), until=10.0)
    assert found.is_whole
    assert found.total[1] == 0.0
    assert math.isfinite(found.share)
