"""Records of an OMOP CDM as SQL: where tables are, windows of days, and the named selects of one trial.

``c`` is the alias of a candidate throughout: a person with a possible time zero (``day``), the last day
before follow-up (``start``) and the strategy begun (``arm``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.data.sql import (
    CastTo,
    Combined,
    Expression,
    Infix,
    InValues,
    Operator,
    Ref,
    Select,
    SetOperator,
    Source,
    SqlType,
    Value,
)
from fedtmle.errors import InputError
from fedtmle.trials.elements import ConceptSet, Domain

# Table, column of the day on which a record begins, column of the concept.
RECORDS = {
    Domain.CONDITION: ("condition_occurrence", "condition_start_date", "condition_concept_id"),
    Domain.DRUG: ("drug_exposure", "drug_exposure_start_date", "drug_concept_id"),
}
VISITS = ("visit_occurrence", "visit_start_date")
MEASUREMENTS = ("measurement", "measurement_date", "measurement_concept_id")

ONE: tuple[tuple[str, Expression], ...] = (("one", Value(1)),)
CANDIDATE: tuple[tuple[str, Expression], ...] = tuple(
    (name, Ref("c", name)) for name in ("person_id", "day", "start", "arm")
)
WITH_ARMS = (*CANDIDATE, ("arms", Ref("c", "arms")))


@final
@dataclass(frozen=True, kw_only=True)
class CdmLayout:
    """Where a silo's tables are, and which of its people take part.

    ``schema`` None means the connection's own; ``vocabulary_schema`` None means ``schema``. ``part`` (index,
    count) selects the people whose person_id leaves the remainder ``index`` when divided by ``count``.
    """

    schema: str | None = None
    vocabulary_schema: str | None = None
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.part is not None:
            index, count = self.part
            if not 0 <= index < count:
                raise InputError("part: expected [index, count] with 0 <= index < count")


def _infix(operator: Operator) -> Callable[[Expression, Expression], Infix]:
    return lambda left, right: Infix(left, operator, right)


equal, below, at_most = _infix(Operator.EQUAL), _infix(Operator.BELOW), _infix(Operator.AT_MOST)
above, at_least = _infix(Operator.ABOVE), _infix(Operator.AT_LEAST)


def plus(day: Expression, days: int) -> Expression:
    """Return the day that is ``days`` days after ``day``."""
    return Infix(day, Operator.PLUS, Value(days)) if days else day


def date(alias: str, column: str) -> Expression:
    """Return a column as a date, which some databases store with a time."""
    return CastTo(Ref(alias, column), SqlType.DATE)


def same_person(left: str, right: str) -> Expression:
    """Return the condition that the rows of two aliases belong to one person."""
    return equal(Ref(left, "person_id"), Ref(right, "person_id"))


def window(day: Expression, from_day: int | None, to_day: int) -> tuple[Expression, ...]:
    """Return the conditions that a day is in a window around a candidate's time zero."""
    zero = Ref("c", "day")
    latest = at_most(day, plus(zero, to_day))
    return (latest,) if from_day is None else (at_least(day, plus(zero, from_day)), latest)


@final
class NamedSelects:
    """The named selects of one trial, in order, and its concept sets among them."""

    def __init__(self, layout: CdmLayout) -> None:
        self.layout = layout
        self.named: list[tuple[str, Select | Combined]] = []
        self._sets: dict[ConceptSet, str] = {}

    def name(self, name: str, rows: Select | Combined) -> str:
        """Add a named select; return its name."""
        self.named.append((name, rows))
        return name

    def cdm(self, table: str, alias: str) -> Source:
        """Return a table of the CDM under an alias."""
        return Source(table, alias, self.layout.schema)

    def concepts(self, concepts: ConceptSet) -> Select:
        """Return the select of a concept set's ids, from a named select that is made once."""
        if concepts not in self._sets:
            name = f"concepts_{len(self._sets) + 1}"
            self._sets[concepts] = name
            if concepts.exclude:
                included = self.name(f"{name}_included", self._ids(concepts.ids, concepts.descendants))
                excluded = self.name(f"{name}_excluded", self._ids(concepts.exclude, concepts.descendants))
                parts = (_concept_ids_of(included), _concept_ids_of(excluded))
                self.name(name, Combined(SetOperator.EXCEPT, parts))
            else:
                self.name(name, self._ids(concepts.ids, concepts.descendants))
        return _concept_ids_of(self._sets[concepts])

    def _ids(self, ids: Sequence[int], descendants: bool) -> Combined:
        parts = [Select(columns=(("concept_id", CastTo(Value(each), SqlType.BIGINT)),)) for each in ids]
        if descendants:
            schema = self.layout.vocabulary_schema or self.layout.schema
            descending = Select(
                columns=(("concept_id", CastTo(Ref("a", "descendant_concept_id"), SqlType.BIGINT)),),
                source=Source("concept_ancestor", "a", schema),
                where=(InValues(Ref("a", "ancestor_concept_id"), tuple(ids)),),
            )
            parts.insert(0, descending)
        return Combined(SetOperator.UNION, tuple(parts))


def _concept_ids_of(name: str) -> Select:
    return Select(columns=(("concept_id", Ref("s", "concept_id")),), source=Source(name, "s"))
