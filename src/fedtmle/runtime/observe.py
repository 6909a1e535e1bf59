"""Watching a run in one process: pooled losses along its trajectory, outside the protocol.

For study of the algorithms, where the rows are at hand anyway. A deployed run cannot do this,
and nothing here is counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtmle.model.types import Part
from fedtmle.protocol.outcome import Personalised, Targeted


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Pooled loss and residual at each update k = 0..K, and pooled loss at each round."""

    loss: tuple[float, ...]
    residual: tuple[float, ...]
    loss_by_round: tuple[float, ...]


def observe(law: Any, rows: Any, outcome: Targeted | Personalised) -> Observation:
    """Follow a finished run from its initial law on the pooled rows."""
    problem = outcome.problem
    n = problem.count(rows)
    origin = np.zeros(problem.dim)
    loss: list[float] = []
    residual: list[float] = []
    by_round: list[float] = []
    for k in range(outcome.updates + 1):
        submodel, normaliser = problem.submodel(law, rows), problem.normaliser(law)
        loss.append(float(np.mean(problem.losses(law, rows))))
        score = submodel.sums(origin, Part.GRADIENT).values(n) + normaliser.gradient(origin)
        residual.append(math.sqrt(math.fsum(score * score)))
        for point in (point for point in outcome.trajectory if point.update == k):
            eps = np.array(point.eps)
            change = float(submodel.sums(eps, Part.LOSS).values(n)[0])
            by_round.append(loss[k] + change + normaliser.value(eps))
        if k < outcome.updates:
            law = problem.move(law, np.array(outcome.accepted[k]))
    return Observation(loss=tuple(loss), residual=tuple(residual), loss_by_round=tuple(by_round))
