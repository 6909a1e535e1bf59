"""What a study asks of each silo's table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fedtmle.algorithms.study import MOST_STRATA, Study
from fedtmle.data import Column, Kind, Schema
from fedtmle.initial.glm import Supplied
from fedtmle.initial.superlearner import formulas

# What is said of an outcome whose bounds are those of a study that declares none.
OUTSIDE_UNIT = (
    "is outside 0 to 1",
    "declare outcome_bounds, the least and the largest possible value, or check the unit and the records",
)
NEGATIVE = ("is negative", "weights must not be negative; correct it, or name another column of weights")


def schema_of(study: Study) -> Schema:
    """The columns, their kinds, bounds and levels, and where values may be missing."""
    columns: dict[tuple[str, bool], Column] = {}
    for column in (*_roles(study), *_covariates(study)):
        columns.setdefault((column.name, column.kind is Kind.FACTOR), column)
    return Schema(tuple(columns.values()))


def _roles(study: Study) -> Iterator[Column]:
    """Columns that play a part of their own; asked first, because they are declared in more detail."""
    target = study.target
    outcome = Column(
        name=target.outcome,
        kind={"binary": Kind.BINARY, "count": Kind.COUNT, "continuous": Kind.NUMERIC}[target.response],
        bounds=None if target.is_binary else target.outcome_bounds,
        may_be_missing=study.missingness_model is not None,
    )
    yield replace(outcome, outside=OUTSIDE_UNIT) if target.outcome_bounds == (0.0, 1.0) else outcome
    if target.treatment is not None:
        yield Column(name=target.treatment, kind=Kind.FACTOR, levels=target.arms)
    if target.strata is not None:
        yield Column(name=target.strata, kind=Kind.FACTOR, most=MOST_STRATA)
    if study.weights is not None:
        yield Column(name=study.weights, kind=Kind.NUMERIC, bounds=(0.0, math.inf), outside=NEGATIVE)
    if study.cluster is not None:
        yield Column(name=study.cluster, kind=Kind.FACTOR)
    for regime in target.regimes():
        yield from (Column(name=name, kind=Kind.NUMERIC) for name in regime.needs)


def _covariates(study: Study) -> Iterator[Column]:
    for model in study.models.values():
        if isinstance(model, Supplied):
            yield from (Column(name=name, kind=Kind.NUMERIC) for name in model.columns)
        for formula in formulas(model, public=True):
            yield from (Column(name=name, kind=Kind.NUMERIC) for name in sorted(formula.numeric_names))
            factors = set(formula.factor_names) - {study.target.treatment}
            yield from (Column(name=name, kind=Kind.FACTOR) for name in sorted(factors))
