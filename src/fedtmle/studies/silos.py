"""What the server can say of single silos from their closing answers: only for those that consent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def per_silo(
    study: Study,
    problem: EffectProblem,
    components: Sequence[Component],
    closing: Mapping[str, Sums],
    sizes: Mapping[str, int],
    release: Sequence[str],
) -> dict[str, list[Row]]:
    """One-step estimates of each releasing silo at the pooled law."""
    return {
        silo: _rows(study, problem, components, closing[silo], sizes[silo])
        for silo in closing
        if silo in release and sizes[silo] > 1
    }


def leave_one_out(
    study: Study,
    problem: EffectProblem,
    components: Sequence[Component],
    closing: Mapping[str, Sums],
    sizes: Mapping[str, int],
    release: Sequence[str],
) -> dict[str, list[Row]]:
    """The one-step estimate without each releasing silo; with the pooled one it tells that silo's own."""
    found = {}
    for silo in closing:
        others = [sums for name, sums in closing.items() if name != silo]
        if silo in release and others:
            n = sum(sizes.values()) - sizes[silo]
            found[silo] = _rows(study, problem, components, reduce(add, others), n)
    return found


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


def _rows(
    study: Study, problem: EffectProblem, components: Sequence[Component], sums: Sums, n: int
) -> list[Row]:
    d = len(problem.combination[0])
    own, covariance = estimate_components(sums, d, n, one_step=True)
    L: Array = problem.L
    psi = problem.outcome_bounds[0] * L.sum(axis=1) + L @ own
    pointwise, _ = table_rows(study, components, psi, L @ covariance @ L.T)
    return pointwise
