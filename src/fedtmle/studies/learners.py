"""What the learners of a super learner weigh, as plain data: all of it from pooled sums."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fedtmle.algorithms.study import Study
from fedtmle.algorithms.study_flow import StudyDetails
from fedtmle.initial.crossfit import CrossFitted
from fedtmle.initial.superlearner import SuperLearner
from fedtmle.studies.describe import model_text


def learners_document(study: Study, details: StudyDetails) -> list[dict[str, Any]]:
    """One object for each learner of each fit: its weight, and its cross-validated mean squared error."""
    found: list[dict[str, Any]] = []
    low, high = study.target.outcome_bounds
    for role, fits in details.nuisances.items():
        spec = study.models[role]
        if not isinstance(spec, SuperLearner):
            continue
        kind = study.target.response if role == "outcome" else "binary"
        scale = (high - low) ** 2 if role == "outcome" else 1.0
        for k, fit in enumerate(fits, start=1):
            arm = study.target.arms[k] if len(fits) > 1 else None
            parts = enumerate(fit.models, start=1) if isinstance(fit, CrossFitted) else [(None, fit)]
            for fold, part in parts:
                found += [
                    {"model": role, "arm": arm, "fold": fold, **learner}
                    for learner in _weighted(part, [model_text(own, kind) for own in spec.learners], scale)
                ]
    return found


def _weighted(fit: Any, texts: list[str], scale: float) -> Iterator[dict[str, Any]]:
    """Of a `SuperLearned`, which is what a super learner's regression gives."""
    for label, weight, risk in zip(fit.labels, fit.weights, fit.risks, strict=True):
        learner, *silo = map(int, re.findall(r"\d+", label))  # "learner 2, silo 1"
        yield {
            "learner": learner,
            "text": texts[learner - 1] + (f", silo {silo[0]}" if silo else ""),
            "weight": weight,
            "risk": scale * risk,
        }
