"""One row's loss difference, mean and variance function; like `_elementary`, one source for both backends.

The difference is rho(eta) - rho(offset) + y delta, with delta = eps . X; the term -y delta is
added by the caller. NEAR formulas have an error of about 1e-15 |delta| however small delta is;
they would overflow for a runaway delta, where the plain difference, FAR, loses nothing.
"""

from __future__ import annotations

from fedtmle.model.kernels._elementary import exp, expm1_near, log1p, softplus
from fedtmle.model.kernels._primitives import select
from fedtmle.model.types import Array

NEAR = 64.0


def logistic_near(lower: Array, delta: Array) -> Array:
    """softplus(eta) - softplus(offset) = +-log(1 + lower (e^|delta| - 1)), lower = expit(min(offset, eta)).

    From the lower end every term is positive, so nothing cancels.
    """
    gain = log1p(lower * expm1_near(abs(delta)))
    return select(delta < 0.0, -gain, gain)


def logistic_far(offset: Array, eta: Array) -> Array:
    """softplus(eta) - softplus(offset)."""
    return softplus(eta) - softplus(offset)


def poisson_near(offset: Array, delta: Array) -> Array:
    """e^eta - e^offset = e^offset (e^delta - 1)."""
    return exp(offset) * expm1_near(delta)


def poisson_far(offset: Array, eta: Array) -> Array:
    """e^eta - e^offset."""
    return exp(eta) - exp(offset)


def gaussian_change(offset: Array, y: Array, delta: Array) -> Array:
    """((eta - y)^2 - (offset - y)^2)/2 = delta (offset - y + delta/2)."""
    return delta * ((offset - y) + 0.5 * delta)


def logistic_variance(p: Array) -> Array:
    """rho'' = p (1 - p), p = expit(eta); its error is below 2^-53, of a ceiling of 1/4."""
    return p * (1.0 - p)
