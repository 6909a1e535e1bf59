"""A target trial as two SQL statements over an OMOP CDM: one for the attrition, one for the study's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedtmle.data.sql import (
    Aggregate,
    Aggregated,
    Combined,
    Dialect,
    Ref,
    Select,
    SetOperator,
    Source,
    Statement,
    Value,
)
from fedtmle.trials.records import CdmLayout, NamedSelects
from fedtmle.trials.steps import name_cohort
from fedtmle.trials.table import select_table
from fedtmle.trials.trial import TargetTrial


@final
@dataclass(frozen=True, kw_only=True)
class CompiledTrial:
    """A trial's two statements, which share their named selects.

    ``attrition`` has the columns step and people; ``steps`` describes each step in words, in order.
    """

    steps: tuple[str, ...]
    attrition: Statement
    table: Statement

    def print(self, dialect: Dialect) -> str:
        """Return both statements as SQL text, for a person to read."""
        return "\n\n".join(f"{dialect.print(statement)};" for statement in (self.attrition, self.table))


def compile_trial(trial: TargetTrial, layout: CdmLayout | None = None) -> CompiledTrial:
    """Return the statements of ``trial`` for a database with this layout."""
    selects = NamedSelects(layout or CdmLayout())
    steps = name_cohort(trial, selects)
    counted = tuple(selects.named)
    people = ("people", Aggregated(Aggregate.COUNT_DISTINCT, Ref("c", "person_id")))
    counts = tuple(
        Select(columns=(("step", Value(index)), people), source=Source(name, "c"))
        for index, (_, name) in enumerate(steps)
    )
    table = select_table(trial, selects)
    return CompiledTrial(
        steps=tuple(words for words, _ in steps),
        attrition=Statement(counted, Combined(SetOperator.UNION_ALL, counts, order_by=("step",))),
        table=Statement(tuple(selects.named), table),
    )
