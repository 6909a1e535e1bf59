"""A block with hundreds of rows and a hundred thousand columns, kept as its few directions that differ."""

from __future__ import annotations

from typing import final

import numpy as np

from fedtmle.model.types import Array
from fedtmle.privacy.modulus import multipliers, values

BUFFER = 48  # rows gathered before they are reduced
CUTOFF = 1e-11  # of the largest singular value: smaller directions are rounding


@final
class Compressed:
    """B with B^T B = A^T A, row by row: the modulus depends on nothing else."""

    def __init__(self, columns: int) -> None:
        self._kept = np.zeros((0, columns))
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
        if not len(self._kept):
            return np.zeros(0), self._kept
        singular = np.linalg.norm(self._kept, axis=1)
        return singular, self._kept / singular[:, None]

    def _reduce(self) -> None:
        if not self._count:
            return
        stacked = np.concatenate([self._kept, *self._waiting])
        self._waiting, self._count = [], 0
        if stacked.shape[1] < stacked.shape[0]:
            _, singular, right = np.linalg.svd(stacked, full_matrices=False)
        else:  # the SVD of a flat block through the R of its transpose
            Q, R = np.linalg.qr(stacked.T)
            _, singular, small = np.linalg.svd(R.T, full_matrices=False)
            right = small @ Q.T
        kept = singular > CUTOFF * singular[0]
        self._kept = singular[kept, None] * right[kept]


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
