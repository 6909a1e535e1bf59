"""A finished run of Algorithm 4, followed on the rows at hand: silo gradients and losses query by query.

All vectors are in the run's coordinates: C g for gradients, u with eps = C^T u for fluctuations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtmle.algorithms.outcome import Point
from fedtmle.model.types import Array, Part
from fedtmle.protocol.lattice import Lattice, floating
from fedtmle.protocol.query import Problem


@dataclass(frozen=True, kw_only=True)
class Path:
    """R queries of K + 1 submodels over M silos."""

    update: tuple[int, ...]  # k of each query
    step: tuple[int, ...]  # t of each query
    u: Array  # (R, d): where each query was
    gradient: Array  # (R, M, d): each silo's
    loss: Array  # (R,): pooled, less that of the initial law
    share: Array  # (M,): N_m/n

    @property
    def pooled(self) -> Array:
        """The pooled gradients, (R, d)."""
        return np.asarray(np.einsum("m,rmd->rd", self.share, self.gradient))

    def transitions(self) -> Iterator[tuple[int, bool]]:
        """Each r < R with whether the next query is in the same submodel (a step) or a new one."""
        for r in range(len(self.update) - 1):
            yield r, self.update[r + 1] == self.update[r]

    def origins(self) -> list[int]:
        """The query at the origin of each submodel."""
        return [r for r, t in enumerate(self.step) if t == 0]

    def endpoints(self) -> list[int]:
        """The query that accepted each update: the last of its submodel, but for the last submodel."""
        return [r for r, is_step in self.transitions() if not is_step]

    def rounded_norms(self, beta: float) -> Array:
        """||g~_r|| over the steps: beta times the length of each, since u moves by -g~/beta."""
        moved = [np.linalg.norm(self.u[r + 1] - self.u[r]) for r, is_step in self.transitions() if is_step]
        return beta * np.array(moved)

    def variation(self) -> Array:
        """sum_r ||g_{m,r} - g_{m,r-1}||, one per silo, (M,)."""
        return np.asarray(np.linalg.norm(np.diff(self.gradient, axis=0), axis=2).sum(axis=0))


def follow(
    problem: Problem,
    law: Any,
    rows: Mapping[str, Any],
    points: Sequence[Point],
    accepted: Sequence[Sequence[float]],
    lattice: Lattice,
) -> Path:
    """The path of a run from its initial law, on the silos' validated rows."""
    sizes = [problem.count(own) for own in rows.values()]
    n = sum(sizes)
    C, B = floating(lattice.C), floating(lattice.B)
    gradients, losses = [], []
    reached = 0.0  # pooled loss of the current law, less that of the first
    for k in range(len(accepted) + 1):
        submodels = [problem.submodel(law, own) for own in rows.values()]
        normaliser = problem.normaliser(law)
        base = normaliser.value(np.zeros(problem.dim))
        for point in (point for point in points if point.update == k):
            eps = np.array(point.eps)
            sums = [submodel.sums(eps, Part.LOSS | Part.GRADIENT) for submodel in submodels]
            public = normaliser.gradient(eps)
            gradients.append([C @ (own[1:].values(N) + public) for own, N in zip(sums, sizes, strict=True)])
            # Differences from the submodel's origin are exact sums: small decreases keep their digits.
            change = float(sum(own[:1].fractions()[0] for own in sums) / n)
            losses.append(reached + change + normaliser.value(eps) - base)
        if k < len(accepted):
            reached = losses[-1]  # l_{k+1}(0) = l_k(eps^k)
            law = problem.move(law, np.array(accepted[k]))
    return Path(
        update=tuple(point.update for point in points),
        step=tuple(point.step for point in points),
        u=np.array([B.T @ np.array(point.eps) for point in points]),
        gradient=np.array(gradients),
        loss=np.array(losses),
        share=np.array(sizes) / n,
    )
