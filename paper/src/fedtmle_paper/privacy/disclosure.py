"""thm:disclosure: the best possible attack on an attribute, and an affine decoder that attains it.

The last section has attributes phi of a silo's data x, shape (N, q): value, gradient and H_phi.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.privacy.audit import require_at_least_zero
from fedtmle_core.types import Array
from fedtmle_paper.privacy.design import design_modulus, modulus_forms, range_slope

GRID = 64  # radii tried for the reduced-radius bound; each gives a valid bound of its own
NARROWINGS = 6


@final
@dataclass(frozen=True, kw_only=True)
class Remainders:
    """b_T = H_g rho^2 sqrt(T)/2 and b_phi = H_phi rho^2/2: the remainders of eq:proof-query-remainders."""

    response: float
    attribute: float


@final
@dataclass(frozen=True, kw_only=True)
class AttributeRisk:
    """Bounds of the minimax error of an attribute, eq:disclosure-sandwich.

    ``lower`` is the better of the sandwich's and of the reduced-radius bound; ``upper`` is achieved by
    an affine decoder. ``relative`` bounds risk/omega from both sides where omega(eta) > 0 and eta > 0.
    """

    modulus: float  # omega(eta)
    lower: float
    upper: float
    curvature: Remainders
    relative: tuple[float, float] | None


def curvature(*, radius: float, T: int, H_g: float, H_phi: float) -> Remainders:
    """What the bends of responses and attribute cost: eq:proof-query-remainders."""
    require_at_least_zero(radius=radius, H_g=H_g, H_phi=H_phi)
    return Remainders(response=H_g * radius**2 * math.sqrt(T) / 2, attribute=H_phi * radius**2 / 2)


def response_smoothness(C_obs: float, n_rows: int) -> float:
    """H_g = C_obs/N_m from an observation-level Lipschitz constant of grad_o g: eq:attribute-smoothness."""
    return C_obs / n_rows


def attribute_risk(
    A: Array | Sequence[Array],
    c: Array,
    *,
    radius: float,
    noise: float,
    T: int | None = None,
    H_g: float = 0.0,
    H_phi: float = 0.0,
) -> AttributeRisk:
    """The sandwich of thm:disclosure for one block A, or for the family of a list of blocks.

    ``T`` is the number of queries in a block, needed where responses bend (H_g > 0).
    """
    if T is None and H_g > 0:
        raise InputError("T: say how many queries a block has, because H_g is not zero")
    blocks = [A] if isinstance(A, np.ndarray) and A.ndim == 2 else list(A)
    if not blocks:
        raise InputError("A: expected a block, or at least one of a list")
    queries = T or 1
    bend = curvature(radius=radius, T=queries, H_g=H_g, H_phi=H_phi)

    def omega(rho: float, eta: float) -> float:
        return min(design_modulus(block, c, radius=rho, noise=eta) for block in blocks)

    modulus = omega(radius, noise)
    lower = reduced_radius_bound(omega, radius=radius, noise=noise, T=queries, H_g=H_g, H_phi=H_phi)
    if noise >= bend.response:
        lower = max(lower, omega(radius, noise - bend.response) - bend.attribute)
    return AttributeRisk(
        modulus=modulus,
        lower=max(0.0, lower),
        upper=omega(radius, noise + bend.response) + bend.attribute,
        curvature=bend,
        relative=relative_bounds(modulus, noise, bend),
    )


def relative_bounds(modulus: float, noise: float, bend: Remainders) -> tuple[float, float] | None:
    """1 -+ b_T/eta -+ b_phi/omega, S.2.5; None where eta < b_T, or omega = 0."""
    if noise <= 0 or modulus <= 0 or bend.response > noise:
        return None
    spread = bend.response / noise + bend.attribute / modulus
    return 1 - spread, 1 + spread


def reduced_radius_bound(
    omega: Callable[[float, float], float], *, radius: float, noise: float, T: int, H_g: float, H_phi: float
) -> float:
    """sup over rho' <= rho with H_g rho'^2 sqrt(T)/2 <= eta of omega(rho', eta - b_T(rho')) - b_phi(rho').

    A smaller ball of candidates cannot be harder, so every rho' is a bound and the best one tried is
    returned (S.2.5). ``omega`` is a function of rho' and eta.
    """
    widest = radius if H_g == 0 else min(radius, math.sqrt(2 * noise / (H_g * math.sqrt(T))))
    if H_g == 0 and H_phi == 0:
        return max(0.0, float(omega(radius, noise)))  # omega grows with rho

    def bound(rho: float) -> float:
        bend = curvature(radius=rho, T=T, H_g=H_g, H_phi=H_phi)
        return float(omega(rho, max(0.0, noise - bend.response))) - bend.attribute

    low, high, best = 0.0, widest, 0.0
    for _ in range(NARROWINGS):
        radii = np.linspace(low, high, GRID if high == widest and low == 0.0 else 9)
        bounds = [bound(float(rho)) for rho in radii]
        at = int(np.argmax(bounds))
        best = max(best, bounds[at])
        low, high = float(radii[max(at - 1, 0)]), float(radii[min(at + 1, len(radii) - 1)])
    return best


@final
@dataclass(frozen=True, kw_only=True)
class AffineDecoder:
    """phi^(Y) = phi(x_o) + w . (Y - F(x_o)), with an error that no candidate and no noise exceeds."""

    weights: Array
    response: Array  # F(x_o)
    value: float  # phi(x_o)
    error: float  # eq:proof-affine-error

    def __call__(self, answers: Array) -> float:
        return self.value + float(self.weights @ (np.asarray(answers) - self.response))

    def above(self, answers: Array, threshold: float) -> bool | None:
        """Whether phi exceeds a threshold; None where the error bound leaves it open."""
        return decided(self(answers), threshold, self.error)


def affine_decoder(
    A: Array,
    c: Array,
    *,
    radius: float,
    noise: float,
    response: Array | None = None,
    value: float = 0.0,
    T: int | None = None,
    H_g: float = 0.0,
    H_phi: float = 0.0,
) -> AffineDecoder:
    """The best affine decoder for a block: the w of omega_A(eta + b_T), eq:proof-affine-error.

    ``response`` and ``value`` are F(x_o) and phi(x_o) at the centre of what the attacker knows.
    """
    if T is None and H_g > 0:
        raise InputError("T: say how many queries the block has, because H_g is not zero")
    bend = curvature(radius=radius, T=T or 1, H_g=H_g, H_phi=H_phi)
    forms = modulus_forms(A, c, radius=radius, noise=noise + bend.response)
    return AffineDecoder(
        weights=forms.weights,
        response=np.zeros(len(A)) if response is None else np.asarray(response, dtype=np.float64),
        value=value,
        error=forms.dual + bend.attribute,
    )


def range_error(A: Array, c: Array, *, noise: float, bend: Remainders) -> float | None:
    """(eta + b_T)(sum c_j^2/lambda_j)^1/2 + b_phi if c is in the range of A^T, else None: S.2.5."""
    slope = range_slope(A, c)
    return None if slope is None else (noise + bend.response) * slope + bend.attribute


def decided(estimate: float, threshold: float, error: float) -> bool | None:
    """Which side of the threshold phi is on, given |estimate - phi| <= error; None if it may be either."""
    if estimate > threshold + error:
        return True
    return False if estimate < threshold - error else None


def threshold_is_identified(value: float, threshold: float, error: float) -> bool:
    """Whether every decoder within ``error`` puts phi = value on its side of the threshold: S.2.5."""
    return abs(value - threshold) > error


class AbstractAttribute(ABC):
    """A prespecified scalar function of the data."""

    @abstractmethod
    def value(self, x: Array) -> float:
        """phi(x)."""

    @abstractmethod
    def gradient(self, x: Array) -> Array:
        """The gradient of phi at x, flattened record by record; shape (N q,)."""

    @property
    @abstractmethod
    def bend(self) -> float:
        """H_phi: a Lipschitz constant of the gradient, eq:attribute-smoothness."""


@final
@dataclass(frozen=True, kw_only=True)
class Coordinate(AbstractAttribute):
    """One coordinate of one record."""

    record: int
    column: int

    def value(self, x: Array) -> float:
        return float(x[self.record, self.column])

    def gradient(self, x: Array) -> Array:
        gradient = np.zeros(x.shape)
        gradient[self.record, self.column] = 1.0
        return gradient.ravel()

    @property
    def bend(self) -> float:
        return 0.0


@final
@dataclass(frozen=True, kw_only=True)
class ColumnMean(AbstractAttribute):
    """The mean of one column."""

    column: int

    def value(self, x: Array) -> float:
        return float(x[:, self.column].mean())

    def gradient(self, x: Array) -> Array:
        gradient = np.zeros(x.shape)
        gradient[:, self.column] = 1.0 / len(x)
        return gradient.ravel()

    @property
    def bend(self) -> float:
        return 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Linear(AbstractAttribute):
    """sum of weights times entries, the weights of the shape of the data."""

    weights: Array

    def value(self, x: Array) -> float:
        return float((self.weights * x).sum())

    def gradient(self, x: Array) -> Array:
        if x.shape != self.weights.shape:
            raise InputError(f"weights: expected the shape of the data, {x.shape}, not {self.weights.shape}")
        return np.asarray(self.weights, dtype=np.float64).ravel()

    @property
    def bend(self) -> float:
        return 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Smooth(AbstractAttribute):
    """A function of the data with its gradient and H_phi, all given by its author."""

    function: Callable[[Array], float]
    slope: Callable[[Array], Array]
    H_phi: float

    def value(self, x: Array) -> float:
        return float(self.function(x))

    def gradient(self, x: Array) -> Array:
        return np.asarray(self.slope(x), dtype=np.float64).ravel()

    @property
    def bend(self) -> float:
        return self.H_phi
