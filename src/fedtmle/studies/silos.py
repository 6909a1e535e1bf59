"""What the server can say of single silos from their closing answers: only for those that consent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from fedtmle.algorithms.study import Study
from fedtmle.errors import NumericalError
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
    release: Sequence[str]

    def per_silo(self) -> dict[str, list[Row]]:
        """One-step estimates of each releasing silo at the pooled law."""
        found = {silo: self._rows(sums) for silo, sums in self.answers.items() if silo in self.release}
        return {silo: rows for silo, rows in found.items() if rows}

    def leave_one_out(self) -> dict[str, list[Row]]:
        """The estimate without each releasing silo; beside the pooled one it tells that silo's own."""
        found = {}
        for silo in self.answers:
            others = [sums for name, sums in self.answers.items() if name != silo]
            if silo in self.release and others:
                found[silo] = self._rows(reduce(add, others))
        return {silo: rows for silo, rows in found.items() if rows}

    def _rows(self, sums: Sums) -> list[Row]:
        """The table of part of the silos; empty where they hold nothing of some component's own."""
        R: Array = self.problem.R
        d = R.shape[1]
        # u = m in every row of a component that took nobody's outcome: a regime nobody followed here.
        if any(u == m for u, m in zip(sums.units[:d], sums.units[2 * d : 3 * d], strict=True)):
            return []
        own, covariance = estimate_components(sums, d, one_step=True)
        if not (np.isfinite(own).all() and np.isfinite(covariance).all()):
            return []
        psi = self.problem.outcome_bounds[0] * R.sum(axis=1) + R @ own
        try:
            pointwise, _ = table_rows(self.study, self.components, psi, R @ covariance @ R.T)
        except NumericalError:  # a one-step mean may leave the range of a ratio
            return []
        return pointwise


def heterogeneity(rows: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Cochran's Q and I^2 of each estimand over the silos that released their own."""
    found = []
    for estimates in zip(*rows.values(), strict=True):
        value = np.array([row.estimate for row in estimates])
        weight = 1.0 / np.array([row.std_error for row in estimates]) ** 2
        if len(value) < 2:
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
