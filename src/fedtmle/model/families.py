"""The loss of one row as a function of its linear predictor: rho(eta, y)."""

from __future__ import annotations

import enum
import math
from typing import Literal

Response = Literal["binary", "continuous", "count"]  # the kinds of a response


class Family(enum.IntEnum):
    """rho, with rho' and rho'' its derivatives in eta. The integer is the kernels' code."""

    LINEAR = 0  # rho = eta: the exponential tilt, whose curvature is all in the normaliser
    GAUSSIAN = 1  # rho = (eta - y)^2 / 2
    LOGISTIC = 2  # rho = log(1 + e^eta) - y eta: binomial outcomes and the density fluctuation
    POISSON = 3  # rho = e^eta - y eta

    @property
    def curvature_ceiling(self) -> float | None:
        """sup of rho'', or None where there is none on the whole line."""
        return _CURVATURE_CEILINGS[self]

    def slope_ceiling(self, eta: float, y: float) -> float:
        """A bound of |rho'| where |eta| and |y| are at most these."""
        match self:
            case Family.LINEAR:
                return 1.0
            case Family.GAUSSIAN:
                return eta + y
            case Family.LOGISTIC:
                return 1.0 + y
            case Family.POISSON:
                return (math.exp(eta) if eta < 709 else math.inf) + y


_CURVATURE_CEILINGS = (0.0, 1.0, 0.25, None)  # in the order of the codes
