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
from fedtmle.privacy.audit import multipliers, require_at_least_zero, values
from fedtmle_core.types import Array

ROUNDING = 1e-13  # of ||c||: a smaller part in the kernel is none


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
        outside = outside - self.right.T @ (self.right @ outside)  # remove the rounding error along the range
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
        size, response = float(np.linalg.norm(direction)), float(np.linalg.norm(s * along))
        # Feasible by construction, whatever is left of the root's rounding.
        scale = min(radius / size if size else 0.0, noise / response if response > 0 else math.inf)
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
    positive = singular > max(A.shape) * np.finfo(float).eps * (singular[0] if len(singular) else 0.0)
    return Spectrum(left=left[:, positive], singular=singular[positive], right=right[positive])


def checked(A: Array, c: Array, *, radius: float, noise: float) -> tuple[Array, Array]:
    """Arrays of matching shapes; `InputError` names what is wrong."""
    A, c = np.asarray(A, dtype=np.float64), np.asarray(c, dtype=np.float64)
    if A.ndim != 2 or c.ndim != 1 or A.shape[1] != len(c):
        raise InputError(f"A, c: expected shapes (m, q) and (q,), not {A.shape} and {c.shape}")
    if not (np.isfinite(A).all() and np.isfinite(c).all()):
        raise InputError("A, c: expected finite numbers")
    require_at_least_zero(radius=radius, noise=noise)
    return A, c
