"""A target trial as two SQL statements over an OMOP CDM: one for the attrition, one for the study's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.data.sql import (
    Aggregate,
    Aggregated,
    AllOf,
    CaseWhen,
    CastTo,
    Combined,
    Dialect,
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
from fedtmle.trials.elements import (
    AbstractCovariate,
    AgeAtBaseline,
    AnyRecord,
    Censoring,
    Domain,
    LastMeasurement,
    Sex,
    VisitCount,
)
from fedtmle.trials.steps import (
    MEASUREMENTS,
    RECORDS,
    VISITS,
    CdmLayout,
    NamedSelects,
    above,
    at_least,
    at_most,
    below,
    date,
    equal,
    name_cohort,
    plus,
    same_person,
    window,
)
from fedtmle.trials.trial import PERSON_COLUMN, TREATMENT_COLUMN, TargetTrial

# The table of a trial's cohort, as SQL: strategy, outcome and baseline covariates.

MALE, FEMALE = 8507, 8532  # standard concepts of gender


def select_table(trial: TargetTrial, selects: NamedSelects) -> Select:
    """Return the select of the table, a row per person of the select "cohort" in the order of person_id."""
    return _Table(trial, selects).select()


@final
class _Table:
    """Collects the joins of the table. Each adds an aggregate over the records of each person."""

    def __init__(self, trial: TargetTrial, selects: NamedSelects) -> None:
        self._trial, self._selects = trial, selects
        self._joins = [Join(selects.cdm("person", "p"), same_person("p", "c"))]

    def select(self) -> Select:
        trial = self._trial
        arms = [
            (equal(Ref("c", "arm"), Value(arm)), Value(strategy.name))
            for arm, strategy in enumerate(trial.strategies)
        ]
        strategy = CastTo(CaseWhen(tuple(arms[:-1]), arms[-1][1]), SqlType.TEXT)
        columns: list[tuple[str, Expression]] = [(TREATMENT_COLUMN, strategy)]
        if trial.outcome.period_days is None:
            columns.append((trial.outcome.name, self._outcome()))
        else:
            columns += zip(trial.outcome.variables, self._time_to_event(), strict=True)
        for index, covariate in enumerate(trial.covariates, start=1):
            columns += self._covariate(covariate, f"covariate_{index}")
        columns.append((PERSON_COLUMN, CastTo(Ref("c", "person_id"), SqlType.TEXT)))
        return Select(
            columns=tuple(columns),
            source=Source("cohort", "c"),
            joins=tuple(self._joins),
            order_by=(Ref("c", "person_id"),),
        )

    def _per_person(
        self,
        name: str,
        *,
        source: Source,
        value: tuple[str, Expression],
        where: Sequence[Expression],
    ) -> Ref:
        """Add a named select with an aggregate over each person's records, and join it; return its column."""
        person = Ref("c", "person_id")
        rows = Select(
            columns=(("person_id", person), value),
            source=Source("cohort", "c"),
            joins=(Join(source, same_person(source.alias, "c")),),
            where=tuple(where),
            group_by=(person,),
        )
        self._joins.append(
            Join(Source(self._selects.name(name, rows), name), same_person(name, "c"), outer=True)
        )
        return Ref(name, value[0])

    def _outcome(self) -> Expression:
        """Return 1 with the event, 0 without it, NULL if it is unknown.

        A condition as outcome is unknown whenever observation ends before the last day, even after an event;
        otherwise events would be known more often than their absence. Observation that ends with death
        counts as complete. If the outcome is death, a recorded death counts. Events before a switch count.
        """
        outcome, censoring = self._trial.outcome, self._trial.censoring
        last = plus(Ref("c", "start"), outcome.days)
        ends = Censoring.END_OF_OBSERVATION in censoring
        observed_to = self._observed_to() if ends else None
        death = None
        if outcome.conditions is None or ends:
            death = self._first_day("deaths", self._selects.cdm("death", "x"), "death_date", ())
        if outcome.conditions is None and death is not None:
            event_day = death
            event: Expression = Inverse(IsNull(death))
            if observed_to is not None:
                event = AllOf((event, at_most(death, observed_to)))
        else:
            table, started, concept = RECORDS[Domain.CONDITION]
            concepts = self._selects.concepts(outcome.conditions) if outcome.conditions is not None else None
            chosen = () if concepts is None else (InSelect(Ref("x", concept), concepts),)
            event_day = self._first_day("events", self._selects.cdm(table, "x"), started, chosen)
            event = Inverse(IsNull(event_day))
        cases: list[tuple[Expression, Expression]] = []
        if Censoring.SWITCH in censoring:
            other = Inverse(equal(Ref("x", "arm"), Ref("c", "arm")))
            switch = self._first_day("switches", Source("exposures", "x"), "day", (other,))
            before = CaseWhen(((event, below(switch, event_day)),), equal(Value(1), Value(1)))
            cases.append((AllOf((Inverse(IsNull(switch)), before)), Value(None)))
        if observed_to is not None and death is not None and outcome.conditions is not None:
            died = AllOf((Inverse(IsNull(death)), at_most(death, observed_to)))
            cases.append((AllOf((below(observed_to, last), Inverse(died))), Value(None)))
        cases.append((event, Value(1)))
        if observed_to is not None and outcome.conditions is None:
            cases.append((below(observed_to, last), Value(None)))
        return CastTo(CaseWhen(tuple(cases), Value(0)), SqlType.INTEGER)

    def _time_to_event(self) -> tuple[Expression, Expression]:
        """Return whether the event comes before the end of follow-up (1 or 0), and the day of the first.

        Follow-up ends with the last day, with the observation period, or with a switch. Death does not end
        it: a person who died has no event from then on.
        """
        outcome, censoring, start = self._trial.outcome, self._trial.censoring, Ref("c", "start")
        end: Expression = plus(start, outcome.days)
        ends = Censoring.END_OF_OBSERVATION in censoring
        death = None
        if outcome.conditions is None or ends:
            death = self._first_day("deaths", self._selects.cdm("death", "x"), "death_date", ())
        if outcome.conditions is not None:
            table, started, concept = RECORDS[Domain.CONDITION]
            chosen = (InSelect(Ref("x", concept), self._selects.concepts(outcome.conditions)),)
            event_day = self._first_day("events", self._selects.cdm(table, "x"), started, chosen)
        elif death is not None:
            event_day = death
        if ends and death is not None:
            observed_to = self._observed_to()
            stops: Expression = below(observed_to, end)
            if outcome.conditions is not None:
                died = AllOf((Inverse(IsNull(death)), at_most(death, observed_to)))
                stops = AllOf((stops, Inverse(died)))
            end = CaseWhen(((stops, observed_to),), end)
        if Censoring.SWITCH in censoring:
            other = Inverse(equal(Ref("x", "arm"), Ref("c", "arm")))
            switch = self._first_day("switches", Source("exposures", "x"), "day", (other,))
            first = AllOf((Inverse(IsNull(switch)), below(switch, end)))
            end = CaseWhen(((first, switch),), end)
        event = AllOf((Inverse(IsNull(event_day)), at_most(event_day, end)))
        until = Infix(CaseWhen(((event, event_day),), end), Operator.MINUS, start)
        is_event = CaseWhen(((event, Value(1)),), Value(0))
        return CastTo(is_event, SqlType.INTEGER), CastTo(until, SqlType.INTEGER)

    def _first_day(self, name: str, source: Source, column: str, chosen: Sequence[Expression]) -> Ref:
        """Add each person's first day of follow-up with one of the chosen records; return its column."""
        day, start = date("x", column), Ref("c", "start")
        within = (above(day, start), at_most(day, plus(start, self._trial.outcome.days)))
        first = ("day", Aggregated(Aggregate.MIN, day))
        return self._per_person(name, source=source, value=first, where=(*chosen, *within))

    def _observed_to(self) -> Ref:
        begins, ends = date("o", "observation_period_start_date"), date("o", "observation_period_end_date")
        start = Ref("c", "start")
        return self._per_person(
            "observed",
            source=self._selects.cdm("observation_period", "o"),
            value=("day", Aggregated(Aggregate.MAX, ends)),
            where=(at_most(begins, start), at_least(ends, start)),
        )

    def _count(self, name: str, source: Source, where: Sequence[Expression]) -> Ref:
        records = ("value", Aggregated(Aggregate.COUNT, Ref("x", "person_id")))
        return self._per_person(name, source=source, value=records, where=where)

    def _covariate(self, covariate: AbstractCovariate, name: str) -> list[tuple[str, Expression]]:
        match covariate:
            case AgeAtBaseline():
                age = Infix(YearOf(Ref("c", "day")), Operator.MINUS, Ref("p", "year_of_birth"))
                values: tuple[Expression, ...] = (CastTo(age, SqlType.INTEGER),)
            case Sex():
                gender = Ref("p", "gender_concept_id")
                cases = (
                    (equal(gender, Value(MALE)), Value("male")),
                    (equal(gender, Value(FEMALE)), Value("female")),
                )
                values = (CastTo(CaseWhen(cases, Value("other")), SqlType.TEXT),)
            case VisitCount():
                table, started = VISITS
                where = window(date("x", started), covariate.from_day, covariate.to_day)
                count, most = self._count(name, self._selects.cdm(table, "x"), where), Value(covariate.most)
                counted = CaseWhen(((IsNull(count), Value(0)), (above(count, most), most)), count)
                values = (CastTo(counted, SqlType.INTEGER),)
            case AnyRecord():
                table, started, concept = RECORDS[covariate.domain]
                where = (
                    InSelect(Ref("x", concept), self._selects.concepts(covariate.concepts)),
                    *window(date("x", started), covariate.from_day, covariate.to_day),
                )
                count = self._count(name, self._selects.cdm(table, "x"), where)
                values = (CaseWhen(((IsNull(count), Value(0)),), Value(1)),)
            case LastMeasurement():
                measured = self._last_measurement(covariate, name)
                values = (
                    CaseWhen(((IsNull(measured), Value(float(covariate.if_missing))),), measured),
                    CaseWhen(((IsNull(measured), Value(0)),), Value(1)),
                )
            case _:
                raise TypeError(f"{type(covariate).__name__} has no SQL")
        return list(zip(covariate.columns, values, strict=True))

    def _last_measurement(self, covariate: LastMeasurement, name: str) -> Ref:
        table, taken, concept = MEASUREMENTS
        person, day = Ref("c", "person_id"), date("x", taken)
        number = CastTo(Ref("x", "value_as_number"), SqlType.DOUBLE)
        least, largest = covariate.range
        where: list[Expression] = [
            InSelect(Ref("x", concept), self._selects.concepts(covariate.concepts)),
            *window(day, covariate.from_day, covariate.to_day),
            at_least(number, Value(least)),
            at_most(number, Value(largest)),
        ]
        if covariate.units:
            where.append(InValues(Ref("x", "unit_concept_id"), covariate.units))
        # Of several measurements on the last day the one entered last, so that every reading gives the same.
        latest = RowNumber((person,), ((day, True), (Ref("x", "measurement_id"), True)))
        rows = Select(
            columns=(("person_id", person), ("value", number), ("place", latest)),
            source=Source("cohort", "c"),
            joins=(Join(self._selects.cdm(table, "x"), same_person("x", "c")),),
            where=tuple(where),
        )
        on = AllOf((same_person(name, "c"), equal(Ref(name, "place"), Value(1))))
        self._joins.append(Join(Source(self._selects.name(name, rows), name), on, outer=True))
        return Ref(name, "value")


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
