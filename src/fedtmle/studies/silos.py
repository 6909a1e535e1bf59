"""What the server can say of single silos from their closing answers: only for those that consent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from fedtmle.algorithms.study import Study
from fedtmle.model.exact import Sums
from fedtmle.model.types import Array
from fedtmle.studies.inference import Row, table_rows
from fedtmle.targets.effects.components import Component
from fedtmle.targets.effects.moments import estimate_components
from fedtmle.targets.effects.problem import EffectProblem


@dataclass(frozen=True, kw_only=True)
class Closing:
    """Each silo's closing answer, and which silos release what can be made of it."""

    study: Study
    problem: EffectProblem
    components: Sequence[Component]
    answers: Mapping[str, Sums]
    sizes: Mapping[str, int]
    release: Sequence[str]

    def per_silo(self) -> dict[str, list[Row]]:
        """One-step estimates of each releasing silo at the pooled law."""
        return {
            silo: self._rows(sums, self.sizes[silo])
            for silo, sums in self.answers.items()
            if silo in self.release and self.sizes[silo] > 1
        }

    def leave_one_out(self) -> dict[str, list[Row]]:
        """The estimate without each releasing silo; beside the pooled one it tells that silo's own."""
        found = {}
        for silo in self.answers:
            others = [sums for name, sums in self.answers.items() if name != silo]
            if silo in self.release and others:
                found[silo] = self._rows(reduce(add, others), sum(self.sizes.values()) - self.sizes[silo])
        return found

    def _rows(self, sums: Sums, n: int) -> list[Row]:
        L: Array = self.problem.L
        own, covariance = estimate_components(sums, L.shape[1], n, one_step=True)
        psi = self.problem.outcome_bounds[0] * L.sum(axis=1) + L @ own
        pointwise, _ = table_rows(self.study, self.components, psi, L @ covariance @ L.T)
        return pointwise


def heterogeneity(rows: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Cochran's Q and I^2 of each estimand over the silos that released their own."""
    found = []
    for estimates in zip(*rows.values(), strict=True):
        value = np.array([row.estimate for row in estimates])
        weight = 1.0 / np.array([row.std_error for row in estimates]) ** 2
        if len(value) < 2 or not np.isfinite(weight).all():
            continue
        centre = float(weight @ value / weight.sum())
        q = float(weight @ (value - centre) ** 2)
        df = len(value) - 1
        found.append(
            {
                "estimand": estimates[0].estimand,
                "silos": len(value),
                "Q": q,
                "df": df,
                "I2": max(0.0, (q - df) / q) if q > 0 else 0.0,
            }
        )
    return found
