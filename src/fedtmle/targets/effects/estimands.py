"""Estimands: what a study can ask for.

An estimand is a class that holds everything the package needs to know about it: the means it is made of, the
delta method from these means to its values, their scale, its arguments and its words. The study file, the
template, the report, the generated pages and ``import fedtmle`` read them from the classes in `ESTIMANDS`.
To add one, write the class and add it to that tuple.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, final

import numpy as np

from fedtmle.defects import expect, expect_column, label
from fedtmle.errors import InputError, NumericalError
from fedtmle.targets.effects.components import (
    AbstractPopulation,
    AbstractRegime,
    Component,
    Everyone,
    InArm,
    InStratum,
    OverlapWeighted,
    Static,
)
from fedtmle_core.types import Array

ColumnUse = Literal["number", "factor"]
_NO_CONFOUNDING = (
    "Within levels of the covariates of the models, treatment is as good as random (no unmeasured "
    "confounding), each arm could have been taken by everyone, and nobody's treatment changes another's "
    "outcome."
)


@final
class Scale(Enum):
    """How a value is compared: which value means "no effect", and where its interval is symmetric.

    `VALUE` is a mean by itself, `DIFFERENCE` has its null at 0, and `RATIO` has its null at 1 and an
    interval that is symmetric on the log scale.

    Examples
    --------
    >>> ft.Scale.RATIO.null
    1.0
    """

    VALUE = "value"  # a mean by itself, of which no value means "no effect"
    DIFFERENCE = "difference"  # 0 means "no effect"
    RATIO = "ratio"  # 1 means "no effect"; the interval is symmetric on the log scale

    @property
    def null(self) -> float | None:
        """The value that means "no effect", None if there is none."""
        return {Scale.VALUE: None, Scale.DIFFERENCE: 0.0, Scale.RATIO: 1.0}[self]

    @property
    def is_log(self) -> bool:
        """Whether intervals are computed for the logarithm."""
        return self is Scale.RATIO


@final
@dataclass(frozen=True, kw_only=True)
class Summary:
    """One reported number of an estimand, with its gradient for the delta method.

    Parameters
    ----------
    name
        The name in tables, such as "ATE in army".
    value
        The value at the estimated means.
    gradient
        Its gradient in the means of the population, one entry per regime.
    scale
        How the value is compared.

    Examples
    --------
    >>> ft.Summary(name="difference", value=0.1, gradient=np.array([-1.0, 1.0])).scale.null
    0.0
    """

    name: str
    value: float
    gradient: Array
    scale: Scale = Scale.DIFFERENCE


@dataclass(frozen=True, kw_only=True)
class AbstractEffect(ABC):
    """Base of all estimands of a study.

    A subclass is a frozen dataclass. It gives its question (`question_stem`) and its values (`summarise`).
    It may change the regimes and populations of its means, and the sentences of `assumptions`.

    Parameters
    ----------
    outcome
        The name of the outcome, as the dictionary has it.
    treatment
        The name of the treatment. Estimands without a treatment leave it out.
    arms
        The levels of the treatment, the reference first. By default they are in the order of the
        dictionary.
    strata
        The name of a categorical variable. Estimates are then given overall and in each of its levels.

    Raises
    ------
    InputError
        A name is not text, the treatment is the outcome, or the estimand has no strata.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class RiskReduction(ft.AbstractEffect):
    ...     description = "a relative risk reduction"
    ...     def question_stem(self):
    ...         return f"By what share does {self.comparison} lower the mean of {self.outcome}"
    ...     def summarise(self, psi, label):
    ...         gradient = np.array([psi[1] / psi[0] ** 2, -1 / psi[0]])
    ...         return [ft.Summary(name="RiskReduction", value=float(1 - psi[1] / psi[0]), gradient=gradient)]
    >>> RiskReduction(outcome="died", treatment="treated", arms=("0", "1")).question
    'By what share does treated (1 against 0) lower the mean of died?'
    """

    description: ClassVar[str] = ""  # a noun phrase for lists of estimands
    measures: ClassVar[tuple[str, str] | None] = None  # its name for a binary outcome, and for any other
    has_treatment: ClassVar[bool] = True  # whether a study must name a treatment; else it must name none
    has_strata: ClassVar[bool] = True  # whether a study may name strata
    roles: ClassVar[tuple[str, ...]] = ("outcome", "treatment", "missingness")  # roles of the nuisance models
    fitted_roles: ClassVar[tuple[str, ...]] = ()  # those whose predictions no silo can supply as columns
    fixed_options: ClassVar[tuple[str, ...]] = ()  # options of a study that must keep their defaults
    may_impute: ClassVar[bool] = True  # whether its study may impute covariates
    keeps_own: ClassVar[bool] = True  # whether C(silo) is an intercept that each silo keeps

    outcome: str
    treatment: str | None = None
    arms: tuple[str, ...] = ()  # none: the levels of the treatment, in the dictionary's order
    strata: str | None = None

    def __post_init__(self) -> None:
        self._read_arguments()
        self._check_treatment()
        if self.strata is not None and not self.has_strata:
            raise InputError(f"strata: {type(self).__name__} has no estimates by stratum; leave strata out")

    def _read_arguments(self) -> None:
        """Check that names are text; make arms text, as they are at every silo."""
        for name in ("outcome", "treatment", "strata"):
            if name == "outcome" or getattr(self, name) is not None:
                expect_column(name, getattr(self, name))
        expect("arms", self.arms, tuple | list, 'the levels of the treatment, such as ("0", "1")')
        object.__setattr__(self, "arms", tuple(label("arms", arm) for arm in self.arms))
        if self.treatment == self.outcome:
            raise InputError(f"treatment: '{self.outcome}' is the outcome; name another column")

    def _check_treatment(self) -> None:
        name = type(self).__name__
        if self.treatment is None:
            if self.has_treatment:
                raise InputError(f"treatment: {name} needs the name of a column")
            object.__setattr__(self, "arms", ("all",))
        elif not self.has_treatment:
            raise InputError(f"treatment: {name} has no arms; leave it out, or use TSM for a mean per arm")
        elif len(set(self.arms)) != len(self.arms) or len(self.arms) == 1:
            raise InputError("arms: expected at least two different levels, the reference first")

    @abstractmethod
    def question_stem(self) -> str:
        """Return the question without strata and question mark: "How much does a change the mean of y"."""

    @property
    def is_modified(self) -> bool:
        """Whether rules modify the observed treatment, a number: then there are no arms."""
        return False

    @property
    def question(self) -> str:
        """The whole question, as results, reports and approvals show it."""
        strata = f", overall and by {self.strata}" if self.strata else ""
        return f"{self.question_stem()}{strata}?"

    @property
    def comparison(self) -> str:
        """The treatment with its arms in words: "a (1 against 0)"."""
        return f"{self.treatment} ({' or '.join(self.arms[1:])} against {self.arms[0]})"

    def assumptions(self) -> tuple[str, ...]:
        """Return what no computation on the records can show, beside the models, as whole sentences."""
        return (_NO_CONFOUNDING,) if self.has_treatment else ()

    def more_columns(self) -> Mapping[str, ColumnUse]:
        """Return further columns that the target reads itself, each as a "number" or a "factor"."""
        return {}

    def own_models(self) -> dict[str, Any]:
        """Return the nuisance models that are arguments of the target, not of the study, by role."""
        return {}

    def excluded(self, role: str) -> dict[str, str]:
        """Return the columns that the model of ``role`` may not use, each with its part in the study.

        Only the outcome comes after the treatment: a model of the treatment or of who is observed that used
        the outcome would silently give a wrong estimate.
        """
        treatment = {self.treatment: "treatment"} if role == "treatment" and self.treatment else {}
        return {self.outcome: "outcome", **treatment}

    def never_missing(self) -> dict[str, str]:
        """Return the columns beside outcome and treatment that no study imputes, with their parts in it."""
        return {}

    def components(self, strata: Sequence[str]) -> tuple[Component, ...]:
        """Return the means that the effect is made of, population by population."""
        return tuple(
            Component(regime, population)
            for population in self.populations(strata)
            for regime in self.regimes_in(population)
        )

    def populations(self, strata: Sequence[str]) -> tuple[AbstractPopulation, ...]:
        """Return everyone and each stratum; a subclass may name others."""
        groups = (InStratum(code, level) for code, level in enumerate(strata))
        return (Everyone(), *groups)

    def regimes(self) -> tuple[AbstractRegime, ...]:
        """Return what everyone is given in each of the means; a subclass may name others."""
        return tuple(Static(arm) for arm in self.arms)

    def regimes_in(self, population: AbstractPopulation) -> tuple[AbstractRegime, ...]:  # noqa: ARG002
        """Return the regimes whose means are needed in one population; all, unless a subclass says which."""
        return self.regimes()

    @abstractmethod
    def summarise(self, psi: Array, label: str) -> list[Summary]:
        """Return the numbers to report for one population.

        ``psi`` are its means, one per regime of `regimes_in`, in which gradients are taken; ``label`` names
        it ("in army"), empty for everyone.
        """

    def contrast(self) -> tuple[float, ...] | None:
        """Return the one combination of means that can be targeted by itself, None if there is none.

        An effect with a contrast has one summary, on the scale of a difference.
        """
        return None

    def name_of(self, arm: str, label: str) -> str:
        """Return the name of a comparison of ``arm`` with the reference in one population."""
        kind = type(self).__name__
        return _joined(kind if len(self.arms) == 2 else f"{kind} {arm} vs {self.arms[0]}", label)


def _joined(name: str, label: str) -> str:
    return f"{name} {label}".strip()


def _differences(effect: AbstractEffect, psi: Array, label: str) -> list[Summary]:
    """Return the difference of each arm's mean from that of the reference."""
    return [
        Summary(
            name=effect.name_of(arm, label),
            value=float(psi[j] - psi[0]),
            gradient=_unit(j, len(psi)) - _unit(0, len(psi)),
        )
        for j, arm in enumerate(effect.arms)
        if j
    ]


def _unit(index: int, size: int) -> Array:
    return np.asarray(np.eye(size)[index])


@final
@dataclass(frozen=True, kw_only=True)
class ATE(AbstractEffect):
    """The average treatment effect: E[Y(arm)] - E[Y(reference)] for each arm but the reference.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.ATE(outcome="died", treatment="treated", arms=("0", "1")).question)
    How much does treated (1 against 0) change the mean of died?
    """

    description = "a difference of means"
    measures = ("risk difference", "difference of means")

    def question_stem(self) -> str:
        return f"How much does {self.comparison} change the mean of {self.outcome}"

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        return _differences(self, psi, label)

    def contrast(self) -> tuple[float, ...] | None:
        return (-1.0, 1.0) if len(self.arms) == 2 else None


@final
@dataclass(frozen=True, kw_only=True)
class TSM(AbstractEffect):
    """The mean outcome if everyone had the same arm, E[Y(arm)], for each arm.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.TSM(outcome="died", treatment="treated", arms=("0", "1")).question)
    What would the mean of died be in each arm of treated (0, 1)?
    """

    description = "a mean per arm"
    measures = ("risk per arm", "mean per arm")

    def question_stem(self) -> str:
        arms = ", ".join(self.arms)
        return f"What would the mean of {self.outcome} be in each arm of {self.treatment} ({arms})"

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        return [
            Summary(
                name=_joined(f"E[Y({arm})]", label),
                value=float(psi[j]),
                gradient=_unit(j, len(psi)),
                scale=Scale.VALUE,
            )
            for j, arm in enumerate(self.arms)
        ]


@final
@dataclass(frozen=True, kw_only=True)
class RR(AbstractEffect):
    """The ratio E[Y(arm)] / E[Y(reference)]. Its interval is symmetric on the log scale.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.RR(outcome="died", treatment="treated", arms=("0", "1")).question)
    By what factor does treated (1 against 0) change the mean of died?
    """

    description = "a ratio of means"
    measures = ("risk ratio", "ratio of means")

    def question_stem(self) -> str:
        return f"By what factor does {self.comparison} change the mean of {self.outcome}"

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        _require(bool((psi > 0).all()), "RR: a mean is not above zero")
        return [
            Summary(
                name=self.name_of(arm, label),
                value=float(psi[j] / psi[0]),
                gradient=_unit(j, len(psi)) / psi[0] - _unit(0, len(psi)) * psi[j] / psi[0] ** 2,
                scale=Scale.RATIO,
            )
            for j, arm in enumerate(self.arms)
            if j
        ]


@final
@dataclass(frozen=True, kw_only=True)
class OR(AbstractEffect):
    """The ratio of the odds of E[Y(arm)] and E[Y(reference)]. Its interval is on the log scale.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.OR(outcome="died", treatment="treated", arms=("0", "1")).question)
    By what factor does treated (1 against 0) change the odds of died?
    """

    description = "a ratio of odds"
    measures = ("odds ratio", "odds ratio of means")

    def question_stem(self) -> str:
        return f"By what factor does {self.comparison} change the odds of {self.outcome}"

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        _require(bool(((psi > 0) & (psi < 1)).all()), "OR: a mean is not strictly between 0 and 1")
        odds, slope = psi / (1 - psi), 1 / (1 - psi) ** 2
        return [
            Summary(
                name=self.name_of(arm, label),
                value=float(odds[j] / odds[0]),
                gradient=_unit(j, len(psi)) * slope[j] / odds[0]
                - _unit(0, len(psi)) * odds[j] * slope[0] / odds[0] ** 2,
                scale=Scale.RATIO,
            )
            for j, arm in enumerate(self.arms)
            if j
        ]


@dataclass(frozen=True, kw_only=True)
class AbstractArmEffect(AbstractEffect):
    """Base of effects among the people of one arm: E[Y(arm) - Y(reference) | A = a].

    The distribution of (A, W) is the empirical one, and only Q is fluctuated.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> issubclass(ft.ATT, ft.AbstractArmEffect)
    True
    """

    has_strata = False

    def contrast(self) -> tuple[float, ...] | None:
        return (-1.0, 1.0) if len(self.arms) == 2 else None


@final
@dataclass(frozen=True, kw_only=True)
class ATT(AbstractArmEffect):
    """The effect among the treated: of each arm against the reference, among those in that arm.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.ATT(outcome="died", treatment="treated", arms=("0", "1")).question)
    How much does treated (1 against 0) change the mean of died among those in arm 1?
    """

    description = "the effect among the treated"
    measures = ("risk difference among the treated", "difference of means among the treated")

    def question_stem(self) -> str:
        among = f"arm {self.arms[1]}" if len(self.arms) == 2 else "that arm"
        return f"How much does {self.comparison} change the mean of {self.outcome} among those in {among}"

    def populations(self, strata: Sequence[str]) -> tuple[AbstractPopulation, ...]:  # noqa: ARG002
        return tuple(InArm(code, arm) for code, arm in enumerate(self.arms) if code)

    def regimes_in(self, population: AbstractPopulation) -> tuple[AbstractRegime, ...]:
        if not isinstance(population, InArm):
            raise TypeError("the population of an ATT is an arm")
        return Static(self.arms[0]), Static(population.arm)

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        own = {InArm(code, arm).label: arm for code, arm in enumerate(self.arms)}
        name = self.name_of(own.get(label, self.arms[1]), "")
        return [Summary(name=name, value=float(psi[1] - psi[0]), gradient=np.array([-1.0, 1.0]))]


@final
@dataclass(frozen=True, kw_only=True)
class ATC(AbstractArmEffect):
    """The effect among the untreated: E[Y(arm) - Y(reference)] among those in the reference arm.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.ATC(outcome="died", treatment="treated", arms=("0", "1")).question)
    How much does treated (1 against 0) change the mean of died among those in arm 0?
    """

    description = "the effect among the untreated"
    measures = ("risk difference among the untreated", "difference of means among the untreated")

    def question_stem(self) -> str:
        among = f"among those in arm {self.arms[0]}"
        return f"How much does {self.comparison} change the mean of {self.outcome} {among}"

    def populations(self, strata: Sequence[str]) -> tuple[AbstractPopulation, ...]:  # noqa: ARG002
        return (InArm(0, self.arms[0]),)

    def summarise(self, psi: Array, label: str) -> list[Summary]:  # noqa: ARG002 - one population
        return _differences(self, psi, "")


@final
@dataclass(frozen=True, kw_only=True)
class ATO(AbstractEffect):
    """The effect among people who could have had any arm, E[h (Y(arm) - Y(reference))] / E[h].

    The overlap weight is h = 1 / sum_a 1/g_a, which is g (1 - g) for two arms: people for whom either arm
    was about as likely count most. Nobody has a large weight, so this is the effect to ask for where
    overlap is poor. For more arms these are the generalised overlap weights of Li and Li (2019).

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.ATO(outcome="died", treatment="treated", arms=("0", "1")).question)
    How much does treated (1 against 0) change the mean of died among people for whom every arm was likely
    (overlap weights)?
    """

    description = "the effect among those who could have had any arm (overlap weights)"
    measures = ("risk difference in the overlap population", "difference of means in the overlap population")
    has_strata = False

    def question_stem(self) -> str:
        among = "among people for whom every arm was likely (overlap weights)"
        return f"How much does {self.comparison} change the mean of {self.outcome} {among}"

    def populations(self, strata: Sequence[str]) -> tuple[AbstractPopulation, ...]:  # noqa: ARG002
        return (OverlapWeighted(),)

    def assumptions(self) -> tuple[str, ...]:
        return (
            "Within levels of the covariates of the models, treatment is as good as random (no unmeasured "
            "confounding), and nobody's treatment changes another's outcome. The population is defined by "
            "the propensity score: where its model is wrong, it is another population.",
        )

    def summarise(self, psi: Array, label: str) -> list[Summary]:  # noqa: ARG002 - one population
        return _differences(self, psi, "")

    def contrast(self) -> tuple[float, ...] | None:
        return (-1.0, 1.0) if len(self.arms) == 2 else None


@final
@dataclass(frozen=True, kw_only=True)
class OutcomeMean(AbstractEffect):
    """The mean of an outcome that is missing for some people, in a study without a treatment.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> print(ft.OutcomeMean(outcome="died").question)
    What is the mean of died, its missing values accounted for?
    """

    description = "a mean with missing outcomes, no treatment"
    measures = ("risk", "mean")
    has_treatment = False

    def question_stem(self) -> str:
        return f"What is the mean of {self.outcome}, its missing values accounted for"

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        name = _joined("E[Y]", label)
        return [Summary(name=name, value=float(psi[0]), gradient=np.ones(1), scale=Scale.VALUE)]


@final
@dataclass(frozen=True, kw_only=True)
class PolicyMeans(AbstractEffect):
    """The mean outcome if everyone followed a known rule, for each of several rules.

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
    >>> rules = (ft.Static("1"), ft.Threshold("age", 65, arm="1", otherwise="0"))
    >>> print(ft.PolicyMeans(outcome="died", treatment="treated", arms=("0", "1"), rules=rules).question)
    What would the mean of died be under each rule for treated?
    """

    description = "means under known rules"
    measures = ("risk under each rule", "mean under each rule")

    rules: tuple[AbstractRegime, ...]

    def __post_init__(self) -> None:
        AbstractEffect.__post_init__(self)
        if not self.rules:
            raise InputError("rules: expected at least one")
        for rule in self.rules if self.arms else ():
            rule.check(self.arms)

    def question_stem(self) -> str:
        return f"What would the mean of {self.outcome} be under each rule for {self.treatment}"

    def regimes(self) -> tuple[AbstractRegime, ...]:
        return self.rules

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        return [
            Summary(
                name=_joined(f"E[Y({rule.label})]", label),
                value=float(psi[j]),
                gradient=_unit(j, len(psi)),
                scale=Scale.VALUE,
            )
            for j, rule in enumerate(self.rules)
        ]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise NumericalError(message)


# The estimands that study files, templates, pages and `import fedtmle` offer, in the order of their lists.
ESTIMANDS: tuple[type[AbstractEffect], ...] = (ATE, TSM, RR, OR, ATT, ATC, ATO, OutcomeMean, PolicyMeans)
