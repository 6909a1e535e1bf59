"""What a study asks of each silo's table."""

from __future__ import annotations

import math

from fedtmle.algorithms.study import Study
from fedtmle.data import Column, Kind, Schema
from fedtmle.initial.glm import GLM, Supplied


def schema_of(study: Study) -> Schema:
    """The columns, their kinds, bounds and levels, and where values may be missing."""
    target = study.target
    columns: dict[tuple[str, Kind], Column] = {}

    def ask(column: Column) -> None:
        columns.setdefault((column.name, column.kind), column)

    ask(
        Column(
            name=target.outcome,
            kind=Kind.NUMERIC,
            bounds=target.outcome_bounds,
            may_be_missing=study.missingness_model is not None,
        )
    )
    if target.treatment is not None:
        ask(Column(name=target.treatment, kind=Kind.FACTOR, levels=target.arms))
    if target.strata is not None:
        ask(Column(name=target.strata, kind=Kind.FACTOR))
    if study.weights is not None:
        ask(Column(name=study.weights, kind=Kind.NUMERIC, bounds=(0.0, math.inf)))
    if study.cluster is not None:
        ask(Column(name=study.cluster, kind=Kind.FACTOR))
    for regime in target.regimes():
        for name in regime.needs:
            ask(Column(name=name, kind=Kind.NUMERIC))
    for model in study.models.values():
        if isinstance(model, Supplied):
            for name in model.columns:
                ask(Column(name=name, kind=Kind.NUMERIC))
        elif isinstance(model, GLM):
            for name in sorted(model.parsed.numeric_names):
                ask(Column(name=name, kind=Kind.NUMERIC))
            for name in sorted(model.parsed.factor_names):
                if name != target.treatment:
                    ask(Column(name=name, kind=Kind.FACTOR))
    return Schema(tuple(columns.values()))
