"""Baseline covariates of a target trial: the columns of each, and their entries in the study's dictionary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

from fedtmle.errors import InputError
from fedtmle.initial.variables import LONGEST_TEXT, Variable
from fedtmle.model.arguments import expect, expect_integer, expect_number
from fedtmle.trials.elements import (
    MOST_AGE,
    ConceptSet,
    Domain,
    Eligibility,
    concept_ids,
    expect_column_name,
    expect_window,
    window_words,
)

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
