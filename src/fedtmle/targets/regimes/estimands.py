"""Estimands of treatment over time, means of an outcome or risks of an event under regimes; and the rules."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, final

import numpy as np

from fedtmle.defects import expect, expect_column, expect_integer, expect_number, label
from fedtmle.errors import InputError, NumericalError
from fedtmle.initial.variables import Variables
from fedtmle.model.table import Table
from fedtmle.targets.effects.components import AbstractRegime, Component, Static, require_arms
from fedtmle.targets.effects.estimands import AbstractEffect, Scale, Summary
from fedtmle.targets.regimes.timeline import LAG, Timeline
from fedtmle_core.types import Array

# Rules for treatment over time, beside `Static`, `Threshold` and `Stochastic`, which hold in each period.


@final
@dataclass(frozen=True)
class Planned(AbstractRegime):
    """The rule that fixes one arm for each period, the same for everyone.

    Parameters
    ----------
    plan
        The arm of each period, in order.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Planned(("1", "1", "0"))
    Planned(plan=('1', '1', '0'))
    """

    needs = ()

    plan: tuple[str, ...]

    def __post_init__(self) -> None:
        expect("plan", self.plan, tuple | list, 'an arm for each period, such as ("1", "1", "0")')
        object.__setattr__(self, "plan", tuple(label("plan", arm) for arm in self.plan))

    @property
    def label(self) -> str:
        return " then ".join(self.plan)

    def check(self, arms: tuple[str, ...]) -> None:
        require_arms(arms, *self.plan)

    def check_periods(self, periods: int) -> None:
        if len(self.plan) != periods:
            raise InputError(f"plan: expected an arm for each of {periods} periods, not {len(self.plan)}")

    def at(self, period: int) -> AbstractRegime:
        return Static(self.plan[period - 1])

    def probabilities(self, table: Table, arms: tuple[str, ...]) -> Array:
        return self.at(1).probabilities(table, arms)


@final
@dataclass(frozen=True)
class Onset(AbstractRegime):
    """The rule that starts ``arm`` in the first period in which ``column`` is at least ``cut``.

    Parameters
    ----------
    column
        The name of a variable over time.
    cut
        The threshold.
    arm
        The arm from the onset on.
    otherwise
        The arm before the onset.
    below
        Whether treatment starts once the variable is below the threshold instead.
    period
        The period that the rule is about. Studies set it.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Onset("cd4", 350, arm="1", otherwise="0", below=True).cut
    350
    """

    column: str
    cut: float
    arm: str
    otherwise: str
    below: bool = False
    period: int = 1

    def __post_init__(self) -> None:
        expect_column("column", self.column)
        expect_number("cut", self.cut)
        expect("below", self.below, bool, "True or False")

    @property
    def label(self) -> str:
        sign = "<" if self.below else ">="
        return f"{self.arm} once {self.column} {sign} {self.cut:g}, {self.otherwise} before"

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.column,)

    def check(self, arms: tuple[str, ...]) -> None:
        require_arms(arms, self.arm, self.otherwise)

    def at(self, period: int) -> AbstractRegime:
        return Onset(self.column, self.cut, self.arm, self.otherwise, self.below, period)

    def probabilities(self, table: Table, arms: tuple[str, ...]) -> Array:
        begun = np.zeros(table.n_rows, dtype=bool)
        for name in (self.column, *(f"lag{lag}_{self.column}" for lag in range(1, self.period))):
            values = table.numeric[name]
            begun |= (values < self.cut) if self.below else (values >= self.cut)
        d = np.zeros((len(arms), table.n_rows))
        d[arms.index(self.arm)] += begun
        d[arms.index(self.otherwise)] += ~begun
        return d


@final
@dataclass(frozen=True)
class Shift(AbstractRegime):
    """A modified treatment policy: ``factor`` times the observed treatment plus ``by``, in every period.

    The treatment is a number. Where the modified value is below ``least`` or above ``most``, the observed
    one stays.

    Parameters
    ----------
    by
        What is added.
    factor
        What the observed treatment is multiplied by.
    least
        The least modified value.
    most
        The largest modified value.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Shift(by=-1.0, least=0.0)
    Shift(by=-1.0, factor=1.0, least=0.0, most=None)
    """

    needs = ()
    is_modified = True

    by: float = 0.0
    factor: float = 1.0
    least: float | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        for name in ("by", "factor", "least", "most"):
            value = getattr(self, name)
            if value is not None or name in ("by", "factor"):
                expect_number(name, value)
                if not math.isfinite(value):
                    raise InputError(f"{name}: expected a finite number, not {value}")
        if self.factor <= 0:
            raise InputError(f"factor: expected a number above 0, not {self.factor}")

    @property
    def label(self) -> str:
        if self.is_identity:
            return "as observed"
        scaled = "A" if self.factor == 1.0 else f"{self.factor:g} A"
        moved = f"{scaled} {'+' if self.by > 0 else '-'} {abs(self.by):g}" if self.by else scaled
        limits = [f"at least {self.least:g}"] if self.least is not None else []
        limits += [f"at most {self.most:g}"] if self.most is not None else []
        return f"{moved} if {' and '.join(limits)}" if limits else moved

    @property
    def is_identity(self) -> bool:
        return self.by == 0.0 and self.factor == 1.0

    def check(self, arms: tuple[str, ...]) -> None:
        if arms:
            raise InputError("rules: Shift is for a treatment that the dictionary declares as a number")

    def moved(self, treatment: Array) -> Array:
        """Return the modified treatment, shape (N,)."""
        moved = self.factor * treatment + self.by
        inside = np.ones(len(treatment), dtype=bool)
        if self.least is not None:
            inside &= moved >= self.least
        if self.most is not None:
            inside &= moved <= self.most
        return np.where(inside, moved, treatment)

    def reach(self, bounds: tuple[float, float]) -> tuple[float, float]:
        """Return the range of observed and modified treatments, given that of the observed."""
        ends = [self.factor * end + self.by for end in bounds]
        low = max(min(ends), -math.inf if self.least is None else self.least)
        high = min(max(ends), math.inf if self.most is None else self.most)
        return min(bounds[0], low), max(bounds[1], high)

    def probabilities(self, table: Table, arms: tuple[str, ...]) -> Array:  # noqa: ARG002 - it has no arms
        raise TypeError("a modified treatment policy has no arms")


# Estimands of treatment over time: means of an outcome, or risks of an event, under regimes.

MOST_PERIODS = 60


class RegimeChain(NamedTuple):
    """One mean: a rule, and the number of periods up to the outcome."""

    rule: AbstractRegime
    horizon: int


@dataclass(frozen=True, kw_only=True)
class AbstractRegimeEffect(AbstractEffect):
    """Base of estimands under rules for a treatment that is given in several periods.

    Within a period the order is covariates, treatment, censoring, event. Comparisons are with the first
    rule. The inverse probabilities are in the weights of the fluctuation, as in R's ltmle and lmtp,
    whatever the study's ``clever`` says.

    Parameters
    ----------
    rules
        What everyone is given: `Static`, `Planned`, `Threshold`, `Onset` or `Stochastic` for a treatment
        with arms, `Shift` for a treatment that is a number.
    over_time
        The columns of each variable over time, one per period. The treatment is one of these variables.
    censoring
        The variable over time that is 1 in the period in which a person is censored. By default nobody is.
    horizons
        For a binary outcome over time: the periods by whose end the risk is estimated. By default the last
        one.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> issubclass(ft.RegimeMean, ft.AbstractRegimeEffect)
    True
    """

    roles = ("outcome", "treatment", "censoring")
    fitted_roles = roles
    fixed_options = ("submodel", "link")

    rules: tuple[AbstractRegime, ...]
    over_time: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    censoring: str | None = None
    horizons: tuple[int, ...] = ()

    fewest_rules: ClassVar[int] = 1
    is_value: ClassVar[bool] = False  # whether each rule's own value is reported

    def __post_init__(self) -> None:
        AbstractEffect.__post_init__(self)
        expect("rules", self.rules, tuple | list, 'rules such as (Static("1"), Static("0"))')
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            expect("rules", rule, AbstractRegime, 'rules such as (Static("1"), Static("0"))')
        if len(self.rules) < self.fewest_rules:
            raise InputError(f"rules: {type(self).__name__} needs at least {self.fewest_rules}")
        if len({rule.label for rule in self.rules}) < len(self.rules):
            raise InputError("rules: two of them are the same")
        if len({rule.is_modified for rule in self.rules}) > 1:
            raise InputError("rules: Shift is for a treatment that is a number, the others are for arms")
        self._read_over_time()
        if self.strata in {*self.over_time, *(name for each in self.over_time.values() for name in each)}:
            raise InputError(f"strata: '{self.strata}' changes over time; name a column of baseline")
        self._read_horizons()
        for rule in self.rules:
            rule.check_periods(self.periods)
            if self.arms or rule.is_modified:
                rule.check(self.arms)

    def _read_over_time(self) -> None:
        expect("over_time", self.over_time, Mapping, 'columns by period, such as {"a": ("a1", "a2")}')
        columns: dict[str, tuple[str, ...]] = {}
        for name, listed in self.over_time.items():
            expect_column("over_time", name)
            expect(
                "over_time", listed, tuple | list, f'the columns of {name}, such as ("{name}1", "{name}2")'
            )
            for column in listed:
                expect_column("over_time", column)
            columns[name] = tuple(listed)
            if LAG.fullmatch(name):
                raise InputError(f"over_time: '{name}' is the name of a lag in formulas; give another name")
        object.__setattr__(self, "over_time", columns)
        treatment = str(self.treatment)
        if treatment not in columns:
            raise InputError(
                f"over_time: list the columns of the treatment, as in over_time = {{{treatment} = "
                f'["{treatment}1", "{treatment}2"]}}'
            )
        periods = len(columns[treatment])
        if not 1 <= periods <= MOST_PERIODS:
            raise InputError(f"over_time: expected from 1 to {MOST_PERIODS} periods, not {periods}")
        for name, listed in columns.items():
            if len(listed) != periods:
                raise InputError(
                    f"over_time: '{name}' has {len(listed)} column(s) and the treatment {periods}; list one "
                    "for each period"
                )
        every = [column for each in columns.values() for column in each]
        twice = sorted({column for column in every if every.count(column) > 1})
        if twice:
            raise InputError(f"over_time: '{twice[0]}' is listed twice")
        clash = sorted({*every} & {*columns} - {name for name, each in columns.items() if each == (name,)})
        if clash:
            raise InputError(f"over_time: '{clash[0]}' is the name of a variable and of a column; rename one")
        if self.censoring is not None:
            expect_column("censoring", self.censoring)
            if self.censoring not in columns:
                raise InputError(f"censoring: '{self.censoring}' is not in over_time; list its columns there")
        parts = [self.treatment, self.outcome, *([self.censoring] if self.censoring else [])]
        if len(set(parts)) < len(parts):
            raise InputError("censoring: treatment, censoring and outcome are three different variables")

    def _read_horizons(self) -> None:
        expect("horizons", self.horizons, tuple | list, "numbers of periods, such as (5, 10)")
        if not self.is_survival:
            if self.horizons:
                raise InputError(
                    f"horizons: '{self.outcome}' is measured once, after the last period; leave horizons "
                    "out, or list its columns in over_time if it is an event"
                )
            return
        horizons = tuple(self.horizons) or (self.periods,)
        for horizon in horizons:
            expect_integer("horizons", horizon)
            if not 1 <= horizon <= self.periods:
                raise InputError(f"horizons: expected numbers from 1 to {self.periods}, not {horizon}")
        if sorted(set(horizons)) != list(horizons):
            raise InputError("horizons: list each once, in rising order")
        object.__setattr__(self, "horizons", horizons)

    @property
    def periods(self) -> int:
        """K: how often treatment is decided."""
        return len(self.over_time[str(self.treatment)])

    def excluded(self, role: str) -> dict[str, str]:
        """Return the outcome, censoring and their lags and, for the model of treatment, the treatment."""
        named = {self.outcome: "outcome", **({} if self.censoring is None else {self.censoring: "censoring"})}
        lags = {f"lag{lag}_{name}": of for name, of in named.items() for lag in range(1, self.periods)}
        own = role == "treatment" and not self.is_modified
        return {**named, **lags, **({str(self.treatment): "treatment"} if own else {})}

    def never_missing(self) -> dict[str, str]:
        """Return the outcome and the censoring, whose values are missing once a person has left only."""
        censoring = {} if self.censoring is None else {self.censoring: "the censoring"}
        return {self.outcome: "the outcome", **censoring}

    @property
    def is_survival(self) -> bool:
        """Whether the outcome is an event over time."""
        return self.outcome in self.over_time

    @property
    def is_modified(self) -> bool:
        return self.rules[0].is_modified

    @cached_property
    def chains(self) -> tuple[RegimeChain, ...]:
        """The means, rule by rule."""
        horizons = self.horizons or (self.periods,)
        return tuple(RegimeChain(rule, horizon) for rule in self.rules for horizon in horizons)

    def timeline(self, variables: Variables) -> Timeline:
        """Return the columns by period; the dictionary says which values take the place of missing ones."""
        ranges = variables.ranges
        return Timeline(
            over_time=self.over_time,
            treatment=str(self.treatment),
            outcome=self.outcome,
            censoring=self.censoring,
            event=self.outcome if self.is_survival else None,
            fills={
                name: min(max(0.0, ranges[name][0]), ranges[name][1])
                for name in self.over_time
                if name in ranges
            },
            imputed=frozenset(
                name for name in self.over_time if name in variables and variables[name].missing == "impute"
            ),
        )

    def question_stem(self) -> str:
        what = f"the mean of {self.outcome}"
        if self.is_survival:
            what = f"the risk of {self.outcome} by the end of period {', '.join(map(str, self.horizons))}"
        rules = " | ".join(rule.label for rule in self.rules)
        return f"{self._asks(what)} over {self.periods} period(s) ({rules})"

    @abstractmethod
    def _asks(self, what: str) -> str:
        """Return the beginning of the question."""

    def assumptions(self) -> tuple[str, ...]:
        return (
            "In every period, given the covariates and treatments so far that are in the models, treatment "
            "is as good as random (no unmeasured confounding over time), everyone could have been treated as "
            "the rules say, and nobody's treatment changes another's outcome.",
            *(
                (
                    "In every period, given the covariates and treatments so far that are in the models, "
                    "being censored says nothing about the outcome, and everyone could have stayed "
                    "uncensored.",
                )
                if self.censoring
                else ()
            ),
        )

    def regimes(self) -> tuple[AbstractRegime, ...]:
        return self.rules

    def components(self, strata: Sequence[str]) -> tuple[Component, ...]:
        return tuple(
            Component(rule, population, f"risk at {horizon}" if self.is_survival else None)
            for population in self.populations(strata)
            for rule, horizon in self.chains
        )

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        horizons = self.horizons or (None,)
        summaries = []
        for k, horizon in enumerate(horizons):
            places = [j * len(horizons) + k for j in range(len(self.rules))]
            at = "" if horizon is None else f" at {horizon}"
            units = [np.asarray(np.eye(len(psi))[place]) for place in places]
            summaries += self._compared(
                [float(psi[place]) for place in places], units, f"{at} {label}".rstrip()
            )
        return summaries

    @abstractmethod
    def _compared(self, values: list[float], units: list[Array], suffix: str) -> list[Summary]:
        """Return the summaries of one horizon from the mean of each rule; ``units`` are its gradients."""

    def _against(self, j: int) -> str:
        return f"{self.rules[j].label} vs {self.rules[0].label}"


@final
@dataclass(frozen=True, kw_only=True)
class RegimeMean(AbstractRegimeEffect):
    """The mean of the outcome, or the risk of the event, under each rule for treatment over time.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> columns = {"a": ("a1", "a2"), "l": ("l1", "l2")}
    >>> rules = (ft.Static("0"), ft.Static("1"))
    >>> effect = ft.RegimeMean(outcome="y", treatment="a", arms=("0", "1"), rules=rules, over_time=columns)
    >>> print(effect.question)
    What would the mean of y be under each rule for a over 2 period(s) (0 | 1)?
    """

    description = "means or risks under rules for treatment over time"
    measures = ("risk under each rule over time", "mean under each rule over time")
    is_value = True

    def _asks(self, what: str) -> str:
        return f"What would {what} be under each rule for {self.treatment}"

    def _compared(self, values: list[float], units: list[Array], suffix: str) -> list[Summary]:
        kind = "risk" if self.is_survival else "E[Y]"
        return [
            Summary(name=f"{kind} under {rule.label}{suffix}", value=value, gradient=unit, scale=Scale.VALUE)
            for rule, value, unit in zip(self.rules, values, units, strict=True)
        ]


@final
@dataclass(frozen=True, kw_only=True)
class RegimeDifference(AbstractRegimeEffect):
    """The mean or risk under each rule, less that under the first rule.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> columns = {"a": ("a1", "a2"), "l": ("l1", "l2")}
    >>> rules = (ft.Static("0"), ft.Static("1"))
    >>> effect = ft.RegimeDifference(
    ...     outcome="y", treatment="a", arms=("0", "1"), rules=rules, over_time=columns
    ... )
    >>> print(effect.question)
    How much would another rule for a than the first change the mean of y over 2 period(s) (0 | 1)?
    """

    description = "differences of means or risks between rules for treatment over time"
    measures = ("risk difference between rules over time", "mean difference between rules over time")
    fewest_rules = 2

    def _asks(self, what: str) -> str:
        return f"How much would another rule for {self.treatment} than the first change {what}"

    def _compared(self, values: list[float], units: list[Array], suffix: str) -> list[Summary]:
        return [
            Summary(
                name=f"{self._against(j)}{suffix}", value=values[j] - values[0], gradient=units[j] - units[0]
            )
            for j in range(1, len(values))
        ]


@final
@dataclass(frozen=True, kw_only=True)
class RegimeRatio(AbstractRegimeEffect):
    """The mean or risk under each rule over that under the first. Intervals are on the log scale.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> columns = {"a": ("a1", "a2"), "l": ("l1", "l2")}
    >>> rules = (ft.Static("0"), ft.Static("1"))
    >>> effect = ft.RegimeRatio(outcome="y", treatment="a", arms=("0", "1"), rules=rules, over_time=columns)
    >>> print(effect.question)
    By what factor would another rule for a than the first change the mean of y over 2 period(s) (0 | 1)?
    """

    description = "ratios of means or risks between rules for treatment over time"
    measures = ("risk ratio between rules over time", "ratio of means between rules over time")
    fewest_rules = 2

    def _asks(self, what: str) -> str:
        return f"By what factor would another rule for {self.treatment} than the first change {what}"

    def _compared(self, values: list[float], units: list[Array], suffix: str) -> list[Summary]:
        if not min(values) > 0:
            raise NumericalError("RegimeRatio: a value is not above zero, so that there is no ratio")
        return [
            Summary(
                name=f"{self._against(j)}{suffix}",
                value=values[j] / values[0],
                gradient=units[j] / values[0] - units[0] * values[j] / values[0] ** 2,
                scale=Scale.RATIO,
            )
            for j in range(1, len(values))
        ]


REGIME_ESTIMANDS: tuple[type[AbstractRegimeEffect], ...] = (RegimeMean, RegimeDifference, RegimeRatio)
