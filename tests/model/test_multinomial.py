"""The softmax submodel: sums against brute force, the same in any partition and backend, and its bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedtmle.model import kernels
from fedtmle.model.multinomial import Multinomial
from fedtmle.model.types import Part, RowBound, unpack

ALL = Part.LOSS | Part.GRADIENT | Part.HESSIAN
BOUND = RowBound(gradient=2, curvature=0)


def rows(n: int, classes: int, columns: int, seed: int = 0) -> Multinomial:
    rng = np.random.default_rng(seed)
    X = np.vstack([np.full(n, 0.5), rng.uniform(-1, 1, size=(columns - 1, n))])
    return Multinomial(
        X=X,
        y=rng.integers(0, classes, size=n),
        w=rng.uniform(0.5, 2.0, size=n),
        classes=classes,
        bound=BOUND,
    )


def losses(submodel: Multinomial, eps: np.ndarray) -> np.ndarray:
    """Row by row, longhand; eps may be complex."""
    eta = np.vstack([np.zeros(submodel.n_rows), eps.reshape(submodel.classes - 1, -1) @ submodel.X])
    taken = eta[submodel.y, np.arange(submodel.n_rows)]
    return submodel.w * (np.log(np.exp(eta).sum(axis=0)) - taken - np.log(submodel.classes))


@pytest.mark.parametrize(("classes", "columns"), [(2, 1), (3, 2), (5, 4)])
def test_sums_are_the_derivatives_of_the_loss(classes: int, columns: int) -> None:
    submodel = rows(50, classes, columns)
    eps = np.random.default_rng(1).normal(size=submodel.dim)
    sums, d, step = submodel.sums(eps, ALL).values(), submodel.dim, 1e-200
    np.testing.assert_allclose(sums[0], losses(submodel, eps).sum(), atol=1e-11)
    unit = np.eye(d)
    slopes = [losses(submodel, eps + 1j * step * e).sum().imag / step for e in unit]
    np.testing.assert_allclose(sums[1 : 1 + d], slopes, atol=1e-11)
    for j, k in itertools.combinations_with_replacement(range(d), 2):
        ahead, behind = (
            losses(submodel, eps + sign * 1e-5 * unit[j] + 1j * step * unit[k]).sum().imag / step
            for sign in (1, -1)
        )
        assert unpack(sums[1 + d :], d)[j, k] == pytest.approx((ahead - behind) / 2e-5, abs=1e-8)


def test_any_partition_and_either_backend_give_the_same_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    submodel = rows(500, 4, 3, seed=2)
    eps = np.random.default_rng(3).normal(size=submodel.dim)
    whole = submodel.sums(eps, ALL)
    parts = [submodel.take(part) for part in np.array_split(np.random.default_rng(4).permutation(500), 7)]
    total = parts[0].sums(eps, ALL)
    for part in parts[1:]:
        total = total + part.sums(eps, ALL)
    assert total == whole
    monkeypatch.setattr("fedtmle.model.parallel.BLOCK", 13)
    assert submodel.sums(eps, ALL) == whole
    with kernels.using_backend("numpy"):
        assert submodel.sums(eps, ALL) == whole


def test_the_ceiling_bounds_the_hessian() -> None:
    submodel = rows(80, 4, 3, seed=5)
    ceiling = submodel.curvature_ceiling()
    for seed in range(20):
        eps = 3 * np.random.default_rng(seed).normal(size=submodel.dim)
        hessian = unpack(submodel.sums(eps, Part.HESSIAN).values(submodel.n_rows), submodel.dim)
        assert np.linalg.eigvalsh(ceiling - hessian).min() >= -1e-12
    streamed = 0.25 * unpack(submodel.gram().values(submodel.n_rows), submodel.dim)
    np.testing.assert_allclose(streamed, ceiling, atol=1e-12)


def test_concentration_is_that_of_the_gradient() -> None:
    submodel = rows(60, 3, 2, seed=6)
    eps = np.random.default_rng(7).normal(size=submodel.dim)
    shares = []
    for i in range(submodel.n_rows):
        shares.append(np.abs(submodel.take(np.array([i])).sums(eps, Part.GRADIENT).values()))
    contributions = np.array(shares)
    found = submodel.concentration(eps)
    assert found.is_whole
    np.testing.assert_allclose(found.spread.total, contributions.sum(axis=0), rtol=1e-9)
    np.testing.assert_allclose(found.spread.largest, contributions.max(axis=0), rtol=1e-9)
    np.testing.assert_allclose(found.spread.squares, (contributions**2).sum(axis=0), rtol=1e-9)
    # Within the radius no row's share can exceed the one that was asked for.
    share = 1.5 * found.share
    radius = found.radius(share)
    assert radius > 0
    rng = np.random.default_rng(8)
    for _ in range(50):
        move = rng.normal(size=submodel.dim)
        move *= radius / found.distance(move)
        assert submodel.concentration(eps + move).share <= share * (1 + 1e-12)


def test_a_few_rows_may_show_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle.model.multinomial.SPREAD_ROWS", 64)
    submodel = rows(5000, 3, 2, seed=9)
    found = submodel.concentration(np.zeros(submodel.dim), share=0.5, least=10)
    assert not found.is_whole
    assert found.shows(0.5, 10)
    assert found.share >= submodel.concentration(np.zeros(submodel.dim)).share
