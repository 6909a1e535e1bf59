"""How many values are missing of each variable that may have some, and of pairs in the same records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from fedtmle.errors import InputError
from fedtmle.estimation.diagnostics.base import AbstractDiagnostic
from fedtmle.programs.missing import MissingCounts
from fedtmle_core.blocks import Block, Moments
from fedtmle_core.terms import ONE, Term
from fedtmle_core.types import Array


@final
@dataclass(frozen=True, kw_only=True)
class MayBeMissing:
    """A variable, or its column of one period: where it is known, among those at risk in the period."""

    name: str
    known: Term
    at_risk: Term | None = None  # None: everyone should have a value

    @property
    def missing(self) -> Term:
        """1 where there should be a value and is none."""
        return 1.0 - self.known if self.at_risk is None else self.at_risk * (1.0 - self.known)


@final
@dataclass(frozen=True, kw_only=True)
class MissingValues(AbstractDiagnostic[MissingCounts]):
    """Counts of missing values; columns of one period are not counted in pairs."""

    variables: tuple[MayBeMissing, ...]

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        whole = [k for k, each in enumerate(self.variables) if each.at_risk is None]
        return [(j, k) for j in whole for k in whole if j < k]

    @cached_property
    def _risks(self) -> tuple[Term, ...]:
        """Those at risk in the periods of which there is a column, each once."""
        return tuple(dict.fromkeys(each.at_risk for each in self.variables if each.at_risk is not None))

    @property
    def blocks(self) -> tuple[Block, ...]:
        if not self.variables:
            return ()
        count = len(self.variables)
        singles = range(count + len(self._risks) + 1)
        return (
            Moments(
                columns=(*(each.missing for each in self.variables), *self._risks, ONE),
                products=(*((k,) for k in singles), *self._pairs),
                places=0,
            ),
        )

    def read(self, values: Sequence[Array]) -> MissingCounts:
        """Return the counts; `InputError` if nobody has a value of some variable."""
        if not values:
            return MissingCounts(n=0, counts={})
        found = list(map(round, values[0].tolist()))
        count, risks = len(self.variables), self._risks
        at_risk = dict(zip(risks, found[count:], strict=False))
        names = [each.name for each in self.variables]
        counts = MissingCounts(
            n=found[count + len(risks)],
            counts=dict(zip(names, found, strict=False)),
            at_risk={each.name: at_risk[each.at_risk] for each in self.variables if each.at_risk is not None},
            doubles=self._doubles(found),
        )
        for each in self.variables:
            missing = counts.counts[each.name]
            if missing and missing == counts.of(each.name):
                where = "for everyone at risk in it" if each.at_risk else "in every record of every silo"
                raise InputError(f"variables: '{each.name}' is missing {where}; take it out of the formulas")
        return counts

    def _doubles(self, found: Sequence[int]) -> dict[str, str]:
        """Return the variables that are missing in just the records in which another one before is."""
        doubles: dict[str, str] = {}
        both = found[len(self.variables) + len(self._risks) + 1 :]
        for (j, k), together in zip(self._pairs, both, strict=True):
            if together == found[j] == found[k] > 0:
                doubles.setdefault(self.variables[k].name, self.variables[j].name)
        return doubles
