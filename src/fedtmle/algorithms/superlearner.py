"""Nuisance models as sub-flows: GLMs, pilots and super learners, fitted once or once per left-out fold."""

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
        return (yield from _pilot(model, parts, levels))
    fits = []
    for part in parts:
        fits.append((yield from fit_glm(part, model, levels, n)))
    return fits


def together(flows: Sequence[SubFlow[Result]]) -> SubFlow[list[Result]]:
    """The flows side by side: each round carries one query of each that is still going."""
    results: dict[int, Result] = {}
    waiting: dict[int, Query] = {}
    replies: dict[int, Any] = dict.fromkeys(range(len(flows)))  # a fresh flow is started by sending None
    while True:
        for k, reply in replies.items():
            try:
                waiting[k] = flows[k].send(reply)
            except StopIteration as stop:
                results[k] = stop.value
        if not waiting:
            return [results[k] for k in range(len(flows))]
        pooled = yield JointQuery(tuple(waiting.values()))
        replies = dict(zip(waiting, pooled, strict=True))
        waiting = {}


def alone(flow: SubFlow[Result], local: Local) -> Result:
    """What a flow gives where one silo is the whole federation."""
    try:
        query = next(flow)
        while True:
            answers = {local.name: query.answer(local)}
            query = flow.send(query.pool(answers, {local.name: local.n_rows}))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # mypy does not follow a generator's result here


def _fit_super(regression: Regression, spec: SuperLearner, levels: Levels, n: int) -> SubFlow[SuperLearned]:
    left_out = regression.fold - 1 if regression.fold else None
    folds = spec.folds_within(left_out, regression.cluster, spanning=regression.spanning)
    parts = [*(regression.without(folds, v) for v in range(spec.folds)), regression]
    fitted = yield from together([_candidates(learner, parts, levels, n) for learner in spec.learners])
    labelled = {f"learner {k}{which}": m for k, each in enumerate(fitted, 1) for which, m in each.items()}
    if len(labelled) > MAX_CANDIDATES:
        raise InputError(f"{regression.what}: more than {MAX_CANDIDATES} models to weight; use fewer PerSilo")
    crossed = [CrossFitted(models=models[:-1], folds=folds) for models in labelled.values()]
    pairs = [(k, j) for k in range(len(crossed)) for j in range(k, len(crossed))]

    def products(table: Table) -> Array:
        y, w = regression.response(table)
        residuals = [y - unit(model.predict(table)) for model in crossed]
        return np.stack([w, *(w * (residuals[k] * residuals[j]) for k, j in pairs)])

    bound = exponent(regression.weight_ceiling)
    pooled = yield TallyQuery(columns=products, exponents=(bound,) * (1 + len(pairs)), n=n)
    total, *units = pooled.units
    if total <= 0:
        raise InputError(f"{regression.what}: no row has a positive weight")
    gram = dict(zip(pairs, units, strict=True))
    size = range(len(crossed))
    return SuperLearned(
        labels=tuple(labelled),
        models=tuple(models[-1] for models in labelled.values()),
        weights=simplex_weights([[gram[min(k, j), max(k, j)] for j in size] for k in size]),
        risks=tuple(gram[k, k] / total for k in size),
    )


def _candidates(
    learner: Learner, parts: Sequence[Regression], levels: Levels, n: int
) -> SubFlow[dict[str, Models]]:
    """Every model to weight, fitted on each part: one, or one for each silo that has its own."""
    if isinstance(learner, GLM):
        fits = yield from together([fit_glm(part, learner, levels, n) for part in parts])
        return {"": tuple(fits)}
    if isinstance(learner, Pilot):
        return {"": (yield from _pilot(learner, parts, levels))}
    shipped = yield _ship(learner, learner.model, parts, levels)
    own = {f", silo {m}": models for m, models in enumerate(shipped, start=1) if models is not None}
    if not own:
        raise InputError(f"{parts[0].what}: no silo has the rows to fit its own trees; lower min_leaf")
    return own


def _pilot(pilot: Pilot, parts: Sequence[Regression], levels: Levels) -> SubFlow[Models]:
    model = pilot.model
    if isinstance(model, FittedGLM | TreeEnsemble):
        low, high = (0.0, 1.0) if pilot.unit_scale else parts[0].bounds
        return (Rescaled(model=model, low=low, width=high - low),) * len(parts)
    (models,) = yield _ship(pilot, model, parts, levels)
    return models  # type: ignore[no-any-return]  # what a round brings is Any


def _ship(
    learner: Pilot | PerSilo, model: GLM | GradientBoostedTrees, parts: Sequence[Regression], levels: Levels
) -> ModelsQuery:
    def fit(local: Local) -> Models | None:
        if isinstance(learner, PerSilo) and not local.evaluate(can_split):
            return None
        return tuple(fit_alone(model, part, levels, local) for part in parts)

    def can_split(table: Table) -> bool:
        return isinstance(model, GradientBoostedTrees) and all(
            model.enough(part.response(table)[1]) for part in parts
        )

    return ModelsQuery(
        fit=fit,
        at=learner.at if isinstance(learner, Pilot) else None,
        count=len(parts),
        codec=_codec(model, parts[0], levels),
    )


def fit_alone(
    model: GLM | GradientBoostedTrees, part: Regression, levels: Levels, local: Local
) -> FittedGLM | TreeEnsemble:
    """The fit on one party's rows alone."""
    if isinstance(model, GLM):
        return alone(fit_glm(part, model, levels, local.n_rows), local)

    def grow(table: Table) -> TreeEnsemble:
        return model.fit(table, levels, *part.response(table), binary=part.kind == "binary")

    fitted: TreeEnsemble = local.evaluate(grow)
    return fitted


def _codec(model: GLM | GradientBoostedTrees, part: Regression, levels: Levels) -> Codec:
    if isinstance(model, GLM):
        return GLMCodec(formula=model.parsed, levels=levels, family=part.family_of(model))
    family = Family.LOGISTIC if part.kind == "binary" else Family.GAUSSIAN
    return TreesCodec(trees=model, levels=levels, family=family)
