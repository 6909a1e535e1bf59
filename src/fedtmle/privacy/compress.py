"""A block with hundreds of rows and a hundred thousand columns, kept as its few directions that differ."""

from __future__ import annotations

from typing import final

import numpy as np

from fedtmle.model.types import Array
from fedtmle.privacy.modulus import multipliers, values

BUFFER = 48  # rows gathered before they are reduced
NEW = 1e-9  # of a row's norm: less outside the directions known so far counts as rounding


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
        """More rows of A; rows of zeros say nothing."""
        rows = rows[np.abs(rows).max(axis=1, initial=0.0) > 0]
        if len(rows):
            self._waiting.append(rows)
            self._count += len(rows)
        if self._count >= BUFFER:
            self._reduce()

    def basis(self) -> tuple[Array, Array]:
        """Singular values (r,), falling, and right singular vectors (r, q)."""
        self._reduce()
        _, singular, turn = np.linalg.svd(self._S, full_matrices=False)
        kept = singular > 0
        return singular[kept], turn[kept] @ self._V

    def _reduce(self) -> None:
        if not self._count:
            return
        rows = np.concatenate(self._waiting)
        self._waiting, self._count = [], 0
        sizes = np.linalg.norm(rows, axis=1, keepdims=True)
        rest = rows / sizes
        coefficients = np.zeros((len(rows), len(self._V)))
        for _ in range(2):  # twice: what rounding left along V
            along = rest @ self._V.T
            coefficients, rest = coefficients + along, rest - along @ self._V
        # New directions: the large part of the rest first, then what it hid.
        for _ in range(2):
            squares, turn = np.linalg.eigh(rest @ rest.T)
            new = squares > max(NEW**2, 1e-14 * squares[-1])
            if not new.any():
                break
            directions = (turn[:, new].T @ rest) / np.sqrt(squares[new])[:, None]
            along = rest @ directions.T
            rest = rest - along @ directions
            self._V = np.concatenate([self._V, directions])
            coefficients = np.concatenate([coefficients, along], axis=1)
        kept = np.pad(self._S, ((0, 0), (0, len(self._V) - self._S.shape[1])))
        self._S = np.asarray(np.linalg.qr(np.concatenate([kept, coefficients * sizes]), mode="r"))


def coordinate_moduli(block: Compressed, *, radius: float, noise: float, chunk: int = 20_000) -> Array:
    """omega_A(eta) of every single coordinate at once, shape (q,)."""
    singular, right = block.basis()
    found = []
    for start in range(0, right.shape[1], chunk):
        inside = np.ascontiguousarray(right[:, start : start + chunk].T)
        outside = np.sqrt(np.maximum(0.0, 1.0 - (inside**2).sum(axis=1)))
        lam = multipliers(singular, inside, outside, radius=radius, noise=noise)
        found.append(values(singular, inside, outside, lam, radius=radius, noise=noise))
    return np.concatenate(found)


def direction_modulus(block: Compressed, c: Array, *, radius: float, noise: float) -> float:
    """omega_A(eta) of one attribute's gradient c, (q,)."""
    singular, right = block.basis()
    inside = right @ c
    outside = np.array([float(np.linalg.norm(c - right.T @ inside))])
    lam = multipliers(singular, inside[None, :], outside, radius=radius, noise=noise)
    return float(values(singular, inside[None, :], outside, lam, radius=radius, noise=noise)[0])
