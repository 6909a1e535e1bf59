"""A target trial as a value: who is eligible, what is compared from when on, what counts as the outcome.

Day 0 is time zero. Baseline is day 0 and before; follow-up is day 1 to the last day of the outcome's window.
The same words are the keys of `trial.toml` (`trials.file`).
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict, final

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.coded import Coded
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import used_columns
from fedtmle.model.arguments import expect, expect_integer, expect_number
from fedtmle.programs.study import NuisanceModel, Study
from fedtmle.targets.effects.estimands import ATE, OR, RR, TSM, AbstractEffect

MOST_DAYS = 36_525  # a hundred years
MOST_AGE = 150
LARGEST_CONCEPT_ID = 2**63 - 1
TREATMENT_COLUMN = "strategy"
_COLUMN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,49}")

EFFECTS: Mapping[str, type[AbstractEffect]] = {
    "risk difference": ATE,
    "risk ratio": RR,
    "odds ratio": OR,
    "risks": TSM,
}


def window_words(from_day: int | None, to_day: int) -> str:
    """Return a window of days in words."""
    return f"any day to {to_day}" if from_day is None else f"day {from_day} to {to_day}"


def _expect_days(argument: str, days: int, least: int = 0) -> None:
    expect_integer(argument, days)
    if not least <= days <= MOST_DAYS:
        raise InputError(f"{argument}: expected a number of days, {least} to {MOST_DAYS}, got {days}")


def _expect_window(from_day: int | None, to_day: int) -> None:
    expect_integer("to_day", to_day)
    if not -MOST_DAYS <= to_day <= 0:
        raise InputError(
            f"to_day: expected a day from {-MOST_DAYS} to 0, got {to_day}; baseline ends with day 0"
        )
    if from_day is not None:
        expect_integer("from_day", from_day)
        if not -MOST_DAYS <= from_day <= to_day:
            raise InputError(
                f"from_day: expected a day from {-MOST_DAYS} to to_day ({to_day}), got {from_day}"
            )


def _expect_column_name(name: str) -> None:
    expect("name", name, str, "text")
    if not _COLUMN_NAME.fullmatch(name) or name == "lambda":
        raise InputError(
            f"name: '{name}' cannot be a column; expected a letter, then letters, digits and '_', 50 at most"
        )


class Domain(enum.Enum):
    """The kind of record that a criterion or a covariate looks for."""

    CONDITION = "conditions"
    DRUG = "drugs"


class Censoring(enum.Enum):
    """Why the outcome of a person is unknown."""

    END_OF_OBSERVATION = "end of observation"
    SWITCH = "switch"


@final
@dataclass(frozen=True, kw_only=True)
class ConceptSet:
    """Concepts of the OMOP vocabulary by id, with all their descendants unless ``descendants`` is False.

    ``exclude`` takes concepts out again, with their descendants where those are included.
    """

    name: str
    ids: tuple[int, ...]
    exclude: tuple[int, ...] = ()
    descendants: bool = True

    def __post_init__(self) -> None:
        expect("name", self.name, str, "text")
        object.__setattr__(self, "ids", _concept_ids("ids", self.ids))
        object.__setattr__(self, "exclude", _concept_ids("exclude", self.exclude))
        expect("descendants", self.descendants, bool, "True or False")
        if not self.ids:
            raise InputError("ids: expected at least one concept id")
        if set(self.ids) & set(self.exclude):
            raise InputError("exclude: a concept is both included and excluded; name it once")


def _concept_ids(argument: str, ids: Sequence[int]) -> tuple[int, ...]:
    expect(argument, ids, tuple | list, "concept ids, such as (1118084,)")
    for each in ids:
        expect_integer(argument, each)
        if not 0 < each <= LARGEST_CONCEPT_ID:
            raise InputError(f"{argument}: a concept id is a whole number above 0")
    return tuple(ids)


@final
@dataclass(frozen=True, kw_only=True)
class TreatmentStrategy:
    """Start a drug of a concept set; ``name`` is the level of the treatment in the study's table."""

    name: str
    drugs: ConceptSet

    def __post_init__(self) -> None:
        expect("name", self.name, str, "text")
        expect("drugs", self.drugs, ConceptSet, "a ConceptSet")
        if not self.name.strip() or self.name != self.name.strip():
            raise InputError("name: expected text without blanks at its ends")


@final
@dataclass(frozen=True, kw_only=True)
class TimeZero:
    """When a person enters the trial.

    Without ``condition``: on the day on which a strategy's drug is started. With it: on the day of the
    person's first such condition; the drug may then be started up to ``grace_days`` later, and follow-up
    begins at the end of this grace period, among those who are still free of the outcome.

    ``washout_days`` are days before time zero without any drug of any strategy. Without it only people enter
    who have never had one.
    """

    condition: ConceptSet | None = None
    grace_days: int = 0
    washout_days: int | None = None

    def __post_init__(self) -> None:
        _expect_days("grace_days", self.grace_days)
        if self.washout_days is not None:
            _expect_days("washout_days", self.washout_days, least=1)
        if self.condition is not None:
            expect("condition", self.condition, ConceptSet, "a ConceptSet")
        elif self.grace_days:
            raise InputError(
                "grace_days: with time zero at the start of a drug nobody has to wait; leave grace_days out, "
                "or name the condition at which time zero is"
            )


@final
@dataclass(frozen=True, kw_only=True)
class Criterion:
    """Records of a concept set that a person must have, or must not have, in a window of days at baseline.

    ``from_day`` None is the whole record; both ends belong to the window.
    """

    domain: Domain
    concepts: ConceptSet
    present: bool
    from_day: int | None = None
    to_day: int = 0

    def __post_init__(self) -> None:
        expect("domain", self.domain, Domain, "a Domain")
        expect("concepts", self.concepts, ConceptSet, "a ConceptSet")
        expect("present", self.present, bool, "True or False")
        _expect_window(self.from_day, self.to_day)

    @property
    def words(self) -> str:
        """What the criterion asks, for a line of the attrition."""
        kind = "condition" if self.domain is Domain.CONDITION else "drug"
        asked = "with" if self.present else "without"
        return f"{asked} {kind} {self.concepts.name}, {window_words(self.from_day, self.to_day)}"


@final
@dataclass(frozen=True, kw_only=True)
class Eligibility:
    """Who may enter: age in years at time zero (both ends included), days of observation, and records.

    ``observation_days_before`` None does not look at observation periods at all; 0 asks that time zero be
    in one.
    """

    age: tuple[int, int] | None = None
    observation_days_before: int | None = None
    criteria: tuple[Criterion, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "criteria", tuple(self.criteria))
        for criterion in self.criteria:
            expect("criteria", criterion, Criterion, "Criterion values")
        if self.age is not None:
            expect("age", self.age, tuple | list, "two whole numbers, (least, most)")
            object.__setattr__(self, "age", tuple(self.age))
            for years in self.age:
                expect_integer("age", years)
            if len(self.age) != 2 or not 0 <= self.age[0] <= self.age[1] <= MOST_AGE:
                raise InputError(f"age: expected (least, most) in years, 0 to {MOST_AGE}")
        if self.observation_days_before is not None:
            _expect_days("observation_days_before", self.observation_days_before)


@final
@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The first condition of a concept set, or death (``conditions`` None), on day 1 to day ``days``.

    ``name`` is the column of the study's table: 1 with the event, 0 without, missing if censored.
    """

    name: str
    days: int
    conditions: ConceptSet | None = None

    def __post_init__(self) -> None:
        _expect_column_name(self.name)
        _expect_days("days", self.days, least=1)
        if self.conditions is not None:
            expect("conditions", self.conditions, ConceptSet, "a ConceptSet, or None for death")


# Baseline covariates.


@dataclass(frozen=True, kw_only=True)
class AbstractCovariate(ABC):
    """A covariate at baseline: one or more columns of the study's table, and its terms in a formula."""

    name: str

    def __post_init__(self) -> None:
        _expect_column_name(self.name)
        self._check()

    def _check(self) -> None:  # noqa: B027 - without further arguments there is nothing to check
        """Check the arguments beside the name."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of the study's table."""

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms of a formula that uses the covariate as it is."""
        return self.columns

    is_factor: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class AbstractWindowed(AbstractCovariate):
    """A covariate of the records in a window of days; ``from_day`` None is the whole record."""

    from_day: int | None = None
    to_day: int = 0

    def _check(self) -> None:
        _expect_window(self.from_day, self.to_day)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,)


@final
@dataclass(frozen=True, kw_only=True)
class AgeAtBaseline(AbstractCovariate):
    """The year of time zero minus the year of birth, as OMOP's tools compute age."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,)


@final
@dataclass(frozen=True, kw_only=True)
class Sex(AbstractCovariate):
    """The factor with the levels female, male and other."""

    is_factor = True

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def terms(self) -> tuple[str, ...]:
        return (f"C({self.name})",)


@final
@dataclass(frozen=True, kw_only=True)
class VisitCount(AbstractWindowed):
    """The number of visits that begin in the window."""


@final
@dataclass(frozen=True, kw_only=True)
class AnyRecord(AbstractWindowed):
    """1 if a condition or a drug of the concept set begins in the window, else 0."""

    domain: Domain
    concepts: ConceptSet

    def _check(self) -> None:
        _expect_window(self.from_day, self.to_day)
        expect("domain", self.domain, Domain, "a Domain")
        expect("concepts", self.concepts, ConceptSet, "a ConceptSet")


@final
@dataclass(frozen=True, kw_only=True)
class LastMeasurement(AbstractWindowed):
    """The last number measured in the window, and a column ``<name>_measured`` that is 0 where there is none.

    A person without a measurement has the value ``if_missing``, which the trial declares. ``units`` keeps
    measurements in these units (concept ids) only.
    """

    concepts: ConceptSet
    if_missing: float
    units: tuple[int, ...] = ()

    def _check(self) -> None:
        _expect_window(self.from_day, self.to_day)
        expect("concepts", self.concepts, ConceptSet, "a ConceptSet")
        expect_number("if_missing", self.if_missing)
        object.__setattr__(self, "units", _concept_ids("units", self.units))

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_measured")


# The trial.


class StudyOptions(TypedDict, total=False):
    """The arguments of `Study` that a trial may set; the others name columns, and a trial has its own."""

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
    """A target trial to emulate on OMOP databases; the first strategy is the reference.

    ``effect`` is "risk difference", "risk ratio", "odds ratio" or "risks" on the last day of the outcome's
    window. A model that is not given uses every covariate as it is. `study` is the study over the tables that
    `trials.compile` describes.
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
        return table_columns(self.outcome.name, self.covariates)

    @property
    def factors(self) -> frozenset[str]:
        """Those columns that are texts."""
        return frozenset(
            {TREATMENT_COLUMN, *(name for c in self.covariates if c.is_factor for name in c.columns)}
        )

    @property
    def study(self) -> Study:
        """The study over the table of each silo."""
        models = self._models()
        target = EFFECTS[self.effect](
            outcome=self.outcome.name,
            outcome_type="binary",
            treatment=TREATMENT_COLUMN,
            arms=tuple(strategy.name for strategy in self.strategies),
        )
        return Study(
            target=target,
            outcome_model=models["outcome"],
            treatment_model=models["treatment"],
            missingness_model=models.get("missingness"),
            algorithm=self.algorithm,
            **self.options,
        )

    @property
    def default_formulas(self) -> dict[str, str]:
        """The formulas of the models that are not given, by role: all covariates as they are."""
        terms = [term for covariate in self.covariates for term in covariate.terms]
        with_treatment = " + ".join([f"C({TREATMENT_COLUMN})", *terms])
        default = {"outcome": with_treatment, "treatment": " + ".join(terms) or "1"}
        if self.censoring:
            default["missingness"] = with_treatment
        return {role: formula for role, formula in default.items() if role not in self.models}

    def _models(self) -> dict[str, NuisanceModel]:
        return {**{role: GLM(formula) for role, formula in self.default_formulas.items()}, **self.models}


def table_columns(outcome: str, covariates: Sequence[AbstractCovariate]) -> tuple[str, ...]:
    """Return the columns of a trial's table: the strategy, the outcome, and the covariates' columns."""
    return (TREATMENT_COLUMN, outcome, *(name for covariate in covariates for name in covariate.columns))


Contradiction = tuple[tuple[str, ...], str | None, str]  # section, key of it if any, message


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
                "censoring at the end of observation needs people who are observed at time zero; set "
                "observation_days_before in [eligibility], at least 0",
            )
    if "missingness" in models and not censoring:
        yield ("models", "missingness"), None, "without censoring no outcome is missing; leave this model out"
    if outcome is not None:
        names = table_columns(outcome.name, covariates)
        for name, count in Counter(each.casefold() for each in names).items():
            if count > 1:
                yield ("covariates",), name, f"two columns of the table are called '{name}'; rename one"
        for role, model in models.items():
            for column in sorted(set(used_columns(model)) - set(names)):
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
