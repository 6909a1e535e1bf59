"""A target trial as a value, and the study over the tables that it defines.

The same words are the keys of `trial.toml` (`trials.file`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict, final

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.coded import Coded
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import used_columns
from fedtmle.initial.variables import Variable, Variables
from fedtmle.model.arguments import expect
from fedtmle.programs.study import NuisanceModel, Study
from fedtmle.targets.effects.estimands import ATE, OR, RR, TSM, AbstractEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect, Risk, RiskDifference, RiskRatio
from fedtmle.targets.time.followup import PERIOD
from fedtmle.trials.covariates import AbstractCovariate
from fedtmle.trials.elements import Censoring, Eligibility, TimeZero, TreatmentStrategy, TrialOutcome

TREATMENT_COLUMN = "strategy"

TIME_EFFECTS: Mapping[str, type[AbstractTimeEffect]] = {
    "risk difference": RiskDifference,
    "risk ratio": RiskRatio,
    "risks": Risk,
}
ROLES = ("outcome", "treatment", "missingness")
TIME_ROLES = ("hazard", "treatment", "censoring")
EFFECTS: Mapping[str, type[AbstractEffect]] = {
    "risk difference": ATE,
    "risk ratio": RR,
    "odds ratio": OR,
    "risks": TSM,
}


class StudyOptions(TypedDict, total=False):
    """The arguments of `Study` that a trial may set. The others name columns, which the trial fixes."""

    g_bounds: Literal["auto"] | float | None
    clever: Literal["covariate", "weight"]
    submodel: Literal["per arm", "contrast"]
    link: Literal["logistic", "linear"]
    folds: int | None
    seed: int
    confidence: float
    diagnostics: bool


@final
@dataclass(frozen=True, kw_only=True)
class TargetTrial:
    """A target trial to emulate on OMOP databases.

    Parameters
    ----------
    name
        The trial's name.
    strategies
        The treatment strategies, the reference first.
    outcome
        The outcome and its window.
    time_zero
        When follow-up begins.
    eligibility
        Who is eligible.
    censoring
        What ends follow-up early.
    covariates
        The covariates at time zero.
    effect
        "risk difference", "risk ratio", "odds ratio" or "risks", on the last day of the outcome's window,
        or by its horizons where the time to the event is analysed.
    models
        Nuisance models by role. A model that is not given uses every covariate as it is.
    algorithm
        The algorithm that targets the estimate.
    options
        Options of the study, by name.

    Raises
    ------
    InputError
        A part of the trial is wrong, or contradicts another.

    Examples
    --------
    >>> from dataclasses import fields
    >>> [field.name for field in fields(ft.TargetTrial)][:3]
    ['name', 'strategies', 'outcome']
    """

    name: str
    strategies: tuple[TreatmentStrategy, ...]
    outcome: TrialOutcome
    time_zero: TimeZero = TimeZero()
    eligibility: Eligibility = Eligibility()
    censoring: tuple[Censoring, ...] = ()
    covariates: tuple[AbstractCovariate, ...] = ()
    effect: str = "risk difference"
    models: Mapping[str, NuisanceModel] = field(default_factory=dict)
    algorithm: AbstractAlgorithm = Coded()
    options: StudyOptions = field(default_factory=StudyOptions)

    def __post_init__(self) -> None:
        expect("name", self.name, str, "text")
        for name, kind in (
            ("strategies", TreatmentStrategy),
            ("censoring", Censoring),
            ("covariates", AbstractCovariate),
        ):
            expect(name, getattr(self, name), tuple | list, f"a tuple of {kind.__name__} values")
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for each in getattr(self, name):
                expect(name, each, kind, f"{kind.__name__} values")
        expect("outcome", self.outcome, TrialOutcome, "a TrialOutcome")
        expect("time_zero", self.time_zero, TimeZero, "a TimeZero")
        expect("eligibility", self.eligibility, Eligibility, "an Eligibility")
        if self.effect not in EFFECTS:
            raise InputError(f"effect: expected one of {', '.join(EFFECTS)}, got '{self.effect}'")
        if self.outcome.period_days is not None and self.effect not in TIME_EFFECTS:
            known = ", ".join(TIME_EFFECTS)
            raise InputError(f"effect: with period_days expected one of {known}, got '{self.effect}'")
        defects = list(
            contradictions(
                strategies=self.strategies,
                outcome=self.outcome,
                time_zero=self.time_zero,
                eligibility=self.eligibility,
                censoring=self.censoring,
                covariates=self.covariates,
                models=self.models,
            )
        )
        if defects:
            raise InputError(
                "; ".join(f"{key or section[-1]}: {message}" for section, key, message in defects)
            )
        self.study  # noqa: B018 - raises what is wrong with the models and options

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the study's table, in order."""
        return table_columns(self.outcome, self.covariates)

    @property
    def digest(self) -> str:
        """SHA-256 of the parts of the trial that decide the table; the same at all silos that emulate it."""
        parts = (self.strategies, self.outcome, self.time_zero, self.eligibility, self.censoring)
        return hashlib.sha256(repr((*parts, self.covariates)).encode()).hexdigest()

    @property
    def variables(self) -> Variables:
        """The dictionary of the study's table: every column, in order.

        The label of the strategy names the trial by its digest, so that a plan belongs to one trial only.
        """
        strategies = tuple((strategy.name, "") for strategy in self.strategies)
        label = f"treatment strategy of trial {self.digest[:16]}"
        table = {
            TREATMENT_COLUMN: Variable(kind="category", levels=strategies, label=label),
            **self.outcome.variables,
        }
        for covariate in self.covariates:
            table |= covariate.variables(self.eligibility)
        return Variables(table)

    @property
    def study(self) -> Study:
        """The study over the table of each silo."""
        models = self._models()
        return Study(
            target=self._target(),
            outcome_model=models.get("outcome"),
            treatment_model=models["treatment"],
            missingness_model=models.get("missingness"),
            hazard_model=models.get("hazard"),
            censoring_model=models.get("censoring"),
            algorithm=self.algorithm,
            variables=self.variables,
            **self.options,
        )

    def _target(self) -> AbstractEffect:
        outcome = self.outcome
        if outcome.period_days is None:
            return EFFECTS[self.effect](outcome=outcome.name, treatment=TREATMENT_COLUMN)
        return TIME_EFFECTS[self.effect](
            outcome=outcome.name,
            time=outcome.time,
            periods=outcome.days // outcome.period_days,
            period_length=float(outcome.period_days),
            horizons=tuple(sorted({day // outcome.period_days for day in outcome.horizons})),
            treatment=TREATMENT_COLUMN,
        )

    @property
    def default_formulas(self) -> dict[str, str]:
        """The formulas of the models that are not given, by role: all covariates as they are."""
        terms = [term for covariate in self.covariates for term in covariate.terms]
        with_treatment = " + ".join([f"C({TREATMENT_COLUMN})", *terms])
        default = {"outcome": with_treatment, "treatment": " + ".join(terms) or "1"}
        unknown = {"missingness": with_treatment}
        if self.outcome.period_days is not None:
            # Without covariates, hazards are counted by arm and period.
            hazard = {"hazard": f"{PERIOD} + {with_treatment}"} if terms else {}
            default = {**hazard, "treatment": default["treatment"]}
            unknown = {"censoring": f"{PERIOD} + {with_treatment}"}
        if self.censoring:
            default |= unknown
        return {role: formula for role, formula in default.items() if role not in self.models}

    def _models(self) -> dict[str, NuisanceModel]:
        return {**{role: GLM(formula) for role, formula in self.default_formulas.items()}, **self.models}


def table_columns(outcome: TrialOutcome, covariates: Sequence[AbstractCovariate]) -> tuple[str, ...]:
    """Return the columns of a trial's table: the strategy, the outcome's, and the covariates'."""
    baseline = [name for covariate in covariates for name in covariate.columns]
    return (TREATMENT_COLUMN, *outcome.variables, *baseline)


Contradiction = tuple[tuple[str, ...], str | None, str]  # section, key in it or None, message


def contradictions(
    *,
    strategies: Sequence[TreatmentStrategy],
    outcome: TrialOutcome | None,
    time_zero: TimeZero | None,
    eligibility: Eligibility | None,
    censoring: Sequence[Censoring],
    covariates: Sequence[AbstractCovariate],
    models: Mapping[str, NuisanceModel],
) -> Iterator[Contradiction]:
    """Yield every contradiction between parts of a trial, with the section and the key that it is about.

    A part that could not be read is None.
    """
    yield from _strategy_contradictions(strategies)
    if eligibility is not None:
        observed = eligibility.observation_days_before
        washout = None if time_zero is None else time_zero.washout_days
        if washout is not None and (observed is None or observed < washout):
            yield (
                ("time_zero",),
                "washout_days",
                "earlier use is on record only while a person is observed; set observation_days_before in "
                f"[eligibility] to at least {washout}",
            )
        if Censoring.END_OF_OBSERVATION in censoring and observed is None:
            yield (
                ("follow_up",),
                "censor",
                "censoring at the end of observation requires observation at time zero; set "
                "observation_days_before in [eligibility], at least 0",
            )
    for role in ("missingness", "censoring"):
        if role in models and not censoring:
            yield ("models", role), None, "without censoring every outcome is known; leave this model out"
    if outcome is not None:
        names = table_columns(outcome, covariates)
        known = {*names, *([PERIOD] if outcome.period_days else [])}
        roles = TIME_ROLES if outcome.period_days else ROLES
        for role in (role for role in models if role not in roles):
            message = f"this outcome has models of {', '.join(roles)}; period_days in [outcome] decides"
            yield ("models", role), None, message
        for name, count in Counter(each.casefold() for each in names).items():
            if count > 1:
                yield ("covariates",), name, f"two columns of the table are called '{name}'; rename one"
        for role, model in models.items():
            for column in sorted(set(used_columns(model)) - known):
                yield (
                    ("models", role),
                    None,
                    f"it uses '{column}', which the trial does not define; known: {', '.join(names)}",
                )


def _strategy_contradictions(strategies: Sequence[TreatmentStrategy]) -> Iterator[Contradiction]:
    if len(strategies) < 2:
        yield ("strategies",), None, "expected at least two strategies to compare"
    for name, count in Counter(strategy.name for strategy in strategies).items():
        if count > 1:
            yield ("strategies",), None, f"two strategies are called '{name}'; give each its own name"
    for concept, count in Counter(each for s in strategies for each in set(s.drugs.ids)).items():
        if count > 1:
            yield (
                ("strategies",),
                None,
                f"concept {concept} is in the drugs of two strategies; leave it in one",
            )
