"""Pilots that are fitted on a public sample: the model becomes part of the plan, and nothing is sent."""

from __future__ import annotations

from dataclasses import replace

from fedtmle.data import DataErrors, Schema, load
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import GradientBoostedTrees, Pilot, formulas
from fedtmle.initial.variables import Variables
from fedtmle.programs.nuisance import effect_columns, regressions
from fedtmle.programs.study import Study
from fedtmle.programs.superlearner import fit_alone
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.schema import in_memory, schema_of
from fedtmle.targets.effects.estimands import AbstractEffect

SAMPLE = "public sample"


def fit_on_sample(
    target: AbstractEffect,
    variables: Variables,
    role: str,
    model: GLM | GradientBoostedTrees,
    sample: object,
) -> Pilot:
    """Return the pilot that a silo with the rows of ``sample`` would send.

    ``variables`` is the study's dictionary, and ``role`` is "outcome", "treatment" or "missingness".
    ``sample`` is a frame or the path of a file, with the columns of the model and its response. Rows are not
    weighted; those without an outcome are used for missingness only.
    """
    if role in ("hazard", "censoring"):
        raise InputError("sample: hazards are fitted across the silos, or at one of them; give a GLM")
    study = _study(target, variables, role, model)
    if role == "treatment" and len(study.target.arms) > 2:
        raise InputError("sample: a public model gives one probability, so it is for two arms")
    needed = {name for f in formulas(model) for name in (*f.numeric_names, *f.factor_names)}
    needed.add(str(target.treatment) if role == "treatment" else target.outcome)
    schema = Schema(tuple(column for column in schema_of(study).columns if column.name in needed))
    try:
        table = in_memory({SAMPLE: load(sample, schema, silo=SAMPLE)}, "a public model")[SAMPLE]
    except DataErrors as errors:
        raise InputError(f"sample: {'; '.join(map(str, errors.defects))}") from None
    levels = study.levels
    (regression,) = regressions(study, effect_columns(study), 1.0)[role]
    local = LocalRows(SAMPLE, table, table.n_rows, None)
    try:
        return Pilot(fit_alone(model, regression, levels, local), unit_scale=True)
    except InputError as error:
        raise InputError(f"sample: {error}") from None


def _study(
    target: AbstractEffect, variables: Variables, role: str, model: GLM | GradientBoostedTrees
) -> Study:
    """Return a study that reads the columns of this model only; trees are read by their formula."""
    read = GLM(str(model.parsed)) if isinstance(model, GradientBoostedTrees) else model
    models = {"outcome": GLM("1"), "missingness": GLM("1"), role: read}
    if target.treatment is not None:
        models.setdefault("treatment", GLM("1"))
    return Study(
        target=replace(target, strata=None),
        outcome_model=models["outcome"],
        missingness_model=models["missingness"],
        treatment_model=models.get("treatment"),
        variables=variables,
    )
