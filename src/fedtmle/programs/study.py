"""A study: a target, nuisance models and an algorithm, as one value that each silo approves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from functools import cached_property
from typing import Literal, final

import numpy as np

from fedtmle.algorithms.base import UNMASKABLE, AbstractAlgorithm
from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.gradient import OneStep
from fedtmle.algorithms.local import Personalized
from fedtmle.defects import expect, expect_column, expect_integer, expect_number
from fedtmle.errors import InputError
from fedtmle.initial.crossfit import Folds
from fedtmle.initial.design import UNIT, Range, column_ranges
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.own import own_formula
from fedtmle.initial.superlearner import Pilot, SuperLearner, formulas, pilots, used_columns
from fedtmle.initial.syntax import Categorical, quoted_level
from fedtmle.initial.variables import Variable, Variables
from fedtmle.model.budget import Privacy
from fedtmle.model.table import SILO, AnyTable, StreamedTable
from fedtmle.targets.effects.components import Static
from fedtmle.targets.effects.estimands import ATE, OR, RR, TSM, AbstractEffect, OutcomeMean
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.regimes.timeline import Timeline
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.followup import PERIOD, period_levels
from fedtmle_core.types import IntArray, Response

MOST_STRATA = 50  # every one has its own estimates: a column with more is a number, most likely
LONGEST_TITLE = 200  # characters
NuisanceModel = GLM | Pilot | SuperLearner | Supplied
ROLES = ("outcome", "hazard", "treatment", "missingness", "censoring")  # roles of nuisance models
RESPONSES: dict[str, Response] = {"binary": "binary", "count": "count", "number": "continuous"}
DRAFT = (
    "draft the dictionary from a table with `fedtmle init --from table.csv` or `ft.draft(table)`, and edit "
    "the draft"
)


@final
class Use(Enum):
    """How a study uses a variable, in words that say which kinds suit it."""

    OUTCOME = 'the outcome: kind "binary", "number" or "count"'
    TREATMENT = 'the treatment: kind "category" with its arms as levels, or "binary"'
    NUMBER = 'a number in a formula or a rule: kind "number" or "count" with its range, or "binary"'
    FACTOR = 'a factor, as in C(name) or strata: kind "category" with its levels, or "binary"'
    EVENT = 'the event: kind "category" with its codes as levels, or "binary"'
    TIME = 'a time: kind "number" or "count" with its range'
    CENSORING = 'censoring, 1 in the period of it: kind "binary"'
    WEIGHT = 'the weights: kind "number" with its range, not below 0'
    CLUSTER = 'the cluster: kind "identifier"'

    def admits(self, variable: Variable) -> bool:
        """Return whether a variable of this kind suits this use."""
        match self:
            case Use.OUTCOME | Use.NUMBER | Use.TIME:
                return variable.bounds is not None
            case Use.WEIGHT:
                return variable.bounds is not None and variable.bounds[0] >= 0
            case Use.CENSORING:
                return variable.kind == "binary"
            case Use.FACTOR | Use.EVENT:
                return bool(variable.codes)
            case Use.TREATMENT:
                return variable.kind != "identifier"
            case Use.CLUSTER:
                return variable.kind == "identifier"


@final
@dataclass(frozen=True, kw_only=True)
class Study:
    """A study: the estimand, the models, the dictionary and the options.

    All of it is in the plan that each silo approves.

    Parameters
    ----------
    target
        The estimand, such as `ATE`.
    outcome_model
        The model of the outcome: `GLM`, `SuperLearner`, `Supplied`, `Pilot` or trees.
    treatment_model
        The model of the treatment (the propensity score).
    missingness_model
        The model of who has an outcome. Without it, the outcome may not be missing.
    hazard_model
        For time to an event: the model of the event over person-periods, whose formula may use ``period``.
        Without it, hazards are counted by arm and period (Kaplan-Meier).
    censoring_model
        For time to an event and treatment over time: the model of being censored in a period.
    algorithm
        The algorithm that targets the estimate.
    g_bounds
        The lower bound of each arm's probability (times that of being observed): "auto" is 5/(sqrt(n) log
        n) with the pooled n, a number is itself, None does not truncate.
    clever
        Whether the inverse probabilities are in the "covariate" or in the "weight" of the fluctuation.
    submodel
        Whether each arm is fluctuated ("per arm"), or the contrast alone.
    link
        The link of the fluctuation of a bounded outcome.
    weights
        The column of observation weights.
    weight_ceiling
        The largest possible weight, relative to their mean.
    cluster
        The column that names clusters, such as families.
    cluster_scope
        What an identifier means in another silo: "shared", the same cluster, and one that is in two silos
        stops the run; "spanning", the same, and it may be in several; "silo", nothing.
    largest_cluster
        The most records of a cluster.
    folds
        The number of folds for cross-fitting (CV-TMLE). None does not cross-fit.
    seed
        The public seed of folds and imputations.
    confidence
        The level of intervals.
    diagnostics
        Whether to make the tables of overlap, balance and fit, which no estimate needs.
    sums
        "rounded" fits the models by rounded gradients, coded as differences, and rounds all other sums,
        such that the estimate is within some ``fit_accuracy`` standard errors of that of pooled rows.
        "exact" discloses every sum to the last bit, Hessians included, and the result has the same bits in
        any partition. "auto" is rounded with `Coded` and `OneStep`, and exact with the other algorithms.
    fit_accuracy
        The accuracy of rounded fits, in standard errors of the estimate.
    aggregation
        "masked" adds up the silos' answers under pairwise masks: server and silos learn totals over all
        silos only. "open" sends each silo's own sums. "auto" is masked if the study file has the keys of at
        least three silos, and open in one process.
    variables
        The dictionary: every variable that the study uses, as `Variables` or as a plain mapping. The
        outcome's kind and bounds, the arms, the levels of factors and what happens to missing values follow
        from it. `draft` drafts one from a table.
    imputations
        The number of completed data sets, if the dictionary asks for imputation.
    imputation_sweeps
        The number of sweeps over the imputed variables.
    on_refusal
        Whether the study stops ("stop") or goes on without the silo ("go on") if one refuses or is absent
        when the study opens. The result names it.
    title
        A title for people.
    privacy
        A budget of differential privacy: noise is added, and the interval counts it.

    Raises
    ------
    InputError
        Something is missing, is not declared in the dictionary, or does not fit together. The message says
        what to change.

    Examples
    --------
    >>> study = ft.Study(
    ...     target=ft.ATE(outcome="died", treatment="treated"),
    ...     outcome_model=ft.GLM("treated + age"),
    ...     treatment_model=ft.GLM("age"),
    ...     variables={
    ...         "died": {"kind": "binary"},
    ...         "treated": {"kind": "binary"},
    ...         "age": {"kind": "number", "range": (18, 110), "unit": "years"},
    ...     },
    ... )
    >>> study.response
    'binary'
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
    weight_ceiling: float = 64.0  # largest ratio of a weight to the mean weight
    cluster: str | None = None
    cluster_scope: Literal["shared", "silo", "spanning"] = "shared"
    largest_cluster: int = 4096  # rows of one cluster: refused beyond
    folds: int | None = None
    seed: int = 0
    confidence: float = 0.95
    diagnostics: bool = True
    sums: Literal["auto", "rounded", "exact"] = "auto"
    fit_accuracy: float = 1e-6
    aggregation: Literal["auto", "open", "masked"] = "auto"
    variables: Variables = Variables({})
    imputations: int = 5  # data sets, where a variable is imputed
    imputation_sweeps: int = 5  # over the variables to impute, in each data set
    on_refusal: Literal["stop", "go on"] = "stop"
    title: str = ""
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        expect("variables", self.variables, Mapping, "a dictionary such as ft.Variables({...})")
        object.__setattr__(self, "variables", Variables(self.variables))
        self._refuse_types()
        self._refuse_silo_column()
        self._refuse_responses()
        if (self.treatment_model is None) != (self.target.treatment is None):
            raise InputError("treatment_model: give one if and only if the target names a treatment")
        self._check_variables()
        if len(self.target.arms) > 2 and any(pilot.is_public for pilot in pilots(self.treatment_model)):
            raise InputError(
                "treatment_model: a public model gives one probability, so it is for two arms; name a silo "
                "that fits a Pilot, or give a GLM"
            )
        if not (self.g_bounds in ("auto", None) or 0 < float(self.g_bounds or 0) < 0.5):
            raise InputError(
                f"g_bounds: expected 'auto', None or a number in (0, 0.5), not {self.g_bounds!r}"
            )
        static = all(isinstance(regime, Static) for regime in self.target.regimes())
        if self.clever == "weight" and not (static and self.target.strata is None):
            raise InputError("clever: 'weight' is for static arms without strata")
        by_stratum = self.target.strata is not None and self.privacy is None
        if self.submodel == "contrast" and (self.target.contrast() is None or by_stratum):
            raise InputError(
                "submodel: 'contrast' needs a target that is one difference of two arms, without strata"
            )
        if self.cluster_scope not in ("shared", "silo", "spanning"):
            raise InputError(
                f"cluster_scope: expected 'shared', 'silo' or 'spanning', not {self.cluster_scope!r}"
            )
        if self.clever not in ("covariate", "weight") or self.submodel not in ("per arm", "contrast"):
            raise InputError("clever is 'covariate' or 'weight'; submodel is 'per arm' or 'contrast'")
        if self.link not in ("logistic", "linear"):
            raise InputError(f"link: expected 'logistic' or 'linear', not {self.link!r}")
        if self.on_refusal not in ("stop", "go on"):
            raise InputError(f"on_refusal: expected 'stop' or 'go on', not {self.on_refusal!r}")
        if self.on_refusal == "go on" and self.algorithm.pools_rows:
            raise InputError("on_refusal: where all rows are pooled no silo can refuse; leave it out")
        if self.on_refusal == "go on" and self.aggregation == "masked":
            raise InputError(
                "on_refusal: masks are agreed by all silos of a plan, and a sum without one has no meaning; "
                "leave it out"
            )
        if self.on_refusal == "go on" and self.algorithm.silo_weights is not None:
            raise InputError(
                "on_refusal: weights by silo are for all silos of the study; leave them out, or stop"
            )
        self._check_numbers()
        self._check_privacy()

    def _check_privacy(self) -> None:
        """Refuse what is not available with privacy; take the one-step estimate of the contrast."""
        if self.privacy is None:
            return
        expect("privacy", self.privacy, Privacy, "a budget such as ft.Privacy(epsilon=1.0)")
        if self.algorithm == Coded():
            object.__setattr__(self, "algorithm", OneStep())
        if self.target.contrast() is not None:
            object.__setattr__(self, "submodel", "contrast")
        if self.privacy.server == "untrusted":
            object.__setattr__(self, "aggregation", "masked")
        for message in self._without_privacy():
            raise InputError(f"privacy: {message}")

    def _without_privacy(self) -> Iterator[str]:
        """Yield what the study has that is not available with privacy."""
        target = self.target
        if not isinstance(target, ATE | RR | OR | TSM | OutcomeMean):
            yield f"{type(target).__name__} is not available; use ATE, RR, OR, TSM or OutcomeMean"
        if len(target.arms) > 2:
            yield f"expected a treatment with two arms, not {len(target.arms)}"
        if not isinstance(self.algorithm, OneStep):
            yield "the estimate is the one-step estimate; leave the algorithm out, or give OneStep()"
        options = {"weights": self.weights, "cluster": self.cluster, "folds": self.folds}
        for name in (name for name, value in options.items() if value is not None):
            yield f"{name} are not available; leave them out"
        if self.on_refusal != "stop":  # the shares of noise are those of all silos
            yield "a study cannot go on without a silo; leave on_refusal out"
        if self.g_bounds is None:
            yield "g must be bounded; leave g_bounds out, or give a number"
        for role, model in self.models.items():
            if isinstance(model, Supplied) and role == "treatment" and len(model.columns) == 1:
                continue
            if not isinstance(model, GLM):
                yield f"{role}_model: expected a GLM" + (
                    ", or the known probability of the second arm as Supplied" if role == "treatment" else ""
                )
            elif model.ridge or (role == "outcome" and model.family not in ("auto", "binomial")):
                yield f"{role}_model: expected a logistic GLM without a ridge; outcomes are scaled to [0, 1]"
        yield from ["C(silo) is not available; leave it out"] if self.uses_silo else []
        if self.may_be_missing or self.omits:
            yield "missing covariates and treatments are not available; leave such records out"

    def _check_numbers(self) -> None:
        if not (math.isfinite(self.weight_ceiling) and self.weight_ceiling >= 1):
            raise InputError(f"weight_ceiling: expected a number of at least 1, not {self.weight_ceiling}")
        if self.largest_cluster < 1:
            raise InputError(f"largest_cluster: expected at least 1, not {self.largest_cluster}")
        if self.folds is not None and self.folds < 2:
            raise InputError(f"folds: expected at least 2, or None, not {self.folds}")
        if isinstance(self.target, AbstractTimeEffect):
            self._check_time()
        self._check_options()
        if isinstance(self.target, AbstractRegimeEffect):
            self._check_regimes(self.target)
        if self.imputations < 5:
            raise InputError(f"imputations: expected at least 5 data sets, not {self.imputations}")
        if self.imputation_sweeps < 1:
            raise InputError(f"imputation_sweeps: expected at least 1, not {self.imputation_sweeps}")
        self._check_sums()
        if not 1e-9 <= self.fit_accuracy <= 0.1:
            raise InputError(f"fit_accuracy: expected a number from 1e-9 to 0.1, not {self.fit_accuracy}")
        if not 0.5 < self.confidence < 1:
            raise InputError(f"confidence: expected a number between 0.5 and 1, not {self.confidence}")

    def _check_sums(self) -> None:
        if self.sums not in ("auto", "rounded", "exact"):
            raise InputError(f"sums: expected 'auto', 'rounded' or 'exact', not {self.sums!r}")
        if self.aggregation not in ("auto", "open", "masked"):
            raise InputError(f"aggregation: expected 'auto', 'open' or 'masked', not {self.aggregation!r}")
        if self.aggregation == "masked" and not (self.algorithm.adds_integers or self.algorithm.pools_rows):
            raise InputError(f"aggregation: {UNMASKABLE}")
        if self.aggregation == "masked":
            self.refuse_silo_columns()

    def _check_time(self) -> None:
        """Refuse what a target of time to an event does not offer."""
        if PERIOD in self.variables:
            raise InputError(f"variables: '{PERIOD}' is the period's name in formulas; rename the variable")

    def _check_options(self) -> None:
        """Refuse options that the target does not have, and predictions that no silo can supply."""
        target, kind = self.target, type(self.target).__name__
        for option in (field for field in fields(self) if field.name in target.fixed_options):
            if getattr(self, option.name) != option.default:
                raise InputError(f"{option.name}: {kind} has {option.default!r} only; leave it out")
        for role in target.fitted_roles:
            if isinstance(self.models.get(role), Supplied):
                raise InputError(f"{role}_model: its predictions cannot be supplied as a column; give a GLM")

    def _check_regimes(self, target: AbstractRegimeEffect) -> None:
        """Refuse what a target of treatment over time does not offer."""
        if (target.censoring is None) != (self.censoring_model is None):
            raise InputError("censoring_model: give one if and only if the target names a censoring variable")
        treatment = str(target.treatment)
        declared_kind = self.variables[treatment].basic_kind if treatment in self.variables else "number"
        if target.is_modified and declared_kind not in ("number", "count"):
            raise InputError(
                f"rules: Shift is for a treatment that is a number, and '{treatment}' is declared as "
                f"{declared_kind}; use Static, Planned, Threshold, Onset or Stochastic"
            )
        uses = treatment in used_columns(self.treatment_model)
        if target.is_modified and not uses:
            raise InputError(
                f"treatment_model: it tells modified from observed treatments, so its formula must use "
                f"'{treatment}'"
            )
        columns = {column for name, listed in target.over_time.items() for column in listed if column != name}
        declared = sorted(columns & {*self.variables})
        if declared:
            raise InputError(
                f"variables: '{declared[0]}' is a column of a variable over time; declare that variable "
                "once, by its name in over_time"
            )
        for role, model in self.models.items():
            for column in (column for column in used_columns(model) if column in columns):
                raise InputError(
                    f"{role}_model: '{column}' is a column of one period; use the name of the variable in "
                    "over_time, or its lag, as in lag1_name"
                )

    @cached_property
    def timeline(self) -> Timeline | None:
        """The columns by period, where treatment is given over time; else None."""
        return self.target.timeline(self.variables) if isinstance(self.target, AbstractRegimeEffect) else None

    def _refuse_types(self) -> None:
        expect("target", self.target, AbstractEffect, 'an effect such as ATE(outcome="y", treatment="a")')
        for role, model in {**self.needed_models, **self.given_models}.items():
            expect(f"{role}_model", model, NuisanceModel, 'a model such as GLM("age + C(sex)")')
        for role in (role for role in self.given_models if role not in self.target.roles):
            known = ", ".join(f"{each}_model" for each in self.target.roles) or "none"
            raise InputError(
                f"{role}_model: the models of {type(self.target).__name__} are {known}; leave it out"
            )
        expect("algorithm", self.algorithm, AbstractAlgorithm, "an algorithm such as Coded()")
        expect("diagnostics", self.diagnostics, bool, "True or False")
        expect("title", self.title, str, "a text")
        if len(self.title) > LONGEST_TITLE or not self.title.isprintable():
            raise InputError(f"title: expected one line of at most {LONGEST_TITLE} characters")
        for name in ("weights", "cluster"):
            if getattr(self, name) is not None:
                expect_column(name, getattr(self, name))
        for name in (
            "largest_cluster",
            "seed",
            "imputations",
            "imputation_sweeps",
            *(() if self.folds is None else ("folds",)),
        ):
            expect_integer(name, getattr(self, name))
        bounded = () if self.g_bounds is None or isinstance(self.g_bounds, str) else ("g_bounds",)
        for name in ("weight_ceiling", "confidence", "fit_accuracy", *bounded):
            expect_number(name, getattr(self, name))

    def _check_variables(self) -> None:
        """Check that the dictionary declares what is used; take the treatment's arms from it."""
        variables = self.variables
        uses: dict[str, Use] = {}
        for name, use in self._used():
            uses.setdefault(name, use)
        undeclared = {name: use for name, use in uses.items() if name not in variables}
        if undeclared:
            near = {name: get_close_matches(name, variables, n=1) for name in undeclared}
            listed = [
                f"'{name}' ({use.value}){f', did you mean {near[name][0]!r}?' if near[name] else ''}"
                for name, use in undeclared.items()
            ]
            remedy = "correct the name" if all(near.values()) else DRAFT
            raise InputError(f"variables: the dictionary does not declare {'; '.join(listed)}; {remedy}")
        self._check_missing(variables)
        for name, use in self._used():
            if not use.admits(variables[name]):
                raise InputError(
                    f"variables: '{name}' is declared as {variables[name].noun}, and used as {use.value}"
                )
        if isinstance(self.target, AbstractTimeEffect):
            _check_event(self.target, variables)
        if isinstance(self.target, AbstractRegimeEffect):
            _check_over_time(self.target, variables)
        object.__setattr__(self, "target", replace(self.target, arms=declared_arms(self.target, variables)))
        self._check_ranges()

    def _check_ranges(self) -> None:
        """Refuse a formula with a column that the declared ranges do not bound, and too many strata."""
        # The silos are not known yet; an indicator's range is the same for all of them.
        stand_in = ("\0", *dict.fromkeys(reference for _, reference in self._silo_references()))
        levels = self.levels | {SILO: stand_in}
        for role, model in self.models.items():
            for formula in formulas(model):
                try:
                    column_ranges(formula, levels, self.ranges)
                except InputError as error:
                    raise InputError(f"{role}_model: {error}") from None
        strata = self.target.strata
        if strata is not None and len(self.levels[strata]) > MOST_STRATA:
            raise InputError(
                f"strata: '{strata}' has {len(self.levels[strata])} levels, more than {MOST_STRATA}; group "
                "its values into a few, or name another column"
            )

    def _check_missing(self, variables: Variables) -> None:
        """Check that "omit" is declared for the treatment only, and other ways for covariates only."""
        others = self.always_complete
        for name, variable in variables.items():
            how = variable.missing
            if (how == "omit") != (name == self.target.treatment and how != "refuse"):
                raise InputError(
                    f"variables: '{name}' declares missing = \"{how}\"; records are omitted for a missing "
                    "treatment only, and it is neither imputed nor given an indicator"
                )
            if how in ("indicator", "impute") and name in others:
                raise InputError(f"variables: '{name}' declares missing = \"{how}\", and is {others[name]}")
        if self.imputes and not self.target.may_impute:
            raise InputError(
                f"variables: covariates of a study of {type(self.target).__name__} cannot be imputed; "
                "declare an indicator"
            )
        for name in self.target.over_time if isinstance(self.target, AbstractRegimeEffect) else ():
            how = variables[name].missing if name in variables else "refuse"
            if how not in ("refuse", "impute"):
                raise InputError(
                    f"variables: '{name}' declares missing = \"{how}\", and is a variable over time: its "
                    "values are missing after censoring or the event only, unless it is a covariate with "
                    'missing = "impute"'
                )
        if self.imputes and isinstance(self.algorithm, Personalized):
            raise InputError(
                "variables: a study that imputes combines pooled estimates, and Personalized has none"
            )

    @property
    def always_complete(self) -> dict[str, str]:
        """The columns but the treatment that are neither imputed nor given an indicator, with their parts."""
        never: Mapping[str, str] = self.target.never_missing()
        columns: dict[str | None, str] = {
            self.target.outcome: "the outcome; give a missingness_model",
            self.target.strata: "the strata",
            self.weights: "the weight of records",
            self.cluster: "the cluster",
            **dict(never.items()),
            **{
                name: "a supplied prediction"
                for model in self.models.values()
                if isinstance(model, Supplied)
                for name in model.columns
            },
            **{
                self.declared_name(name): "what a rule reads"
                for rule in self.target.regimes()
                for name in rule.needs
            },
            **dict.fromkeys(self.target.more_columns(), "a column of the target"),
        }
        return {name: part for name, part in columns.items() if name is not None}

    @property
    def may_be_missing(self) -> tuple[str, ...]:
        """The columns whose missing values are counted before anything is fitted; none in most studies.

        They are the covariates that the dictionary declares to be imputed or to have an indicator, by period
        if they are over time, and the outcome where some are imputed and outcomes may be missing.
        """
        variables, used = self.variables, self.used_variables
        names = [n for n, v in variables.items() if n in used and v.missing in ("indicator", "impute")]
        outcome = [self.target.outcome] if self.imputes and self.missingness_model is not None else []
        over_time = {} if self.timeline is None else self.timeline.over_time
        return (*(column for name in names for column in over_time.get(name, (name,))), *outcome)

    @property
    def imputes(self) -> bool:
        """Whether the dictionary declares that a covariate of some model is imputed."""
        used = self.used_variables
        return any(n in used and v.missing == "impute" for n, v in self.variables.items())

    @property
    def used_variables(self) -> set[str]:
        """The variables that models use, also by their lags."""
        return {self.declared_name(name) for model in self.models.values() for name in used_columns(model)}

    def variable_of(self, column: str) -> Variable:
        """Return the declaration of a column; that of a column of one period is its variable's over time."""
        variable = None if self.timeline is None else self.timeline.variable_of(column)
        return self.variables[variable or column]

    @property
    def omits(self) -> bool:
        """Whether records without a treatment are left out."""
        variable = self.variables.get(self.target.treatment or "")
        return variable is not None and variable.missing == "omit"

    def _used(self) -> Iterator[tuple[str, Use]]:
        """Yield every column that the dictionary must declare, and how it is used."""
        target = self.target
        if isinstance(target, AbstractTimeEffect):
            yield target.outcome, Use.EVENT
            yield target.time, Use.TIME
            yield from ((name, Use.TIME) for name in (target.entry,) if name is not None)
        else:
            yield target.outcome, Use.OUTCOME
        if target.treatment is not None:
            yield target.treatment, Use.NUMBER if target.is_modified else Use.TREATMENT
        if isinstance(target, AbstractRegimeEffect) and target.censoring is not None:
            yield target.censoring, Use.CENSORING
        if target.strata is not None:
            yield target.strata, Use.FACTOR
        if self.weights is not None:
            yield self.weights, Use.WEIGHT
        if self.cluster is not None:
            yield self.cluster, Use.CLUSTER
        for regime in target.regimes():
            yield from ((self.declared_name(name), Use.NUMBER) for name in regime.needs)
        for name, use in target.more_columns().items():
            yield name, Use.FACTOR if use == "factor" else Use.NUMBER
        for model in self.models.values():
            for formula in formulas(model, public=True):
                numbers = dict.fromkeys(map(self.declared_name, formula.numeric_names))
                factors = dict.fromkeys(map(self.declared_name, formula.factor_names))
                known = (target.treatment, SILO)
                yield from ((name, Use.NUMBER) for name in numbers if not self.is_period(name))
                yield from (
                    (name, Use.FACTOR) for name in factors if name not in known and not self.is_period(name)
                )

    def declared_name(self, name: str) -> str:
        """Return the name by which the dictionary declares a variable: that of the variable for a lag."""
        lagged = None if self.timeline is None else self.timeline.lagged(name)
        return name if lagged is None else lagged.name

    def is_period(self, name: str) -> bool:
        """Return whether a name in a formula is that of the period, which no silo has as a column."""
        return name == PERIOD and isinstance(self.target, AbstractTimeEffect)

    @property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """The levels of every factor, from the dictionary; those of the treatment are its arms."""
        levels = {name: self.variables[name].codes for name in self.factors} | self.derived_levels
        return levels | ({} if self.target.treatment is None else {self.target.treatment: self.target.arms})

    @property
    def response(self) -> Response:
        """How the outcome is modelled: "binary", "count" or "continuous"; an event is binary."""
        if isinstance(self.target, AbstractTimeEffect):
            return "binary"
        return RESPONSES[self.variables[self.target.outcome].basic_kind]

    @property
    def outcome_bounds(self) -> tuple[float, float]:
        """The least and the largest possible value of the outcome; those of an event are 0 and 1."""
        if isinstance(self.target, AbstractTimeEffect):
            return UNIT
        return self.variables.ranges[self.target.outcome]

    @property
    def uses_silo(self) -> bool:
        """Whether the silo is a variable of some model: its formula has C(silo)."""
        return any(SILO in used_columns(model) for model in self.models.values())

    @property
    def profiles_silo(self) -> bool:
        """Whether terms with C(silo) have coefficients that each silo keeps.

        C(silo) is a factor like others in studies of targets of other packages.
        """
        return self.target.keeps_own

    @property
    def has_silo_columns(self) -> bool:
        """Whether some model has a column that one silo alone fills."""
        return any(reason for _, reason in self._silo_terms())

    @property
    def keeps_coefficients(self) -> bool:
        """Whether some model has coefficients of each silo's own, if there are several silos."""
        return any(not reason for _, reason in self._silo_terms())

    def refuse_silo_columns(self) -> None:
        """Refuse a column that one silo alone fills: under masks its total is this silo's own sum."""
        if self.algorithm.pools_rows:
            return
        for where, reason in self._silo_terms():
            if reason:
                raise InputError(
                    f"{where}: with masked sums, the total of a column that one silo alone fills would be "
                    f"this silo's own sum, and {reason}, C(silo) has such columns. Leave the terms with "
                    'C(silo) out, or ask the owners whether they allow aggregation = "open"'
                )

    def _silo_terms(self) -> Iterator[tuple[str, str]]:
        """Yield the place of each model or learner with the silo, and why silos do not keep its coefficients.

        The reason is empty if they do.
        """
        levels = {**self.levels, SILO: ("", " ")}
        for role, model in self.models.items():
            for part in model.learners if isinstance(model, SuperLearner) else (model,):
                if SILO not in used_columns(part):
                    continue
                where = f"{role}_model" + (f", {part.formula!r}" if isinstance(part, GLM) else "")
                if not self.target.keeps_own:
                    yield where, f"in a study of {type(self.target).__name__}"
                elif not isinstance(part, GLM):
                    yield where, f"in {type(part).__name__}"
                elif own_formula(part.parsed, levels) is None:
                    yield where, "where factors of several interactions overlap as here"
                else:
                    yield where, ""

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
            "target": (target.outcome, target.treatment, target.strata, *target.more_columns()),
            "weights": (self.weights,),
            "cluster": (self.cluster,),
            "variables": tuple(self.variables),
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
        """Refuse a model that uses its response, or a variable that comes after it."""
        for role, model in self.models.items():
            excluded = self.target.excluded(role)
            for column in used_columns(model):
                if column in excluded:
                    raise InputError(
                        f"{role}_model: it uses '{column}', which is the study's {excluded[column]}; "
                        "leave it out"
                    )

    @property
    def rounds_sums(self) -> bool:
        """Whether sums are rounded and fits coded."""
        return self.algorithm.rounds_sums if self.sums == "auto" else self.sums == "rounded"

    @property
    def models(self) -> dict[str, NuisanceModel]:
        """The nuisance models that the study has and the target uses, by role."""
        return {role: model for role, model in self.given_models.items() if role in self.target.roles}

    @property
    def given_models(self) -> dict[str, NuisanceModel]:
        """The nuisance models that the study has, by role."""
        named = {role: getattr(self, f"{role}_model") for role in ROLES}
        if not set(self.target.roles) <= set(ROLES):
            named |= self.target.own_models()
        return {role: model for role, model in named.items() if model is not None}

    @property
    def needed_models(self) -> dict[str, NuisanceModel | None]:
        """The models that must be there, by role: that of the outcome, and those of the target itself."""
        outcome = {"outcome": self.outcome_model} if "outcome" in self.target.roles else {}
        return {**outcome, **self.target.own_models()}

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors of formulas that silos have as columns, and the strata; without the treatment."""
        names = {
            name
            for model in self.models.values()
            for formula in formulas(model)
            for name in formula.factor_names
        } - {self.target.treatment, SILO, *self.derived_levels}
        read = {name for name, use in self.target.more_columns().items() if use == "factor"}
        return tuple(sorted({*names, *read, *({self.target.strata} if self.target.strata else ())}))

    @property
    def derived_levels(self) -> dict[str, tuple[str, ...]]:
        """The levels of factors that no silo has as a column: the period, and variables over time."""
        if isinstance(self.target, AbstractTimeEffect):
            return {PERIOD: period_levels(len(self.target.edges))}
        timeline = self.timeline
        if timeline is None:
            return {}
        names = {name: self.declared_name(name) for name in (*timeline.over_time, *self._lags)}
        return {name: self.variables[of].codes for name, of in names.items() if of in self.variables}

    @property
    def _lags(self) -> tuple[str, ...]:
        """The lags of variables over time that models use."""
        used = {name for model in self.models.values() for name in used_columns(model)}
        return tuple(sorted(name for name in used if self.declared_name(name) != name))

    @property
    def ranges(self) -> dict[str, Range]:
        """The range of every number that formulas may use, that of the period included."""
        declared, timeline = self.variables.ranges, self.timeline
        if isinstance(self.target, AbstractTimeEffect):
            return {**declared, PERIOD: (1.0 / self.target.subperiods, float(len(self.target.edges)))}
        if timeline is None:
            return declared
        lags = {name: self.declared_name(name) for name in self._lags}
        return {**declared, **{name: declared[of] for name, of in lags.items() if of in declared}}

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


def declared_arms(target: AbstractEffect, variables: Variables) -> tuple[str, ...]:
    """Return the arms of the treatment: its levels, in the order that the target gives, if it gives any."""
    if target.treatment is None:
        return target.arms
    treatment = variables[target.treatment]
    if target.is_modified:
        if target.arms:
            raise InputError("arms: a treatment that rules modify has none; leave them out")
        return ()
    if not treatment.codes:  # a number or a count: a dose, of which the arms are some values
        if not target.arms:
            raise InputError(
                f"arms: '{target.treatment}' is declared as {treatment.noun}; list the values to compare"
            )
        return target.arms
    if target.arms and set(target.arms) != set(treatment.codes):
        raise InputError(
            f"arms: expected the levels that the dictionary declares for '{target.treatment}' in any order, "
            f"{', '.join(treatment.codes)}, or leave it out"
        )
    return target.arms or treatment.codes


def _check_over_time(target: AbstractRegimeEffect, variables: Variables) -> None:
    """Check that rules read what is there in every period, and that an event over time is binary."""
    timeline = target.timeline(variables)
    for rule in target.rules:
        for name in rule.needs:
            if not timeline.is_there(name, 1):
                raise InputError(f"rules: '{name}' does not exist in period 1; name the variable itself")
    if target.is_survival and variables[target.outcome].kind != "binary":
        raise InputError(
            f"variables: '{target.outcome}' is declared as {variables[target.outcome].noun}, and used as an "
            'event over time: kind "binary"'
        )


def _check_event(target: AbstractTimeEffect, variables: Variables) -> None:
    """Check that the dictionary declares the event, with the codes that the target names."""
    codes = variables[target.outcome].codes
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
