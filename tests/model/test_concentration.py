"""How far a gradient rests on single rows: against the definition, with both backends, and stopped early."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.model import kernels
from fedtmle.model.concentration import Concentration, RowSpread
from fedtmle.model.families import Family
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.types import RowBound, Scaled
from tests.narrow import array
from tests.premise import Premise


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
    eta = model.offset + eps @ array(model.X)
    w = 1.0 if model.w is None else model.w
    return w * (1 / (1 + np.exp(-eta)) - model.y) * array(model.X)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("n", [1, 700, 20_000])
def test_the_definition(backend: str, weighted: bool, n: int) -> None:
    model, eps = design(n, 1, weighted=weighted), np.array([0.3, -0.2, 0.1])
    with kernels.using_backend(backend):
        found = model.concentration(eps)
    size = np.abs(contributions(model, eps))
    reach = np.abs(array(model.X)) if model.w is None else model.w * np.abs(array(model.X))
    np.testing.assert_allclose(found.spread.total, size.sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.spread.squares, (size**2).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.spread.largest, size.max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.spread.reach_total, reach.sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.spread.reach_largest, reach.max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.spread.columns, np.abs(array(model.X)).max(axis=1), rtol=1e-12)
    assert found.share == pytest.approx((size.max(axis=1) / size.sum(axis=1)).max())
    assert found.effective == pytest.approx((size.sum(axis=1) ** 2 / (size**2).sum(axis=1)).min())
    assert found.effective >= 1 / found.share - 1e-9
    assert found.is_whole


at_edge = Premise("a move goes to the edge of the radius", at_least=0.25)


@at_edge
@given(
    st.integers(0, 20),
    st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    st.floats(0.05, 0.9),
    st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=60, deadline=None)
def test_within_the_radius_no_share_is_larger(
    seed: int, direction: list[float], share: float, asked: float
) -> None:
    """Both for all rows and for the few that were enough, at the edge of the radius."""
    model = design(5_000 if asked else 50, seed)
    here = model.concentration(np.zeros(3), share=asked * share)
    radius, distance = here.radius(share), here.distance(direction)
    if radius < 0:
        assert here.is_whole
        assert here.share > share
    if at_edge.holds(radius >= 0 and distance > 0):
        edge = np.array(direction) * (radius / distance)
        assert model.concentration(edge).share <= share + 1e-9


def test_the_radius_is_as_large_as_the_bounds_allow() -> None:
    """Longhand: one coordinate, total 10, largest 1, reach 20 and 2, at a share of a half and L = 1/4."""
    numbers = np.array([[10.0], [10.0], [1.0], [20.0], [2.0], [3.0], [10.0]])
    found = Concentration(spread=RowSpread(*numbers), lipschitz=0.25)
    s = (0.5 * 10 - 1) / (2 + 0.5 * 20)
    assert found.radius(0.5) == pytest.approx(s / 0.25)
    assert (1 + s * 2) / (10 - s * 20) == pytest.approx(0.5)
    assert found.radius(0.1) == 0.0
    assert found.radius(0.09) == -1.0
    assert found.distance(np.array([-2.0])) == 6.0


@pytest.mark.parametrize("lipschitz", [0.0, math.inf])
def test_the_radius_of_a_slope_that_never_or_always_moves(lipschitz: float) -> None:
    found = design(50, 1).concentration(np.zeros(3))._replace(lipschitz=lipschitz)
    assert found.radius(0.9) == (math.inf if lipschitz == 0 else 0.0)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize(
    ("gradient", "family"), [(5, Family.LOGISTIC), (30, Family.LOGISTIC), (30, Family.GAUSSIAN)]
)
def test_it_stops_when_the_rows_seen_are_enough(backend: str, gradient: int, family: Family) -> None:
    """By the public bound where that is near, else by the largest values of the columns."""
    bound = RowBound(gradient=gradient, curvature=8)
    model = dataclasses.replace(design(200_000, 2), bound=bound, family=family)
    eps = np.array([0.3, -0.2, 0.1])
    whole = model.concentration(eps)
    with kernels.using_backend(backend):
        found = model.concentration(eps, share=0.5, least=5)
    assert not found.is_whole
    assert found.radius(0.5) > 0
    assert (found.spread.rows >= 5).all()
    assert (found.spread.total <= whole.spread.total / 2).all()
    assert (found.spread.largest >= whole.spread.largest).all()
    assert found.share >= whole.share
    if gradient == 30:
        eta = np.abs(model.offset).max() + np.abs(eps) @ found.spread.columns
        slope = family.slope_ceiling(eta, np.abs(model.y).max())
        np.testing.assert_allclose(found.spread.largest, slope * model.w.max() * found.spread.columns)
        assert (found.spread.reach_largest >= whole.spread.reach_largest).all()
        np.testing.assert_array_equal(found.spread.columns, np.abs(array(model.X)).max(axis=1))
        with kernels.using_backend(backend):  # once the largest values are known
            again = model.concentration(eps, share=0.5, least=5)
            np.testing.assert_array_equal(again.spread, found.spread)
    else:  # the public bound holds at every eps
        assert (found.spread.largest == 2.0**gradient).all()
        assert (found.spread.reach_largest == 0).all()


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_how_many_rows_are_looked_at(backend: str) -> None:
    """At least ``few``; no more where ``many`` would not do; else as many as it takes."""
    model, eps = design(200_000, 4), np.zeros(3)
    whole = model.concentration(eps)
    with kernels.using_backend(backend):
        _, seen, enough = kernels.glm_spread(model._rows, eps, np.ones(3), few=30_000)
        assert enough
        assert 30_000 <= seen < 60_000
        half = 0.5 * whole.spread.total
        _, seen, enough = kernels.glm_spread(model._rows, eps, half, few=1_000, many=50_000)
        assert not enough
        assert 1_000 <= seen < 50_000
        found, seen, enough = kernels.glm_spread(model._rows, eps, half, few=1_000, many=150_000)
        assert enough
        assert (found.total >= half).all()
        assert 90_000 < seen < 130_000
        found, seen, enough = kernels.glm_spread(model._rows, eps)
        assert (seen, enough) == (200_000, False)
        np.testing.assert_allclose(found, whole.spread, rtol=1e-12)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_row_that_is_not_among_the_first_is_not_overlooked(backend: str) -> None:
    model = design(100_000, 3)
    model = dataclasses.replace(model, bound=RowBound(gradient=40, curvature=80))
    array(model.X)[1, -1] = 1e9
    with kernels.using_backend(backend):
        found = model.concentration(np.zeros(3), share=0.5)
    assert found.is_whole
    assert found.share > 0.99


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_coordinate_with_too_few_rows_is_looked_at_to_the_end(backend: str) -> None:
    model = design(50_000, 3)
    array(model.X)[1, 4:] = 0.0
    with kernels.using_backend(backend):
        found = model.concentration(np.zeros(3), share=0.5, least=5)
    assert found.is_whole
    assert found.support == 4


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_few_heavy_rows_are_not_enough_rows(backend: str) -> None:
    X = np.ones((2, 20_000))
    X[1, 3:10_000] = 0.0
    model = GeneralisedLinear(family=Family.LINEAR, X=X, bound=RowBound(gradient=30, curvature=8))
    with kernels.using_backend(backend):
        assert model.concentration(np.zeros(2), share=0.9, least=5).support >= 5
        assert model.concentration(np.zeros(2), share=0.9, least=3).support == 3


def test_the_public_bound_is_used_where_it_is_the_lower_one() -> None:
    """Offsets and outcomes are large, what is left of them is not."""
    model = design(100_000, 6)
    y = 1_000.0 + model.y
    far = dataclasses.replace(model, family=Family.GAUSSIAN, offset=np.full(100_000, 1_000.0), y=y)
    far._extents  # noqa: B018 - they are known
    found = far.concentration(np.zeros(3), share=0.5, least=5)
    assert not found.is_whole
    assert (found.spread.largest == 2.0**5).all()


def test_nothing_is_sought_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, largest = design(50_000, 7, weighted=False), kernels.largest
    columns = tuple(array(model.X))
    known = dataclasses.replace(
        model,
        X=Scaled(columns, np.ones(3), np.array([largest(column) for column in columns])),
        bound=RowBound(gradient=30, curvature=8),
        y_largest=1.0,
    )
    sought = dataclasses.replace(known, y_largest=None).concentration(np.zeros(3), share=0.5, least=5)
    monkeypatch.setattr(kernels, "largest", lambda _: pytest.fail("sought"))
    found = known.concentration(np.zeros(3), share=0.5, least=5)
    np.testing.assert_allclose(found.spread.largest, 2.0 * found.spread.columns)  # |expit - y| <= 1 + |y|
    np.testing.assert_allclose(sought.spread.largest, (1.0 + model.y.max()) * found.spread.columns)
    assert known.take(np.arange(9)).y_largest == 1.0


@pytest.mark.parametrize("gradient", [5, 30])
def test_a_coordinate_to_which_no_row_contributes_has_no_share(gradient: int) -> None:
    model = dataclasses.replace(design(100_000, 3), bound=RowBound(gradient=gradient, curvature=8))
    array(model.X)[1] = 0.0
    found = model.concentration(np.zeros(3), share=0.5, least=5)
    assert not found.is_whole  # nor are all rows looked at for it
    assert found.spread.total[1] == 0.0
    assert found.radius(0.5) > 0
    assert found.support >= 5


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_rows_without_a_slope_are_counted_to_the_last(backend: str) -> None:
    """Outcomes all 0 at the start: nothing is told, and a column rare among the first rows is not refused."""
    X = np.ones((3, 20_000))
    X[1, 3:10_000], X[2] = 0.0, 0.0
    model = GeneralisedLinear(
        family=Family.GAUSSIAN, X=X, y=np.zeros(20_000), bound=RowBound(gradient=4, curvature=4)
    )
    with kernels.using_backend(backend):
        found = model.concentration(np.zeros(3), share=0.5, least=5)
    assert found.support == 10_003
    assert found.share == 0.0
    assert found.radius(0.5) == 0.0


@pytest.mark.parametrize("family", list(Family))
def test_the_ceiling_of_the_slope(family: Family) -> None:
    rng = np.random.default_rng(5)
    eta, y = rng.uniform(-3, 2, size=500), rng.uniform(-1.5, 1.0, size=500)
    mean = {
        Family.LINEAR: np.ones(500) + y,
        Family.GAUSSIAN: eta,
        Family.LOGISTIC: 1 / (1 + np.exp(-eta)),
        Family.POISSON: np.exp(eta),
    }[family]
    assert np.abs(mean - y).max() <= family.slope_ceiling(np.abs(eta).max(), np.abs(y).max())
