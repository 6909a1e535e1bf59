"""Attacks on totals under masks that are no counts: of fits, and of what is left after own coefficients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.protocol.fits import FitAverage, FitQuery
from fedtmle.protocol.plan import Plan
from fedtmle.studyfile.schema import schema_of
from fedtmle.targets.effects.prepare import ArmResponse
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.combinations import AbstractCombination
from tests.attacks.over_time import sums_of, until
from tests.attacks.settings import NAMES
from tests.attacks.small import AbstractStudyAttack, Columns
from tests.declare import declare
from tests.narrow import load

MEANS = dict(zip(NAMES, (11.15, 9.0, 13.0, 8.35, 14.0, 10.5), strict=True))
TREATED = dict(zip(NAMES, (15, 16, 17, 18, 19, 20), strict=True))
EVENTS = dict(zip(NAMES, (6, 9, 4, 11, 13, 8), strict=True))
SIZES = dict(zip(NAMES, (59, 53, 47, 43, 41, 37), strict=True))


class OneRetires(AbstractAttack):
    """Subtracts two totals of the fits, between which one silo retired by a rule that lets it leave early."""

    yields = "the silo's own mean, to 0.001 where the rule allows 0.33"
    only_masked = True
    in_open = "sent"
    problem = ft.Mean(bounds=(0.0, 20.0))
    start = 10.0

    def plan(self) -> Plan:
        algorithm = ft.Personalized(noise=0.5, lattice=2.0**-20, min_active=3)
        program = TargetingProgram(
            problem=self.problem, law=self.problem.start(self.start), algorithm=algorithm
        )
        return Plan(program=program, roster=self.members)

    def crowd(self, silo: str) -> np.ndarray:
        return MEANS[silo] + np.linspace(-6.0, 6.0, 31)

    def rows(self) -> np.ndarray:
        return self.crowd("a")

    def run(self, victim: Victim) -> float:
        server = self.connect(victim)
        answer = server.begin(server.open())
        totals: list[tuple[float, int]] = []
        while len(totals) < 2:
            if isinstance(server.query, FitQuery):
                average: FitAverage = answer
                totals.append((float(average.eps[0]), average.people or 0))
            answer = server.go_on(answer)
        (first, everybody), (second, people) = totals
        # At the second law the fits of all six add up to zero: the total is that of the one who left.
        return self.start - first + second * people / (everybody - people)

    def works(self, learned: float) -> bool:
        return abs(learned - MEANS["a"]) < 1e-3


class SumOfFits(AbstractStudyAttack):
    """Averages fits on a fine lattice, and seeks the counts of events whose fits add up to the total."""

    yields = "how many of the treated have the event in each silo, exactly, where the silos' sizes are known"
    options = {  # noqa: RUF012 - read only
        "algorithm": ft.LocalAverage(tolerance=1e-6, lattice=2.0**-40),
        "sums": "exact",
        "diagnostics": False,
        "variables": declare(y="binary", a="binary", q0=(0, 1), q1=(0, 1), g=(0, 1)),
    }
    only_masked = True
    in_open = "sent"

    def columns_of(self, silo: str) -> Columns:
        treated, half = TREATED[silo], np.full(2 * TREATED[silo], 0.5)
        row = np.arange(2 * treated)
        y = np.where(row < treated, row < EVENTS[silo], row % 2)
        return {"y": y * 1.0, "a": (row < treated) * 1.0, "q0": half, "q1": half, "g": half}

    def columns(self) -> Columns:
        return self.columns_of("a")

    def crowd(self, silo: str) -> Any:
        return load(self.columns_of(silo), schema_of(self.study()), silo=silo)

    def run(self, victim: Victim) -> tuple[int, ...]:
        server, answer = self.server(victim)
        while not isinstance(server.query, FitQuery):
            answer = server.go_on(answer)
        total = -float(answer.eps[1]) * 2 * sum(TREATED.values())
        halves = [self._totals(silos) for silos in (NAMES[:3], NAMES[3:])]
        (first, ones), (second, others) = halves
        order = np.argsort(second)
        place = np.clip(np.searchsorted(second[order], total - first), 1, len(order) - 1)
        near = np.stack([order[place - 1], order[place]])
        miss = np.abs(first + second[near] - total)
        side, best = np.unravel_index(int(miss.argmin()), miss.shape)
        return (*ones[best], *others[near[side, best]])

    def _totals(self, silos: tuple[str, ...]) -> tuple[np.ndarray, list[tuple[int, ...]]]:
        """The totals of three silos' weighted fits for every choice of their events."""
        choices = list(itertools.product(*(range(1, TREATED[silo]) for silo in silos)))
        people = np.array([TREATED[silo] for silo in silos])
        events = np.array(choices)
        # With clever covariate 2 and prediction 1/2 the fit is minus half the log odds; a silo weighs 2 n.
        return (people * np.log(events / (people - events))).sum(axis=1), choices

    def works(self, learned: tuple[int, ...]) -> bool:
        return learned == tuple(EVENTS.values())

    def choices(self, spacing: float) -> int:
        """How many choices of the events could have the same total, if fits are rounded to a spacing."""
        (first, ones), (second, others) = (self._totals(silos) for silos in (NAMES[:3], NAMES[3:]))
        total = (
            first[ones.index(tuple(EVENTS.values())[:3])] + second[others.index(tuple(EVENTS.values())[3:])]
        )
        reach = spacing * sum(TREATED.values())  # each fit is off by half of the spacing, times 2 n people
        ends = (np.searchsorted(np.sort(second), total - first + side * reach) for side in (-1, 1))
        low, high = ends
        return int((high - low).sum())


class OwnFractions(AbstractCombination):
    """Gives each silo an intercept of its own: the exact total is a fraction with each silo's size."""

    yields = "the silo's own number of smokers, exactly, where sizes and numbers of treated are known"
    formula = "smoker + C(silo)"
    only_masked = True
    in_open = "sent"
    keys = ()

    def __init__(self) -> None:
        super().__init__()
        self.options |= {"diagnostics": False}

    def columns_of(self, silo: str) -> Columns:
        size, columns = SIZES[silo], AbstractCombination.columns(self)
        columns["a"] = np.arange(60) % 2
        columns["smoker"] = (np.arange(60) % (3 + NAMES.index(silo)) == 0) * 1.0
        return {name: column[:size] for name, column in columns.items()}

    def columns(self) -> Columns:
        return self.columns_of("a")

    def crowd(self, silo: str) -> Any:
        return load(self.columns_of(silo), schema_of(self.study()), silo=silo)

    def run(self, victim: Victim) -> int:
        server, answer = self.server(victim)
        answer = until(server, answer, ArmResponse)
        ((query, sums),) = sums_of(server, answer, ArmResponse)
        # At zero, silo m adds its smokers times its share of treated, less its treated smokers.
        total = float(sums[0]) * 2.0 ** query.problem.scales[0]
        whole = math.prod(SIZES.values())
        numerator = round(total * whole)
        size = SIZES["a"]
        treated = size // 2
        return numerator * pow(treated * (whole // size), -1, size) % size

    def works(self, learned: int) -> bool:
        return learned == int(self.columns()["smoker"].sum())


WORKING: tuple[AbstractAttack, ...] = (OneRetires(), SumOfFits(), OwnFractions())
