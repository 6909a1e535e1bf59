"""A study: a target, nuisance models and an algorithm, as one value that each silo approves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.coded import Coded
from fedtmle.errors import InputError
from fedtmle.initial.crossfit import Folds
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.pilot import Pilot
from fedtmle.initial.ranges import Range, column_ranges
from fedtmle.initial.superlearner import SuperLearner, formulas, pilots, used_columns
from fedtmle.initial.syntax import Categorical, quoted_level
from fedtmle.initial.variables import Variables
from fedtmle.model.arguments import expect, expect_column, expect_integer, expect_number
from fedtmle.model.table import SILO, AnyTable, StreamedTable
from fedtmle.model.types import IntArray
from fedtmle.targets.effects.components import Static
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.followup import PERIOD, period_levels

MOST_STRATA = 50  # every one has its own estimates: a column with more is a number, most likely
NuisanceModel = GLM | Pilot | SuperLearner | Supplied
ROLES = ("outcome", "hazard", "treatment", "missingness", "censoring")  # of nuisance models
OutcomeType = Literal["binary", "count", "continuous"]
OUTCOME_TYPES: dict[str, OutcomeType] = {"binary": "binary", "count": "count", "number": "continuous"}


@final
@dataclass(frozen=True, kw_only=True)
class Study:
    """What the consortium asks: all of it is in the plan that each silo approves.

    ``g_bounds`` bounds each arm's probability (times that of being observed) from below: "auto" is
    5/(sqrt(n) log n) with the pooled n, a number is itself, None does not truncate. ``clever`` puts
    the inverse probabilities into the covariate or into the weight of the fluctuation; ``submodel``
    fluctuates each arm, or the contrast alone. ``folds`` cross-fits the nuisances (CV-TMLE).
    ``cluster_scope`` says what a cluster's identifier means in another silo: "shared", the same
    cluster, and one that is in two silos stops the run; "spanning", the same, and it may be in several;
    "silo", nothing, each silo numbers its own (`protocol.clusters` has what each discloses).
    ``diagnostics`` False leaves out the last round: tables of overlap and fit, which no estimate needs.
    A target of time to an event has a ``hazard_model`` and a ``censoring_model`` over person-periods, whose
    formulas may use ``period``, instead of an ``outcome_model`` and a ``missingness_model``; without one, the
    hazard is counted by arm and period (Kaplan-Meier).
    ``variables`` is the dictionary: with it the silos are asked neither for the levels of factors nor for the
    size of their values, and the outcome's type and bounds are those that it declares.
    """

    target: AbstractEffect
    outcome_model: NuisanceModel | None = None
    treatment_model: NuisanceModel | None = None
    missingness_model: NuisanceModel | None = None
    hazard_model: NuisanceModel | None = None
    censoring_model: NuisanceModel | None = None
    algorithm: AbstractAlgorithm = Coded()
    g_bounds: Literal["auto"] | float | None = "auto"
    clever: Literal["covariate", "weight"] = "covariate"
    submodel: Literal["per arm", "contrast"] = "per arm"
    link: Literal["logistic", "linear"] = "logistic"
    weights: str | None = None
    weight_ceiling: float = 64.0  # of a weight over the mean weight
    cluster: str | None = None
    cluster_scope: Literal["shared", "silo", "spanning"] = "shared"
    largest_cluster: int = 4096  # rows of one cluster: refused beyond
    folds: int | None = None
    seed: int = 0
    confidence: float = 0.95
    diagnostics: bool = True
    variables: Variables | None = None

    def __post_init__(self) -> None:
        self._refuse_types()
        self._refuse_silo_column()
        if self.variables is not None:
            self._check_variables(self.variables)
        if (self.treatment_model is None) != (self.target.treatment is None):
            raise InputError("treatment_model: give one if and only if the target names a treatment")
        if len(self.target.arms) > 2 and any(pilot.is_public for pilot in pilots(self.treatment_model)):
            raise InputError(
                "treatment_model: a public model gives one probability, so it is for two arms; name a silo "
                "that fits a Pilot, or give a GLM"
            )
        self._refuse_responses()
        if not (self.g_bounds in ("auto", None) or 0 < float(self.g_bounds or 0) < 0.5):
            raise InputError(
                f"g_bounds: expected 'auto', None or a number in (0, 0.5), not {self.g_bounds!r}"
            )
        static = all(isinstance(regime, Static) for regime in self.target.regimes())
        if self.clever == "weight" and not (static and self.target.strata is None):
            raise InputError("clever: 'weight' is for static arms without strata")
        if self.submodel == "contrast" and self.target.contrast() is None:
            raise InputError("submodel: 'contrast' needs a target that is one difference of two arms")
        if self.cluster_scope not in ("shared", "silo", "spanning"):
            raise InputError(
                f"cluster_scope: expected 'shared', 'silo' or 'spanning', not {self.cluster_scope!r}"
            )
        if self.clever not in ("covariate", "weight") or self.submodel not in ("per arm", "contrast"):
            raise InputError("clever is 'covariate' or 'weight'; submodel is 'per arm' or 'contrast'")
        if self.link not in ("logistic", "linear"):
            raise InputError(f"link: expected 'logistic' or 'linear', not {self.link!r}")
        self._check_numbers()

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.weight_ceiling) and self.weight_ceiling >= 1):
            raise InputError(f"weight_ceiling: expected a number of at least 1, not {self.weight_ceiling}")
        if self.largest_cluster < 1:
            raise InputError(f"largest_cluster: expected at least 1, not {self.largest_cluster}")
        if self.folds is not None and self.folds < 2:
            raise InputError(f"folds: expected at least 2, or None, not {self.folds}")
        if isinstance(self.target, AbstractTimeEffect):
            self._check_time()
        if not 0.5 < self.confidence < 1:
            raise InputError(f"confidence: expected a number between 0.5 and 1, not {self.confidence}")

    def _check_time(self) -> None:
        """Refuse what a target of time to an event has not."""
        if self.variables is None:
            raise InputError("variables: a target of time to an event needs the dictionary of its variables")
        if PERIOD in self.variables:
            raise InputError(f"variables: '{PERIOD}' is the period's name in formulas; rename the variable")
        fixed = {"clever": "covariate", "submodel": "per arm", "link": "logistic"}
        for name, value in fixed.items():
            if getattr(self, name) != value:
                raise InputError(f"{name}: a target of time to an event has {value!r} only; leave it out")
        for role in ("hazard", "censoring"):
            if isinstance(self.models.get(role), Supplied):
                raise InputError(f"{role}_model: hazards cannot be supplied as a column; give a GLM")

    def _refuse_types(self) -> None:
        expect("target", self.target, AbstractEffect, 'an effect such as ATE(outcome="y", treatment="a")')
        for role, model in {**self.needed_models, **self.given_models}.items():
            expect(f"{role}_model", model, NuisanceModel, 'a model such as GLM("age + C(sex)")')
        for role in (role for role in self.given_models if role not in self.target.roles):
            known = ", ".join(f"{each}_model" for each in self.target.roles)
            raise InputError(
                f"{role}_model: the models of {type(self.target).__name__} are {known}; leave it out"
            )
        expect("algorithm", self.algorithm, AbstractAlgorithm, "an algorithm such as Coded()")
        expect("diagnostics", self.diagnostics, bool, "True or False")
        for name in ("weights", "cluster"):
            if getattr(self, name) is not None:
                expect_column(name, getattr(self, name))
        for name in ("largest_cluster", "seed", *(() if self.folds is None else ("folds",))):
            expect_integer(name, getattr(self, name))
        bounded = () if self.g_bounds is None or isinstance(self.g_bounds, str) else ("g_bounds",)
        for name in ("weight_ceiling", "confidence", *bounded):
            expect_number(name, getattr(self, name))

    def _check_variables(self, variables: Variables) -> None:
        """Check that the dictionary declares what is used; take the outcome's type and bounds from it."""
        undeclared = dict.fromkeys(repr(name) for name, _ in self._used() if name not in variables)
        if undeclared:
            raise InputError(
                f"variables: {', '.join(undeclared)} are used and not declared; describe each of them by its "
                "kind, and by its range or its levels"
            )
        for name, variable in variables.items():
            if variable.missing != "refuse":
                raise InputError(
                    f"variables: '{name}' declares missing = \"{variable.missing}\", "
                    'which this version does not have; declare "refuse"'
                )
        for name, as_factor in self._used():
            variable = variables[name]
            if as_factor and not variable.codes:
                raise InputError(f"variables: '{name}' is used as a factor; declare it as a category")
            if not as_factor and not variable.is_numeric:
                raise InputError(f"variables: '{name}' is a category; write C({name}) in a formula")
        object.__setattr__(self, "target", declared_target(self.target, variables))
        # The silos are not known yet; an indicator's range is the same for all of them.
        stand_in = ("\0", *dict.fromkeys(reference for _, reference in self._silo_references()))
        for role, model in self.models.items():
            for formula in formulas(model):
                try:
                    levels = self.declared_levels(variables) | {SILO: stand_in}
                    column_ranges(formula, levels, self.ranges(variables))
                except InputError as error:
                    raise InputError(f"{role}_model: {error}") from None

    def _used(self) -> Iterator[tuple[str, bool]]:
        """Yield the columns that the dictionary must declare, and whether each is used as a factor."""
        target = self.target
        if isinstance(target, AbstractTimeEffect):
            yield target.time, False
            yield from ((name, False) for name in (target.entry,) if name is not None)
        else:
            yield target.outcome, False
        if target.strata is not None:
            yield target.strata, True
        if self.weights is not None:
            yield self.weights, False
        for regime in target.regimes():
            yield from ((name, False) for name in regime.needs)
        for model in self.models.values():
            for formula in formulas(model, public=True):
                derived = self.derived_levels
                yield from ((name, False) for name in formula.numeric_names if name not in derived)
                known = (target.treatment, SILO, *derived)
                factors = (name for name in formula.factor_names if name not in known)
                yield from ((name, True) for name in factors)

    def declared_levels(self, variables: Variables) -> dict[str, tuple[str, ...]]:
        """Return the levels of every factor, from the dictionary; those of the treatment are its arms."""
        levels = {name: variables[name].codes for name in self.factors} | self.derived_levels
        return levels | ({} if self.target.treatment is None else {self.target.treatment: self.target.arms})

    @property
    def uses_silo(self) -> bool:
        """Whether the silo is a variable of some model: its formula has C(silo)."""
        return any(SILO in used_columns(model) for model in self.models.values())

    def silo_levels(self, silos: Sequence[str]) -> tuple[str, ...]:
        """Return the levels of C(silo) in a run over ``silos``: they, or none if no formula has it."""
        if not self.uses_silo:
            return ()
        for role, reference in self._silo_references():
            if reference not in silos:
                raise InputError(
                    f"{role}_model: C(silo, ref={quoted_level(reference)}) names no silo of this run; the "
                    f"silos are {', '.join(map(quoted_level, silos))}"
                )
        return tuple(silos)

    def _silo_references(self) -> Iterator[tuple[str, str]]:
        for role, model in self.models.items():
            for formula in formulas(model):
                for variable in (variable for term in formula.terms for variable in term):
                    if isinstance(variable, Categorical) and variable.name == SILO and variable.reference:
                        yield role, variable.reference

    def _refuse_silo_column(self) -> None:
        """Refuse "silo" as the name of a column: it stands for the silo, which is a variable by itself."""
        target = self.target
        roles = {
            "target": (target.outcome, target.treatment, target.strata),
            "weights": (self.weights,),
            "cluster": (self.cluster,),
            "variables": tuple(self.variables or ()),
        }
        for role, names in roles.items():
            if SILO in names:
                raise InputError(
                    f"{role}: 'silo' is no column; it stands for the silo of a record, as in C(silo). Give "
                    "the column another name, which silo files can map to their own"
                )
        for role, model in self.models.items():
            if any(SILO in formula.numeric_names for formula in formulas(model, public=True)):
                raise InputError(f"{role}_model: the silo is a factor; write C(silo)")

    def _refuse_responses(self) -> None:
        """Refuse a model that uses its response, and a treatment or missingness model that uses the outcome.

        Only the outcome comes after the treatment, so the latter would silently give a wrong estimate.
        """
        target = self.target
        after = {target.outcome: "outcome"}
        if isinstance(target, AbstractTimeEffect):
            after |= {target.time: "time", **({} if target.entry is None else {target.entry: "entry"})}
        before = after | dict.fromkeys(self.derived_levels, "period")
        before |= {} if target.treatment is None else {target.treatment: "treatment"}
        for role, model in self.models.items():
            refused = before if role == "treatment" else after
            for column in used_columns(model):
                if column in refused:
                    raise InputError(
                        f"{role}_model: it uses '{column}', which is the study's {refused[column]}; leave it "
                        "out"
                    )

    @property
    def models(self) -> dict[str, NuisanceModel]:
        """The nuisance models that are there and that the target uses, by role."""
        return {role: model for role, model in self.given_models.items() if role in self.target.roles}

    @property
    def given_models(self) -> dict[str, NuisanceModel]:
        """The nuisance models that are there, by role."""
        named = {role: getattr(self, f"{role}_model") for role in ROLES}
        return {role: model for role, model in named.items() if model is not None}

    @property
    def needed_models(self) -> dict[str, NuisanceModel | None]:
        """The models that must be there, by role: an outcome has no estimate without a model."""
        return {"outcome": self.outcome_model} if "outcome" in self.target.roles else {}

    @property
    def factors(self) -> tuple[str, ...]:
        """Factors whose levels are negotiated: those of formulas, and the strata."""
        names = {
            name
            for model in self.models.values()
            for formula in formulas(model)
            for name in formula.factor_names
        } - {self.target.treatment, SILO, *self.derived_levels}
        return tuple(sorted({*names, *({self.target.strata} if self.target.strata else ())}))

    @property
    def derived_levels(self) -> dict[str, tuple[str, ...]]:
        """The levels of factors that no silo has as a column: the period of a person-period."""
        if not isinstance(self.target, AbstractTimeEffect):
            return {}
        return {PERIOD: period_levels(len(self.target.edges))}

    def ranges(self, variables: Variables) -> dict[str, Range]:
        """Return the range of every number that formulas may use, that of the period included."""
        derived = {name: (1.0, float(len(levels))) for name, levels in self.derived_levels.items()}
        return {**variables.ranges, **derived}

    @property
    def outer_folds(self) -> Folds | None:
        """The folds of cross-fitting."""
        if self.folds is None:
            return None
        spanning = self.cluster_scope == "spanning"
        return Folds(count=self.folds, seed=self.seed, cluster=self.cluster, spanning=spanning)

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def smallest_part(self, rows: AnyTable) -> int:
        """Return the fewest rows of a fold, a super learner's included: sums over the others disclose it."""
        smallest = rows.n_rows
        if isinstance(rows, StreamedTable):  # it is in no study with folds
            return smallest
        outer = self.outer_folds
        spanning = self.cluster_scope == "spanning"
        left_out = [None] if outer is None else list(range(outer.count))
        fold = None if outer is None else outer.of(rows)
        if outer is not None and fold is not None:
            smallest = _fewest(fold, outer.count)
        for model in self.models.values():
            if isinstance(model, SuperLearner):
                for v in left_out:
                    inner = model.folds_within(v, self.cluster, spanning=spanning)
                    inner_fold = inner.of(rows) if v is None else inner.of(rows)[fold != v]
                    smallest = min(smallest, _fewest(inner_fold, inner.count))
        return smallest


def declared_target(target: AbstractEffect, variables: Variables) -> AbstractEffect:
    """Return the target with the outcome's type and bounds as the dictionary declares them."""
    if isinstance(target, AbstractTimeEffect):
        _check_event(target, variables)
        return target
    outcome = variables.get(target.outcome)
    if outcome is None or outcome.bounds is None:
        raise InputError(f"variables: declare the outcome '{target.outcome}' as a number, a count or binary")
    bounds, outcome_type = outcome.bounds, OUTCOME_TYPES[outcome.kind]
    if target.outcome_bounds not in ((0.0, 1.0), bounds):
        raise InputError("outcome_bounds: leave it out; the dictionary declares the range of the outcome")
    if target.outcome_type not in ("auto", outcome_type):
        raise InputError("outcome_type: leave it out; the dictionary declares the kind of the outcome")
    return replace(target, outcome_bounds=bounds, outcome_type=outcome_type)


def _check_event(target: AbstractTimeEffect, variables: Variables) -> None:
    """Check that the dictionary declares the event, with the codes that the target names."""
    event = variables.get(target.outcome)
    if event is None or event.kind not in ("binary", "category"):
        raise InputError(
            f"variables: declare the event '{target.outcome}' as binary, or as a category of causes"
        )
    codes = event.codes or ("0", "1")
    absent = [code for code in (target.censored, *target.causes) if code not in codes]
    if absent or len(codes) != 1 + len(target.causes):
        raise InputError(
            f"causes: with censored they are the levels that the dictionary declares of '{target.outcome}', "
            f"{', '.join(map(repr, codes))}"
        )


def _fewest(fold: IntArray, count: int) -> int:
    """Return how many rows the smallest fold has, of those that have any."""
    sizes = np.bincount(fold, minlength=count)
    return int(sizes[sizes > 0].min(initial=len(fold)))
