"""Designs that stay where their columns are, and loops over the rows of an effect: the same bits each way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fedtmle.errors import ContributionError, InputError
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle_core import kernels, parallel
from fedtmle_core.exact import CHUNK, query_shifts
from fedtmle_core.types import Array, Family, Part, RowBound, Scaled, matrix, scaled

BACKENDS = ("numba", "numpy")
EVERYTHING = Part.LOSS | Part.GRADIENT | Part.HESSIAN
BOUND = RowBound(gradient=6, curvature=6)


@pytest.fixture(autouse=True)
def _default_threads() -> Iterator[None]:
    yield
    parallel.set_threads(None)


FACTORS = (0.5, 0.25, 1.0, -0.3, 1.0)
POWERS = (0.5, 0.25, 1.0, 2.0, 2.0**-3)  # with these alone, columns are read where they are


def design(n: int, seed: int = 0, factors: tuple[float, ...] = FACTORS) -> Scaled:
    """Columns from here and there: a constant, slices, a column of its own, one of whole numbers."""
    rng = np.random.default_rng(seed)
    wide = rng.uniform(-1, 1, (2 * n, 3))
    columns: tuple[Any, ...] = (
        np.broadcast_to(np.float64(1.0), (n,)),
        rng.uniform(-4, 4, n),
        wide[::2, 1],
        wide[:n, 0].copy(),
        rng.integers(0, 2, n),
    )
    return Scaled(columns, np.array(factors))


EPS = np.array([0.3, -0.7, 0.11, 0.4, -0.2])


def sums(X: Scaled | Array, family: Family, parts: Part = EVERYTHING) -> tuple[int, ...]:
    y = np.random.default_rng(9).uniform(size=X.shape[1:])
    rows = kernels.glm_rows(family, X, None, y)
    return kernels.glm_sums(rows, EPS, parts, query_shifts(BOUND, EPS, parts))


def means(family: Family, X: Scaled) -> Array:
    return kernels.glm_means(kernels.glm_rows(family, X), EPS)


@pytest.mark.parametrize("family", list(Family))
@pytest.mark.parametrize("n", [1, kernels.BLOCK - 1, kernels.BLOCK, kernels.BLOCK + 1, CHUNK + 300])
@pytest.mark.parametrize("parts", [EVERYTHING, Part.LOSS | Part.GRADIENT, Part.GRADIENT])
@pytest.mark.parametrize("factors", [FACTORS, POWERS])
def test_sums_are_those_of_the_matrix(
    n: int, family: Family, parts: Part, factors: tuple[float, ...]
) -> None:
    X = design(n, factors=factors)
    with kernels.using_backend("numpy"):
        want = sums(matrix(X), family, parts)
    known = Scaled(X.columns, X.factors, np.array([1.0, 4.0, 1.0, 1.0, 1.0]))  # largest magnitudes
    for backend in BACKENDS:
        with kernels.using_backend(backend):
            assert sums(X, family, parts) == sums(known, family, parts) == want


def test_threads_do_not_change_them() -> None:
    X, found = design(200_000), []
    for threads in (1, 2, 3):
        parallel.set_threads(threads)
        found.append((sums(X, Family.LOGISTIC), means(Family.LOGISTIC, X).tobytes()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 700, CHUNK + 1])
@pytest.mark.parametrize("factors", [FACTORS, POWERS])
def test_means_are_of_the_predictor_added_in_order(n: int, factors: tuple[float, ...], backend: str) -> None:
    X, eta = design(n, factors=factors), np.zeros(n)
    for coefficient, column, factor in zip(EPS, X.columns, X.factors, strict=True):
        eta = eta + coefficient * (column * factor)
    with kernels.using_backend(backend):
        for family, mean in (
            (Family.GAUSSIAN, eta),
            (Family.LOGISTIC, kernels.expit(eta)),
            (Family.POISSON, kernels.exp(eta)),
        ):
            assert means(family, X).tobytes() == mean.tobytes()


def test_large_columns_are_looked_at_before_their_products_are_trusted() -> None:
    X = Scaled((np.array([1.0, 3.0, -2.0]), np.array([0.5, 1e3, 0.1])), np.ones(2))
    within, beyond = (
        GeneralisedLinear(family=Family.GAUSSIAN, X=X, bound=RowBound(gradient=30, curvature=curvature))
        for curvature in (20, 19)
    )
    for backend in BACKENDS:
        with kernels.using_backend(backend):
            found = within.sums(np.zeros(2), Part.HESSIAN).values()
            np.testing.assert_allclose(found, [14.0, 3000.3, 1e6 + 0.26], rtol=1e-12)
            with pytest.raises(ContributionError, match="1 row"):
                beyond.sums(np.zeros(2), Part.HESSIAN)


@pytest.mark.parametrize("factor", [2.0**-4, 1.0, 0.75])
@pytest.mark.parametrize("largest", [None, np.array([2.0])])
def test_a_gradient_beyond_its_bound_is_refused_for_any_factor(factor: float, largest: Array | None) -> None:
    X = Scaled((np.array([1.0, 2.0, -0.5]),), np.array([factor]), largest)
    rows = kernels.glm_rows(Family.LINEAR, X)
    widest = 50 - np.frexp(2.0 * factor)[1]  # of the shifts that the largest row, 2 factor, allows
    if factor != 0.75:  # a power of two reaches the bound 2^50 itself
        widest += 1
    for backend in BACKENDS:
        with kernels.using_backend(backend):
            (units,) = kernels.glm_sums(rows, np.zeros(1), Part.GRADIENT, (int(widest),))
            assert units == 2.5 * factor * 2.0**widest
            with pytest.raises(ContributionError, match="1 row"):
                kernels.glm_sums(rows, np.zeros(1), Part.GRADIENT, (int(widest) + 1,))


def test_a_submodel_counts_and_draws_rows_alike() -> None:
    X, y = design(50), np.linspace(0, 1, 50)
    here = GeneralisedLinear(family=Family.LOGISTIC, X=X, y=y, bound=BOUND)
    there = GeneralisedLinear(family=Family.LOGISTIC, X=matrix(X), y=y, bound=BOUND)
    rows = np.array([3, 3, 49, 0])
    assert here.take(rows).sums(EPS, EVERYTHING) == there.take(rows).sums(EPS, EVERYTHING)
    assert (here.column_people() == there.column_people()).all()
    assert here.gram() == there.gram()
    assert here.look(EPS).largest == there.look(EPS).largest


def test_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="X"):
        sums(Scaled((*design(10).columns[:4], np.ones(9)), np.ones(5)), Family.GAUSSIAN)
    with pytest.raises(InputError, match="X"):
        sums(Scaled(design(10).columns, np.ones(4)), Family.GAUSSIAN)
    assert scaled(np.ones((2, 3))).shape == (2, 3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_the_numerator_over_a_bounded_probability(backend: str) -> None:
    rng = np.random.default_rng(1)
    p, codes = rng.uniform(0, 1, 300), rng.integers(0, 3, 300).astype(np.int16)
    p[:3] = 0.0, 0.1, np.nan
    for numerator in (np.array([0.7]), rng.uniform(0, 1, 300)):
        H, taken, below = np.empty(300), np.full(300, -1.0), np.empty(300, dtype=bool)
        chance = np.full(300, 2.0)
        with kernels.using_backend(backend):
            kernels.weigh(numerator, p, 0.1, codes, 2, H, taken, below)
            kernels.weigh(numerator, p, 0.1, codes, 1, H, np.empty(300), below, chance)
        want = numerator / np.maximum(p, 0.1)
        assert H.tobytes() == want.tobytes()
        assert taken.tobytes() == np.where(codes == 2, want, -1.0).tobytes()
        assert (below == (p < 0.1)).all()
        assert chance.tobytes() == np.where(codes == 1, p, 2.0).tobytes()
    with pytest.raises(InputError, match="numerator"):
        kernels.weigh(np.ones(2), p, 0.1, codes, 2, H, taken, below)
    with pytest.raises(InputError, match="taken"):
        kernels.weigh(np.ones(1), p, 0.1, codes, 2, H, taken[:5], below)
    with pytest.raises(InputError, match="chance"):
        kernels.weigh(np.ones(1), p, 0.1, codes, 2, H, taken, below, chance[:5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_predictions_are_kept_inside_and_have_their_logits(backend: str) -> None:
    values = np.concatenate([np.random.default_rng(2).uniform(-0.2, 1.2, 1000), [0.0, 0.5, 1.0, 2.0**-30]])
    q, logits = np.empty_like(values), np.empty_like(values)
    with kernels.using_backend(backend):
        assert kernels.bound(values, 1e-6, 1 - 1e-6, q, logits)
        assert q.tobytes() == np.clip(values, 1e-6, 1 - 1e-6).tobytes()
        assert logits.tobytes() == kernels.logit(q).tobytes()
        for bad in (np.nan, np.inf, -np.inf):
            values[7] = bad
            assert not kernels.bound(values, 1e-6, 1 - 1e-6, q, logits)
        with pytest.raises(InputError, match="bounds"):
            kernels.bound(values, 0.0, 1.0, q, logits)
