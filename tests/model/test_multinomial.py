"""The softmax submodel: sums against brute force, the same in any partition and backend, and its bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedtmle.model.submodels import Multinomial
from fedtmle_core import kernels
from fedtmle_core.types import Part, RowBound, unpack

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
    monkeypatch.setattr("fedtmle_core.parallel.BLOCK", 13)
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


def test_leverages_are_those_of_variance_and_residual() -> None:
    submodel = rows(60, 3, 2, seed=6)
    eps = np.random.default_rng(7).normal(size=submodel.dim)
    own = []
    for i in range(submodel.n_rows):
        row = submodel.take(np.array([i]))
        weight = float(submodel.w[i])
        variance = weight * unpack(row.sums(eps, Part.HESSIAN).values(), submodel.dim)
        residual = row.sums(eps, Part.GRADIENT).values()
        own.append(variance + np.outer(residual, residual))
    inverse = np.linalg.inv(sum(own))
    assert submodel.look(eps).largest == pytest.approx(max(np.trace(inverse @ each) for each in own))
    assert submodel.look(eps).radius(1.0) == 0.0
