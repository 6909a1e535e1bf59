"""The diagnostics of a study of time to an event, asked in the round that closes it."""

from __future__ import annotations

import math
from typing import NamedTuple

from fedtmle.estimation.diagnostics.balance import CovariateBalance
from fedtmle.estimation.diagnostics.base import Pool
from fedtmle.estimation.diagnostics.covariates import measured, model_covariates
from fedtmle.estimation.diagnostics.histograms import PropensityHistograms, Treatment
from fedtmle.estimation.diagnostics.periods import PeopleAtRisk
from fedtmle.estimation.flow import Flow, both
from fedtmle.estimation.times import PreparedTime
from fedtmle.programs.time import AtRisk
from fedtmle.targets.diagnostics import Balance
from fedtmle_core.terms import Apply, product, total

MOST_SHOWN = 12  # periods whose number at risk is shown: as many as fit under a curve


class TimeDiagnostics(NamedTuple):
    """People at risk with histograms of propensity scores, and the covariates by arm."""

    at_risk: AtRisk
    balance: tuple[Balance, ...] | None


def diagnose_time(prepared: PreparedTime, pool: Pool) -> Flow[TimeDiagnostics]:
    """Ask for the diagnostics of a prepared study."""
    target, people = prepared.target, prepared.timed.people
    parts = target.subperiods
    last = math.ceil(prepared.timed.horizon / parts)
    shown = tuple(range(1, last + 1, math.ceil(last / MOST_SHOWN)))
    treatment = Treatment(arms=people.arms, taken=people.taken, scores=prepared.timed.g)
    counts, (histograms, lines) = yield from both(
        people_at_risk(prepared, pool, [(period - 1) * parts + 1 for period in shown]).ask(),
        both(
            PropensityHistograms(pool=pool, treatments=(treatment,)).ask(),
            arm_balance(prepared, pool).ask(),
        ),
    )
    at_risk = AtRisk(
        periods=shown,
        counts=counts,
        silos=((pool.silos,) * len(shown),) * len(people.arms),
        overlap=histograms,
    )
    return TimeDiagnostics(at_risk, lines or None)


def people_at_risk(prepared: PreparedTime, pool: Pool, begins: list[int]) -> PeopleAtRisk:
    """Return who is at risk in some periods of the grid, by arm."""
    periods = prepared.timed.periods
    return PeopleAtRisk(
        pool=pool,
        arms=prepared.timed.people.taken,
        at_risk=total([periods.at_risk(begin) for begin in begins]),
        periods=len(begins),
    )


def arm_balance(prepared: PreparedTime, pool: Pool) -> CovariateBalance:
    """Return the covariates by arm, as they are and weighted by 1 / max(g, floor) of the arm taken."""
    people, declared = prepared.timed.people, prepared.declared
    return CovariateBalance(
        pool=pool,
        covariates=tuple(
            measured(declared.study, declared.dictionary, each) for each in model_covariates(declared.study)
        ),
        arms=people.taken,
        weights=tuple(
            product(people.relative, arm, Apply("inverse", g, low=prepared.timed.least))
            for arm, g in zip(people.taken, prepared.timed.g, strict=True)
        ),
        weight=people.relative,
    )
