"""The counts of a study of time to an event: people and events by arm, and hazards that need no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.estimation.flow import Flow, ask
from fedtmle.estimation.followup import Periods
from fedtmle.estimation.people import People
from fedtmle.estimation.strands import CountedHazard
from fedtmle.protocol.bins import PooledBin, PooledBins
from fedtmle.targets.effects.components import PooledWeights
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle_core.blocks import Moments
from fedtmle_core.exact import Sums
from fedtmle_core.terms import ONE, Term, product
from fedtmle_core.types import Array

# A counted hazard of censoring stays below 1, so that G is above 0 when all who are left are censored.
LARGEST_CENSORING = 1.0 - 2.0**-20


@final
@dataclass(frozen=True, kw_only=True)
class Tally:
    """Totals over all hospitals: people and their events per arm, and sums of weights.

    ``events`` has the people with an event of each cause, per arm; ``censors`` says whether anyone is
    censored before the last period.
    """

    n: int
    arms: tuple[int, ...]
    events: tuple[tuple[int, ...], ...]
    censors: bool
    weights: PooledWeights

    @property
    def weight_mean(self) -> float:
        """The mean weight of a person."""
        return self.weights.total / self.n

    def pooled_events(self, hospitals: int) -> PooledBins:
        """Return people without an event, and with one of each cause, per arm, as results show them."""
        return tuple(
            tuple(
                PooledBin(silos=hospitals, count=count, total=Sums((), ()))
                for count in (people - sum(causes), *causes)
            )
            for people, causes in zip(self.arms, self.events, strict=True)
        )


def count_followed(target: AbstractTimeEffect, people: People, periods: Periods, horizon: int) -> Flow[Tally]:
    """Count people by arm and stratum, who is at risk at the horizon, and who has an event; one round."""
    groups: tuple[Term, ...] = (ONE, *people.taken, *people.strata)
    arms, size, causes = range(1, 1 + len(people.arms)), len(groups), len(periods.ends)
    columns = (*groups, people.relative, periods.at_risk(horizon), periods.is_censored, *periods.happens)
    weight, risk, censored, first = range(size, size + 4)
    (totals,) = yield from ask(
        Moments(
            columns=columns,
            products=(
                *((k,) for k in range(size)),
                *((k, weight) for k in range(size)),
                *((a, risk) for a in arms),
                *((a, first + j) for a in arms for j in range(causes)),
                (censored,),
            ),
        )
    )
    counts, weights, risks, events, (censors,) = _split(
        totals, (size, size, len(arms), len(arms) * causes, 1)
    )
    tally = Tally(
        n=round(counts[0]),
        arms=tuple(map(round, counts[1 : 1 + len(arms)])),
        events=tuple(tuple(map(round, each)) for each in np.reshape(events, (len(arms), causes)).tolist()),
        censors=censors > 0,
        weights=PooledWeights(
            total=weights[0],
            by_arm=tuple(weights[1 : 1 + len(arms)]),
            by_stratum=tuple(weights[1 + len(arms) :]),
        ),
    )
    _refuse(target, tally, risks, horizon)
    return tally


def _refuse(target: AbstractTimeEffect, tally: Tally, at_risk: Sequence[float], horizon: int) -> None:
    """Refuse counts with which there is nothing to estimate."""
    if not tally.weights.total > 0:
        raise InputError("weights: the sum of the weights is zero")
    for arm, people, risk in zip(target.arms, tally.arms, at_risk, strict=True):
        if not people:
            raise InputError(
                f"treatment: no silo has a record in arm '{arm}'; check the treatment's column and its arms"
            )
        if not risk:
            raise InputError(
                f"horizons: nobody in arm '{arm}' is at risk in {target.follow_up.name(horizon)}; choose an "
                "earlier horizon, or longer periods"
            )
    for cause, happens in zip(target.causes, map(sum, zip(*tally.events, strict=True)), strict=True):
        if not happens:
            raise InputError(
                f"causes: nobody has an event of cause '{cause}'; check the codes of column "
                f"'{target.outcome}', or leave the cause out"
            )


def count_hazards(
    people: People, periods: Periods, causes: Sequence[int]
) -> Flow[Mapping[int, CountedHazard]]:
    """Return hazards by arm and period, events over people at risk; one round if there are any.

    After the numbers of the causes, their count stands for being censored.
    """
    if not causes:
        return {}
    censoring = len(periods.ends)
    last = {cause: periods.last - (cause == censoring) for cause in causes}
    arms = [product(people.relative, taken) for taken in people.taken]
    places = [(cause, t) for cause in causes for t in range(1, last[cause] + 1)]
    columns = [*arms]
    for cause, t in places:
        if cause == censoring:
            columns += [periods.at_risk_of_censoring(t), periods.censored(t)]
        else:
            columns += [periods.at_risk_of(cause, t), periods.event(cause, t)]
    products = tuple((a, k) for k in range(len(arms), len(columns)) for a in range(len(arms)))
    (totals,) = yield from ask(Moments(columns=tuple(columns), products=products))
    sums = dict(zip(places, totals.reshape(len(places), 2, len(arms)), strict=True))
    found = {}
    for cause in causes:
        risk, events = np.stack([sums[cause, t] for t in range(1, last[cause] + 1)], axis=2)
        hazards = np.divide(events, risk, out=np.zeros_like(events), where=risk > 0)
        if cause == censoring:
            hazards = np.minimum(hazards, LARGEST_CENSORING)
        found[cause] = CountedHazard.of(people.treatment, hazards.tolist())
    return found


def _split(totals: Array, sizes: Sequence[int]) -> list[list[float]]:
    """Return consecutive parts of some totals."""
    parts = np.split(totals, np.cumsum(sizes)[:-1])
    return [part.tolist() for part in parts]
