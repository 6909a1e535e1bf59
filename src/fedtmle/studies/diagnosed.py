"""A study's diagnostics as plain data, on the outcome's own scale; `docs/result.md` has the keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any

from fedtmle.algorithms.diagnostics import Histogram, OutcomeFit
from fedtmle.algorithms.study import Study
from fedtmle.algorithms.study_flow import study_details
from fedtmle.protocol.bins import PooledBin
from fedtmle.runtime.session import Finished
from fedtmle.targets.effects.rows import PROBABILITY_EDGES


def diagnostics_document(study: Study, finished: Finished) -> dict[str, Any] | None:
    """Overlap, outcome fit and EIF means; None for a personalised run, or if they were not wanted."""
    details = study_details(finished.outcome)
    if details.diagnostics is None:
        return None
    silos = len(finished.sizes)
    return {
        "overlap": [histogram_document(histogram, silos) for histogram in details.diagnostics.overlap],
        "outcome_fit": _fit(details.diagnostics.fit, study, silos),
        "eif_mean": eif_means(finished),
    }


def histogram_document(histogram: Histogram, silos: int) -> dict[str, Any]:
    """One histogram; a count is of the silos that show it, None if none does."""
    return {
        "probability_of": histogram.of,
        "arm": histogram.arm,
        "edges": list(PROBABILITY_EDGES),
        "counts": _counts(histogram.bins),
        "hidden_in": [silos - cell.silos for cell in histogram.bins],
    }


def _counts(bins: Sequence[PooledBin]) -> list[int | None]:
    return [cell.count if cell.silos else None for cell in bins]


def _fit(fit: OutcomeFit, study: Study, silos: int) -> dict[str, Any]:
    low, high = study.target.outcome_bounds

    def own(share: float) -> float:
        return low + (high - low) * share

    def mean(k: int) -> Callable[[PooledBin], float | None]:
        return lambda cell: own(cell.sums[k] / cell.sums[0]) if cell.silos and cell.sums[0] else None

    return {
        "r_squared": _before_after(fit.r_squared),
        "deviance_explained": None if fit.deviance is None else _before_after(fit.deviance),
        "calibration": {
            "edges": [low, *(min(max(own(edge), low), high) for edge in fit.edges), high],
            "counts": _counts(fit.calibration),
            "hidden_in": [silos - cell.silos for cell in fit.calibration],
            "observed": list(map(mean(1), fit.calibration)),
            "initial": list(map(mean(2), fit.calibration)),
            "targeted": list(map(mean(3), fit.calibration)),
        },
    }


def _before_after(pair: tuple[float, float]) -> dict[str, float | None]:
    found = [value if math.isfinite(value) else None for value in pair]
    return {"initial": found[0], "targeted": found[1]}


def eif_means(finished: Finished) -> dict[str, float]:
    """P_n D of each component: (sum u - sum m)/n, whose plug-in part cancels (`targets.effects.moments`)."""
    details = study_details(finished.outcome)
    pooled, d = reduce(add, finished.closing.values()).fractions(), len(details.components)
    n = sum(finished.sizes.values())
    return {
        component.name: float((pooled[r] - pooled[2 * d + r]) / n)
        for r, component in enumerate(details.components)
    }
