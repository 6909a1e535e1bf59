"""Nuisance models as sub-flows: GLMs, pilots and super learners, each fitted once or once per left-out fold."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from fedtmle.algorithms.nuisance import Regression, fit_glm
from fedtmle.algorithms.outcome import Query
from fedtmle.errors import InputError
from fedtmle.initial.crossfit import CrossFitted, Fitted, Folds
from fedtmle.initial.glm import GLM, FittedGLM, Levels
from fedtmle.initial.pilot import Pilot, Rescaled
from fedtmle.initial.superlearner import (
    MAX_CANDIDATES,
    Learner,
    PerSilo,
    SuperLearned,
    SuperLearner,
    simplex_weights,
    unit,
)
from fedtmle.initial.trees import GradientBoostedTrees, TreeEnsemble
from fedtmle.model.families import Family
from fedtmle.model.table import Table
from fedtmle.model.types import Array, exponent
from fedtmle.protocol.learners import Codec, GLMCodec, JointQuery, Models, ModelsQuery, TreesCodec
from fedtmle.protocol.query import Local
from fedtmle.protocol.tables import TallyQuery

Result = TypeVar("Result")
SubFlow = Generator[Query, Any, Result]


def fit_nuisance(regression: Regression, levels: Levels, n: int, folds: Folds | None) -> SubFlow[Fitted]:
    """The fit, or one fit per fold left out."""
    if folds is None:
        return (yield from _fit_each([regression], levels, n))[0]
    parts = [replace(regression.without(folds, v), fold=v + 1) for v in range(folds.count)]
    return CrossFitted(models=tuple((yield from _fit_each(parts, levels, n))), folds=folds)


def _fit_each(parts: Sequence[Regression], levels: Levels, n: int) -> SubFlow[Sequence[Fitted]]:
    """The same model on several sets of rows."""
    model = parts[0].model
    if isinstance(model, SuperLearner):
        return (yield from together([_fit_super(part, model, levels, n) for part in parts]))
    if isinstance(model, Pilot):
        return (yield from _ship(model, parts, levels))[0].models
    fits = []
    for part in parts:
        fits.append((yield from fit_glm(part, model, levels, n)))
    return fits
