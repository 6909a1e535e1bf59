"""Who enters a trial, as SQL: records of an OMOP CDM, candidates, and a step for each condition on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.data.sql import (
    Aggregate,
    Aggregated,
    AllOf,
    CastTo,
    Combined,
    ExistsIn,
    Expression,
    Infix,
    InSelect,
    InValues,
    Inverse,
    IsNull,
    Join,
    Operator,
    Ref,
    RowNumber,
    Select,
    SetOperator,
    Source,
    SqlType,
    Value,
    YearOf,
)
from fedtmle.errors import InputError
from fedtmle.trials.elements import ConceptSet, Criterion, Domain
from fedtmle.trials.trial import TargetTrial

# Records of an OMOP CDM as SQL: where tables are, windows of days, and the named selects of one trial.
#
# ``c`` is the alias of a candidate throughout: a person with a possible time zero (``day``), the last day
# before follow-up (``start``) and the strategy begun (``arm``).

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


def name_cohort(trial: TargetTrial, selects: NamedSelects) -> tuple[tuple[str, str], ...]:
    """Add the selects that lead to the one named "cohort": every person's first eligible candidate.

    Return the steps of the attrition: the words of each, and the named select whose people it counts.
    """
    return _Steps(trial, selects).named()


@final
class _Steps:
    def __init__(self, trial: TargetTrial, selects: NamedSelects) -> None:
        self._trial, self._selects = trial, selects
        self._steps: list[tuple[str, str]] = []

    def named(self) -> tuple[tuple[str, str], ...]:
        everyone = (("person_id", Ref("p", "person_id")),)
        people = Select(columns=everyone, source=self._selects.cdm("person", "p"), where=self._part())
        self._steps.append(("people in the database", self._selects.name("people", people)))
        self._exposures()
        self._candidates()
        self._eligible()
        place = RowNumber((Ref("c", "person_id"),), ((Ref("c", "day"), False),))
        ordered = Select(columns=(*CANDIDATE, ("place", place)), source=Source(self._steps[-1][1], "c"))
        self._selects.name("ordered", ordered)
        first = equal(Ref("c", "place"), Value(1))
        cohort = Select(columns=CANDIDATE, source=Source("ordered", "c"), where=(first,))
        self._selects.name("cohort", cohort)
        return tuple(self._steps)

    def _part(self) -> tuple[Expression, ...]:
        if self._selects.layout.part is None:
            return ()
        index, count = self._selects.layout.part
        return (equal(Infix(Ref("p", "person_id"), Operator.MODULO, Value(count)), Value(index)),)

    # Candidates.

    def _exposures(self) -> None:
        """Name the days on which a person begins a drug of a strategy, as (person_id, day, arm)."""
        table, started, concept = RECORDS[Domain.DRUG]
        selects = []
        for arm, strategy in enumerate(self._trial.strategies):
            concepts = self._selects.concepts(strategy.drugs)
            selects.append(
                Select(
                    columns=(
                        ("person_id", Ref("x", "person_id")),
                        ("day", date("x", started)),
                        ("arm", Value(arm)),
                    ),
                    source=self._selects.cdm(table, "x"),
                    joins=(Join(Source("people", "p"), same_person("p", "x")),),
                    where=(InSelect(Ref("x", concept), concepts), Inverse(IsNull(Ref("x", started)))),
                )
            )
        self._selects.name("exposures", Combined(SetOperator.UNION, tuple(selects)))

    def _candidates(self) -> None:
        """Name the candidates, (person_id, day, start, arm, arms); ``arms`` counts the strategies begun."""
        time_zero = self._trial.time_zero
        person, day = Ref("x", "person_id"), Ref("x", "day")
        if time_zero.condition is None:
            source, arm = Source("exposures", "x"), Ref("x", "arm")
            joins: tuple[Join, ...] = ()
            words = "with a drug of a strategy"
        else:
            self._first_condition(time_zero.condition)
            within = AllOf(
                (
                    same_person("x", "e"),
                    at_least(Ref("e", "day"), day),
                    at_most(Ref("e", "day"), plus(day, time_zero.grace_days)),
                )
            )
            source, arm = Source("conditions", "x"), Ref("e", "arm")
            joins = (Join(Source("exposures", "e"), within),)
            words = f"with a drug of a strategy within {time_zero.grace_days} days"
        candidates = Select(
            columns=(
                ("person_id", person),
                ("day", day),
                ("start", plus(day, time_zero.grace_days)),
                ("arm", Aggregated(Aggregate.MIN, arm)),
                ("arms", Aggregated(Aggregate.COUNT_DISTINCT, arm)),
            ),
            source=source,
            joins=joins,
            group_by=(person, day),
        )
        self._steps.append((words, self._selects.name("candidates", candidates)))
        earlier: list[Expression] = [same_person("e", "c"), below(Ref("e", "day"), Ref("c", "day"))]
        words = "without an earlier drug of any strategy"
        if time_zero.washout_days is not None:
            earlier.append(at_least(Ref("e", "day"), plus(Ref("c", "day"), -time_zero.washout_days)))
            words = f"without a drug of any strategy in the {time_zero.washout_days} days before"
        used = Select(columns=ONE, source=Source("exposures", "e"), where=tuple(earlier))
        self._step(words, Inverse(ExistsIn(used)))
        self._step("with a drug of one strategy only", equal(Ref("c", "arms"), Value(1)))

    def _first_condition(self, concepts: ConceptSet) -> None:
        table, started, concept = RECORDS[Domain.CONDITION]
        person = Ref("x", "person_id")
        first = Select(
            columns=(("person_id", person), ("day", Aggregated(Aggregate.MIN, date("x", started)))),
            joins=(Join(Source("people", "p"), same_person("p", "x")),),
            where=(InSelect(Ref("x", concept), self._selects.concepts(concepts)),),
            source=self._selects.cdm(table, "x"),
            group_by=(person,),
        )
        self._steps.append((f"with condition {concepts.name}", self._selects.name("conditions", first)))

    def _step(self, words: str, condition: Expression) -> None:
        """Keep the candidates that meet a condition, and add a step of the attrition."""
        before = self._steps[-1][1]
        kept = Select(columns=WITH_ARMS, source=Source(before, "c"), where=(condition,))
        self._steps.append((words, self._selects.name(f"step_{len(self._steps)}", kept)))

    # Eligibility.

    def _eligible(self) -> None:
        eligibility = self._trial.eligibility
        if eligibility.age is not None:
            least, most = eligibility.age
            age = Infix(YearOf(Ref("c", "day")), Operator.MINUS, Ref("p", "year_of_birth"))
            aged = (same_person("p", "c"), at_least(age, Value(least)), at_most(age, Value(most)))
            person = Select(columns=ONE, source=self._selects.cdm("person", "p"), where=aged)
            self._step(f"aged {least} to {most}", ExistsIn(person))
        if eligibility.observation_days_before is not None:
            days = eligibility.observation_days_before
            self._step(f"observed for {days} days before time zero", self._observed("day", days))
        for criterion in eligibility.criteria:
            self._step(criterion.words, self._criterion(criterion))
        if self._trial.time_zero.condition is not None:
            self._step("free of the outcome, alive and observed when follow-up starts", self._at_landmark())

    def _observed(self, column: str, days: int) -> Expression:
        """Return the condition that an observation period holds ``column`` and ``days`` days before it."""
        day = Ref("c", column)
        covers = (
            same_person("o", "c"),
            at_most(date("o", "observation_period_start_date"), plus(day, -days)),
            at_least(date("o", "observation_period_end_date"), day),
        )
        return ExistsIn(
            Select(columns=ONE, source=self._selects.cdm("observation_period", "o"), where=covers)
        )

    def _criterion(self, criterion: Criterion) -> Expression:
        table, started, concept = RECORDS[criterion.domain]
        where = (
            same_person("x", "c"),
            InSelect(Ref("x", concept), self._selects.concepts(criterion.concepts)),
            *window(date("x", started), criterion.from_day, criterion.to_day),
        )
        records = ExistsIn(Select(columns=ONE, source=self._selects.cdm(table, "x"), where=where))
        return records if criterion.present else Inverse(records)

    def _at_landmark(self) -> Expression:
        """Return the condition that a candidate is alive and without the outcome when follow-up starts."""
        died = Select(
            columns=ONE,
            source=self._selects.cdm("death", "x"),
            where=(same_person("x", "c"), at_most(date("x", "death_date"), Ref("c", "start"))),
        )
        conditions: list[Expression] = [Inverse(ExistsIn(died))]
        if self._trial.outcome.conditions is not None:
            table, started, concept = RECORDS[Domain.CONDITION]
            day = date("x", started)
            event = Select(
                columns=ONE,
                source=self._selects.cdm(table, "x"),
                where=(
                    same_person("x", "c"),
                    InSelect(Ref("x", concept), self._selects.concepts(self._trial.outcome.conditions)),
                    above(day, Ref("c", "day")),
                    at_most(day, Ref("c", "start")),
                ),
            )
            conditions.append(Inverse(ExistsIn(event)))
        if self._trial.eligibility.observation_days_before is not None:
            conditions.append(self._observed("start", 0))
        return AllOf(tuple(conditions))
