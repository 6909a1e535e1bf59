"""Pilots fitted on a public sample: the model becomes part of the plan, and nothing is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedtmle.data import DataErrors, Schema, load
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM
from fedtmle.initial.pilot import Pilot
from fedtmle.initial.superlearner import formulas
from fedtmle.initial.trees import GradientBoostedTrees
from fedtmle.programs.nuisance import effect_columns, regressions
from fedtmle.programs.study import Study
from fedtmle.programs.superlearner import fit_alone
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.schema import in_memory, schema_of
from fedtmle.targets.effects.estimands import AbstractEffect

SAMPLE = "public sample"


def fit_on_sample(
    target: AbstractEffect, role: str, model: GLM | GradientBoostedTrees, sample: object
) -> Pilot:
    """The pilot that a silo with these rows would ship: ``role`` is outcome, treatment or missingness.

    ``sample`` is whatever a silo's data may be: a frame or the path of a file, with the columns of the
    model and its response. All rows count alike; those without an outcome count for missingness alone.
    """
    if role == "treatment" and len(target.arms) > 2:
        raise InputError("sample: a public model gives one probability, so it is for two arms")
    study = _study(target, role, model)
    needed = {name for f in formulas(model) for name in (*f.numeric_names, *f.factor_names)}
    needed.add(str(target.treatment) if role == "treatment" else target.outcome)
    schema = Schema(tuple(column for column in schema_of(study).columns if column.name in needed))
    try:
        table = in_memory({SAMPLE: load(sample, schema, silo=SAMPLE)}, "a public model")[SAMPLE]
    except DataErrors as errors:
        mistakes = "; ".join(str(problem) for problem in errors.problems)
        raise InputError(f"sample: {mistakes}") from None
    levels = {name: factor.levels for name, factor in table.factors.items()}
    (regression,) = regressions(study, effect_columns(study, levels), 1.0)[role]
    local = LocalRows(SAMPLE, table, table.n_rows, None)
    try:
        return Pilot(fit_alone(model, regression, levels, local), unit_scale=True)
    except InputError as error:
        raise InputError(f"sample: {error}") from None


def _study(target: AbstractEffect, role: str, model: GLM | GradientBoostedTrees) -> Study:
    """A study that asks for no more than this model's fit; trees are read by their formula."""
    asked = GLM(str(model.parsed)) if isinstance(model, GradientBoostedTrees) else model
    plain = GLM("1")
    models: dict[str, Any] = {"outcome_model": plain, "missingness_model": plain}
    if target.treatment is not None:
        models["treatment_model"] = plain
    return Study(target=replace(target, strata=None), **{**models, f"{role}_model": asked})
