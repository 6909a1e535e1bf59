"""From a hospital's table to its sheet: the dictionary of a study, and the columns that it declares.

The dictionary follows from the study alone. A binary variable is a number from 0 to 1, the treatment and a
category are levels. The loader also computes what a formula's free arithmetic needs, such as I(dose/weight),
and checks supplied predictions; the core checks every value against its declared range.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.errors import DataError, InputError
from fedtmle.estimation.people import is_categorical, known, levels, number
from fedtmle.estimation.rows import LINEAR_REACH
from fedtmle.estimation.vocabulary import LoaderColumn, Vocabulary
from fedtmle.estimation.worlds import Both, Given, World, loaded
from fedtmle.initial.crossfit import Fitted
from fedtmle.initial.design import UNIT, Range, part_values, study_codes
from fedtmle.initial.glm import Supplied
from fedtmle.initial.superlearner import formulas
from fedtmle.initial.syntax import Categorical as Factor
from fedtmle.model.table import SILO, Table, without_missing
from fedtmle.programs.missing import Filled, MissingCounts, constant_for, is_missing, with_indicators
from fedtmle.programs.preparation import supplied_predictors
from fedtmle.programs.study import Study
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.followup import PERIOD
from fedtmle_core.dictionary import Categorical, Dictionary, Identifier, Numeric, Variable
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import Apply, Constant, Pick, total
from fedtmle_core.types import Array, Codes, IntArray


@final
@dataclass(frozen=True)
class Declared:
    """A study's dictionary, and the vocabulary of its formulas; nothing of it depends on a table.

    ``base`` is the study as it was declared, if indicators of missing values have been added to its formulas.
    """

    study: Study
    base: Study | None = None

    @property
    def declared(self) -> Study:
        """The study as it was declared, of which hospitals have the columns."""
        return self.study if self.base is None else self.base

    @cached_property
    def indicators(self) -> tuple[str, ...]:
        """The covariates that have an indicator where their values are missing."""
        study = self.declared
        return tuple(n for n in study.may_be_missing if study.variable_of(n).missing == "indicator")

    def with_indicators(self, counts: MissingCounts | None = None) -> Declared:
        """Return the study whose formulas have the indicators that it needs; without counts, all of them."""
        found = counts or MissingCounts(n=1, counts=dict.fromkeys(self.indicators, 1))
        return Declared(with_indicators(self.declared, found), self.declared)

    @cached_property
    def dictionary(self) -> Dictionary:
        """Every variable that a sheet has, loader columns and supplied predictions included."""
        computed = (column.variable for column in self.loader_columns)
        supplied = (self._supplied(role, name) for role, name in self._supplied_names())
        found: dict[str, Variable] = {}
        for variable in (*self._variables, *self._times, *computed, *supplied):
            found.setdefault(variable.name, variable)
        return Dictionary(tuple(found.values()))

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the names of formulas stand for."""
        return self._vocabulary(self.dictionary)

    @cached_property
    def loader_columns(self) -> tuple[LoaderColumn, ...]:
        """The columns that the loader computes for the formulas."""
        used = [formula for model in self.declared.models.values() for formula in formulas(model)]
        return self._vocabulary(Dictionary(self._variables)).loader_columns(used)

    def arm(self, code: int) -> World:
        """Return the world in which everyone is in one arm."""
        target = self.study.target
        if target.treatment is None:
            return World({})
        number = as_number(target.arms[code])
        if number is None:
            return self.vocabulary.world({target.treatment: code})
        return self.vocabulary.world({target.treatment: Both(code=code, number=Constant(number))})

    @property
    def time(self) -> str:
        """The name of the number that says how long a person is followed, from entry."""
        target = self.study.target
        if not isinstance(target, AbstractTimeEffect):
            raise TypeError("this study is not of time to an event")
        return target.time if target.entry is None else f"{target.time} since {target.entry}"

    def supplied(self, role: str) -> tuple[Fitted, ...]:
        """Return what computes the predictions of a role that hospitals have as columns."""
        model = self.study.models.get(role)
        return supplied_predictors(model, role, self.study) if isinstance(model, Supplied) else ()

    def sheet(self, table: Table) -> Sheet:
        """Return the sheet of a hospital's table; `DataError` counts the records that do not fit."""
        study = self.study
        if study.omits and study.target.treatment is not None:
            shown = without_missing(table, study.target.treatment)
            if not isinstance(shown, Table):
                raise TypeError("a table in memory stays one")
            table = shown
        numbers: dict[str, Array] = {}
        levels: dict[str, Codes] = {}
        clusters: dict[str, IntArray] = {}
        for variable in self._variables:
            match variable:
                case Numeric(name=name):
                    numbers[name] = self._number(table, name)
                case Categorical(name=name):
                    levels[name] = table.factors[name].recode(variable.levels).astype(np.int16)
                case Identifier(name=name):
                    clusters[name] = np.asarray(table.factors[name].codes)
        self._require_outcomes(numbers)
        numbers |= {**self._computed(table), **self._predicted(table), **self._followed(table)}
        return Sheet.read(self.dictionary, numbers, levels, clusters)

    def _require_outcomes(self, numbers: Mapping[str, Array]) -> None:
        """Refuse a missing outcome where no model says who was observed."""
        study, name = self.study, self.study.target.outcome
        if study.missingness_model is None and study.censoring_model is None and name in numbers:
            missing = int(np.count_nonzero(np.isnan(numbers[name])))
            if missing:
                raise DataError(
                    f"column '{name}' has missing values in {missing} row(s); give a missingness_model, or "
                    "leave those rows out"
                )

    @cached_property
    def _variables(self) -> tuple[Variable, ...]:
        """The variables that hospitals have as columns, without supplied predictions."""
        found: dict[str, Variable] = {}
        for name in self._names():
            found.setdefault(name, self._variable(name))
        return tuple(found.values())

    def _names(self) -> Iterator[str]:
        study, target = self.declared, self.study.target
        roles = (target.outcome, target.treatment, target.strata, study.weights, study.cluster)
        yield from (name for name in roles if name is not None)
        for regime in target.regimes():
            yield from regime.needs
        for model in study.models.values():
            for formula in formulas(model, public=True):
                names = (*formula.numeric_names, *formula.factor_names)
                yield from (name for name in names if name not in (SILO, PERIOD))

    def _variable(self, name: str) -> Variable:
        study, target = self.declared, self.study.target
        if name == target.outcome and isinstance(target, AbstractTimeEffect):
            return Categorical(name=name, levels=(target.censored, *target.causes))
        if name == target.outcome:
            low, high = study.outcome_bounds
            return Numeric(name=name, low=low, high=high)
        if name == target.treatment:
            return Categorical(name=name, levels=target.arms, required=True)
        variable = study.variables[name]
        if variable.kind == "identifier":
            return Identifier(name=name, largest=study.largest_cluster)
        if variable.kind == "category":
            return Categorical(name=name, levels=variable.codes, required=variable.missing == "refuse")
        low, high = UNIT if variable.bounds is None else variable.bounds
        return Numeric(name=name, low=low, high=high)

    @cached_property
    def _times(self) -> tuple[Numeric, ...]:
        """The time of follow-up, from entry; formulas do not use it."""
        target, variables = self.study.target, self.study.variables
        if not isinstance(target, AbstractTimeEffect):
            return ()
        low, high = variables.ranges[target.time]
        if target.entry is not None:
            earliest, _ = variables.ranges[target.entry]
            low, high = 0.0, max(high - earliest, 0.0)
        return (Numeric(name=self.time, low=low, high=high),)

    def _followed(self, table: Table) -> Mapping[str, Array]:
        """Return the time of follow-up; `DataError` if it or the event does not fit the grid."""
        target = self.study.target
        if not isinstance(target, AbstractTimeEffect):
            return {}
        target.follow_up.read(table)
        time = table.numeric[target.time]
        return {self.time: time if target.entry is None else time - table.numeric[target.entry]}

    def _vocabulary(self, dictionary: Dictionary) -> Vocabulary:
        study, treatment = self.study, self.study.target.treatment
        numbers = {each.name for each in dictionary.variables if isinstance(each, Numeric)}
        levels = {name: codes for name, codes in study.levels.items() if name in numbers}
        ranges: dict[str, Range] = {}
        if isinstance(study.target, AbstractTimeEffect):  # every world of a period sets it
            ranges[PERIOD], levels[PERIOD] = study.ranges[PERIOD], study.levels[PERIOD]
        meanings: dict[str, Given] = {}
        for name in self.indicators:
            meanings |= self._filled(name, dictionary)
            ranges[is_missing(name)] = UNIT
        if self.indicators:  # a computed column is itself: the loader has filled what it is computed from
            computed = (name for name in numbers if loaded(name)[0] is not None)
            meanings |= {name: number(dictionary, name) for name in computed}
        doses = [] if treatment is None else [as_number(arm) for arm in study.target.arms]
        if treatment is not None and treatment in self._used_as_numbers and None not in doses:
            listed = [dose for dose in doses if dose is not None]
            ranges[treatment] = (min(0.0, *listed), max(0.0, *listed))
            if listed != [0.0, 1.0]:  # else the vocabulary takes the second level for the number
                meanings[treatment] = Pick(treatment, tuple(map(Constant, listed)))
        return Vocabulary.of(dictionary, ranges=ranges, levels=levels, meanings=World(meanings))

    def _filled(self, name: str, dictionary: Dictionary) -> dict[str, Given]:
        """Return what a covariate is, with a constant or its first level where it is missing, and where."""
        missing = 1.0 - known(dictionary, name)
        if is_categorical(dictionary, name):
            first, *others = levels(dictionary, name, dictionary.levels(name))
            return {name: (first + missing, *others), is_missing(name): missing}
        variable, value = dictionary.numeric(name), number(dictionary, name)
        constant = constant_for(self.declared.variables[name])
        if self.declared.variables[name].kind == "binary":  # 0 where it is missing
            return {name: (1.0 - value, value), is_missing(name): missing}
        # The interval of the sum is wider than its values, which the clip does not change.
        filled = Apply("clip", total([value, missing], [1.0, constant]), low=variable.low, high=variable.high)
        return {name: filled, is_missing(name): missing}

    @cached_property
    def _used_as_numbers(self) -> frozenset[str]:
        models = self.study.models.values()
        return frozenset(name for model in models for f in formulas(model) for name in f.numeric_names)

    def _supplied_names(self) -> Iterator[tuple[str, str]]:
        for role, model in self.study.models.items():
            if isinstance(model, Supplied):
                yield from ((role, name) for name in model.columns)

    def _supplied(self, role: str, name: str) -> Numeric:
        """Return a supplied prediction's variable: of an outcome on its unit scale, else a probability."""
        if role == "outcome":
            return Numeric(name=prediction(role, name), low=1.0 - LINEAR_REACH, high=LINEAR_REACH)
        return Numeric(name=prediction(role, name), low=0.0, high=1.0)

    def _number(self, table: Table, name: str) -> Array:
        """Return a number; 0 or 1 for a binary variable that the table has as levels alone."""
        if name in table.numeric:
            return table.numeric[name]
        if name not in table.factors:
            raise InputError(f"there is no column '{name}'")
        codes = table.factors[name].recode(self.study.variables[name].codes)
        return np.where(codes < 0, np.nan, codes.astype(np.float64))

    def _predicted(self, table: Table) -> Mapping[str, Array]:
        found: dict[str, Array] = {}
        for role, model in self.study.models.items():
            if isinstance(model, Supplied):
                for name, predictor in zip(model.columns, self.supplied(role), strict=True):
                    variable = self._supplied(role, name)
                    found[variable.name] = np.clip(predictor.predict(table), variable.low, variable.high)
        return found

    def _computed(self, table: Table) -> Mapping[str, Array]:
        found: dict[str, Array] = {}
        if self.loader_columns and self.indicators:
            constants = {name: constant_for(self.declared.variables[name]) for name in self.indicators}
            table = Filled(constants=constants, levels=self.declared.levels).fill(table)
        for column in self.loader_columns:
            variable = column.part.variable
            names = (variable.name,) if isinstance(variable, Factor) else ()
            codes = {name: study_codes(name, table, self.study.levels[name]) for name in names}
            with np.errstate(all="ignore"):  # what is not finite is refused as outside the range
                found[column.variable.name] = part_values(column.part, table, codes)
        return found


def prediction(role: str, name: str) -> str:
    """Return the name of a supplied prediction in the dictionary: a column may serve several roles."""
    return f"{role} prediction: {name}"


def as_number(level: str) -> float | None:
    """Return the number that a level is, None if it is none."""
    try:
        return float(level)
    except ValueError:
        return None
