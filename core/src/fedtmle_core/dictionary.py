"""The dictionary of a plan: which variables a record has, and every value that each may have.

The loader checks records against it before the core sees them. All public bounds follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, final

from fedtmle_core.errors import InputError

Interval: TypeAlias = tuple[float, float]  # the least and the largest value


@final
@dataclass(frozen=True, kw_only=True)
class Numeric:
    """A number from ``low`` to ``high``; it may be missing."""

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.high):
            raise InputError(f"'{self.name}': expected a finite range, the least value first")

    @property
    def exponent(self) -> int:
        """The least e with every value at most 2^e in magnitude."""
        fraction, power = math.frexp(max(abs(self.low), abs(self.high)))
        return power - 1 if fraction == 0.5 else power


@final
@dataclass(frozen=True, kw_only=True)
class Categorical:
    """One of the listed levels; it may be missing unless it is ``required``."""

    name: str
    levels: tuple[str, ...]
    required: bool = False

    def __post_init__(self) -> None:
        if not self.levels or len(set(self.levels)) != len(self.levels):
            raise InputError(f"'{self.name}': expected different levels")


@final
@dataclass(frozen=True, kw_only=True)
class Identifier:
    """A mark that the records of one cluster share, of whom there are at most ``largest``."""

    name: str
    largest: int


Variable: TypeAlias = Numeric | Categorical | Identifier


@final
@dataclass(frozen=True)
class Dictionary:
    """The variables of a plan."""

    variables: tuple[Variable, ...]

    def __post_init__(self) -> None:
        if len(self._by_name) != len(self.variables):
            raise InputError("the dictionary has two variables of one name")

    @cached_property
    def _by_name(self) -> Mapping[str, Variable]:
        return {variable.name: variable for variable in self.variables}

    def numeric(self, name: str) -> Numeric:
        """Return a numeric variable; `InputError` if there is none of this name."""
        variable = self._by_name.get(name)
        if not isinstance(variable, Numeric):
            raise InputError(f"the dictionary has no number '{name}'")
        return variable

    def levels(self, name: str) -> tuple[str, ...]:
        """Return the levels of a categorical variable; `InputError` if there is none of this name."""
        variable = self._by_name.get(name)
        if not isinstance(variable, Categorical):
            raise InputError(f"the dictionary has no categorical variable '{name}'")
        return variable.levels

    def is_required(self, name: str) -> bool:
        """Return whether everybody has a level of this variable, so that its levels add up to everybody."""
        variable = self._by_name.get(name)
        return isinstance(variable, Categorical) and variable.required

    def largest_cluster(self, name: str) -> int:
        """Return how many people a cluster may have; `InputError` if there is no identifier of this name."""
        variable = self._by_name.get(name)
        if not isinstance(variable, Identifier):
            raise InputError(f"the dictionary has no identifier '{name}'")
        return variable.largest

    def require(self, name: str) -> None:
        """Raise `InputError` if there is no variable of this name."""
        if name not in self._by_name:
            raise InputError(f"the dictionary has no variable '{name}'")
