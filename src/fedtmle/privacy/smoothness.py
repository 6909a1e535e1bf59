"""C_s along a segment, numerically: a Chebyshev interpolant differentiated s times.

Accurate for the analytic responses of the shipped targets, but an estimate, not a proof; a factor of safety
is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.polynomial import chebyshev

from fedtmle.model.types import Array

DEGREE = 40
POINTS = 801


def segment_smoothness(along: Callable[[Array], Array], s: int, radius: float) -> float:
    """sup over |u| <= rho of ||d^s/du^s g(o_o + u v)||: C_s of eq:query-smoothness for one query.

    ``along`` maps u, (k,), to g there, (d, k).
    """
    nodes = np.cos((np.arange(DEGREE + 1) + 0.5) * np.pi / (DEGREE + 1))
    coefficients = chebyshev.chebfit(nodes, along(radius * nodes).T, DEGREE)
    # Coefficients at the level of rounding would grow with each derivative.
    coefficients[np.abs(coefficients) < 1e-14 * np.abs(coefficients).max()] = 0.0
    derived = chebyshev.chebder(coefficients, s)
    values = chebyshev.chebval(np.linspace(-1, 1, POINTS), derived)
    return float(np.linalg.norm(np.atleast_2d(values), axis=0).max()) / radius**s
