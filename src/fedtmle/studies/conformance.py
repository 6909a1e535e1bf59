"""The check of a target that another distribution brings, on synthetic rows, before a silo's first answer.

The rows are drawn from the study's dictionary alone: numbers within their declared ranges, levels at random.
The study's own flow fits its models to them, and `check_problem` measures what the target's problem promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fedtmle.algorithms.gradient import Gradient
from fedtmle.algorithms.optimizers import Newton
from fedtmle.data import Kind, Schema
from fedtmle.errors import CheckFailedError, FedTMLEError, InputError
from fedtmle.initial.glm import GLM
from fedtmle.model.check import check_problem
from fedtmle.model.table import Factor, Table
from fedtmle.model.types import Array
from fedtmle.programs.flow import StudyProgram, study_details
from fedtmle.programs.study import Study
from fedtmle.programs.target import AbstractTarget
from fedtmle.protocol.plan import Plan, brought, follow_alone
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.file import study_of
from fedtmle.studyfile.schema import schema_of

ROWS = 240
SEED = 2026
SILO = "synthetic"

_passed: set[bytes] = set()  # digests of plans whose target was checked in this process


def examine_target(plan: Plan) -> None:
    """Raise `CheckFailedError` if the target of a plan is of another distribution and fails its checks.

    A plan is checked once in a process.
    """
    target = study_of(plan).target
    if not isinstance(target, AbstractTarget) or not brought(target) or plan.digest in _passed:
        return
    kind = type(target).__name__
    try:
        check_target(study_of(plan))
    except (FedTMLEError, ArithmeticError) as error:
        if type(error) in (CheckFailedError, InputError):  # from the check or the study's arguments
            raise
        raise CheckFailedError(f"{kind}: it could not be run on synthetic rows: {error}") from error
    _passed.add(plan.digest)


def check_target(study: Study) -> None:
    """Run the study on synthetic rows, and check the problem that its target makes of them."""
    table = synthetic_rows(schema_of(study))
    study = replace(_plain(study), algorithm=Gradient(optimizer=Newton()), diagnostics=False)
    program = StudyProgram.of(study, (SILO,))
    rows = program.at(SILO, table)
    local = LocalRows(SILO, rows, table.n_rows)
    local.place(0)
    details = study_details(follow_alone(program.flow(table.n_rows), local))
    check_problem(details.problem, details.start, rows).raise_if_failed()


def _plain(study: Study) -> Study:
    """Return the study with an intercept in the place of models that no single silo can fit."""
    simple = {role: GLM("1") for role, model in study.models.items() if not isinstance(model, GLM)}
    arguments: dict[str, Any] = {f"{role}_model": model for role, model in simple.items()}
    of_target = {f"{role}_model" for role in study.target.own_models()}
    target = replace(study.target, **{name: model for name, model in arguments.items() if name in of_target})
    return replace(study, target=target, **{k: model for k, model in arguments.items() if k not in of_target})


def synthetic_rows(schema: Schema, n: int = ROWS, seed: int = SEED) -> Table:
    """Return rows with values that the schema allows, drawn independently of each other."""
    rng = np.random.default_rng(seed)
    numeric: dict[str, Array] = {}
    factors: dict[str, Factor] = {}
    for column in schema.columns:
        low, high = column.bounds or (0.0, 1.0)
        match column.kind:
            case Kind.FACTOR:
                levels = column.levels or tuple(map(str, range(n // 4)))  # clusters, say
                factors[column.name] = Factor(rng.integers(len(levels), size=n), tuple(levels))
            case Kind.NUMERIC:
                numeric[column.name] = rng.uniform(low, high, size=n)
            case _:  # 0 and 1, or a count
                numeric[column.name] = rng.integers(int(low), int(high) + 1, size=n).astype(np.float64)
    return Table(n_rows=n, numeric=numeric, factors=factors)
