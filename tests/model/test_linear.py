"""Linear algebra in plain floats against LAPACK, on random and on ill-conditioned matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import NumericalError
from fedtmle.model.linear import (
    cholesky,
    congruence,
    dot,
    eigen,
    invert,
    invert_lower,
    multiply,
    operator_norm_squared,
    solve_factored,
    symmetric_norm,
)

CLOSE = 1e-12


@st.composite
def symmetric(draw: st.DrawFn, *, definite: bool = False) -> np.ndarray:
    """Return Q diag(values) Q^T, with values that span up to nine decades."""
    d = draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    Q, _ = np.linalg.qr(rng.normal(size=(d, d)))
    values = 10.0 ** rng.uniform(-draw(st.floats(0, 9)), 0, size=d)
    if not definite:
        values *= rng.choice([-1.0, 0.0, 1.0], size=d)
    matrix = (Q * values) @ Q.T * 2.0 ** draw(st.integers(-40, 40))
    return np.asarray(0.5 * (matrix + matrix.T))


def scale(matrix: np.ndarray) -> float:
    return float(np.abs(matrix).max()) or 1.0


@given(symmetric(definite=True))
def test_cholesky_and_inverses(H: np.ndarray) -> None:
    L = cholesky(H)
    assert L is not None
    assert np.abs(L @ L.T - H).max() <= CLOSE * scale(H)
    assert (np.triu(L, 1) == 0).all()
    condition = float(np.linalg.cond(H))
    root = invert_lower(L)
    expected = np.linalg.inv(np.linalg.cholesky(H))
    assert np.abs(root - expected).max() <= CLOSE * condition * scale(expected)
    assert np.abs(root @ L - np.eye(len(H))).max() <= CLOSE * math.sqrt(condition)
    b = np.arange(1.0, len(H) + 1)
    x = solve_factored(L, b)
    assert np.abs(H @ x - b).max() <= CLOSE * scale(H) * scale(x)
    inverse = invert(H)
    assert inverse is not None
    assert np.abs(inverse - np.linalg.inv(H)).max() <= CLOSE * condition * scale(inverse)


@given(symmetric())
@settings(max_examples=200)
def test_eigenvalues_and_vectors(H: np.ndarray) -> None:
    values, V = eigen(H)
    assert np.abs(values - np.linalg.eigvalsh(H)).max() <= CLOSE * scale(H)
    assert np.abs(V.T @ V - np.eye(len(H))).max() <= CLOSE
    assert np.abs((V * values) @ V.T - H).max() <= CLOSE * scale(H)
    assert symmetric_norm(H) == pytest.approx(np.linalg.norm(H, 2), rel=CLOSE, abs=0)


@pytest.mark.parametrize("size", [1, 2, 5, 10])
def test_eigenvalues_of_a_hilbert_matrix(size: int) -> None:
    """The condition number of the largest is 1e13."""
    H = 1.0 / (1.0 + np.add.outer(np.arange(size), np.arange(size)))
    values, _ = eigen(H)
    assert np.abs(values - np.linalg.eigvalsh(H)).max() <= 1e-15 * size
    L = cholesky(H)
    assert L is not None
    assert np.abs(L @ L.T - H).max() <= 1e-15 * size


def test_repeated_and_zero_eigenvalues() -> None:
    assert eigen(np.zeros((3, 3)))[0].tolist() == [0.0, 0.0, 0.0]
    assert eigen(np.eye(3) * 7)[0].tolist() == [7.0, 7.0, 7.0]
    assert np.abs(eigen(np.ones((4, 4)))[0] - [0, 0, 0, 4]).max() <= 1e-15
    assert np.abs(eigen(np.array([[0.0, 2.0], [2.0, 0.0]]))[0] - [-2, 2]).max() <= 1e-15
    tiny = np.array([[0.0, 5e-324], [5e-324, 1.0]])
    assert eigen(tiny)[0].tolist() == [0.0, 1.0]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6))
def test_products_and_norms(p: int, q: int, r: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    A, B = rng.normal(size=(p, q)), rng.normal(size=(q, r))
    H = B @ B.T
    assert np.abs(multiply(A, B) - A @ B).max() <= CLOSE
    result = congruence(A, H)
    assert np.abs(result - A @ H @ A.T).max() <= CLOSE
    assert (result == result.T).all()
    assert math.sqrt(operator_norm_squared(A)) == pytest.approx(np.linalg.norm(A, 2), rel=CLOSE)
    # A sum is correctly rounded, so no order of its terms changes a bit.
    order = rng.permutation(q)
    assert dot(A[0].tolist(), B[:, 0].tolist()) == dot(A[0][order].tolist(), B[:, 0][order].tolist())


def test_what_is_not_positive_definite_or_not_finite() -> None:
    assert cholesky(np.array([[1.0, 2.0], [2.0, 1.0]])) is None
    assert cholesky(np.zeros((2, 2))) is None
    assert cholesky(np.array([[math.nan]])) is None
    assert invert(np.ones((2, 2))) is None
    for entry in (math.nan, math.inf):
        with pytest.raises(NumericalError, match="not finite"):
            eigen(np.array([[entry]]))
