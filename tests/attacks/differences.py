"""Attacks by differences of sums: of fits without a fold, of hazards, of completions; and by single fits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import brentq

import fedtmle as ft
from fedtmle.initial.crossfit import Folds
from fedtmle.model.table import numbered
from fedtmle.protocol.fits import FitQuery
from fedtmle.studyfile.schema import schema_of
from fedtmle.targets.effects.prepare import ArmResponse, WithoutFold
from fedtmle.targets.time.statistics import EventResponse
from fedtmle_core.exact import Sums
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.combinations import PERSON
from tests.attacks.invented import ROW, AbstractInvented
from tests.attacks.over_time import AbstractImputed, LoneEvent, first_sums, inner, until
from tests.attacks.settings import Setting
from tests.attacks.small import AbstractStudyAttack, Columns
from tests.declare import declare
from tests.narrow import load

FOLDS = Folds(count=5, seed=0)
FOUR_PERIODS = ft.Risk(outcome="event", time="time", treatment="a", periods=4, period_length=1.0)


class AloneInAFold(AbstractInvented):
    """Cross-fits a model with a covariate that one person alone has in a fold, and subtracts the fits."""

    yields = "the arm of the one person in the fold who has HIV, exactly"
    extra = {"treatment_model": ft.GLM("hiv"), "folds": FOLDS.count}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        fold = FOLDS._draw(ROW)
        hiv = (ROW == PERSON) * 1.0
        for other in set(range(FOLDS.count)) - {int(fold[PERSON])}:
            hiv[np.flatnonzero(fold == other)[:2]] = 1.0
        return {**super().columns(), "hiv": hiv}

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        without = {}
        for query, sums in first_sums(server, answer, WithoutFold):
            model = query.problem
            if isinstance(model.response.response, ArmResponse):
                place = list(model.design_names).index("hiv")
                without[model.response.fold] = sums[place] * 2.0 ** model.scales[place]
        fold = int(FOLDS._draw(ROW)[PERSON])
        return float(0.5 - (sum(without.values()) / (FOLDS.count - 1) - without[fold]))

    def works(self, learned: float) -> bool:
        return bool(abs(learned - self.columns()["a"][PERSON]) < 1e-9)


class TwoGrids(LoneEvent):
    """Compares hazards on two grids of periods: those who stay to the end cancel in the two gradients."""

    yields = "a covariate of the one person with an event, to 1e-9"

    def study(self) -> ft.Study:
        return replace(
            super().study(),
            target=replace(FOUR_PERIODS, compare_subperiods=2),
            hazard_model=ft.GLM("w"),
        )

    def common(self) -> Columns:
        return {**super().common(), "event": np.zeros(60), "time": np.full(60, 4.0)}

    def columns(self) -> Columns:
        columns = super().columns()
        columns["time"][PERSON] = 1.25
        return columns

    def run(self, victim: Victim) -> float:
        (_, coarse), (_, fine) = sums = first_sums(*self.server(victim), EventResponse)
        scales = np.exp2(np.array(sums[0][0].problem.scales))
        one, w = (fine[:2] - 2 * coarse[:2]) * scales
        return float(w / one)

    def works(self, learned: float) -> bool:
        return abs(learned - 0.777) < 1e-9


class TwoCauses(LoneEvent):
    """Models the hazards of two causes by the same columns, and subtracts: who has no event cancels."""

    yields = "a covariate of the one person with an event of the first cause, to 1e-9"

    def study(self) -> ft.Study:
        return replace(
            super().study(),
            target=replace(FOUR_PERIODS, causes=("1", "2")),
            hazard_model=ft.GLM("smoker + w:smoker + I(1 - smoker):w"),
            variables=declare(event=["0", "1", "2"], time=(0, 4), a="binary", w=(-1, 1), smoker="binary"),
        )

    def common(self) -> Columns:
        event = np.where(ROW == 3, "2", "0")
        smoker = (ROW % 2 == 1) * (ROW != 3) * 1.0
        return {**super().common(), "event": event, "time": np.full(60, 4.0), "smoker": smoker}

    def columns(self) -> Columns:
        columns = {**super().common(), **self.common()}
        columns["time"][PERSON], columns["event"][PERSON], columns["w"][PERSON] = 0.5, "1", 0.777
        return columns

    def run(self, victim: Victim) -> float:
        found = first_sums(*self.server(victim), EventResponse)
        (query, first), (_, second) = found
        scales = np.exp2(np.array(query.problem.scales))
        names = list(query.problem.design_names)
        alone = dict(zip(names, (first - second)[: len(names)] * scales, strict=True))
        return float(alone["w:smoker"] / alone["smoker"])

    def works(self, learned: float) -> bool:
        return abs(learned - 0.777) < 1e-9


class ManyCompletions(AbstractImputed):
    """Imputes a covariate that six people lack in more data sets than people, and solves for each of them."""

    yields = "the arms of all six people whose value is imputed, exactly"
    extra = {**AbstractImputed.extra, "imputations": 12}  # noqa: RUF012 - read only
    lacking = np.arange(5, 60, 10)

    def common(self) -> Columns:
        return {**super().common(), "w": super().columns()["w"]}

    def columns(self) -> Columns:
        columns = super().columns()
        columns["w"][self.lacking] = np.nan
        return columns

    def run(self, victim: Victim) -> tuple[int, ...]:
        server, count = self.server(victim)
        if self.setting is Setting.COLLUDING:
            count = Sums((60 << count.shifts[0],), count.shifts)  # the guard refuses fewer
        answer = until(server, server.tell(count), ArmResponse)
        views, told = [], []
        for member, part in zip(server.query.members, server.query.split(answer), strict=True):
            model = inner(member).problem
            if isinstance(model.response, ArmResponse):
                views.append(member.view)
                told.append(part.values()[1] * 2.0 ** model.scales[1])
        drawn = np.array([self._drawn(views, arm) for arm in (0, 1)])  # every party draws by a public rule
        people = np.arange(len(self.lacking))

        def left(arms: tuple[int, ...]) -> float:
            """How far the sums over the data sets differ once the six are taken out."""
            values = drawn[list(arms), :, people]
            return float(np.ptp(told - (0.5 - np.array(arms)) @ values))

        return min(itertools.product((0, 1), repeat=len(people)), key=left)

    def _drawn(self, views: list[Any], arm: int) -> np.ndarray:
        """The imputed values of the six in each data set if all of them were in an arm."""
        columns = self.columns()
        columns["a"][self.lacking] = arm
        rows = numbered(load(columns, schema_of(self.study()), silo="a"))
        return np.array([view.of(rows).numeric["w"][self.lacking] for view in views])

    def works(self, learned: tuple[int, ...]) -> bool:
        return bool(np.array_equal(learned, self.columns()["a"][self.lacking]))


class LoneFit(AbstractStudyAttack):
    """Has each silo fit its own fluctuation, which one treated person without the event decides."""

    yields = "the treatment probability, thus covariates, of the one treated person without the event"
    keys = ("min_people",)
    options = {"algorithm": ft.LocalAverage(tolerance=1e-6), "sums": "exact"}  # noqa: RUF012 - read only

    def columns(self) -> Columns:
        columns = super().columns()
        treated = columns["a"] == 1
        half = np.full(60, 0.5)
        columns |= {"q0": half, "q1": half, "g": np.where(treated, 0.9, 0.5)}
        columns["y"] = np.where(treated, 1.0, ROW // 2 % 2)
        columns["y"][PERSON], columns["g"][PERSON] = 0.0, 0.17
        return columns

    def crowd(self, silo: str) -> Any:
        columns = self.columns()
        columns["g"][PERSON] = 0.9
        return load(columns, schema_of(self.study()), silo=silo)

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        while not isinstance(server.query, FitQuery):
            answer = server.go_on(answer)
        (_, eps) = answer.eps
        left = 29 / 0.9 / (1.0 + np.exp(-eps / 0.9))  # of the residuals of the others
        return float(brentq(lambda g: 1.0 / g / (1.0 + np.exp(eps / g)) - left, 0.158, 1.0))

    def works(self, learned: float) -> bool:
        return abs(learned - 0.17) < 1e-3


ATTACKS: tuple[AbstractAttack, ...] = (
    AloneInAFold(),
    TwoGrids(),
    TwoCauses(),
    ManyCompletions(),
    LoneFit(),
)
