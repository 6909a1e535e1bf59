"""Table 1: the cohort by arm before a study runs, who is lost at each step, and missing values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from fedtmle.estimation.diagnostics.balance import Measured
from fedtmle.estimation.diagnostics.base import AbstractDiagnostic, Pool
from fedtmle.targets.diagnostics import BaselineTable, Characteristic, Count, largest_difference
from fedtmle_core.blocks import Block, Moments
from fedtmle_core.publish.counts import cells, cut, is_safe
from fedtmle_core.publish.groups import not_dominated
from fedtmle_core.publish.numbers import digits, on_grid, step_above
from fedtmle_core.terms import Term, product
from fedtmle_core.types import Array

# Means are shown with three digits and deviations with two; a deviation is a 50th of the declared range at
# least. These are the numbers of `balance.MEAN_ERROR`.
VALUE_ERROR = 4e-6


@final
@dataclass(frozen=True, kw_only=True)
class Step:
    """People who drop out at a step, of all or of those who are left before it."""

    name: str
    lost: Term


@final
@dataclass(frozen=True, kw_only=True)
class Characteristics(AbstractDiagnostic[BaselineTable]):
    """For each number and arm the count of those known, the sums of x and x^2; for each level a count.

    ``lost`` are steps, of which each is of those who are left; ``missing`` has those who lack a variable. The
    table is rounded, so that nothing is said about 1 to ``floor`` - 1 people; without a floor it is exact.
    """

    pool: Pool
    arms: tuple[str, ...]
    taken: tuple[Term, ...]
    covariates: tuple[Measured, ...]
    lost: tuple[Step, ...]
    missing: tuple[Step, ...]
    floor: int | None = None

    @cached_property
    def _sums(self) -> tuple[Term, ...]:
        """Each sum that is asked, once."""
        counted = (*self.taken, *(step.lost for step in (*self.lost, *self.missing)))
        of_lines = (term for each in self.covariates for arm in self.taken for term in _parts(each, arm))
        return tuple(dict.fromkeys((*counted, *of_lines)))

    @property
    def blocks(self) -> tuple[Block, ...]:
        places = None if self.floor is None else self.pool.places(VALUE_ERROR)
        return (Moments.of(self._sums, places=places),)

    def read(self, values: Sequence[Array]) -> BaselineTable:
        found = dict(zip(self._sums, values[0].tolist(), strict=True))
        people = [round(found[arm]) for arm in self.taken]
        lost = [round(found[step.lost]) for step in self.lost]
        missing = [round(found[step.lost]) for step in self.missing]
        return BaselineTable(
            n=self.pool.n,
            arms=self._counts(self.arms, self._parts_of_all(people)),
            lost=self._counts([step.name for step in self.lost], self._parts_of_all(lost)),
            missing=self._counts([step.name for step in self.missing], map(self._part_of_all, missing)),
            lines=tuple(
                self._line(each, people, [[found[term] for term in _parts(each, arm)] for arm in self.taken])
                for each in self.covariates
            ),
        )

    def _part_of_all(self, count: int) -> int:
        return count if self.floor is None else cut(count, self.pool.n, self.floor)

    def _parts_of_all(self, counts: Sequence[int]) -> Sequence[int]:
        """Return the sizes of groups of which nobody is in two, and in which some may be in none."""
        rest = self.pool.n - sum(counts)
        if self.floor is None or is_safe([*counts, rest], self.floor):
            return counts
        return cells([*counts, rest], self.pool.n, self.floor)[: len(counts)]

    def _counts(self, names: Sequence[str], counts: Iterable[int]) -> tuple[Count, ...]:
        n = self.pool.n
        return tuple(Count(name=name, count=count, of=n) for name, count in zip(names, counts, strict=True))

    def _line(
        self, each: Measured, people: Sequence[int], by_arm: Sequence[Sequence[float]]
    ) -> Characteristic:
        covariate = each.covariate
        width = covariate.high - covariate.low
        level = "1" if covariate.is_binary else covariate.level
        if covariate.is_indicator:
            means = [
                self._share(round(count), round(known), everyone)
                for (known, count), everyone in zip(by_arm, people, strict=True)
            ]
            variances, sds = [mean * (1.0 - mean) for mean in means], None
        else:
            pairs = [self._spread(*sums) for sums in by_arm]
            means, deviations = [mean for mean, _ in pairs], [sd for _, sd in pairs]
            variances, sds = [sd * sd for sd in deviations], tuple(width * sd for sd in deviations)
        is_shown = self.floor is None or not any(map(math.isnan, means))
        has_spread = self.floor is None or not any(map(math.isnan, variances))
        return Characteristic(
            name=covariate.name,
            level=level,
            mean=tuple(map(covariate.on_scale, means)) if is_shown else (),
            sd=sds if sds is None or has_spread else (),
            difference=largest_difference(means, variances) if is_shown and has_spread else None,
            silos=self.pool.silos if is_shown else 0,
        )

    def _share(self, count: int, known: int, people: int) -> float:
        """Return the share of those known who have a level, NaN if it is not to be had."""
        if self.floor is None:
            return count / known if known else math.nan
        # Of fewer than two floors a share would be 0 or 1, whatever it is. Those of whom it is not known are
        # no fewer than the floor either.
        of = cut(known, people, self.floor)
        return min(cut(count, known, self.floor) / of, 1.0) if known >= 2 * self.floor <= of else math.nan

    def _spread(self, known: float, total: float, squares: float) -> tuple[float, float]:
        """Return the mean and deviation of an arm on the unit scale, NaN if they are not to be had."""
        if known < 1:
            return math.nan, math.nan
        mean = total / known
        sd = math.sqrt(max(squares - known * mean * mean, 0.0) / (known - 1)) if known > 1 else math.nan
        if self.floor is None:
            return mean, sd
        if known < self.floor or not sd > 0 or not not_dominated(mean, math.inf, known, 0.0, 1.0):
            return math.nan, math.nan
        if not not_dominated(mean, sd, known, 0.0, 1.0):
            return on_grid(mean, step_above(1.0 / known)), math.nan  # one person may be most of the squares
        # One person changes a mean by sd / sqrt(n) at most, which is the grid.
        return on_grid(mean, step_above(digits(sd, 2) / math.sqrt(known))), digits(sd, 2)


def _parts(each: Measured, arm: Term) -> tuple[Term, ...]:
    """The sums of a covariate in one arm: known, x, and of a number x^2."""
    parts = (product(arm, each.known), product(arm, each.x))
    return parts if each.covariate.is_indicator else (*parts, product(arm, each.x, each.x))
