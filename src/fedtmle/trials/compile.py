"""A target trial as SQL over the tables of an OMOP CDM: one statement for the attrition, one for the table.

Both statements share their named selects. A candidate is a person with a possible time zero (``day``), the
last day before follow-up (``start``) and the strategy begun (``arm``). Each step keeps some candidates; the
cohort has every person's first remaining candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.errors import InputError
from fedtmle.trials.sql import (
    Aggregate,
    Aggregated,
    AllOf,
    CaseWhen,
    CastTo,
    Combined,
    Dialect,
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
    Statement,
    Value,
    YearOf,
)
from fedtmle.trials.trial import (
    TREATMENT_COLUMN,
    AbstractCovariate,
    AgeAtBaseline,
    AnyRecord,
    Censoring,
    ConceptSet,
    Criterion,
    Domain,
    LastMeasurement,
    Sex,
    TargetTrial,
    VisitCount,
)

MALE, FEMALE = 8507, 8532  # standard concepts of gender

# Table, column of the day on which a record begins, column of the concept.
_RECORDS = {
    Domain.CONDITION: ("condition_occurrence", "condition_start_date", "condition_concept_id"),
    Domain.DRUG: ("drug_exposure", "drug_exposure_start_date", "drug_concept_id"),
}
_VISITS = ("visit_occurrence", "visit_start_date")
_MEASUREMENTS = ("measurement", "measurement_date", "measurement_concept_id")


@final
@dataclass(frozen=True, kw_only=True)
class CdmLayout:
    """Where a silo's tables are, and which of its people take part.

    ``schema`` None is the connection's own; ``vocabulary_schema`` None is ``schema``. ``part`` (index, count)
    takes the people whose person_id leaves the remainder ``index`` when divided by ``count``.
    """

    schema: str | None = None
    vocabulary_schema: str | None = None
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.part is not None:
            index, count = self.part
            if not 0 <= index < count:
                raise InputError("part: expected [index, count] with 0 <= index < count")


@final
@dataclass(frozen=True, kw_only=True)
class CompiledTrial:
    """A trial's two statements; ``steps`` are the words of the attrition's lines, in order."""

    steps: tuple[str, ...]
    attrition: Statement
    table: Statement

    def print(self, dialect: Dialect) -> str:
        """Return both statements as SQL text, for a person to read."""
        return "\n\n".join(f"{dialect.print(statement)};" for statement in (self.attrition, self.table))


def compile_trial(trial: TargetTrial, layout: CdmLayout | None = None) -> CompiledTrial:
    """Return the statements of ``trial`` for a database with this layout."""
    return _Compiler(trial, layout or CdmLayout()).compiled()


def _infix(operator: Operator) -> Callable[[Expression, Expression], Infix]:
    return lambda left, right: Infix(left, operator, right)


_equal, _below, _at_most = _infix(Operator.EQUAL), _infix(Operator.BELOW), _infix(Operator.AT_MOST)
_above, _at_least = _infix(Operator.ABOVE), _infix(Operator.AT_LEAST)


def _plus(day: Expression, days: int) -> Expression:
    return Infix(day, Operator.PLUS, Value(days)) if days else day


def _date(alias: str, column: str) -> Expression:
    return CastTo(Ref(alias, column), SqlType.DATE)


def _same_person(left: str, right: str) -> Expression:
    return _equal(Ref(left, "person_id"), Ref(right, "person_id"))


class _Compiler:
    """Collects the named selects of one trial; `c` is the alias of a candidate throughout."""

    def __init__(self, trial: TargetTrial, layout: CdmLayout) -> None:
        self._trial, self._layout = trial, layout
        self._named: list[tuple[str, Select | Combined]] = []
        self._sets: dict[ConceptSet, str] = {}
        self._steps: list[tuple[str, str]] = []  # words, and the named select whose people are counted

    def compiled(self) -> CompiledTrial:
        everyone = (("person_id", Ref("p", "person_id")),)
        people = Select(columns=everyone, source=self._cdm("person", "p"), where=self._part())
        self._name("people", people)
        self._steps.append(("people in the database", "people"))
        self._exposures()
        self._candidates()
        self._eligible()
        place = RowNumber((Ref("c", "person_id"),), ((Ref("c", "day"), False),))
        ordered = Select(columns=(*_CANDIDATE, ("place", place)), source=Source(self._steps[-1][1], "c"))
        self._name("ordered", ordered)
        first = _equal(Ref("c", "place"), Value(1))
        self._name("cohort", Select(columns=_CANDIDATE, source=Source("ordered", "c"), where=(first,)))
        counted = tuple(self._named)
        attrition = Combined(
            SetOperator.UNION_ALL,
            tuple(
                Select(
                    columns=(
                        ("step", Value(index)),
                        ("people", Aggregated(Aggregate.COUNT_DISTINCT, Ref("c", "person_id"))),
                    ),
                    source=Source(name, "c"),
                )
                for index, (_, name) in enumerate(self._steps)
            ),
            order_by=("step",),
        )
        body = self._table()
        return CompiledTrial(
            steps=tuple(words for words, _ in self._steps),
            attrition=Statement(counted, attrition),
            table=Statement(tuple(self._named), body),
        )

    # Names and tables.

    def _name(self, name: str, rows: Select | Combined) -> str:
        self._named.append((name, rows))
        return name

    def _cdm(self, table: str, alias: str) -> Source:
        return Source(table, alias, self._layout.schema)

    def _part(self) -> tuple[Expression, ...]:
        if self._layout.part is None:
            return ()
        index, count = self._layout.part
        return (_equal(Infix(Ref("p", "person_id"), Operator.MODULO, Value(count)), Value(index)),)

    def _concepts(self, concepts: ConceptSet) -> Select:
        """Return the select of a concept set's ids, from a named select that is made once."""
        if concepts not in self._sets:
            name = f"concepts_{len(self._sets) + 1}"
            self._sets[concepts] = name
            if concepts.exclude:
                included = self._name(f"{name}_included", self._ids(concepts.ids, concepts.descendants))
                excluded = self._name(f"{name}_excluded", self._ids(concepts.exclude, concepts.descendants))
                parts = (_concept_ids_of(included), _concept_ids_of(excluded))
                self._name(name, Combined(SetOperator.EXCEPT, parts))
            else:
                self._name(name, self._ids(concepts.ids, concepts.descendants))
        return _concept_ids_of(self._sets[concepts])

    def _ids(self, ids: Sequence[int], descendants: bool) -> Combined:
        parts = [Select(columns=(("concept_id", CastTo(Value(each), SqlType.BIGINT)),)) for each in ids]
        if descendants:
            schema = self._layout.vocabulary_schema or self._layout.schema
            below = Select(
                columns=(("concept_id", CastTo(Ref("a", "descendant_concept_id"), SqlType.BIGINT)),),
                source=Source("concept_ancestor", "a", schema),
                where=(InValues(Ref("a", "ancestor_concept_id"), tuple(ids)),),
            )
            parts.insert(0, below)
        return Combined(SetOperator.UNION, tuple(parts))

    # Candidates.

    def _exposures(self) -> None:
        """Name the days on which a person begins a drug of a strategy, as (person_id, day, arm)."""
        table, started, concept = _RECORDS[Domain.DRUG]
        selects = []
        for arm, strategy in enumerate(self._trial.strategies):
            concepts = self._concepts(strategy.drugs)
            selects.append(
                Select(
                    columns=(
                        ("person_id", Ref("x", "person_id")),
                        ("day", _date("x", started)),
                        ("arm", Value(arm)),
                    ),
                    source=self._cdm(table, "x"),
                    joins=(Join(Source("people", "p"), _same_person("p", "x")),),
                    where=(InSelect(Ref("x", concept), concepts), Inverse(IsNull(Ref("x", started)))),
                )
            )
        self._name("exposures", Combined(SetOperator.UNION, tuple(selects)))

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
                    _same_person("x", "e"),
                    _at_least(Ref("e", "day"), day),
                    _at_most(Ref("e", "day"), _plus(day, time_zero.grace_days)),
                )
            )
            source, arm = Source("conditions", "x"), Ref("e", "arm")
            joins = (Join(Source("exposures", "e"), within),)
            words = f"with a drug of a strategy within {time_zero.grace_days} days"
        candidates = Select(
            columns=(
                ("person_id", person),
                ("day", day),
                ("start", _plus(day, time_zero.grace_days)),
                ("arm", Aggregated(Aggregate.MIN, arm)),
                ("arms", Aggregated(Aggregate.COUNT_DISTINCT, arm)),
            ),
            source=source,
            joins=joins,
            group_by=(person, day),
        )
        self._steps.append((words, self._name("candidates", candidates)))
        earlier: list[Expression] = [_same_person("e", "c"), _below(Ref("e", "day"), Ref("c", "day"))]
        words = "without an earlier drug of any strategy"
        if time_zero.washout_days is not None:
            earlier.append(_at_least(Ref("e", "day"), _plus(Ref("c", "day"), -time_zero.washout_days)))
            words = f"without a drug of any strategy in the {time_zero.washout_days} days before"
        used = Select(columns=_ONE, source=Source("exposures", "e"), where=tuple(earlier))
        self._step(words, Inverse(ExistsIn(used)))
        self._step("with a drug of one strategy only", _equal(Ref("c", "arms"), Value(1)))

    def _first_condition(self, concepts: ConceptSet) -> None:
        table, started, concept = _RECORDS[Domain.CONDITION]
        person = Ref("x", "person_id")
        first = Select(
            columns=(("person_id", person), ("day", Aggregated(Aggregate.MIN, _date("x", started)))),
            joins=(Join(Source("people", "p"), _same_person("p", "x")),),
            where=(InSelect(Ref("x", concept), self._concepts(concepts)),),
            source=self._cdm(table, "x"),
            group_by=(person,),
        )
        self._steps.append((f"with condition {concepts.name}", self._name("conditions", first)))

    def _step(self, words: str, condition: Expression) -> None:
        """Keep the candidates that meet a condition, as a line of the attrition."""
        before = self._steps[-1][1]
        kept = Select(columns=_WITH_ARMS, source=Source(before, "c"), where=(condition,))
        self._steps.append((words, self._name(f"step_{len(self._steps)}", kept)))

    # Eligibility.

    def _eligible(self) -> None:
        eligibility = self._trial.eligibility
        if eligibility.age is not None:
            least, most = eligibility.age
            age = Infix(YearOf(Ref("c", "day")), Operator.MINUS, Ref("p", "year_of_birth"))
            aged = (_same_person("p", "c"), _at_least(age, Value(least)), _at_most(age, Value(most)))
            person = Select(columns=_ONE, source=self._cdm("person", "p"), where=aged)
            self._step(f"aged {least} to {most}", ExistsIn(person))
        if eligibility.observation_days_before is not None:
            days = eligibility.observation_days_before
            self._step(f"observed for {days} days before time zero", self._observed("day", days))
        for criterion in eligibility.criteria:
            self._step(criterion.words, self._criterion(criterion))
        if self._trial.time_zero.condition is not None:
            self._step("free of the outcome, alive and observed when follow-up starts", self._at_landmark())

    def _observed(self, column: str, days: int) -> Expression:
        """Return whether a period of observation holds a candidate's day and so many days before it."""
        day = Ref("c", column)
        covers = (
            _same_person("o", "c"),
            _at_most(_date("o", "observation_period_start_date"), _plus(day, -days)),
            _at_least(_date("o", "observation_period_end_date"), day),
        )
        return ExistsIn(Select(columns=_ONE, source=self._cdm("observation_period", "o"), where=covers))

    def _criterion(self, criterion: Criterion) -> Expression:
        table, started, concept = _RECORDS[criterion.domain]
        where = (
            _same_person("x", "c"),
            InSelect(Ref("x", concept), self._concepts(criterion.concepts)),
            *_window(_date("x", started), criterion.from_day, criterion.to_day),
        )
        records = ExistsIn(Select(columns=_ONE, source=self._cdm(table, "x"), where=where))
        return records if criterion.present else Inverse(records)

    def _at_landmark(self) -> Expression:
        """Return whether a candidate has neither the outcome nor death up to the start of follow-up."""
        died = Select(
            columns=_ONE,
            source=self._cdm("death", "x"),
            where=(_same_person("x", "c"), _at_most(_date("x", "death_date"), Ref("c", "start"))),
        )
        conditions: list[Expression] = [Inverse(ExistsIn(died))]
        if self._trial.outcome.conditions is not None:
            table, started, concept = _RECORDS[Domain.CONDITION]
            day = _date("x", started)
            event = Select(
                columns=_ONE,
                source=self._cdm(table, "x"),
                where=(
                    _same_person("x", "c"),
                    InSelect(Ref("x", concept), self._concepts(self._trial.outcome.conditions)),
                    _above(day, Ref("c", "day")),
                    _at_most(day, Ref("c", "start")),
                ),
            )
            conditions.append(Inverse(ExistsIn(event)))
        if self._trial.eligibility.observation_days_before is not None:
            conditions.append(self._observed("start", 0))
        return AllOf(tuple(conditions))

    # The table.

    def _table(self) -> Select:
        trial = self._trial
        arms = [
            (_equal(Ref("c", "arm"), Value(arm)), Value(strategy.name))
            for arm, strategy in enumerate(trial.strategies)
        ]
        strategy = CastTo(CaseWhen(tuple(arms[:-1]), arms[-1][1]), SqlType.TEXT)
        columns: list[tuple[str, Expression]] = [(TREATMENT_COLUMN, strategy)]
        joins: list[Join] = [Join(self._cdm("person", "p"), _same_person("p", "c"))]
        columns.append((trial.outcome.name, self._outcome(joins)))
        for index, covariate in enumerate(trial.covariates, start=1):
            columns += self._covariate(covariate, f"covariate_{index}", joins)
        return Select(
            columns=tuple(columns),
            source=Source("cohort", "c"),
            joins=tuple(joins),
            order_by=(Ref("c", "person_id"),),
        )

    def _per_person(
        self,
        name: str,
        joins: list[Join],
        *,
        source: Source,
        value: tuple[str, Expression],
        where: Sequence[Expression],
    ) -> Ref:
        """Name an aggregate over the records of each person of the cohort, and join it; return its column."""
        person = Ref("c", "person_id")
        rows = Select(
            columns=(("person_id", person), value),
            source=Source("cohort", "c"),
            joins=(Join(source, _same_person(source.alias, "c")),),
            where=tuple(where),
            group_by=(person,),
        )
        joins.append(Join(Source(self._name(name, rows), name), _same_person(name, "c"), outer=True))
        return Ref(name, value[0])

    def _outcome(self, joins: list[Join]) -> Expression:
        """Return 1 with the event, 0 without it, NULL if it is unknown.

        A condition is unknown if observation ends before the last day, whatever happened until then: else an
        event would be on record more often than its absence. A death that ends the observation completes it.
        Death itself, and every event before a switch, counts.
        """
        outcome, censoring = self._trial.outcome, self._trial.censoring
        last = _plus(Ref("c", "start"), outcome.days)
        ends = Censoring.END_OF_OBSERVATION in censoring
        observed_to = self._observed_to(joins) if ends else None
        death = None
        if outcome.conditions is None or ends:
            death = self._first_day("deaths", joins, self._cdm("death", "x"), "death_date", ())
        if outcome.conditions is None and death is not None:
            event_day = death
            event: Expression = Inverse(IsNull(death))
            if observed_to is not None:
                event = AllOf((event, _at_most(death, observed_to)))
        else:
            table, started, concept = _RECORDS[Domain.CONDITION]
            concepts = self._concepts(outcome.conditions) if outcome.conditions is not None else None
            chosen = () if concepts is None else (InSelect(Ref("x", concept), concepts),)
            event_day = self._first_day("events", joins, self._cdm(table, "x"), started, chosen)
            event = Inverse(IsNull(event_day))
        cases: list[tuple[Expression, Expression]] = []
        if Censoring.SWITCH in censoring:
            other = Inverse(_equal(Ref("x", "arm"), Ref("c", "arm")))
            switch = self._first_day("switches", joins, Source("exposures", "x"), "day", (other,))
            before = CaseWhen(((event, _below(switch, event_day)),), _equal(Value(1), Value(1)))
            cases.append((AllOf((Inverse(IsNull(switch)), before)), Value(None)))
        if observed_to is not None and death is not None and outcome.conditions is not None:
            died = AllOf((Inverse(IsNull(death)), _at_most(death, observed_to)))
            cases.append((AllOf((_below(observed_to, last), Inverse(died))), Value(None)))
        cases.append((event, Value(1)))
        if observed_to is not None and outcome.conditions is None:
            cases.append((_below(observed_to, last), Value(None)))
        return CastTo(CaseWhen(tuple(cases), Value(0)), SqlType.INTEGER)

    def _first_day(
        self, name: str, joins: list[Join], source: Source, column: str, chosen: Sequence[Expression]
    ) -> Ref:
        """Name the first day of follow-up on which a person has one of the chosen records."""
        day, start = _date("x", column), Ref("c", "start")
        within = (_above(day, start), _at_most(day, _plus(start, self._trial.outcome.days)))
        first = ("day", Aggregated(Aggregate.MIN, day))
        return self._per_person(name, joins, source=source, value=first, where=(*chosen, *within))

    def _observed_to(self, joins: list[Join]) -> Ref:
        begins, ends = _date("o", "observation_period_start_date"), _date("o", "observation_period_end_date")
        start = Ref("c", "start")
        return self._per_person(
            "observed",
            joins,
            source=self._cdm("observation_period", "o"),
            value=("day", Aggregated(Aggregate.MAX, ends)),
            where=(_at_most(begins, start), _at_least(ends, start)),
        )

    def _count(self, name: str, joins: list[Join], source: Source, where: Sequence[Expression]) -> Ref:
        records = ("value", Aggregated(Aggregate.COUNT, Ref("x", "person_id")))
        return self._per_person(name, joins, source=source, value=records, where=where)

    def _covariate(
        self, covariate: AbstractCovariate, name: str, joins: list[Join]
    ) -> list[tuple[str, Expression]]:
        match covariate:
            case AgeAtBaseline():
                age = Infix(YearOf(Ref("c", "day")), Operator.MINUS, Ref("p", "year_of_birth"))
                values: tuple[Expression, ...] = (CastTo(age, SqlType.INTEGER),)
            case Sex():
                gender = Ref("p", "gender_concept_id")
                cases = (
                    (_equal(gender, Value(MALE)), Value("male")),
                    (_equal(gender, Value(FEMALE)), Value("female")),
                )
                values = (CastTo(CaseWhen(cases, Value("other")), SqlType.TEXT),)
            case VisitCount():
                table, started = _VISITS
                window = _window(_date("x", started), covariate.from_day, covariate.to_day)
                count = self._count(name, joins, self._cdm(table, "x"), window)
                values = (CastTo(CaseWhen(((IsNull(count), Value(0)),), count), SqlType.INTEGER),)
            case AnyRecord():
                table, started, concept = _RECORDS[covariate.domain]
                where = (
                    InSelect(Ref("x", concept), self._concepts(covariate.concepts)),
                    *_window(_date("x", started), covariate.from_day, covariate.to_day),
                )
                count = self._count(name, joins, self._cdm(table, "x"), where)
                values = (CaseWhen(((IsNull(count), Value(0)),), Value(1)),)
            case LastMeasurement():
                measured = self._last_measurement(covariate, name, joins)
                values = (
                    CaseWhen(((IsNull(measured), Value(float(covariate.if_missing))),), measured),
                    CaseWhen(((IsNull(measured), Value(0)),), Value(1)),
                )
            case _:
                raise TypeError(f"{type(covariate).__name__} has no SQL")
        return list(zip(covariate.columns, values, strict=True))

    def _last_measurement(self, covariate: LastMeasurement, name: str, joins: list[Join]) -> Ref:
        table, taken, concept = _MEASUREMENTS
        person, day, number = Ref("c", "person_id"), _date("x", taken), Ref("x", "value_as_number")
        where: list[Expression] = [
            InSelect(Ref("x", concept), self._concepts(covariate.concepts)),
            *_window(day, covariate.from_day, covariate.to_day),
            Inverse(IsNull(number)),
        ]
        if covariate.units:
            where.append(InValues(Ref("x", "unit_concept_id"), covariate.units))
        # Of several on the last day, the one that was entered last: the same one at every reading.
        latest = RowNumber((person,), ((day, True), (Ref("x", "measurement_id"), True)))
        rows = Select(
            columns=(("person_id", person), ("value", CastTo(number, SqlType.DOUBLE)), ("place", latest)),
            source=Source("cohort", "c"),
            joins=(Join(self._cdm(table, "x"), _same_person("x", "c")),),
            where=tuple(where),
        )
        on = AllOf((_same_person(name, "c"), _equal(Ref(name, "place"), Value(1))))
        joins.append(Join(Source(self._name(name, rows), name), on, outer=True))
        return Ref(name, "value")


_ONE: tuple[tuple[str, Expression], ...] = (("one", Value(1)),)
_CANDIDATE: tuple[tuple[str, Expression], ...] = tuple(
    (name, Ref("c", name)) for name in ("person_id", "day", "start", "arm")
)
_WITH_ARMS = (*_CANDIDATE, ("arms", Ref("c", "arms")))


def _concept_ids_of(name: str) -> Select:
    return Select(columns=(("concept_id", Ref("s", "concept_id")),), source=Source(name, "s"))


def _window(day: Expression, from_day: int | None, to_day: int) -> tuple[Expression, ...]:
    """Return the conditions that a day is in a window around a candidate's time zero."""
    zero = Ref("c", "day")
    latest = _at_most(day, _plus(zero, to_day))
    return (latest,) if from_day is None else (_at_least(day, _plus(zero, from_day)), latest)
