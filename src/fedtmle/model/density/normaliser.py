"""The public normaliser of a density submodel: A(eps) = log Z(eps), by quadrature over the law's nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model.density.fluctuation import AbstractFluctuation
from fedtmle.model.density.sums import combined, expectation, reweight
from fedtmle.model.submodel import AbstractNormaliser
from fedtmle.model.types import Array, exponent, unpack


@final
@dataclass(frozen=True, kw_only=True)
class DensityNormaliser(AbstractNormaliser):
    """A(eps) = log sum_j m_j f(eps . D_j), with D at the nodes, (d, J), and masses m, (J,)."""

    fluctuation: AbstractFluctuation
    eif: Array
    masses: Array
    vertices: Array

    def value(self, eps: Array) -> float:
        return self._fluctuated(eps)[2]

    def gradient(self, eps: Array) -> Array:
        """E_q[phi' D] under q = p(eps)."""
        t, q, _ = self._fluctuated(eps)
        return self._mean_slope(t, q)

    def hessian(self, eps: Array) -> Array:
        """E_q[(phi'' + phi'^2) D D^T] - E_q[phi' D] E_q[phi' D]^T."""
        t, q, _ = self._fluctuated(eps)
        upper, lower = np.triu_indices(len(self.eif))
        columns = self.fluctuation.curvature_and_slope_squared(t) * self.eif[upper] * self.eif[lower]
        mean = self._mean_slope(t, q)
        return unpack(expectation(q, columns, 2 + 2 * self._bound), len(self.eif)) - np.outer(mean, mean)

    def curvature_ceiling(self, C: Array) -> float:
        # C Hess A C^T is the Hessian of the same normaliser for C D, whose hull has the vertices C V.
        return self.fluctuation.curvature_ceiling(C @ self.vertices)

    def _fluctuated(self, eps: Array) -> tuple[Array, Array, float]:
        """t = eps . D at the nodes, the masses of p(eps), and A(eps)."""
        t = combined(eps, self.eif)
        return t, *reweight(self.masses, self.fluctuation.log_factor(t))

    def _mean_slope(self, t: Array, q: Array) -> Array:
        return expectation(q, self.fluctuation.slope(t) * self.eif, 1 + self._bound)

    @property
    def _bound(self) -> int:
        return exponent(float(np.abs(self.vertices).max()) * (1 + 2.0**-20))
