"""The start p^0: a Gaussian kernel density of a pilot sample, and its public quadrature rule.

    p^0(o) = n0^-1 sum_i N(o; pilot_i, S),   S = n0^(-2/(q+4)) cov(pilot),

the multivariate Scott rule (S.3, "Client partitions and common initialization").
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.linear import cholesky, invert_lower, multiply
from fedtmle_core import kernels
from fedtmle_core.types import Array, IntArray
from fedtmle_paper.density.kernel import log_mean_kernel
from fedtmle_paper.density.quadrature import Memo, reweight

REACH = 9.0  # kernel SDs around the pilot sample; outside lies less than 2 q 1.2e-19 of the mass
DROPPED = 2.0**-50  # bound on the total mass of the nodes left out within that reach
DECAY = 30.0  # the trapezoid's relative error is aimed at e^-30 = 1e-13
MAX_NODES = 2**22
KEPT_RULES = 4


@final
@dataclass(frozen=True, kw_only=True)
class Rule:
    """Nodes (q, J) and masses (J,) that add up to one; ``parity`` names the 2^q interleaved half-rules."""

    nodes: Array
    masses: Array
    parity: IntArray


@final
@dataclass(frozen=True, kw_only=True)
class KernelDensity:
    """p^0 of a pilot sample, shape (n0, q), made by `kernel_density`; equal pilots make equal starts."""

    pilot: Array = field(repr=False, compare=False)
    digest: str
    covariance: Array = field(repr=False, compare=False)  # S, shape (q, q)
    factor: Array = field(repr=False, compare=False)  # S = factor factor^T, lower triangle
    rules: Memo[Rule] = field(default_factory=lambda: Memo(KEPT_RULES), repr=False, compare=False)

    @property
    def columns(self) -> int:
        """q: coordinates of an observation."""
        return int(self.pilot.shape[1])

    def log_density(self, points: Array) -> Array:
        """log p^0 at points of shape (q, N)."""
        return log_mean_kernel(self._whiten(points), self._centres) - self._log_volume

    def spacing(self, ceiling: float, strip: tuple[float, ...]) -> tuple[float, ...]:
        """A spacing per coordinate, at most ``ceiling``, that resolves p^0 times the target's integrands.

        The trapezoid's error is the integrand's Fourier transform at the multiples of w = 2 pi/h.
        Along coordinate j a kernel contributes at most e^-(sd s)^2/2, with sd its *conditional* standard
        deviation (for every dual vector u with u_j = s, u^T S u >= sd^2 s^2), and a function that is
        analytic within |Im o_j| < a contributes e^-a|w - s|. The product decays like the slowest split,
        min over s of (sd s)^2/2 + a (w - s), and h makes that equal to DECAY.
        """
        root = invert_lower(self.factor)
        conditional_sd = 1.0 / np.sqrt(np.diag(multiply(root.T, root)))
        spacings = []
        for sd, a in zip(conditional_sd, strip, strict=True):
            kernel_alone = math.sqrt(2 * DECAY) / sd
            frequency = kernel_alone if a >= sd * sd * kernel_alone else DECAY / a + a / (2 * sd * sd)
            spacings.append(min(ceiling, 2 * math.pi / frequency))
        return tuple(float(h) for h in spacings)

    def quadrature(self, spacing: tuple[float, ...]) -> Rule:
        """The uniform rule of this spacing over +-9 kernel SDs, without its negligible nodes."""
        return self.rules.get(spacing, lambda: self._rule(spacing))

    def _rule(self, spacing: tuple[float, ...]) -> Rule:
        h = np.array(spacing)
        reach = REACH * np.sqrt(np.diag(self.covariance))
        low = self.pilot.min(axis=0) - reach
        counts = [int(n) for n in np.ceil((self.pilot.max(axis=0) + reach - low) / h) + 1]
        if math.prod(counts) > MAX_NODES:
            raise InputError(
                f"spacing: the quadrature would need {math.prod(counts)} nodes, more than {MAX_NODES}; "
                "this method is for observations of few columns on comparable scales"
            )
        index = np.stack(np.meshgrid(*map(np.arange, counts), indexing="ij")).reshape(len(counts), -1)
        nodes = low[:, None] + h[:, None] * index
        masses = kernels.exp(self.log_density(nodes)) * math.prod(spacing)
        relevant = masses > DROPPED / math.prod(counts)
        parity = sum((index[j] % 2) << j for j in range(len(counts)))
        normalised, _ = reweight(masses[relevant], np.zeros(int(relevant.sum())))
        return Rule(
            nodes=np.ascontiguousarray(nodes[:, relevant]),
            masses=normalised,
            parity=np.asarray(parity)[relevant],
        )

    def _whiten(self, points: Array) -> Array:
        """factor^-1 points by forward substitution, in a fixed order."""
        rows: list[Array] = []
        for j, column in enumerate(points):
            rest = column
            for k, whitened in enumerate(rows):
                rest = rest - self.factor[j, k] * whitened
            rows.append(rest / self.factor[j, j])
        return np.stack(rows)

    @cached_property
    def _centres(self) -> Array:
        return self._whiten(np.ascontiguousarray(self.pilot.T))

    @cached_property
    def _log_volume(self) -> float:
        """log of the kernel's normalising constant, (2 pi)^(q/2) det S^(1/2)."""
        halves = [0.5 * kernels.log(2 * math.pi)] * self.columns
        return math.fsum([*halves, *map(kernels.log, map(float, np.diag(self.factor)))])


def kernel_density(pilot: object) -> KernelDensity:
    """Return p^0 of a pilot sample, shape (n0, q); `InputError` if it has no kernel density."""
    sample = _checked(pilot)
    covariance = _scott(sample)
    factor = cholesky(covariance)
    # The share of each variance that the earlier columns leave: zero for a combination of them.
    if factor is None or (np.diag(factor) ** 2 <= 1e-12 * np.diag(covariance)).any():
        raise InputError("pilot: its covariance is singular; a column is constant or repeats others")
    digest = hashlib.sha256(repr(sample.shape).encode() + sample.tobytes()).hexdigest()
    return KernelDensity(pilot=sample, digest=digest, covariance=covariance, factor=factor)


def _checked(pilot: object) -> Array:
    try:
        sample = np.array(pilot, dtype=np.float64, order="C")
    except (TypeError, ValueError):
        raise InputError("pilot: expected numbers, shape (n0, q)") from None
    if sample.ndim != 2 or not sample.shape[1]:
        raise InputError(f"pilot: expected shape (n0, q), not {sample.shape}")
    if len(sample) < sample.shape[1] + 1:
        raise InputError(
            f"pilot: {len(sample)} row(s) are too few for {sample.shape[1]} column(s); "
            "a kernel density needs more rows than columns"
        )
    if not np.isfinite(sample).all():
        raise InputError("pilot: has missing or infinite values")
    sample.setflags(write=False)
    return sample


def _scott(pilot: Array) -> Array:
    """n0^(-2/(q+4)) times the sample covariance (divisor n0 - 1), each sum correctly rounded."""
    n, q = pilot.shape
    centred = pilot - np.array([math.fsum(column) / n for column in pilot.T])
    bandwidth = kernels.exp(-2.0 / (q + 4) * kernels.log(float(n)))
    covariance = np.empty((q, q))
    for j, k in itertools.product(range(q), repeat=2):
        covariance[j, k] = bandwidth * math.fsum(centred[:, j] * centred[:, k]) / (n - 1)
    return covariance
