"""The compiled stages of a generalised linear loss, for one block of rows: each loop vectorises."""

from __future__ import annotations

from fedtmle.model.families import Family
from fedtmle.model.kernels import _scalar  # noqa: F401 - registers what follows with numba
from fedtmle.model.kernels._elementary import exp, expit
from fedtmle.model.kernels._jit import jit
from fedtmle.model.kernels._primitives import bits, from_bits, select
from fedtmle.model.kernels._rows import (
    NEAR,
    gaussian_change,
    logistic_far,
    logistic_near,
    logistic_variance,
    poisson_far,
    poisson_near,
)
from fedtmle.model.types import Array

GAUSSIAN, LOGISTIC, POISSON = int(Family.GAUSSIAN), int(Family.LOGISTIC), int(Family.POISSON)


@jit
def predict(base: Array, eps: Array, X: Array, begin: int, eta: Array) -> None:
    """eta = base + eps . X, added from left to right, three columns at a time."""
    dim, size = len(eps), len(eta)
    end, start = begin + size, base
    for j in range(0, dim - 2, 3):
        e, f, g = eps[j], eps[j + 1], eps[j + 2]
        x, y, z = X[j, begin:end], X[j + 1, begin:end], X[j + 2, begin:end]
        for i in range(size):
            eta[i] = start[i] + e * x[i] + f * y[i] + g * z[i]
        start = eta
    for j in range(dim - dim % 3, dim):
        e, x = eps[j], X[j, begin:end]
        for i in range(size):
            eta[i] = start[i] + e * x[i]
        start = eta


@jit
def set_mean(family: int, eta: Array, mean: Array) -> None:
    """mu(eta): of the logistic and the Poisson loss, whose three parts all need it."""
    if family == LOGISTIC:
        for i in range(len(mean)):
            mean[i] = expit(eta[i])
    elif family == POISSON:
        for i in range(len(mean)):
            mean[i] = exp(eta[i])


@jit
def set_change(
    family: int, base: Array, start: Array, y: Array, eta: Array, mean: Array, delta: Array, change: Array
) -> None:
    """rho(eta) - rho(base), without cancellation; ``start`` is mu(base) for the logistic loss."""
    size = len(change)
    near = True
    if family == LOGISTIC:
        for i in range(size):
            near &= abs(delta[i]) <= NEAR
            lower = select(delta[i] < 0.0, mean[i], start[i])
            change[i] = logistic_near(lower, delta[i]) - y[i] * delta[i]
    elif family == POISSON:
        for i in range(size):
            near &= abs(delta[i]) <= NEAR
            change[i] = poisson_near(base[i], delta[i]) - y[i] * delta[i]
    elif family == GAUSSIAN:
        for i in range(size):
            change[i] = gaussian_change(base[i], y[i], delta[i])
    else:
        for i in range(size):
            change[i] = delta[i]
    if not near:  # rare, and outside the loops above, or LLVM would compute both formulas everywhere
        for i in range(size):
            if abs(delta[i]) > NEAR:
                far = logistic_far(base[i], eta[i]) if family == LOGISTIC else poisson_far(base[i], eta[i])
                change[i] = far - y[i] * delta[i]


@jit
def set_slope(family: int, y: Array, eta: Array, mean: Array, scale: float, slope: Array) -> None:
    """rho'(eta), times the scale; a ``mean`` that no other part needs is empty, and made on the way."""
    size = len(slope)
    if family in (LOGISTIC, POISSON) and len(mean):
        for i in range(size):
            slope[i] = (mean[i] - y[i]) * scale
    elif family == LOGISTIC:
        for i in range(size):
            slope[i] = (expit(eta[i]) - y[i]) * scale
    elif family == POISSON:
        for i in range(size):
            slope[i] = (exp(eta[i]) - y[i]) * scale
    elif family == GAUSSIAN:
        for i in range(size):
            slope[i] = (eta[i] - y[i]) * scale
    else:
        for i in range(size):
            slope[i] = scale


@jit
def set_curvature(family: int, mean: Array, scale: float, curvature: Array) -> None:
    """rho''(eta), times the scale."""
    size = len(curvature)
    if family == LOGISTIC:
        for i in range(size):
            curvature[i] = logistic_variance(mean[i]) * scale
    elif family == POISSON:
        for i in range(size):
            curvature[i] = mean[i] * scale
    else:
        constant = scale if family == GAUSSIAN else 0.0
        for i in range(size):
            curvature[i] = constant


@jit
def multiply(values: Array, factor: Array, product: Array) -> None:
    for i in range(len(product)):
        product[i] = factor[i] * values[i]


@jit
def add_multiple(total: Array, factor: float, values: Array) -> None:
    for i in range(len(total)):
        total[i] = total[i] + factor * values[i]


@jit
def scale(values: Array, factor: float, product: Array) -> None:
    for i in range(len(product)):
        product[i] = values[i] * factor


@jit
def largest(values: Array) -> float:
    """The largest |x|, NaN if one is: bit patterns are ordered as magnitudes are, with NaN above all."""
    top = 0
    for i in range(len(values)):
        top = max(top, bits(abs(values[i])))  # type: ignore[assignment]  # scalars when compiled
    return from_bits(top)  # type: ignore[arg-type, return-value]
