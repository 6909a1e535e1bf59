"""A target trial as a value, the study over the tables that it defines, and its protocol in words.

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
from fedtmle.defects import expect
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import used_columns
from fedtmle.initial.variables import Variable, Variables
from fedtmle.programs.study import NuisanceModel, Study
from fedtmle.targets.effects.estimands import ATE, OR, RR, TSM, AbstractEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect, Risk, RiskDifference, RiskRatio
from fedtmle.targets.time.followup import PERIOD
from fedtmle.trials.elements import (
    AbstractCovariate,
    Censoring,
    ConceptSet,
    Eligibility,
    TimeZero,
    TreatmentStrategy,
    TrialOutcome,
)

TREATMENT_COLUMN = "strategy"
PERSON_COLUMN = "person_id"  # of the table at the hospital, for its home alone: no study reads it

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
        for name, count in Counter(each.casefold() for each in (*names, PERSON_COLUMN)).items():
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


# The protocol of a trial in words: each component of the target trial, and how the records emulate it.
#
# The components are those of the TARGET statement (Cashin et al., JAMA 2025, doi:10.1001/jama.2025.13350).

_CONTRASTS = {
    "risk difference": "difference of the risks",
    "risk ratio": "ratio of the risks",
    "odds ratio": "ratio of the odds",
    "risks": "risk under each strategy",
}


@final
@dataclass(frozen=True, kw_only=True)
class ProtocolElement:
    """One component of the protocol: what the target trial would do, and what is done with the records."""

    name: str
    target: str
    emulation: str


def protocol(trial: TargetTrial) -> tuple[ProtocolElement, ...]:
    """Return the components of a trial's protocol, in the order of the TARGET statement."""
    parts = (
        ("Eligibility criteria", *_eligibility(trial)),
        ("Treatment strategies", *_strategies(trial)),
        ("Assignment", *_assignment(trial)),
        ("Time zero and follow-up", *_follow_up(trial)),
        ("Outcome", *_outcome(trial)),
        ("Causal contrast", *_contrast(trial)),
        ("Identifying assumptions", *_assumptions(trial)),
        ("Data analysis", *_analysis(trial)),
    )
    return tuple(ProtocolElement(name=name, target=target, emulation=done) for name, target, done in parts)


def _sentence(parts: list[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _eligibility(trial: TargetTrial) -> tuple[str, str]:
    eligibility, zero = trial.eligibility, trial.time_zero
    asked = []
    if zero.condition is not None:
        asked.append(f"a first condition {zero.condition.name}")
    if eligibility.age is not None:
        asked.append("aged {} to {} years".format(*eligibility.age))
    if zero.washout_days is None:
        asked.append("no earlier use of a drug of any strategy")
    else:
        asked.append(f"no drug of any strategy in the {zero.washout_days} days before")
    asked += [criterion.words for criterion in eligibility.criteria]
    if zero.condition is not None:
        asked.append("alive and free of the outcome at the end of the grace period")
    days = eligibility.observation_days_before
    observed = (
        "observation periods were not looked at"
        if days is None
        else f"an observation period that holds time zero and the {days} days before it was required"
    )
    done = [
        "the same, by records of the OMOP CDM with the descendants of each concept",
        observed,
        "people who started drugs of two strategies on one day were left out",
    ]
    return _sentence(asked), _sentence(done)


def _concepts(concepts: ConceptSet) -> str:
    ids = ", ".join(map(str, concepts.ids))
    below = "with descendants" if concepts.descendants else "without descendants"
    without = f", not {', '.join(map(str, concepts.exclude))}" if concepts.exclude else ""
    return f"{concepts.name} ({ids}{without}; {below})"


def _strategies(trial: TargetTrial) -> tuple[str, str]:
    grace = trial.time_zero.grace_days
    when = f" within {grace} days" if grace else ""
    asked = [f"{strategy.name}: start{when}" for strategy in trial.strategies]
    done = [f"{s.name}: the first record of {_concepts(s.drugs)}" for s in trial.strategies]
    return _sentence(asked), _sentence(done)


def _assignment(trial: TargetTrial) -> tuple[str, str]:
    covariates = [
        variable.label or name
        for covariate in trial.covariates
        for name, variable in covariate.variables(trial.eligibility).items()
    ]
    given = "; ".join(covariates) or "nothing: there are no covariates"
    return (
        "At random at time zero; people know their strategy.",
        f"By the drug that was started, taken as random given these covariates at baseline: {given}.",
    )


def _follow_up(trial: TargetTrial) -> tuple[str, str]:
    zero, days = trial.time_zero, trial.outcome.days
    if zero.condition is None:
        begins = "Time zero is the day of assignment and of the start of the drug."
        entered = "Time zero is the first eligible day on which a drug was started."
    else:
        begins = f"Time zero is the day of the condition; follow-up starts {zero.grace_days} days later."
        entered = f"Time zero is the first record of {_concepts(zero.condition)}; a landmark analysis."
    ends = f"Follow-up is day 1 to day {days}"
    unknown = {
        Censoring.END_OF_OBSERVATION: "the observation period ends before the last day",
        Censoring.SWITCH: "a drug of another strategy is started first",
    }
    reasons = " or if ".join(unknown[reason] for reason in trial.censoring)
    if trial.outcome.period_days is not None:
        unknown_words = f"A person is censored if {reasons}." if reasons else ""
        grid = f"The time to the event is analysed on periods of {trial.outcome.period_days} days."
        done = f"{unknown_words} {grid}".strip()
    else:
        done = (
            f"The outcome is unknown if {reasons}." if reasons else "Nobody is lost: no record is no event."
        )
    return f"{begins} {ends}.", f"{entered} {ends} after it. {done}"


def _outcome(trial: TargetTrial) -> tuple[str, str]:
    outcome = trial.outcome
    if outcome.conditions is None:
        return f"Death by day {outcome.days}.", "The date in the table of deaths."
    event = f"A first {outcome.conditions.name} by day {outcome.days}."
    return event, f"A record of a condition of {_concepts(outcome.conditions)}."


def _contrast(trial: TargetTrial) -> tuple[str, str]:
    contrast = _CONTRASTS[trial.effect]
    if trial.outcome.horizons:
        contrast += f" by day {', '.join(map(str, trial.outcome.horizons))}"
    if Censoring.SWITCH in trial.censoring:
        kept = "people who switch would have been followed without switching (an analogue of per protocol)"
        return f"The {contrast} if nobody switched.", f"The same; {kept}."
    return (
        f"The {contrast} by assignment (intention to treat).",
        "The same, by the drug started: what people did later is part of the strategy.",
    )


def _assumptions(trial: TargetTrial) -> tuple[str, str]:
    known = "Whether an outcome is known depends on strategy and covariates only."
    also = f" {known}" if trial.censoring else ""
    done = (
        "Given the covariates, strategies were as if assigned at random (no unmeasured confounding), and "
        "everyone had a chance of each strategy (positivity). Differences between ways to follow a strategy "
        "do not matter (consistency). Codes and dates of the records are right."
    )
    return f"Assignment is random.{also}", f"{done}{also}"


def _analysis(trial: TargetTrial) -> tuple[str, str]:
    roles = {
        "outcome": "the outcome",
        "treatment": "the treatment",
        "missingness": "who is observed",
        "hazard": "the hazard of the event in each period",
        "censoring": "who is censored in each period",
    }
    models = ", ".join(roles[role] for role in trial.study.models)
    return (
        "Risks by strategy, adjusted for baseline covariates.",
        f"Federated targeted maximum likelihood with models of {models}; intervals by the efficient "
        "influence function. The section on who was studied has the models' formulas.",
    )
