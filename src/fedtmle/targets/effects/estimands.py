"""What a study asks for: effects as values, and the delta method from components to estimands."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from fedtmle.errors import InputError, NumericalError
from fedtmle.model.arguments import expect, expect_column, expect_number, label
from fedtmle.model.families import Response
from fedtmle.model.types import Array
from fedtmle.targets.effects.components import (
    AbstractPopulation,
    AbstractRegime,
    Component,
    Everyone,
    InArm,
    InStratum,
    Static,
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One estimand: its value, its gradient in the components, and the scale of its interval."""

    name: str
    value: float
    gradient: Array
    log_scale: bool = False
    null: float | None = 0.0  # on the reported scale; None where no value is "no effect"


@dataclass(frozen=True, kw_only=True)
class AbstractEffect:
    """What every effect declares: the outcome and its bounds, the treatment, and strata if any.

    Bounds are declared because a sample's minimum and maximum are two patients' values. So is the type:
    "auto" asks the silos nothing and takes the outcome as continuous within its bounds.
    """

    outcome: str
    outcome_bounds: tuple[float, float] = (0.0, 1.0)
    treatment: str | None = None
    arms: tuple[str, ...] = ("0", "1")  # the first is the reference
    strata: str | None = None
    outcome_type: Literal["auto", "binary", "continuous", "count"] = "auto"

    def __post_init__(self) -> None:
        self._read_arguments()
        low, high = self.outcome_bounds
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(
                f"outcome_bounds: expected finite (low, high) with low < high, not {self.outcome_bounds}"
            )
        if self.treatment is None:
            if self.needs_treatment:
                raise InputError(f"treatment: {type(self).__name__} needs the name of a column")
            object.__setattr__(self, "arms", ("all",))
        elif len(set(self.arms)) != len(self.arms) or len(self.arms) < 2:
            raise InputError("arms: expected at least two different levels, the reference first")
        if self.outcome_type not in ("auto", "binary", "continuous", "count"):
            raise InputError(f"outcome_type: not {self.outcome_type!r}")
        if self.outcome_type == "binary" and self.outcome_bounds != (0.0, 1.0):
            raise InputError("outcome_bounds: a binary outcome has the bounds (0, 1)")
        if self.outcome_type == "count" and self.outcome_bounds[0] != 0.0:
            raise InputError("outcome_bounds: those of a count are 0 and its largest possible value")

    def _read_arguments(self) -> None:
        """Names are text, bounds are two numbers; arms become text, as they are at every silo."""
        for name in ("outcome", "treatment", "strata"):
            if name == "outcome" or getattr(self, name) is not None:
                expect_column(name, getattr(self, name))
        expect("outcome_bounds", self.outcome_bounds, tuple | list, "two numbers, (low, high)")
        if len(self.outcome_bounds) != 2:
            raise InputError(
                f"outcome_bounds: expected two numbers, (low, high), not {len(self.outcome_bounds)}"
            )
        for bound in self.outcome_bounds:
            expect_number("outcome_bounds", bound)
        expect("arms", self.arms, tuple | list, 'the levels of the treatment, such as ("0", "1")')
        object.__setattr__(self, "arms", tuple(label("arms", arm) for arm in self.arms))
        if self.treatment == self.outcome:
            raise InputError(f"treatment: '{self.outcome}' is the outcome; name another column")

    @property
    def needs_treatment(self) -> bool:
        return True

    @property
    def response(self) -> Response:
        """What the outcome is taken as."""
        return "continuous" if self.outcome_type == "auto" else self.outcome_type

    @property
    def is_binary(self) -> bool:
        return self.response == "binary"

    def components(self, strata: Sequence[str]) -> tuple[Component, ...]:
        """The means that the effect is made of, population by population."""
        return tuple(
            Component(regime, population)
            for population in self.populations(strata)
            for regime in self.regimes()
        )

    def populations(self, strata: Sequence[str]) -> tuple[AbstractPopulation, ...]:
        """Everyone and each stratum, unless the effect is about one arm."""
        groups = (InStratum(code, level) for code, level in enumerate(strata))
        return (Everyone(), *groups)

    def regimes(self) -> tuple[AbstractRegime, ...]:
        return tuple(Static(arm) for arm in self.arms)

    @abstractmethod
    def summarise(self, psi: Array, label: str) -> list[Summary]:
        """Estimands of one population from its components' values, gradients in those."""

    def contrast(self) -> tuple[float, ...] | None:
        """The one combination to target where the contrast alone is wanted, else None."""
        return None


def _name(kind: str, label: str) -> str:
    return f"{kind} {label}".strip()


def _unit(index: int, size: int) -> Array:
    return np.asarray(np.eye(size)[index])


@final
@dataclass(frozen=True, kw_only=True)
class TSM(AbstractEffect):
    """Counterfactual means, one per arm."""

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        return [
            Summary(
                name=_name(f"E[Y({arm})]", label), value=float(psi[j]), gradient=_unit(j, len(psi)), null=None
            )
            for j, arm in enumerate(self.arms)
        ]


@final
@dataclass(frozen=True, kw_only=True)
class PolicyMeans(AbstractEffect):
    """Means under known rules: `Static`, `Threshold` or `Stochastic` regimes."""

    rules: tuple[AbstractRegime, ...]

    def __post_init__(self) -> None:
        AbstractEffect.__post_init__(self)
        if not self.rules:
            raise InputError("rules: expected at least one")
        for rule in self.rules:
            rule.check(self.arms)

    def regimes(self) -> tuple[AbstractRegime, ...]:
        return self.rules

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        return [
            Summary(
                name=_name(f"E[Y({rule.label})]", label),
                value=float(psi[j]),
                gradient=_unit(j, len(psi)),
                null=None,
            )
            for j, rule in enumerate(self.rules)
        ]


@final
@dataclass(frozen=True, kw_only=True)
class OutcomeMean(AbstractEffect):
    """The mean of an outcome that is missing for some."""

    def __post_init__(self) -> None:
        AbstractEffect.__post_init__(self)
        if self.treatment is not None:
            raise InputError("treatment: an outcome's mean has none; for means under each arm use TSM")

    @property
    def needs_treatment(self) -> bool:
        return False

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        return [Summary(name=_name("E[Y]", label), value=float(psi[0]), gradient=np.ones(1), null=None)]


@final
@dataclass(frozen=True, kw_only=True)
class ATE(AbstractEffect):
    """E[Y(arm)] - E[Y(reference)] for each arm but the reference."""

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        return [
            Summary(
                name=_name("ATE" if len(self.arms) == 2 else f"ATE {arm} vs {self.arms[0]}", label),
                value=float(psi[j] - psi[0]),
                gradient=_unit(j, len(psi)) - _unit(0, len(psi)),
            )
            for j, arm in enumerate(self.arms)
            if j
        ]

    def contrast(self) -> tuple[float, ...] | None:
        return (-1.0, 1.0) if len(self.arms) == 2 and self.strata is None else None


@final
@dataclass(frozen=True, kw_only=True)
class RR(AbstractEffect):
    """E[Y(arm)] / E[Y(reference)]; its interval is on the log scale."""

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        _require(bool((psi > 0).all()), "RR: a mean is not above zero")
        return [
            Summary(
                name=_name("RR" if len(self.arms) == 2 else f"RR {arm} vs {self.arms[0]}", label),
                value=float(psi[j] / psi[0]),
                gradient=_unit(j, len(psi)) / psi[0] - _unit(0, len(psi)) * psi[j] / psi[0] ** 2,
                log_scale=True,
                null=1.0,
            )
            for j, arm in enumerate(self.arms)
            if j
        ]


@final
@dataclass(frozen=True, kw_only=True)
class OR(AbstractEffect):
    """The ratio of the arms' odds; its interval is on the log scale."""

    def summarise(self, psi: Array, label: str) -> list[Summary]:
        _require(bool(((psi > 0) & (psi < 1)).all()), "OR: a mean is not strictly between 0 and 1")
        odds, slope = psi / (1 - psi), 1 / (1 - psi) ** 2
        return [
            Summary(
                name=_name("OR" if len(self.arms) == 2 else f"OR {arm} vs {self.arms[0]}", label),
                value=float(odds[j] / odds[0]),
                gradient=_unit(j, len(psi)) * slope[j] / odds[0]
                - _unit(0, len(psi)) * odds[j] * slope[0] / odds[0] ** 2,
                log_scale=True,
                null=1.0,
            )
            for j, arm in enumerate(self.arms)
            if j
        ]


@dataclass(frozen=True, kw_only=True)
class AbstractArmEffect(AbstractEffect):
    """E[Y(1) - Y(0) | A = a]: empirical (A, W), only Q is fluctuated (the Q-only convention)."""

    def __post_init__(self) -> None:
        AbstractEffect.__post_init__(self)
        if len(self.arms) != 2 or self.treatment is None:
            raise InputError("arms: an effect among the treated or untreated needs exactly two arms")
        if self.strata is not None:
            raise InputError("strata: not available for an effect among the treated or untreated")

    def summarise(self, psi: Array, label: str) -> list[Summary]:  # noqa: ARG002 - one population
        return [
            Summary(name=type(self).__name__, value=float(psi[1] - psi[0]), gradient=np.array([-1.0, 1.0]))
        ]

    def contrast(self) -> tuple[float, ...] | None:
        return (-1.0, 1.0)


@final
@dataclass(frozen=True, kw_only=True)
class ATT(AbstractArmEffect):
    """The effect among those in the second arm."""

    def populations(self, strata: Sequence[str]) -> tuple[AbstractPopulation, ...]:  # noqa: ARG002
        return (InArm(1, self.arms[1]),)


@final
@dataclass(frozen=True, kw_only=True)
class ATC(AbstractArmEffect):
    """The effect among those in the reference arm."""

    def populations(self, strata: Sequence[str]) -> tuple[AbstractPopulation, ...]:  # noqa: ARG002
        return (InArm(0, self.arms[0]),)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise NumericalError(message)
