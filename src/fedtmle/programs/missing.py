"""Missing covariates: counts of missing values, the values that replace them, and indicator columns.

The dictionary declares for each covariate what happens where it is missing. With "indicator" a constant
inside its declared range takes the value's place, and a column that is 1 there enters every formula that uses
the variable. With "impute" the value is drawn (`programs.imputation`). One round counts the missing values of
these variables over all silos; a variable without any is used as it is, and if there are none at all the
study goes on as if nothing had been declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM
from fedtmle.initial.pilot import Pilot
from fedtmle.initial.superlearner import PerSilo, SuperLearner, formulas
from fedtmle.initial.syntax import Formula, Name
from fedtmle.initial.trees import GradientBoostedTrees
from fedtmle.initial.variables import Variable, Variables
from fedtmle.model.exact import Sums
from fedtmle.model.statistics import AbstractBoundedColumns, Result
from fedtmle.model.table import AnyTable, Factor, PerTable, Table, over_blocks, seen_through
from fedtmle.model.types import Array, Bools
from fedtmle.programs.study import Study
from fedtmle.protocol.query import CountCell, Flow, IntegerSums, Local, Phase
from fedtmle.protocol.sums import TallyQuery

Levels = Mapping[str, tuple[str, ...]]
MOST_RECORDS = 1 << 40  # public bound of the records of all silos


def is_missing(name: str) -> str:
    """Return the name of the column that is 1 where a variable is missing, else 0."""
    return f"{name} missing"


@final
@dataclass(frozen=True, kw_only=True)
class MissingColumns(AbstractBoundedColumns[Table]):
    """Whether each of some variables is missing, and whether two of them are."""

    variables: tuple[str, ...]

    @property
    def label(self) -> str:
        return "missing values of " + ", ".join(self.variables)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        count = len(self.variables)
        return [(j, k) for j in range(count) for k in range(j + 1, count)]

    @property
    def names(self) -> tuple[str, ...]:
        pairs = (f"{self.variables[j]} and {self.variables[k]}" for j, k in self.pairs)
        return (*self.variables, *pairs)

    @property
    def exponents(self) -> tuple[int, ...]:
        return (1,) * len(self.names)

    @property
    def judged(self) -> Sequence[int]:
        return ()  # counts, which have a floor

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        masks = [missing_mask(piece, name).astype(np.float64) for name in self.variables]
        return np.stack([*masks, *(masks[j] * masks[k] for j, k in self.pairs)])


def missing_mask(table: Table, name: str) -> Bools:
    """Return where a variable is missing, as numbers or as a factor, shape (N,)."""
    if name in table.numeric:
        return np.isnan(table.numeric[name])
    return table.factors[name].codes < 0


@dataclass(frozen=True, kw_only=True)
class MissingCounts:
    """The pooled number of missing values of each variable that may have some, of ``n`` records.

    ``doubles`` maps a variable to one before it that is missing in just the same records.
    """

    n: int
    counts: Mapping[str, int]
    doubles: Mapping[str, str] = field(default_factory=dict)

    def affected(self, variables: Variables, how: str) -> tuple[str, ...]:
        """Return the variables with missing values that are declared to be handled in this way."""
        return tuple(n for n, count in self.counts.items() if count and variables[n].missing == how)


def count_missing(study: Study, n: int) -> Flow[MissingCounts]:
    """Ask for the number of missing values, in one round; refuse a variable that no record has."""
    columns = MissingColumns(variables=study.may_be_missing)
    cells = tuple(
        CountCell(k, floor="min_missing", rest_floor="min_missing") for k in range(len(columns.variables))
    )
    pooled = yield TallyQuery(columns=columns, n=n, counts=cells)
    values = [int(value) for value in pooled.values()]
    counts = dict(zip(columns.variables, values, strict=False))
    for name, count in counts.items():
        if count == n:
            raise InputError(
                f"variables: '{name}' is missing in every record of every silo; take it out of the formulas"
            )
    doubles: dict[str, str] = {}
    for (j, k), both in zip(columns.pairs, values[len(counts) :], strict=True):
        if both == values[j] == values[k] > 0:
            doubles.setdefault(columns.variables[k], columns.variables[j])
    return MissingCounts(n=n, counts=counts, doubles=doubles)


@final
@dataclass(frozen=True, kw_only=True)
class OmittedQuery(IntegerSums):
    """The number of records that the study leaves out, because their treatment is missing."""

    n: int
    phase: Phase = Phase.NUISANCE

    @property
    def shifts(self) -> tuple[int, ...]:
        return (0,)

    @property
    def row_units(self) -> int:
        return 1

    @property
    def largest(self) -> tuple[int, ...]:
        return (MOST_RECORDS,)

    @property
    def explanation(self) -> str:
        return "the number of records without a treatment, which the study leaves out"

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

    A missing level of a factor becomes the first of its levels. ``outcome`` names the outcome if some
    are missing: two columns then hold the outcome, with its least value where it is missing, and whether it
    was observed.
    """

    constants: Mapping[str, float]
    levels: Levels
    outcome: tuple[str, float] | None = None
    cache: PerTable[Table] = field(init=False, default_factory=PerTable, compare=False, repr=False)

    def of(self, rows: AnyTable) -> AnyTable:
        return seen_through(self.cache, rows, self.fill)

    def fill(self, table: Table) -> Table:
        """Return the rows with their missing values filled."""
        numeric, factors = dict(table.numeric), dict(table.factors)
        for name, constant in self.constants.items():
            mask = missing_mask(table, name)
            numeric[is_missing(name)] = mask.astype(np.float64)
            if name in table.numeric:
                numeric[name] = np.where(mask, constant, table.numeric[name])
            if name in table.factors:
                codes = table.factors[name].recode(self.levels[name])
                factors[name] = Factor(np.where(mask, 0, codes), self.levels[name])
        if self.outcome is not None:
            name, low = self.outcome
            observed = ~np.isnan(table.numeric[name])
            numeric[observed_name(name)] = observed.astype(np.float64)
            numeric[filled_name(name)] = np.where(observed, table.numeric[name], low)
        return Table(n_rows=table.n_rows, numeric=numeric, factors=factors)


def observed_name(outcome: str) -> str:
    """Return the name of the column that is 1 where the outcome was observed."""
    return f"{outcome} observed"


def filled_name(outcome: str) -> str:
    """Return the name of the outcome's column with its least value where it is missing."""
    return f"{outcome} or least"


def filled(study: Study, counts: MissingCounts, levels: Levels) -> Filled:
    """Return the view that fills the variables with missing values."""
    variables = study.variables
    names = [name for name, count in counts.counts.items() if count and name in variables]
    outcome = study.target.outcome
    least = (outcome, study.outcome_bounds[0]) if counts.counts.get(outcome) else None
    return Filled(
        constants={name: constant_for(variables[name]) for name in names if name != outcome},
        levels=levels,
        outcome=least,
    )


def with_indicators(study: Study, counts: MissingCounts) -> Study:
    """Return the study with an indicator in every formula that uses a variable with missing values.

    Variables that are missing in the same records share one indicator.
    """
    variables = study.variables
    names = counts.affected(variables, "indicator")
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
