"""The elements of a target trial: concept sets, strategies, time zero, eligibility, outcome and covariates.

Day 0 is time zero. Baseline is day 0 and before; follow-up is day 1 to the last day of the outcome's window.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.defects import expect, expect_integer, expect_number
from fedtmle.errors import InputError
from fedtmle.initial.variables import LONGEST_TEXT, Variable

MOST_DAYS = 36_525  # a hundred years
MOST_AGE = 150
LARGEST_CONCEPT_ID = 2**63 - 1
_COLUMN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,49}")


def window_words(from_day: int | None, to_day: int) -> str:
    """Return a window of days in words."""
    return f"any day to {to_day}" if from_day is None else f"day {from_day} to {to_day}"


def _expect_days(argument: str, days: int, least: int = 0) -> None:
    expect_integer(argument, days)
    if not least <= days <= MOST_DAYS:
        raise InputError(f"{argument}: expected a number of days, {least} to {MOST_DAYS}, got {days}")


def expect_window(from_day: int | None, to_day: int) -> None:
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


def expect_column_name(name: str) -> None:
    expect("name", name, str, "text")
    if not _COLUMN_NAME.fullmatch(name) or name == "lambda":
        raise InputError(
            f"name: '{name}' cannot be a column; expected a letter, then letters, digits and '_', 50 at most"
        )


class Domain(enum.Enum):
    """The kind of record that a criterion or a covariate looks for."""

    CONDITION = "conditions"
    DRUG = "drugs"

    @property
    def singular(self) -> str:
        """The word for one such record."""
        return self.value.removesuffix("s")


class Censoring(enum.Enum):
    """Why the outcome of a person is unknown."""

    END_OF_OBSERVATION = "end of observation"
    SWITCH = "switch"


@final
@dataclass(frozen=True, kw_only=True)
class ConceptSet:
    """Concepts of the OMOP vocabulary by id, with all their descendants unless ``descendants`` is False.

    ``exclude`` removes concepts, and their descendants if ``descendants`` is True.
    """

    name: str
    ids: tuple[int, ...]
    exclude: tuple[int, ...] = ()
    descendants: bool = True

    def __post_init__(self) -> None:
        expect("name", self.name, str, "text")
        object.__setattr__(self, "ids", concept_ids("ids", self.ids))
        object.__setattr__(self, "exclude", concept_ids("exclude", self.exclude))
        expect("descendants", self.descendants, bool, "True or False")
        if not self.ids:
            raise InputError("ids: expected at least one concept id")
        if set(self.ids) & set(self.exclude):
            raise InputError("exclude: a concept is both included and excluded; name it once")


def concept_ids(argument: str, ids: Sequence[int]) -> tuple[int, ...]:
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
        too_long = len(self.name) > LONGEST_TEXT
        if not self.name or self.name != self.name.strip() or not self.name.isprintable() or too_long:
            raise InputError(
                f"name: expected one line of at most {LONGEST_TEXT} printable characters, "
                "no blanks at its ends"
            )


@final
@dataclass(frozen=True, kw_only=True)
class TimeZero:
    """When a person enters the trial.

    Without ``condition``: on the day on which a strategy's drug is started. With it: on the day of the
    person's first such condition; the drug may then be started up to ``grace_days`` later, and follow-up
    begins at the end of this grace period, among those who are still free of the outcome.

    ``washout_days`` is the number of days before time zero in which a person had no drug of any strategy. If
    it is None, only people who never had one enter.
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

    ``from_day`` None means the whole record; both ends belong to the window.
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
        expect_window(self.from_day, self.to_day)

    @property
    def words(self) -> str:
        """The criterion in words, for a line of the attrition."""
        asked = "with" if self.present else "without"
        return (
            f"{asked} {self.domain.singular} {self.concepts.name}, {window_words(self.from_day, self.to_day)}"
        )


@final
@dataclass(frozen=True, kw_only=True)
class Eligibility:
    """Who may enter: age in years at time zero (both ends included), days of observation, and records.

    If ``observation_days_before`` is None, observation periods are ignored; with 0, time zero must be in one.
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

    ``name`` is the column of the study's table: 1 with the event, 0 without, missing if unknown. With
    ``period_days``, the time to the event is analysed in periods of that many days: people count until
    censored, risks are estimated by each of ``horizons`` (days; the last day if none is given), and a column
    ``<name>_days`` has the day of the event or of the end of follow-up.
    """

    name: str
    days: int
    conditions: ConceptSet | None = None
    period_days: int | None = None
    horizons: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expect_column_name(self.name)
        _expect_days("days", self.days, least=1)
        if self.conditions is not None:
            expect("conditions", self.conditions, ConceptSet, "a ConceptSet, or None for death")
        expect("horizons", self.horizons, tuple | list, "days, such as (90, 365)")
        object.__setattr__(self, "horizons", tuple(self.horizons))
        if self.period_days is None:
            if self.horizons:
                raise InputError(
                    "horizons: risks by several days need the time to the event; set period_days"
                )
            return
        _expect_days("period_days", self.period_days, least=1)
        if self.days % self.period_days:
            raise InputError(f"period_days: expected a divisor of days ({self.days}), got {self.period_days}")
        for day in self.horizons:
            _expect_days("horizons", day, least=1)
            if day % self.period_days or day > self.days:
                raise InputError(
                    f"horizons: expected multiples of period_days ({self.period_days}) up to days "
                    f"({self.days}), got {day}"
                )

    @property
    def variables(self) -> dict[str, Variable]:
        """The outcome's columns as entries of the dictionary."""
        event = {self.name: Variable(kind="binary", label=self.label)}
        if self.period_days is None:
            return event
        until = "day of the event or of the end of follow-up"
        last = float(self.days)
        return event | {self.time: Variable(kind="number", range=(0.0, last), label=until, unit="days")}

    @property
    def time(self) -> str:
        """The column of the time to the event."""
        return f"{self.name}_days"

    @property
    def label(self) -> str:
        """The event in words, for the study's dictionary."""
        event = "death" if self.conditions is None else f"condition {self.conditions.name}"
        printable = "".join(letter for letter in event if letter.isprintable())
        days = f"day 1 to {self.days}"
        return f"{printable[: LONGEST_TEXT - len(days) - 2]}, {days}"


# Baseline covariates of a target trial: the columns of each, and their entries in the study's dictionary.

MOST_VISITS = 365  # most visits that a covariate counts, unless the trial sets another limit


@dataclass(frozen=True, kw_only=True)
class AbstractCovariate(ABC):
    """A covariate at baseline: one or more columns of the study's table, and its terms in a formula."""

    name: str

    def __post_init__(self) -> None:
        expect_column_name(self.name)
        self._check()

    def _check(self) -> None:  # noqa: B027 - without further arguments there is nothing to check
        """Check the arguments other than the name."""

    @abstractmethod
    def variables(self, eligibility: Eligibility, /) -> dict[str, Variable]:
        """Return the covariate's columns, in order, as entries of the dictionary."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the study's table."""
        return tuple(self.variables(Eligibility()))

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms of a formula that uses the covariate as it is."""
        entries = self.variables(Eligibility()).items()
        return tuple(f"C({name})" if entry.kind == "category" else name for name, entry in entries)


@dataclass(frozen=True, kw_only=True)
class AbstractWindowed(AbstractCovariate):
    """A covariate from the records in a window of days; ``from_day`` None means the whole record."""

    from_day: int | None = None
    to_day: int = 0

    def _check(self) -> None:
        expect_window(self.from_day, self.to_day)

    def _label(self, records: str) -> str:
        """Return the label of the records in the window, as a table of the report prints it."""
        printable = "".join(letter for letter in records if letter.isprintable())
        window = window_words(self.from_day, self.to_day)
        return f"{printable[: LONGEST_TEXT - len(window) - 2]}, {window}".strip()


@final
@dataclass(frozen=True, kw_only=True)
class AgeAtBaseline(AbstractCovariate):
    """The year of time zero minus the year of birth, as OMOP's tools compute age.

    Its range is that of the eligible ages, 0 to 150 where the trial does not limit them.
    """

    def variables(self, eligibility: Eligibility, /) -> dict[str, Variable]:
        least, most = eligibility.age or (0, MOST_AGE)
        ages = (least, max(most, least + 1))
        return {self.name: Variable(kind="number", range=ages, label="age at time zero", unit="years")}


@final
@dataclass(frozen=True, kw_only=True)
class Sex(AbstractCovariate):
    """The factor with the levels female, male and other; other includes people without a recorded sex."""

    def variables(self, _: Eligibility, /) -> dict[str, Variable]:
        levels = (("female", ""), ("male", ""), ("other", ""))
        return {self.name: Variable(kind="category", levels=levels, label="sex")}


@final
@dataclass(frozen=True, kw_only=True)
class VisitCount(AbstractWindowed):
    """The number of visits that begin in the window, at most ``most``."""

    most: int = MOST_VISITS

    def _check(self) -> None:
        expect_window(self.from_day, self.to_day)
        expect_integer("most", self.most)
        if not 1 <= self.most < 2**31:
            raise InputError(f"most: expected a number of visits, at least 1, got {self.most}")

    def variables(self, _: Eligibility, /) -> dict[str, Variable]:
        label = self._label("visits")
        return {self.name: Variable(kind="count", range=(0.0, float(self.most)), label=label)}


@final
@dataclass(frozen=True, kw_only=True)
class AnyRecord(AbstractWindowed):
    """1 if a condition or a drug of the concept set begins in the window, else 0."""

    domain: Domain
    concepts: ConceptSet

    def _check(self) -> None:
        expect_window(self.from_day, self.to_day)
        expect("domain", self.domain, Domain, "a Domain")
        expect("concepts", self.concepts, ConceptSet, "a ConceptSet")

    def variables(self, _: Eligibility, /) -> dict[str, Variable]:
        label = self._label(f"{self.domain.singular} {self.concepts.name}")
        return {self.name: Variable(kind="binary", label=label)}


@final
@dataclass(frozen=True, kw_only=True)
class LastMeasurement(AbstractWindowed):
    """The last number measured in the window; ``<name>_measured`` is 1 if there is one, else 0.

    ``range`` has the least and the largest plausible number; measurements outside it are left out. A person
    without a measurement has the value ``if_missing``, which the trial declares. If ``units`` are
    given (concept ids), only measurements in these units count.
    """

    concepts: ConceptSet
    range: tuple[float, float]
    if_missing: float
    units: tuple[int, ...] = ()

    def _check(self) -> None:
        expect_window(self.from_day, self.to_day)
        expect("concepts", self.concepts, ConceptSet, "a ConceptSet")
        expect("range", self.range, tuple | list, "two numbers, (least, largest)")
        for number in self.range:
            expect_number("range", number)
        if len(self.range) != 2 or not self.range[0] < self.range[1]:
            raise InputError("range: expected the least and the largest plausible number, such as (20, 250)")
        object.__setattr__(self, "range", (float(self.range[0]), float(self.range[1])))
        expect_number("if_missing", self.if_missing)
        if not self.range[0] <= self.if_missing <= self.range[1]:
            raise InputError(f"if_missing: expected a number in range, {list(self.range)}")
        object.__setattr__(self, "units", concept_ids("units", self.units))

    def variables(self, _: Eligibility, /) -> dict[str, Variable]:
        label = self._label(f"last {self.concepts.name}")
        return {
            self.name: Variable(kind="number", range=self.range, label=label),
            f"{self.name}_measured": Variable(kind="binary", label=self._label(f"{self.name} was measured")),
        }
