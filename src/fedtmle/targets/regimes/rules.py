"""Rules for treatment over time, beside `Static`, `Threshold` and `Stochastic`, which hold in each period."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.arguments import expect, expect_column, expect_number, label
from fedtmle.model.table import Table
from fedtmle.model.types import Array
from fedtmle.targets.effects.components import AbstractRegime, Static, require_arms


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

    plan: tuple[str, ...]

    def __post_init__(self) -> None:
        expect("plan", self.plan, tuple | list, 'an arm for each period, such as ("1", "1", "0")')
        object.__setattr__(self, "plan", tuple(label("plan", arm) for arm in self.plan))

    @property
    def label(self) -> str:
        return " then ".join(self.plan)

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

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

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    @property
    def is_modified(self) -> bool:
        return True

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
