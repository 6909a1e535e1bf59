"""The first question of a study of an effect: how many people, by arm and stratum, and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedtmle.errors import FitError, InputError
from fedtmle.estimation.flow import Flow, ask
from fedtmle.estimation.people import People
from fedtmle.programs.study import Study
from fedtmle.targets.effects.components import PooledWeights
from fedtmle_core.blocks import Moments
from fedtmle_core.terms import ONE, Term


@final
@dataclass(frozen=True, kw_only=True)
class Counted:
    """Totals over all hospitals: people, by arm and with an observed outcome, and sums of their weights."""

    n: int
    arms: tuple[int, ...]
    observed: tuple[int, ...]
    weights: PooledWeights

    @property
    def weight_mean(self) -> float:
        """The mean weight of a person."""
        return self.weights.total / self.n

    @property
    def is_complete(self) -> bool:
        """Whether nobody's outcome is missing."""
        return sum(self.observed) == self.n


def count_people(study: Study, people: People) -> Flow[Counted]:
    """Count people by arm and stratum, and add up their weights; refuse an arm without an outcome."""
    groups: tuple[Term, ...] = (ONE, *people.taken, *people.strata)
    arms, size = len(people.arms), len(groups)
    columns = (*groups, people.observed, people.relative)
    seen, weight = size, size + 1
    products = [
        *((k,) for k in range(size)),
        *((k, seen) for k in range(1, 1 + arms)),
        *((k, weight) for k in range(size)),
    ]
    ((totals),) = yield from ask(Moments(columns=columns, products=tuple(products)))
    listed = totals.tolist()
    sums = listed[size + arms :]
    counted = Counted(
        n=round(listed[0]),
        arms=tuple(map(round, listed[1 : 1 + arms])),
        observed=tuple(map(round, listed[size : size + arms])),
        weights=PooledWeights(
            total=sums[0], by_arm=tuple(sums[1 : 1 + arms]), by_stratum=tuple(sums[1 + arms :])
        ),
    )
    _require(study, people, counted)
    return counted


def _require(study: Study, people: People, counted: Counted) -> None:
    """Refuse counts with which there is nothing to estimate."""
    if not counted.n:
        raise FitError("arm", "no hospital has a record")
    if not counted.weights.total > 0:
        raise InputError(f"weights: column '{study.weights}' is zero in every row")
    for arm, count in zip(people.arms, counted.observed, strict=True):
        if not count:
            raise FitError(
                "arm",
                f"treatment: no silo has an observed outcome in arm '{arm}'; check the treatment's column, "
                "its arms and who has an outcome",
            )
