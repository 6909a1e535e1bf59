"""How far the estimate of a run that stopped may be from the estimate at convergence.

Targeting by a regression's fluctuation minimises one convex loss l(eps), whatever its steps: re-centring only
moves the origin. Let g be its gradient where the run stopped, H a lower bound of its Hessian there, and let
a unit step of coordinate k move the link of any record by at most x_k, one coordinate per record. The
logistic loss has |rho'''| <= rho'', so along a step of H-length s the Hessian is at least e^(-M s) H, with
M = max_k x_k sqrt((H^-1)_kk). If a minimum is at H-length s in the direction v,

    0 = v . grad l(eps + s v) >= -lambda + (1 - e^(-M s))/M,   lambda = ||g||_{H^-1},

so that M lambda < 1 implies that there is one, and s <= -log(1 - M lambda)/M. Then coordinate k is within
s sqrt((H^-1)_kk) of its limit, and psi within what its slopes make of that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedtmle.model.linear import invert
from fedtmle.model.problem import ConvergenceBounds

NOT_AT_ORIGIN = "the run stopped between the origins of two fluctuations, where no residual is known"
NO_REACH = (
    "the parties know no bound on the curvature between this fit and convergence: that needs a regression's "
    "fluctuation, a bound on the propensity score and rounded sums"
)
TOO_FAR = "the residual is too large for the curvature here to say where the equation holds"


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Bounds on |psi_k - its value at convergence|, or the reason why there are none."""

    bounds: tuple[float, ...] | None = None
    reason: str | None = None


def root_distance(decrement: float, rate: float) -> float:
    """Return -log(1 - M lambda)/M, the largest H-length to the minimum; infinite if M lambda >= 1."""
    if rate * decrement >= 1:
        return math.inf
    return -math.log1p(-rate * decrement) / rate if rate else decrement


def distance_to_convergence(residuals: Sequence[float], known: ConvergenceBounds | None) -> Distance:
    """Return the distance of psi from its value at convergence, where |g_k| <= ``residuals[k]``."""
    if not all(map(math.isfinite, residuals)):
        return Distance(reason=NOT_AT_ORIGIN)
    inverse = None if known is None else invert(np.array(known.curvature))
    if known is None or inverse is None:
        return Distance(reason=NO_REACH)
    sizes = np.sqrt(np.diag(inverse))
    g = np.array(residuals)
    decrement = math.sqrt(float(g @ np.abs(inverse) @ g))
    rate = float((np.array(known.covariates) * sizes).max())
    length = root_distance(decrement, rate)
    if not math.isfinite(length):
        return Distance(reason=TOO_FAR)
    return Distance(bounds=tuple((np.array(known.slopes) @ (length * sizes)).tolist()))
