"""Missing covariates: counts of missing values, the values that replace them, and indicator columns.

The dictionary declares for each covariate what happens where it is missing. With "indicator" a constant
inside its declared range takes the value's place, and a column that is 1 there enters every formula that uses
the variable. With "impute" the value is drawn (`programs.imputation`). One round counts the missing values of
these variables over all silos; a variable without any is used as it is, and if there are none at all the
study goes on as if nothing had been declared.

A covariate over time has one column per period, and each is counted and imputed by itself. A person who left
before the period has no value there: that is not a missing one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.initial.design import UNIT, Range
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import GradientBoostedTrees, PerSilo, Pilot, SuperLearner, formulas
from fedtmle.initial.syntax import Formula, Name
from fedtmle.initial.variables import Variable, Variables
from fedtmle.model.table import (
    AbstractBoundedColumns,
    AnyTable,
    Factor,
    PerTable,
    Result,
    Table,
    over_blocks,
    seen_through,
)
from fedtmle.programs.study import Study
from fedtmle.protocol.query import CountCell, Flow, IntegerSums, Local, Phase
from fedtmle.protocol.sums import TallyQuery
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.regimes.timeline import Timeline
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.followup import FollowUp
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, Bools

# The outcome as imputation models read it: columns without missing values, in known ranges.
#
# An imputation model must hold the outcome; without it, imputed covariates would be unrelated to the outcome
# and the estimate too near to "no effect". The columns depend on the kind of outcome:
#
# * A point outcome is itself. If some are missing, two columns hold the outcome, with its least value where
#   it is missing, and whether it was observed.
# * Time to an event gives the indicator of each cause and a function of the period of exit L. With a hazard
#   logit lambda(t) = alpha_t + beta x the density of (L, event) given x depends on x by
#
#       beta 1(event) - sum_{t<=L} log(1 + exp(alpha_t + beta x)),
#
#   so that for a binary x the log odds given the follow-up are linear in the event's indicator and in a
#   function of L. White and Royston (2009) derive the same for Cox's model, where that function is the
#   cumulative hazard at the end of follow-up, and replace it by the Nelson-Aalen estimate. Here it is a
#   polynomial of second degree in L/K, whose coefficients are fitted: the grid is public, and no life table
#   must be disclosed. If the study models censoring, an indicator of being censored before the last period is
#   there for the same reason.
# * Treatment over time gives the same columns, from the columns of the periods, and the outcome at the end.


class AbstractOutcomeColumns(ABC):
    """Columns that hold the outcome for imputation models."""

    @property
    @abstractmethod
    def ranges(self) -> dict[str, Range]:
        """The names of the columns, with their ranges."""

    @abstractmethod
    def of(self, table: Table) -> dict[str, Array]:
        """Return the columns by name, shape (N,) each."""


@final
@dataclass(frozen=True, kw_only=True)
class PartlyObserved(AbstractOutcomeColumns):
    """A point outcome of which some are missing."""

    outcome: str
    bounds: Range

    @property
    def ranges(self) -> dict[str, Range]:
        return {f"{self.outcome} observed": UNIT, f"{self.outcome} or least": self.bounds}

    def of(self, table: Table) -> dict[str, Array]:
        values = table.numeric[self.outcome]
        observed = ~np.isnan(values)
        columns = (observed.astype(np.float64), np.where(observed, values, self.bounds[0]))
        return dict(zip(self.ranges, columns, strict=True))


@final
@dataclass(frozen=True, kw_only=True)
class EndOfFollowUp(AbstractOutcomeColumns):
    """The event of each cause, being censored before the last period if ``censors``, L/K and its square."""

    follow_up: FollowUp
    censors: bool

    @property
    def ranges(self) -> dict[str, Range]:
        event, causes = self.follow_up.event, range(1, len(self.follow_up.causes) + 1)
        names = [*(f"{event} of cause {j}" for j in causes), *([f"{event} censored"] * self.censors)]
        return dict.fromkeys((*names, *_exit_names(self.follow_up.time)), UNIT)

    def of(self, table: Table) -> dict[str, Array]:
        seen, periods = self.follow_up.read(table), self.follow_up.periods
        ends = [seen.cause == j for j in range(1, len(self.follow_up.causes) + 1)]
        ends += [(seen.cause == 0) & (seen.last < periods)] * self.censors
        share = seen.last / periods
        columns = (*(end.astype(np.float64) for end in ends), share, share * share)
        return dict(zip(self.ranges, columns, strict=True))


@final
@dataclass(frozen=True, kw_only=True)
class EndOfPeriods(AbstractOutcomeColumns):
    """Treatment over time: the event or the outcome at the end, being censored, L/K and its square.

    L is the last period at risk. It is left out if nobody can leave before the last period. The outcome at
    the end has its least value for people who are censored.
    """

    timeline: Timeline
    bounds: Range

    @property
    def ranges(self) -> dict[str, Range]:
        timeline = self.timeline
        outcome = f"{timeline.outcome} or least"
        names = {f"{timeline.event} in any period": UNIT} if timeline.event else {outcome: self.bounds}
        if timeline.censoring is not None:
            names[f"{timeline.censoring} in any period"] = UNIT
        leaves = timeline.event is not None or timeline.censoring is not None
        return names | (dict.fromkeys(_exit_names(timeline.treatment), UNIT) if leaves else {})

    def of(self, table: Table) -> dict[str, Array]:
        timeline, followed = self.timeline, self.timeline.follow(table)
        if timeline.event is None:
            values = table.numeric[timeline.outcome]
            columns = [np.where(followed.uncensored[-1], values, self.bounds[0])]
        else:
            periods = range(1, timeline.periods + 1)
            events = [timeline.event_in(table, t) & followed.uncensored[t - 1] for t in periods]
            columns = [np.any(events, axis=0).astype(np.float64)]
        if timeline.censoring is not None:
            censored = followed.at_risk & ~followed.uncensored
            columns.append(np.any(censored, axis=0).astype(np.float64))
        share = followed.at_risk.sum(axis=0) / timeline.periods
        return dict(zip(self.ranges, (*columns, share, share * share), strict=False))


def _exit_names(name: str) -> tuple[str, str]:
    """Return the names of L/K and of its square."""
    return f"{name} until exit", f"{name} until exit squared"


def outcome_columns(study: Study, missing_outcomes: int) -> AbstractOutcomeColumns | None:
    """Return the columns that hold the outcome; None if it is a complete point outcome, which is itself."""
    target = study.target
    if isinstance(target, AbstractTimeEffect):
        return EndOfFollowUp(follow_up=target.follow_up, censors=study.censoring_model is not None)
    if isinstance(target, AbstractRegimeEffect) and study.timeline is not None:
        return EndOfPeriods(timeline=study.timeline, bounds=study.outcome_bounds)
    if missing_outcomes:
        return PartlyObserved(outcome=target.outcome, bounds=study.outcome_bounds)
    return None


Levels = Mapping[str, tuple[str, ...]]
MOST_RECORDS = 1 << 40  # public bound of the records of all silos


def is_missing(name: str) -> str:
    """Return the name of the column that is 1 where a variable is missing, else 0."""
    return f"{name} missing"


def has_left(name: str) -> str:
    """Return the name of the column that is 1 for people who left before the period of a column."""
    return f"{name} after exit"


@final
@dataclass(frozen=True, kw_only=True)
class MissingColumns(AbstractBoundedColumns[Table]):
    """Whether each of some variables is missing, and whether two of them are.

    For columns of one period, of those at risk in it: whether they have no value, and who is at risk. Such
    columns are not counted in pairs.
    """

    variables: tuple[str, ...]
    timeline: Timeline | None = None

    @property
    def judged(self) -> Sequence[int]:
        """Those at risk, who differ by the people that leave; the other counts have a floor."""
        return range(len(self.names) - len(self.periods), len(self.names))

    @property
    def label(self) -> str:
        return "missing values of " + ", ".join(self.variables)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        whole = [k for k, name in enumerate(self.variables) if self.period_of(name) is None]
        return [(j, k) for j in whole for k in whole if j < k]

    def period_of(self, name: str) -> int | None:
        return None if self.timeline is None else self.timeline.period_of(name)

    @property
    def periods(self) -> tuple[int, ...]:
        """The periods of which there is a column, in rising order."""
        return tuple(sorted({t for t in map(self.period_of, self.variables) if t is not None}))

    @property
    def names(self) -> tuple[str, ...]:
        pairs = (f"{self.variables[j]} and {self.variables[k]}" for j, k in self.pairs)
        return (*self.variables, *pairs, *(f"at risk in period {t}" for t in self.periods))

    @property
    def exponents(self) -> tuple[int, ...]:
        return (1,) * len(self.names)

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        followed = None if self.timeline is None else self.timeline.follow(piece)
        found = [missing_mask(piece, name) for name in self.variables]
        at_risk: list[Bools] = []
        if followed is not None:
            for k, period in enumerate(map(self.period_of, self.variables)):
                found[k] = found[k] if period is None else found[k] & followed.at_risk[period - 1]
            at_risk = [followed.at_risk[t - 1] for t in self.periods]
        masks = [mask.astype(np.float64) for mask in (*found, *at_risk)]
        count = len(self.variables)
        return np.stack([*masks[:count], *(masks[j] * masks[k] for j, k in self.pairs), *masks[count:]])


def missing_mask(table: Table, name: str) -> Bools:
    """Return where a variable is missing, as numbers or as a factor, shape (N,)."""
    if name in table.numeric:
        return np.isnan(table.numeric[name])
    return table.factors[name].codes < 0


@dataclass(frozen=True, kw_only=True)
class MissingCounts:
    """The pooled number of missing values of each variable that may have some, of ``n`` records.

    ``doubles`` maps a variable to one before it that is missing in just the same records. ``at_risk`` has
    the number of people at risk for each column of one period.
    """

    n: int
    counts: Mapping[str, int]
    doubles: Mapping[str, str] = field(default_factory=dict)
    at_risk: Mapping[str, int] = field(default_factory=dict)

    def affected(self, study: Study, how: str) -> tuple[str, ...]:
        """Return the columns with missing values that are declared to be handled in this way."""
        return tuple(n for n, count in self.counts.items() if count and study.variable_of(n).missing == how)

    def of(self, name: str) -> int:
        """Return how many records should have a value of a column."""
        return self.at_risk.get(name, self.n)


def count_missing(study: Study, n: int) -> Flow[MissingCounts]:
    """Ask for the number of missing values, in one round; refuse a variable that no record has."""
    columns = MissingColumns(variables=study.may_be_missing, timeline=study.timeline)
    variables, pairs, periods = columns.variables, columns.pairs, columns.periods
    first = len(variables) + len(pairs)  # the place of the first number at risk
    places = {name: first + periods.index(t) for name in variables if (t := columns.period_of(name))}
    cells = [
        CountCell(k, of=places.get(name), floor="min_missing", rest_floor="min_missing")
        for k, name in enumerate(variables)
    ]
    cells += [CountCell(k, floor="min_support", rest_floor="") for k in dict.fromkeys(places.values())]
    pooled = yield TallyQuery(columns=columns, n=n, counts=tuple(cells))
    values = [int(value) for value in pooled.values()]
    found = MissingCounts(
        n=n,
        counts=dict(zip(variables, values, strict=False)),
        at_risk={name: values[place] for name, place in places.items()},
        doubles=_doubles(columns, values),
    )
    for name, count in found.counts.items():
        if count and count == found.of(name):
            where = "in every record of every silo" if name not in places else "for everyone at risk in it"
            raise InputError(f"variables: '{name}' is missing {where}; take it out of the formulas")
    return found


def _doubles(columns: MissingColumns, values: Sequence[int]) -> dict[str, str]:
    """Return the variables that are missing in just the records in which another one before is."""
    doubles: dict[str, str] = {}
    for (j, k), both in zip(columns.pairs, values[len(columns.variables) :], strict=False):
        if both == values[j] == values[k] > 0:
            doubles.setdefault(columns.variables[k], columns.variables[j])
    return doubles


@final
@dataclass(frozen=True, kw_only=True)
class OmittedQuery(IntegerSums):
    """The number of records that the study leaves out, because their treatment is missing."""

    shifts = (0,)
    row_units = 1
    largest = (MOST_RECORDS,)
    explanation = "the number of records without a treatment, which the study leaves out"

    n: int
    phase: Phase = Phase.NUISANCE

    def cells(self) -> tuple[CountCell, ...]:
        return (CountCell(0, floor="min_missing", rest_floor="min_missing"),)

    def answer(self, local: Local) -> Sums:
        return Sums((local.evaluate(_omitted),), self.shifts)


def _omitted(table: AnyTable) -> int:
    return table.omitted


def constant_for(variable: Variable) -> float:
    """Return the public constant that replaces a missing number; it is inside the declared range."""
    if variable.bounds is None or variable.kind == "binary":
        return 0.0
    middle = (variable.bounds[0] + variable.bounds[1]) / 2
    return math.floor(middle) if variable.kind == "count" else middle


@final
@dataclass(frozen=True, kw_only=True)
class Filled:
    """A view in which a constant replaces each missing value, and added columns mark where.

    A missing level of a factor becomes the first of its levels. ``outcome`` adds the columns by which
    imputation models read the outcome. With a ``timeline``, columns of one period are filled after a
    person's exit, too, and another added column marks these people.
    """

    constants: Mapping[str, float]
    levels: Levels
    outcome: AbstractOutcomeColumns | None = None
    timeline: Timeline | None = None
    cache: PerTable[Table] = field(init=False, default_factory=PerTable, compare=False, repr=False)

    def of(self, rows: AnyTable) -> AnyTable:
        return seen_through(self.cache, rows, self.fill)

    def fill(self, table: Table) -> Table:
        """Return the rows with their missing values filled."""
        numeric, factors = dict(table.numeric), dict(table.factors)
        timeline = self.timeline
        followed = None if timeline is None else timeline.follow(table)
        for name, constant in self.constants.items():
            if name not in table.numeric and name not in table.factors:
                continue  # a column of one period that no model reads
            mask = missing_mask(table, name)
            period = None if timeline is None else timeline.period_of(name)
            is_here = None if followed is None or period is None else followed.at_risk[period - 1]
            if is_here is not None:
                numeric[has_left(name)] = (~is_here).astype(np.float64)
            numeric[is_missing(name)] = (mask if is_here is None else mask & is_here).astype(np.float64)
            if name in table.numeric:
                numeric[name] = np.where(mask, constant, table.numeric[name])
            if name in table.factors:
                codes = table.factors[name].recode(self.levels[name])
                factors[name] = Factor(np.where(mask, 0, codes), self.levels[name])
        if self.outcome is not None:
            numeric |= self.outcome.of(table)
        return Table(n_rows=table.n_rows, numeric=numeric, factors=factors)


def filled(study: Study, counts: MissingCounts, levels: Levels) -> Filled:
    """Return the view that fills the variables with missing values.

    If some are imputed over time, all columns of the periods are filled: imputation models use them.
    """
    names = [name for name, count in counts.counts.items() if count and name != study.target.outcome]
    constants = {name: constant_for(study.variable_of(name)) for name in names}
    if not counts.affected(study, "impute"):
        return Filled(constants=constants, levels=levels)
    for column, name in columns_over_time(study).items():
        constants[column] = constant_for(study.variables[name])
    return Filled(
        constants=constants,
        levels=levels_over_time(study, levels),
        outcome=outcome_columns(study, counts.counts.get(study.target.outcome, 0)),
        timeline=study.timeline,
    )


def columns_over_time(study: Study) -> dict[str, str]:
    """Return the columns of treatment and covariates in each period, each with its variable over time."""
    timeline = study.timeline
    if timeline is None:
        return {}
    left_out = (timeline.outcome, timeline.censoring)
    names = [name for name in timeline.over_time if name in study.used_variables and name not in left_out]
    names = list(dict.fromkeys((timeline.treatment, *names)))
    return {column: name for name in names for column in timeline.over_time[name]}


def levels_over_time(study: Study, levels: Levels) -> dict[str, tuple[str, ...]]:
    """Return the levels of all factors, those of the columns of each period included."""
    columns = columns_over_time(study)
    return {**levels, **{column: levels[name] for column, name in columns.items() if name in levels}}


def with_indicators(study: Study, counts: MissingCounts) -> Study:
    """Return the study with an indicator in every formula that uses a variable with missing values.

    Variables that are missing in the same records share one indicator.
    """
    variables = study.variables
    names = counts.affected(study, "indicator")
    if not names:
        return study

    def added(formula: Formula) -> Formula:
        used = [name for name in names if name in (*formula.numeric_names, *formula.factor_names)]
        indicators = dict.fromkeys(is_missing(counts.doubles.get(name, name)) for name in used)
        return Formula(formula.intercept, (*formula.terms, *((Name(name),) for name in indicators)))

    declared = {is_missing(name): Variable(kind="binary") for name in names}
    models = {f"{role}_model": _with_formula(model, added) for role, model in study.models.items()}
    return replace(study, variables=Variables({**variables, **declared}), **models)


def _with_formula(model: Any, change: Callable[[Formula], Formula]) -> Any:
    """Return a nuisance model with its formulas changed; a model that is fitted already stays as it is."""
    match model:
        case GLM():
            return replace(model, formula=str(change(model.parsed)))
        case GradientBoostedTrees():
            return replace(model, formula=str(change(model.parsed)))
        case Pilot() if not model.is_public:
            return replace(model, model=_with_formula(model.model, change))
        case PerSilo(inner):
            return PerSilo(_with_formula(inner, change))
        case SuperLearner(learners):
            return replace(model, learners=tuple(_with_formula(each, change) for each in learners))
        case _:
            return model


def refuse_public(study: Study, names: Sequence[str]) -> None:
    """Refuse a public model that uses a variable with an indicator, which it cannot have been fitted with."""
    for role, model in study.models.items():
        fitted = set(formulas(model, public=True)) - set(formulas(model))
        for formula in fitted:
            used = [name for name in names if name in (*formula.numeric_names, *formula.factor_names)]
            if used:
                raise InputError(
                    f"{role}_model: a model that is fitted already uses '{used[0]}', which some records "
                    'lack; declare missing = "impute", or fit the model in the study'
                )
