"""Find what would stop a study or make a silo refuse it, on the silos' own tables, before anything leaves.

Each obstacle names the silo, the column, the level and a remedy, for the owner of the table. Levels are the
dictionary's, which are public; no record's value is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from fedtmle.defects import Defect
from fedtmle.initial.design import column_names
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import SuperLearner, formulas
from fedtmle.model.table import SILO, Table
from fedtmle.model.types import Array, IntArray
from fedtmle.programs.study import Study
from fedtmle.protocol.looks import LookGroups
from fedtmle.protocol.plan import brought
from fedtmle.protocol.policy import TARGETS, Policy
from fedtmle.studyfile.schema import first_period

NO_GROUPS = LookGroups()
MERGE = "merge it with another level (levels in the silo file), or leave the variable out of the models"


def obstacles(
    study: Study,
    tables: Mapping[str, Table],
    policies: Mapping[str, Policy],
    *,
    groups: LookGroups = NO_GROUPS,
) -> list[Defect]:
    """Return what stands in the way of a study over these tables, all of it at once.

    ``policies`` has the limits of each silo; those of `UNGUARDED` refuse nothing. ``groups`` are those
    in which masked silos judge the columns of models together, so that `min_support` does not apply.
    """
    policies = {
        name: replace(policy, min_support=0) if policy.judges_together(groups) else policy
        for name, policy in policies.items()
    }
    found: list[Defect] = []
    tables = first_period(study, tables)
    for name, table in tables.items():
        found += _refusals(study, name, table, policies[name], len(tables))
    found += _pooled(study, tables)
    return found


def _refusals(study: Study, silo: str, table: Table, policy: Policy, silos: int) -> Iterator[Defect]:
    """Yield what the silo's own policy would refuse."""
    if silos < policy.min_silos:
        message = f"its policy asks for {policy.min_silos} silos (min_silos), and the study has {silos}"
        yield Defect(message=message, fix="invite more silos", silo=silo)
    for each in brought(study):
        if not policy.allows(each):
            message = f"its policy does not allow {each} ({TARGETS})"
            yield Defect(message=message, fix=f'write {TARGETS} = ["{each.source}"] in [policy]', silo=silo)
    if table.n_rows < policy.min_rows:
        message = f"has {table.n_rows} records, and its policy asks for {policy.min_rows} (min_rows)"
        yield Defect(message=message, fix="leave the silo out of the study", silo=silo)
    target = study.target
    treatment = None if target.is_modified else target.treatment
    for column in (name for name in (treatment, target.strata) if name is not None):
        for level, count in _level_counts(study, table, column).items():
            if 0 < count < policy.min_arm_rows:
                yield _few(silo, column, level, count, "min_arm_rows", policy.min_arm_rows)
    for column in sorted(_fitted_factors(study)):
        for level, count in _level_counts(study, table, column).items():
            if 0 < count < policy.min_support:
                yield _few(silo, column, level, count, "min_support", policy.min_support)
    for column in sorted(_fitted_numbers(study) & set(table.numeric)):
        count = int(np.count_nonzero(np.nan_to_num(table.numeric[column])))
        if 0 < count < policy.min_support:
            message = (
                f"is not zero in {count} records, and the policy asks for {policy.min_support} (min_support)"
            )
            yield Defect(message=message, fix="leave it out of the models", silo=silo, column=column)


def _few(silo: str, column: str, level: str, count: int, key: str, floor: int) -> Defect:
    message = f"level '{level}' has {count} records, and the policy asks for {floor} ({key})"
    return Defect(message=message, fix=MERGE, silo=silo, column=column)


def _pooled(study: Study, tables: Mapping[str, Table]) -> Iterator[Defect]:
    """Yield what stops the fits whatever the policies are: too few records, constant columns, separation."""
    n = sum(table.n_rows for table in tables.values())
    for role, model in _glms(study):
        levels = {**study.levels, SILO: tuple(tables)}
        count = len(column_names(model.parsed, levels))
        if count >= n:
            message = f"the {role} model has {count} columns, and the study {n} records"
            yield Defect(message=message, fix="give it fewer terms, or invite more silos")
    constant = [name for name in sorted(_fitted_numbers(study)) if _is_constant(name, tables)]
    for name in constant:
        message = "has the same value in every record of every silo: no model can use it"
        yield Defect(message=message, fix="leave it out of the models", column=name)
    for name in sorted(_fitted_factors(study)):
        present = [level for level, count in _pooled_counts(study, tables, name).items() if count]
        if len(present) == 1:
            message = f"only level '{present[0]}' occurs at the silos: no model can use it"
            yield Defect(message=message, fix="leave it out of the models", column=name)
    yield from _separated(study, tables)


def _separated(study: Study, tables: Mapping[str, Table]) -> Iterator[Defect]:
    """Yield the levels of the treatment model's factors in which only some of the arms occur."""
    treatment = None if study.target.is_modified else study.target.treatment
    model = study.models.get("treatment")
    if treatment is None or not isinstance(model, GLM) or model.ridge:
        return
    for name in sorted({*model.parsed.factor_names} - {SILO}):
        levels = study.levels[name]
        counts = np.zeros((len(levels), len(study.target.arms)), dtype=np.int64)
        for table in tables.values():
            arm, code = _codes(study, table, treatment), _codes(study, table, name)
            known = (arm >= 0) & (code >= 0)
            np.add.at(counts, (code[known], arm[known]), 1)
        for level, row in zip(levels, counts, strict=True):
            absent = [arm for arm, count in zip(study.target.arms, row, strict=True) if not count]
            if row.sum() and absent:
                message = (
                    f"nobody with level '{level}' is in arm {', '.join(map(repr, absent))}: the treatment "
                    "model is separated and has no finite coefficients"
                )
                fix = "merge the level with another, leave the variable out, or give the model a small ridge"
                yield Defect(message=message, fix=fix, column=name)


def _glms(study: Study) -> Iterator[tuple[str, GLM]]:
    for role, model in study.models.items():
        members = model.learners if isinstance(model, SuperLearner) else (model,)
        yield from ((role, each) for each in members if isinstance(each, GLM))


def _fitted_factors(study: Study) -> set[str]:
    fitted = {name for _, model in _glms(study) for name in model.parsed.factor_names}
    return fitted - {SILO, study.target.treatment, *study.derived_levels}


def _fitted_numbers(study: Study) -> set[str]:
    used = {name for _, model in _glms(study) for f in formulas(model) for name in f.numeric_names}
    return used - {study.target.treatment, *study.derived_levels}


def _codes(study: Study, table: Table, name: str) -> IntArray:
    return table.factors[name].recode(study.levels[name])


def _level_counts(study: Study, table: Table, name: str) -> dict[str, int]:
    codes = _codes(study, table, name)
    counts = np.bincount(codes[codes >= 0], minlength=len(study.levels[name]))
    return dict(zip(study.levels[name], counts.tolist(), strict=True))


def _pooled_counts(study: Study, tables: Mapping[str, Table], name: str) -> dict[str, int]:
    by_silo = [_level_counts(study, table, name) for table in tables.values()]
    return {level: sum(counts[level] for counts in by_silo) for level in study.levels[name]}


def _is_constant(name: str, tables: Mapping[str, Table]) -> bool:
    values: list[Array] = [table.numeric[name] for table in tables.values() if name in table.numeric]
    known = np.concatenate(values) if values else np.empty(0)
    known = known[~np.isnan(known)]
    return len(known) > 0 and bool((known == known[0]).all())
