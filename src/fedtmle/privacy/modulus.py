"""The design modulus omega_A(eta) of many attributes at once, A the Jacobian of the answers (S.2.5).

omega_A(eta) = max c . u over ||u|| <= rho, ||A u|| <= eta. Its spectral form is the root of

    min over lambda of (rho^2 + lambda eta^2) c^T (I + lambda A^T A)^-1 c    eq:proof-modulus-spectrum

and depends on the singular values and right singular vectors of A alone. lambda = infinity where c is in the
range of A^T and the ball does not bind; eta = 0 and singular A are the limits that the paper takes.
`Compressed` keeps a block with hundreds of rows and a hundred thousand columns as its few directions.
"""

from __future__ import annotations

import math
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.types import Array

BISECTIONS = 64  # bisection steps in log lambda: the error is far below double precision
REACH = 100.0  # larger values of log(lambda s^2) count as infinite
BUFFER = 48  # rows collected before each reduction
CLOSE = 1e-6  # a smaller squared distance from the span is computed from the difference vector
NEW_DIRECTION = 1e-9  # relative to a row's norm: a smaller component outside the span is rounding error


def multipliers(singular: Array, inside: Array, outside: Array, *, radius: float, noise: float) -> Array:
    """Return lambda for each attribute: rows of ``inside`` (k, r), kernel parts of norm ``outside`` (k,).

    At the minimum eta^2 ||k||^2 = rho^2 ||A k||^2; the ratio ||A k||^2/||k||^2 falls as lambda grows.
    """
    count = len(inside)
    if noise == 0 or not len(singular):
        return np.full(count, math.inf if noise == 0 else 0.0)
    if radius == 0:
        return np.zeros(count)
    s2, c2, p2 = singular**2, inside**2, outside**2
    ratio = (noise / radius) ** 2
    low = np.full(count, -math.log(s2[0]) - REACH)
    high = np.full(count, -math.log(s2[-1]) + REACH)

    def exceeds(log_lambda: Array) -> Array:
        k2 = c2 / (1 + np.exp(log_lambda)[:, None] * s2) ** 2
        return np.asarray(k2 @ s2 > ratio * (k2.sum(axis=1) + p2))

    binding, endless = exceeds(np.full(count, -np.inf)), exceeds(high)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        above = exceeds(middle)
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(endless, math.inf, np.where(binding, np.exp(0.5 * (low + high)), 0.0))


def values(
    singular: Array, inside: Array, outside: Array, lam: Array | float, *, radius: float, noise: float
) -> Array:
    """Return [(rho^2 + lambda eta^2) c^T (I + lambda A^T A)^-1 c]^1/2 for each attribute.

    eq:proof-modulus-spectrum.
    """
    lam = np.broadcast_to(np.asarray(lam, dtype=np.float64), (len(inside),))
    finite = np.where(np.isinf(lam), 0.0, lam)
    form = (inside**2 / (1 + finite[:, None] * singular**2)).sum(axis=1) + outside**2
    ordinary = np.sqrt((radius**2 + finite * noise**2) * form)
    limit = radius * outside if noise == 0 else noise * np.sqrt((inside**2 / singular**2).sum(axis=1))
    return np.asarray(np.where(np.isinf(lam), limit, ordinary))


def require_at_least_zero(**arguments: float) -> None:
    """Raise `InputError` unless each argument is a finite number of at least zero."""
    for name, value in arguments.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name}: expected a finite number of at least 0, not {value}")


@final
class Compressed:
    """A = S V with V orthonormal, row by row: omega depends on A^T A = V^T (S^T S) V alone.

    Rows that lie in the span of earlier ones, as repeated queries do, cost two thin products.
    """

    def __init__(self, columns: int) -> None:
        self._V = np.zeros((0, columns))
        self._S = np.zeros((0, 0))
        self._waiting: list[Array] = []
        self._count = 0

    def add(self, rows: Array) -> None:
        """Add rows of A; rows of zeros change nothing."""
        rows = rows[np.abs(rows).max(axis=1, initial=0.0) > 0]
        if len(rows):
            self._waiting.append(rows)
            self._count += len(rows)
        if self._count >= BUFFER:
            self._reduce()

    def basis(self) -> tuple[Array, Array]:
        """Return singular values (r,), falling, and right singular vectors (r, q)."""
        self._reduce()
        _, singular, turn = np.linalg.svd(self._S, full_matrices=False)
        positive = singular > 0
        return singular[positive], turn[positive] @ self._V

    def _reduce(self) -> None:
        if not self._count:
            return
        rows = np.concatenate(self._waiting)
        self._waiting, self._count = [], 0
        sizes = np.linalg.norm(rows, axis=1, keepdims=True)
        rest = rows / sizes
        coefficients = np.zeros((len(rows), len(self._V)))
        for _ in range(2):  # the second pass removes the component along V that rounding left
            along = rest @ self._V.T
            coefficients, rest = coefficients + along, rest - along @ self._V
        # New directions: the first pass finds the large ones, the second the small ones that they hid.
        for _ in range(2):
            if np.linalg.norm(rest) <= NEW_DIRECTION:  # it bounds every singular value: nothing is new
                break
            # QR instead of rest rest^T, whose small directions have large relative errors: omega of a record
            # that is known well depends on its small component outside V.
            basis, lengths = np.linalg.qr(rest.T)
            _, sizes_there, turn = np.linalg.svd(lengths.T)
            new = sizes_there > max(NEW_DIRECTION, 1e-14 * sizes_there[0])
            if not new.any():
                break
            directions = turn[new] @ basis.T
            directions = directions - (directions @ self._V.T) @ self._V
            directions = np.linalg.qr(directions.T)[0].T
            along = rest @ directions.T
            rest = rest - along @ directions
            self._V = np.concatenate([self._V, directions])
            coefficients = np.concatenate([coefficients, along], axis=1)
        before = np.pad(self._S, ((0, 0), (0, len(self._V) - self._S.shape[1])))
        self._S = np.asarray(np.linalg.qr(np.concatenate([before, coefficients * sizes]), mode="r"))


def coordinate_moduli(block: Compressed, *, radius: float, noise: float, chunk: int = 20_000) -> Array:
    """Return omega_A(eta) of every single coordinate at once, shape (q,)."""
    singular, right = block.basis()
    moduli = []
    for start in range(0, right.shape[1], chunk):
        inside = np.ascontiguousarray(right[:, start : start + chunk].T)
        squares = np.maximum(0.0, 1.0 - (inside**2).sum(axis=1))
        for k in np.flatnonzero(squares < CLOSE):  # 1 - |inside|^2 has cancelled
            rest = -(inside[k] @ right)
            rest[start + k] += 1.0
            squares[k] = rest @ rest
        outside = np.sqrt(squares)
        lam = multipliers(singular, inside, outside, radius=radius, noise=noise)
        moduli.append(values(singular, inside, outside, lam, radius=radius, noise=noise))
    return np.concatenate(moduli)


def direction_modulus(block: Compressed, c: Array, *, radius: float, noise: float) -> float:
    """Return omega_A(eta) of one attribute's gradient c, (q,)."""
    singular, right = block.basis()
    inside = right @ c
    outside = np.array([float(np.linalg.norm(c - right.T @ inside))])
    lam = multipliers(singular, inside[None, :], outside, radius=radius, noise=noise)
    return float(values(singular, inside[None, :], outside, lam, radius=radius, noise=noise)[0])
