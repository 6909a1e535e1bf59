"""The design modulus omega_A(eta) of one fixed query block, by its three forms (S.2.5).

    primal    max c . u  over ||u|| <= rho, ||A u|| <= eta          eq:proof-recovery-modulus
    dual      min rho ||c - A^T w|| + eta ||w||  over w             eq:proof-recovery-dual
    spectral  min (rho^2 + lambda eta^2) c^T (I + lambda A^T A)^-1 c, its root   eq:proof-modulus-spectrum

All three are solved by one multiplier lambda: with k = (I + lambda A^T A)^-1 c, u is along k and
w = lambda A k. lambda = infinity where c is in the range of A^T and the ball does not bind; eta = 0 and
singular A are the limits that the paper takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.types import Array

BISECTIONS = 64  # of log lambda: far below the rounding of a double
ROUNDING = 1e-13  # of ||c||: a smaller part in the kernel is none
REACH = 100.0  # log lambda s^2 beyond this is infinity


@final
@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """A = left diag(singular) right, without its numerical kernel; singular values fall."""

    left: Array  # (m, r)
    singular: Array  # (r,)
    right: Array  # (r, q)

    def coordinates(self, c: Array) -> tuple[Array, Array]:
        """c_j = v_j . c, and the projection of c on the kernel of A."""
        inside = self.right @ c
        outside = c - self.right.T @ inside
        outside = outside - self.right.T @ (self.right @ outside)  # what rounding left of the range
        if float(np.linalg.norm(outside)) <= ROUNDING * float(np.linalg.norm(c)):
            outside = np.zeros_like(c)
        return inside, outside


@final
@dataclass(frozen=True, kw_only=True)
class Forms:
    """The three values of one modulus, and the points that attain the first two.

    ``primal`` is c . u at a feasible u and ``dual`` the objective at a w, so the truth lies between.
    """

    primal: float
    dual: float
    spectral: float
    direction: Array  # u, (q,)
    weights: Array  # w, (m,)
    multiplier: float  # lambda


def design_modulus(A: Array, c: Array, *, radius: float, noise: float) -> float:
    """omega_A(eta) for a block A, shape (m, q), an attribute's gradient c, rho and eta: eq:disclosure-design.

    The most by which c . x can vary in the ball ||x|| <= rho while no answer moves by more than eta.
    """
    return modulus_forms(A, c, radius=radius, noise=noise).spectral


def modulus_forms(A: Array, c: Array, *, radius: float, noise: float) -> Forms:
    """By all its forms: eq:proof-recovery-modulus, eq:proof-recovery-dual, eq:disclosure-spectrum."""
    A, c = checked(A, c, radius=radius, noise=noise)
    spectrum = decompose(A)
    s = spectrum.singular
    inside, kernel = spectrum.coordinates(c)
    outside = float(np.linalg.norm(kernel))
    lam = float(multipliers(s, inside[None, :], np.array([outside]), radius=radius, noise=noise)[0])
    # k in the eigenbasis, and its share in the kernel.
    if math.isinf(lam):
        along, beyond = np.zeros_like(inside), (kernel if noise == 0 else np.zeros_like(kernel))
        weights = inside / s if len(s) else inside
        if noise == 0:
            direction = radius * kernel / outside if outside > 0 else np.zeros_like(c)
        else:
            steps = inside / s**2
            size = float(np.linalg.norm(s * steps))
            direction = spectrum.right.T @ (steps * (noise / size if size else 0.0))
    else:
        along, beyond = inside / (1 + lam * s**2), kernel
        weights = lam * s * along
        direction = spectrum.right.T @ along + kernel
        size, seen = float(np.linalg.norm(direction)), float(np.linalg.norm(s * along))
        # Feasible by construction, whatever is left of the root's rounding.
        scale = min(radius / size if size else 0.0, noise / seen if seen > 0 else math.inf)
        direction = direction * (scale if math.isfinite(scale) else 0.0)
    left_over = math.hypot(float(np.linalg.norm(along)), float(np.linalg.norm(beyond)))
    return Forms(
        primal=float(c @ direction),
        dual=radius * left_over + noise * float(np.linalg.norm(weights)),
        spectral=float(values(s, inside[None, :], np.array([outside]), lam, radius=radius, noise=noise)[0]),
        direction=direction,
        weights=spectrum.left @ weights,
        multiplier=lam,
    )


def kernel_floor(A: Array, c: Array, *, radius: float) -> float:
    """rho ||Pi_ker A c|| <= omega_A(eta) at every eta, with equality at eta = 0: what no answer sees."""
    A, c = checked(A, c, radius=radius, noise=0.0)
    return radius * float(np.linalg.norm(decompose(A).coordinates(c)[1]))


def range_slope(A: Array, c: Array) -> float | None:
    """(sum c_j^2/lambda_j)^1/2 if c is in the range of A^T: then omega_A(eta) <= eta times it. Else None."""
    A, c = checked(A, c, radius=1.0, noise=0.0)
    spectrum = decompose(A)
    inside, kernel = spectrum.coordinates(c)
    if float(np.linalg.norm(kernel)) > 1e-10 * max(float(np.linalg.norm(c)), 1e-300):
        return None
    return float(np.linalg.norm(inside / spectrum.singular))


def decompose(A: Array) -> Spectrum:
    """The singular value decomposition of a block, its numerical kernel left out."""
    left, singular, right = np.linalg.svd(A, full_matrices=False)
    kept = singular > max(A.shape) * np.finfo(float).eps * (singular[0] if len(singular) else 0.0)
    return Spectrum(left=left[:, kept], singular=singular[kept], right=right[kept])


def multipliers(singular: Array, inside: Array, outside: Array, *, radius: float, noise: float) -> Array:
    """lambda for each attribute, rows of ``inside`` (k, r) and norms ``outside`` (k,) of their kernel parts.

    At the minimum eta^2 ||k||^2 = rho^2 ||A k||^2; the ratio ||A k||^2/||k||^2 falls as lambda grows.
    """
    count = len(inside)
    if noise == 0 or not len(singular):
        return np.full(count, math.inf if noise == 0 else 0.0)
    if radius == 0:
        return np.zeros(count)
    s2, c2, p2 = singular**2, inside**2, outside**2
    goal = (noise / radius) ** 2
    low = np.full(count, -math.log(s2[0]) - REACH)
    high = np.full(count, -math.log(s2[-1]) + REACH)

    def exceeds(log_lambda: Array) -> Array:
        k2 = c2 / (1 + np.exp(log_lambda)[:, None] * s2) ** 2
        return np.asarray(k2 @ s2 > goal * (k2.sum(axis=1) + p2))

    binding, endless = exceeds(np.full(count, -np.inf)), exceeds(high)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        above = exceeds(middle)
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(endless, math.inf, np.where(binding, np.exp(0.5 * (low + high)), 0.0))


def values(
    singular: Array, inside: Array, outside: Array, lam: Array | float, *, radius: float, noise: float
) -> Array:
    """[(rho^2 + lambda eta^2) c^T (I + lambda A^T A)^-1 c]^1/2 per attribute: eq:proof-modulus-spectrum."""
    lam = np.broadcast_to(np.asarray(lam, dtype=np.float64), (len(inside),))
    finite = np.where(np.isinf(lam), 0.0, lam)
    form = (inside**2 / (1 + finite[:, None] * singular**2)).sum(axis=1) + outside**2
    ordinary = np.sqrt((radius**2 + finite * noise**2) * form)
    limit = radius * outside if noise == 0 else noise * np.sqrt((inside**2 / singular**2).sum(axis=1))
    return np.asarray(np.where(np.isinf(lam), limit, ordinary))


def checked(A: Array, c: Array, *, radius: float, noise: float) -> tuple[Array, Array]:
    """Arrays of matching shapes; `InputError` names what is wrong."""
    A, c = np.asarray(A, dtype=np.float64), np.asarray(c, dtype=np.float64)
    if A.ndim != 2 or c.ndim != 1 or A.shape[1] != len(c):
        raise InputError(f"A, c: expected shapes (m, q) and (q,), not {A.shape} and {c.shape}")
    if not (np.isfinite(A).all() and np.isfinite(c).all()):
        raise InputError("A, c: expected finite numbers")
    require_at_least_zero(radius=radius, noise=noise)
    return A, c


def require_at_least_zero(**arguments: float) -> None:
    """Each argument must be a finite number of at least zero."""
    for name, value in arguments.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name}: expected a finite number of at least 0, not {value}")


# A block with hundreds of rows and a hundred thousand columns, kept as its few directions that differ.


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
