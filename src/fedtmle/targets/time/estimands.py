"""Estimands of time to an event: measures of the cumulative incidences per arm, and their comparisons."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Self, final

import numpy as np

from fedtmle.defects import expect, expect_column, expect_integer, expect_number, label
from fedtmle.errors import InputError, NumericalError
from fedtmle.targets.effects.components import AbstractPopulation, AbstractRegime, Component
from fedtmle.targets.effects.estimands import AbstractEffect, Scale, Summary
from fedtmle.targets.time.followup import PERIOD, FollowUp, Functional
from fedtmle_core.types import Array

MOST_PERIODS = 250


@dataclass(frozen=True, kw_only=True)
class AbstractTimeEffect(AbstractEffect):
    """Base of estimands of time to an event, on a public grid of periods.

    A silo puts its own times on the grid, so that no event time leaves it. Within a period events come
    before censoring.

    Parameters
    ----------
    time
        The name of the variable that says when follow-up ended. The ``outcome`` says what ended it.
    periods
        The number of periods of the grid, if all have the same length.
    period_length
        The length of a period, in the unit of ``time``.
    grid
        The ends of periods of unequal length, instead of ``periods`` and ``period_length``.
    horizons
        Numbers of periods at which the measure is estimated. By default the last one.
    causes
        The codes of the outcome that are events.
    censored
        The code of the outcome for people without an event.
    entry
        The name of the variable that says when follow-up began. By default it began at 0.
    beyond
        Whether follow-up beyond the grid is an error ("refuse") or ends with the grid ("truncate").
    subperiods
        Into how many equal parts each period is divided where hazards are estimated. Horizons, mean times
        and ``period`` in formulas still count whole periods.
    compare_subperiods
        A larger number of parts, for a second estimate on a finer grid that is shown beside the first. By
        default there is none.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> effect = ft.Risk(outcome="status", time="days", treatment="rx", periods=10, period_length=182.625)
    >>> isinstance(effect, ft.AbstractTimeEffect)
    True
    """

    roles = ("hazard", "treatment", "censoring")
    fitted_roles = ("hazard", "censoring")
    fixed_options = ("clever", "submodel", "link")

    time: str
    periods: int = 0
    period_length: float = 1.0
    grid: tuple[float, ...] = ()
    horizons: tuple[int, ...] = ()
    causes: tuple[str, ...] = ("1",)
    censored: str = "0"
    entry: str | None = None
    beyond: Literal["refuse", "truncate"] = "refuse"
    subperiods: int = 1
    compare_subperiods: int | None = None

    first_horizon: ClassVar[int] = 1
    measure: ClassVar[str] = ""  # the measure in words, for the question
    is_per_cause: ClassVar[bool] = True  # whether each cause has its own value

    def __post_init__(self) -> None:
        AbstractEffect.__post_init__(self)
        expect_column("time", self.time)
        if self.entry is not None:
            expect_column("entry", self.entry)
        named = {"outcome": self.outcome, "treatment": self.treatment, "time": self.time, "entry": self.entry}
        for name, column in named.items():
            others = [other for other, value in named.items() if other != name and value == column]
            if column is not None and others:
                raise InputError(f"{name}: '{column}' is the study's {others[0]}; name another column")
            if column == PERIOD:
                raise InputError(f"{name}: '{PERIOD}' is the period's name in formulas; rename the column")
        self._read_causes()
        self._read_grid()
        self._read_horizons()
        self._read_subperiods()
        if self.beyond not in ("refuse", "truncate"):
            raise InputError(f"beyond: expected 'refuse' or 'truncate', not {self.beyond!r}")

    def excluded(self, role: str) -> dict[str, str]:
        entry = {} if self.entry is None else {self.entry: "entry"}
        period = {PERIOD: "period"} if role == "treatment" else {}
        return {**AbstractEffect.excluded(self, role), self.time: "time", **entry, **period}

    def never_missing(self) -> dict[str, str]:
        entry = {} if self.entry is None else {self.entry: "the time of entry"}
        return {self.outcome: "the event", self.time: "the time of follow-up", **entry}

    def _read_causes(self) -> None:
        expect("causes", self.causes, tuple | list, 'the codes of events, such as ("1",)')
        causes = tuple(label("causes", cause) for cause in self.causes)
        object.__setattr__(self, "causes", causes)
        object.__setattr__(self, "censored", label("censored", self.censored))
        if not causes or len({*causes, self.censored}) != len(causes) + 1:
            raise InputError("causes: expected at least one, all different, and other than censored")

    def _read_grid(self) -> None:
        expect_integer("periods", self.periods)
        expect_number("period_length", self.period_length)
        expect("grid", self.grid, tuple | list, "the ends of the periods, such as (30, 90, 180)")
        for end in self.grid:
            expect_number("grid", end)
        if self.grid:
            if self.periods or self.period_length != 1.0:
                raise InputError("grid: give the ends of the periods, or periods and period_length, not both")
            object.__setattr__(self, "grid", tuple(map(float, self.grid)))
        elif not 1 <= self.periods <= MOST_PERIODS:
            raise InputError(f"periods: expected from 1 to {MOST_PERIODS} periods, not {self.periods}")
        if not (math.isfinite(self.period_length) and self.period_length > 0):
            raise InputError(f"period_length: expected a number above 0, not {self.period_length}")
        edges = self.edges
        if len(edges) > MOST_PERIODS or not all(
            math.isfinite(b) and a < b for a, b in zip((0.0, *edges), edges, strict=False)
        ):
            raise InputError(f"grid: expected at most {MOST_PERIODS} rising numbers above 0")

    def _read_horizons(self) -> None:
        expect("horizons", self.horizons, tuple | list, "numbers of periods, such as (5, 10)")
        horizons = tuple(self.horizons) or (len(self.edges),)
        for horizon in horizons:
            expect_integer("horizons", horizon)
            if not self.first_horizon <= horizon <= len(self.edges):
                raise InputError(
                    f"horizons: expected numbers of periods from {self.first_horizon} to {len(self.edges)}, "
                    f"not {horizon}"
                )
        if sorted(set(horizons)) != list(horizons):
            raise InputError("horizons: list each once, in rising order")
        object.__setattr__(self, "horizons", horizons)

    def _read_subperiods(self) -> None:
        self._expect_parts("subperiods", self.subperiods, 1)
        if self.compare_subperiods is not None:
            self._expect_parts("compare_subperiods", self.compare_subperiods, self.subperiods + 1)

    def _expect_parts(self, name: str, parts: int, least: int) -> None:
        expect_integer(name, parts)
        if parts < least:
            raise InputError(f"{name}: expected at least {least} parts of each period, got {parts}")
        if parts * len(self.edges) > MOST_PERIODS:
            raise InputError(
                f"{name}: {parts} parts of {len(self.edges)} periods are {parts * len(self.edges)}; expected "
                f"at most {MOST_PERIODS}"
            )

    @property
    def finer(self) -> Self | None:
        """The same estimand on the finer grid of the comparison; None if there is none."""
        if self.compare_subperiods is None:
            return None
        return replace(self, subperiods=self.compare_subperiods, compare_subperiods=None)

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """The ends of the periods."""
        return self.grid or tuple(k * self.period_length for k in range(1, self.periods + 1))

    @property
    def follow_up(self) -> FollowUp:
        return FollowUp(
            time=self.time,
            event=self.outcome,
            edges=self._divided(self.edges),
            causes=self.causes,
            censored=self.censored,
            entry=self.entry,
            truncate=self.beyond == "truncate",
            subperiods=self.subperiods,
        )

    def _divided(self, edges: tuple[float, ...]) -> tuple[float, ...]:
        """Return the ends of the parts of all periods; the ends of periods are among them, bit for bit."""
        parts = self.subperiods
        return tuple(
            end if k == parts else begin + (end - begin) * k / parts
            for begin, end in zip((0.0, *edges), edges, strict=False)
            for k in range(1, parts + 1)
        )

    def question_stem(self) -> str:
        first, last = self.horizons[0], self.horizons[-1]
        named = f"period {', '.join(map(str, self.horizons))}"
        if len(self.horizons) > 3 and self.horizons == tuple(range(first, last + 1)):
            named = f"each period from {first} to {last}"
        return f"{self._asks()} by the end of {named} of {len(self.edges)}"

    @abstractmethod
    def _asks(self) -> str:
        """Return the beginning of the question."""

    def assumptions(self) -> tuple[str, ...]:
        return (
            *AbstractEffect.assumptions(self),
            "Within levels of the covariates of the models, being censored in a period says nothing about "
            "later events, and everyone could have been followed to the last horizon.",
            "Events and censoring within one period of the grid are ordered as declared: events come first.",
        )

    # The functionals, and what is reported of them.

    @property
    def shown_causes(self) -> tuple[int, ...]:
        """The causes with values of their own, counted from 0; (-1,) for all causes together."""
        return tuple(range(len(self.causes))) if self.is_per_cause else (-1,)

    @cached_property
    def functionals(self) -> tuple[Functional, ...]:
        """One for each cause (or all together) and horizon."""
        return tuple(self._functional(j, horizon) for j in self.shown_causes for horizon in self.horizons)

    def _functional(self, cause: int, horizon: int) -> Functional:
        line = self.weights(horizon)
        none = (0.0,) * len(line)
        rows = tuple(line if cause in (-1, j) else none for j in range(len(self.causes)))
        return Functional(name=self._named(self.symbol, cause, horizon), weights=rows)

    def _named(self, name: str, cause: int, horizon: int) -> str:
        of = f" of {self.causes[cause]}" if cause >= 0 and len(self.causes) > 1 else ""
        return f"{name}{of} at {horizon}"

    def weights(self, horizon: int) -> tuple[float, ...]:
        """Return the weight of F(t) in the functional, by period of the grid: F itself, or its sum before.

        A part of a period counts as that part in a sum.
        """
        grid, last = range(1, len(self.edges) * self.subperiods + 1), horizon * self.subperiods
        if self.is_area:
            return tuple((t < last) / self.subperiods for t in grid)
        return tuple(float(t == last) for t in grid)

    symbol: ClassVar[str] = "risk"  # the functional's name
    is_area: ClassVar[bool] = False  # whether F is summed over the periods before the horizon

    def components(self, strata: Sequence[str]) -> tuple[Component, ...]:
        return tuple(
            Component(regime, population, functional.name)
            for regime, population in self.groups(strata)
            for functional in self.functionals
        )

    def groups(self, strata: Sequence[str]) -> tuple[tuple[AbstractRegime, AbstractPopulation], ...]:
        """Return the regimes in populations, in the order of the components."""
        return tuple(
            (regime, population) for population in self.populations(strata) for regime in self.regimes()
        )

    def value_of(self, functional: float, horizon: int) -> float:  # noqa: ARG002 - some depend on it
        """Return the measure from the functional: an affine map of it."""
        return functional

    slope: ClassVar[float] = 1.0  # slope of that map

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        summaries = []
        for k, (cause, horizon) in enumerate((j, h) for j in self.shown_causes for h in self.horizons):
            places = [a * len(self.functionals) + k for a in range(len(self.regimes()))]
            values = [self.value_of(float(psi[at]), horizon) for at in places]
            gradients = [self.slope * np.asarray(np.eye(len(psi))[at]) for at in places]
            summaries += self._compared(values, gradients, cause, horizon, label)
        return summaries

    @abstractmethod
    def _compared(
        self, values: list[float], gradients: list[Array], cause: int, horizon: int, label: str
    ) -> list[Summary]:
        """Return the summaries of one cause and horizon from the measure of each arm."""

    def _title(self, arm: str | None, cause: int, horizon: int, label: str) -> str:
        name = type(self).__name__
        if arm is not None:
            name = f"{name}({arm})" if self.is_value else name
            if not self.is_value and len(self.arms) > 2:
                name = f"{name} {arm} vs {self.arms[0]}"
        return f"{self._named(name, cause, horizon)} {label}".strip()

    is_value: ClassVar[bool] = False  # whether each arm's own value is reported


@dataclass(frozen=True, kw_only=True)
class AbstractArmValues(AbstractTimeEffect):
    """The measure of each arm by itself."""

    is_value = True

    def _asks(self) -> str:
        return f"What would {self.measure} be in each arm of {self.treatment} ({', '.join(self.arms)})"

    def _labels(self) -> list[str]:
        return [regime.label for regime in self.regimes()]

    def _compared(
        self, values: list[float], gradients: list[Array], cause: int, horizon: int, label: str
    ) -> list[Summary]:
        return [
            Summary(
                name=self._title(arm, cause, horizon, label), value=value, gradient=slope, scale=Scale.VALUE
            )
            for arm, value, slope in zip(self._labels(), values, gradients, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class AbstractTimeDifference(AbstractTimeEffect):
    """The measure of each arm less that of the reference."""

    def _asks(self) -> str:
        return f"How much does {self.comparison} change {self.measure}"

    def _compared(
        self, values: list[float], gradients: list[Array], cause: int, horizon: int, label: str
    ) -> list[Summary]:
        return [
            Summary(
                name=self._title(arm, cause, horizon, label),
                value=values[j] - values[0],
                gradient=gradients[j] - gradients[0],
            )
            for j, arm in enumerate(self.arms)
            if j
        ]


@dataclass(frozen=True, kw_only=True)
class AbstractTimeRatio(AbstractTimeEffect):
    """The measure of each arm over that of the reference; intervals are on the log scale."""

    def _asks(self) -> str:
        return f"By what factor does {self.comparison} change {self.measure}"

    def _compared(
        self, values: list[float], gradients: list[Array], cause: int, horizon: int, label: str
    ) -> list[Summary]:
        if not min(values) > 0:
            raise NumericalError(
                f"{type(self).__name__}: a value at horizon {horizon} is not above zero, so that there is no "
                "ratio; choose a later horizon"
            )
        return [
            Summary(
                name=self._title(arm, cause, horizon, label),
                value=values[j] / values[0],
                gradient=gradients[j] / values[0] - gradients[0] * values[j] / values[0] ** 2,
                scale=Scale.RATIO,
            )
            for j, arm in enumerate(self.arms)
            if j
        ]


@final
@dataclass(frozen=True, kw_only=True)
class Risk(AbstractArmValues):
    """The risk of an event by each horizon, per arm; with several causes, the cumulative incidence of each.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.Risk(outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4).question)
    What would the risk of an event be in each arm of rx (0, 1) by the end of period 4 of 4?
    """

    description = "risks by given horizons, per arm"
    measure = "the risk of an event"


@final
@dataclass(frozen=True, kw_only=True)
class PolicyRisk(AbstractArmValues):
    """The risk of an event by each horizon under known rules at baseline.

    Parameters
    ----------
    rules
        The rules: `Static`, `Threshold` or `Stochastic`.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> effect = ft.PolicyRisk(
    ...     outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4, rules=(ft.Static("1"),)
    ... )
    >>> print(effect.question)
    What would the risk of an event be under each rule for rx by the end of period 4 of 4?
    """

    description = "risks by given horizons under known rules"
    measure = "the risk of an event"

    rules: tuple[AbstractRegime, ...]

    def __post_init__(self) -> None:
        AbstractTimeEffect.__post_init__(self)
        if not self.rules:
            raise InputError("rules: expected at least one")
        for rule in self.rules if self.arms else ():
            rule.check(self.arms)

    def regimes(self) -> tuple[AbstractRegime, ...]:
        return self.rules

    def _asks(self) -> str:
        return f"What would {self.measure} be under each rule for {self.treatment}"


@final
@dataclass(frozen=True, kw_only=True)
class RiskDifference(AbstractTimeDifference):
    """Each arm's risk of an event by each horizon, less that of the reference arm.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> effect = ft.RiskDifference(outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4)
    >>> print(effect.question)
    How much does rx (1 against 0) change the risk of an event by the end of period 4 of 4?
    """

    description = "differences of risks by given horizons"
    measure = "the risk of an event"


@final
@dataclass(frozen=True, kw_only=True)
class RiskRatio(AbstractTimeRatio):
    """Each arm's risk of an event by each horizon, divided by that of the reference arm.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> effect = ft.RiskRatio(outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4)
    >>> print(effect.question)
    By what factor does rx (1 against 0) change the risk of an event by the end of period 4 of 4?
    """

    description = "ratios of risks by given horizons"
    measure = "the risk of an event"


@final
@dataclass(frozen=True, kw_only=True)
class Survival(AbstractArmValues):
    """The probability of no event of any cause by each horizon, per arm.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> effect = ft.Survival(outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4)
    >>> print(effect.question)
    What would the probability of no event be in each arm of rx (0, 1) by the end of period 4 of 4?
    """

    description = "probabilities of no event by given horizons, per arm"
    measure = "the probability of no event"
    is_per_cause = False
    slope = -1.0

    def value_of(self, functional: float, horizon: int) -> float:  # noqa: ARG002 - the same at each
        return 1.0 - functional


@dataclass(frozen=True, kw_only=True)
class _RestrictedMean(AbstractTimeEffect):
    """h - sum of F(t) over the periods t before the horizon h: periods without an event of any cause."""

    measure = "the mean time without an event, in periods,"
    symbol = "time lost"
    is_per_cause = False
    is_area = True
    first_horizon = 2
    slope = -1.0

    def value_of(self, functional: float, horizon: int) -> float:
        return horizon - functional


@final
@dataclass(frozen=True, kw_only=True)
class RMST(_RestrictedMean, AbstractArmValues):
    """The restricted mean survival time to each horizon h, in periods, per arm: 1 + sum_{t<h} S(t).

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.RMST(outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4).question)
    What would the mean time without an event, in periods, be in each arm of rx (0, 1) by the end of period
    4 of 4?
    """

    description = "restricted mean survival times, per arm"


@final
@dataclass(frozen=True, kw_only=True)
class RMSTDifference(_RestrictedMean, AbstractTimeDifference):
    """Each arm's restricted mean survival time less that of the reference arm, in periods.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> effect = ft.RMSTDifference(outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4)
    >>> print(effect.question)
    How much does rx (1 against 0) change the mean time without an event, in periods, by the end of period 4
    of 4?
    """

    description = "differences of restricted mean survival times"


@final
@dataclass(frozen=True, kw_only=True)
class RMSTRatio(_RestrictedMean, AbstractTimeRatio):
    """Each arm's restricted mean survival time divided by that of the reference arm.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> effect = ft.RMSTRatio(outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4)
    >>> print(effect.question)
    By what factor does rx (1 against 0) change the mean time without an event, in periods, by the end of
    period 4 of 4?
    """

    description = "ratios of restricted mean survival times"


@dataclass(frozen=True, kw_only=True)
class _TimeLost(AbstractTimeEffect):
    """The sum of F_j(t) over the periods t before the horizon: periods lost to each cause."""

    measure = "the mean time lost to an event, in periods,"
    symbol = "time lost"
    is_area = True
    first_horizon = 2


@final
@dataclass(frozen=True, kw_only=True)
class TimeLost(_TimeLost, AbstractArmValues):
    """The restricted mean time lost to each cause, in periods, per arm.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> effect = ft.TimeLost(outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4)
    >>> print(effect.question)
    What would the mean time lost to an event, in periods, be in each arm of rx (0, 1) by the end of period
    4 of 4?
    """

    description = "restricted mean times lost, per arm"


@final
@dataclass(frozen=True, kw_only=True)
class TimeLostDifference(_TimeLost, AbstractTimeDifference):
    """Each arm's restricted mean time lost to each cause, less that of the reference arm, in periods.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> effect = ft.TimeLostDifference(
    ...     outcome="status", time="days", treatment="rx", arms=("0", "1"), periods=4
    ... )
    >>> print(effect.question)
    How much does rx (1 against 0) change the mean time lost to an event, in periods, by the end of period 4
    of 4?
    """

    description = "differences of restricted mean times lost"


TIME_ESTIMANDS: tuple[type[AbstractTimeEffect], ...] = (
    Risk,
    PolicyRisk,
    RiskDifference,
    RiskRatio,
    Survival,
    RMST,
    RMSTDifference,
    RMSTRatio,
    TimeLost,
    TimeLostDifference,
)
