"""How far the estimates are from convergence, and what thm:statistical does not cover, for the document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import product

import numpy as np

from fedtmle.errors import FedTMLEError, NumericalError, Reached
from fedtmle.initial.glm import Supplied
from fedtmle.initial.superlearner import SuperLearner
from fedtmle.layout import Document
from fedtmle.model.types import Array
from fedtmle.programs.nuisance import effect_columns
from fedtmle.programs.study import Study
from fedtmle.results.inference import summaries
from fedtmle.runtime.result import Result
from fedtmle.targets.effects.components import Component
from fedtmle.targets.effects.estimands import AbstractEffect

SEVERAL = "the study combines the estimates of several imputed data sets"


def convergence_document(study: Study, components: Sequence[Component], result: Result) -> Document | None:
    """Return a bound on how far each estimate is from its value at convergence, or why there is none.

    None where nothing was targeted, or where the study combines several data sets.
    """
    stated = None if result.certificate is None else result.certificate.distance
    if stated is None or result.psi is None or study.imputes:
        return None
    if stated.bounds is None:
        return {"reason": stated.reason, "estimands": []}
    moved = _largest_moves(study, components, result.psi, np.array(stated.bounds))
    return {"reason": None, "estimands": moved}


def _largest_moves(
    study: Study, components: Sequence[Component], psi: Array, bounds: Array
) -> list[Document]:
    """Return the largest change of each reported number over the box psi +- bounds.

    Every number is monotone in each of its components, so the largest change is at a corner.
    """
    now = summaries(study, components, psi)
    moves: list[float | None] = [0.0] * len(now)
    for index, summary in enumerate(now):
        used = np.flatnonzero(summary.gradient)
        for signs in product((-1.0, 1.0), repeat=len(used)):
            corner = psi.copy()
            corner[used] += np.array(signs) * bounds[used]
            there = None
            with suppress(NumericalError):  # a mean may leave the range of a ratio
                there = abs(summaries(study, components, corner)[index].value - summary.value)
            largest = moves[index]
            moves[index] = None if there is None or largest is None else max(largest, there)
    return [{"estimand": summary.name, "bound": bound} for summary, bound in zip(now, moves, strict=True)]


def reported(study: Study, reached: Reached) -> Reached:
    """Return a run's progress in the numbers that the study reports, instead of those that it targets."""
    if study.imputes and reached.names:
        return replace(reached, names=(), estimate=None, covariance=(), bounds=None, reason=SEVERAL)
    if reached.estimate is None or not isinstance(study.target, AbstractEffect):
        return reached
    components = study.target.components(effect_columns(study, ()).strata_levels)
    psi, covariance = np.array(reached.estimate), np.array(reached.covariance)
    numbers = summaries(study, components, psi)
    slopes = np.stack([number.gradient for number in numbers])
    bounds = reached.bounds
    if bounds is not None:
        moves = _largest_moves(study, components, psi, np.array(bounds))
        bounds = tuple(move["bound"] for move in moves)
    return replace(
        reached,
        names=tuple(number.name for number in numbers),
        estimate=tuple(number.value for number in numbers),
        covariance=tuple(map(tuple, (slopes @ covariance @ slopes.T).tolist())),
        bounds=bounds,
    )


@contextmanager
def reporting_progress(study: Study) -> Iterator[None]:
    """Convert the progress that an error reports to the numbers that the study reports."""
    try:
        yield
    except FedTMLEError as error:
        if error.reached is not None:
            error.reached = reported(study, error.reached)
        raise


def uncovered(study: Study) -> list[str]:
    """Return the reasons why thm:statistical does not cover a study; empty if it does."""
    models = [
        part
        for model in study.models.values()
        for part in (model.learners if isinstance(model, SuperLearner) else (model,))
    ]
    reasons = []
    if any(isinstance(model, Supplied) for model in models):
        reasons.append("predictions supplied by the silos have no code: they must come from other records")
    if study.cluster:
        reasons.append("records of one cluster are not independent")
    if study.imputes:
        reasons.append("the covariates are imputed")
    if study.keeps_intercepts:
        reasons.append("the silos' own intercepts, C(silo), have no code: each silo keeps its own")
    return reasons
