"""Attacks on the counts of a study of time to an event: who has it, who leaves when, and life tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import fedtmle as ft
from fedtmle.protocol.bins import BinsQuery
from fedtmle.protocol.sums import TallyQuery
from fedtmle.targets.regimes.statistics import RegimeCounts
from fedtmle.targets.time.statistics import AtRiskBins, EventBins, EventResponse, LifeTable
from fedtmle_core.types import unpack
from tests.attacks.base import AbstractAttack, Victim
from tests.attacks.combinations import PERSON
from tests.attacks.invented import ROW
from tests.attacks.over_time import AbstractOverTime, LoneEvent, LoneLeaver, first_sums, inner
from tests.attacks.settings import Server
from tests.attacks.small import Columns
from tests.declare import declare


def asked(server: Server, answer: Any, kind: type) -> tuple[Any, Any]:
    """Go on honestly until a statistic of a kind is asked; return the statistic and what is told of it."""
    while True:
        for member, part in zip(server.query.members, server.query.split(answer), strict=True):
            query = inner(member)
            of = query.bins if isinstance(query, BinsQuery) else getattr(query, "columns", None)
            if isinstance(of, kind):
                return of, part
        answer = server.go_on(answer)


def counts(bins: Any) -> list[list[int]]:
    """The counts by bin of each group, 0 where they are hidden."""
    return [[0 if each is None else each.count for each in group] for group in bins]


class FewEvents(LoneEvent):
    """Asks for the events by arm where one person has one."""

    yields = "that one treated person has the event, and nobody else"
    keys = ()
    hidden_by: tuple[str, ...] = ("min_cell",)

    def common(self) -> Columns:
        return {**super().common(), "event": np.zeros(60)}

    def columns(self) -> Columns:
        columns = super().columns()
        columns["a"][PERSON] = 1.0
        return columns

    def run(self, victim: Victim) -> float:
        _, told = asked(*self.server(victim), EventBins)
        (_, untreated), (_, treated) = counts(told)
        return treated - untreated

    def works(self, learned: float) -> bool:
        return learned == 1.0


class FewWithoutEvents(FewEvents):
    """Asks for the events by arm where all but one of the treated have one."""

    yields = "that one treated person has no event"

    def common(self) -> Columns:
        columns = super().common()
        return {**columns, "event": columns["a"].copy()}

    def columns(self) -> Columns:
        columns = super().columns()
        columns["event"][PERSON], columns["time"][PERSON] = 0.0, 4.0
        return columns

    def run(self, victim: Victim) -> float:
        _, told = asked(*self.server(victim), EventBins)
        _, (without, _) = counts(told)
        return without


class LastEvent(FewEvents):
    """Subtracts who left before the last period from the events by arm, where nobody is censored."""

    yields = "that one treated person has the event in the last period"

    def study(self) -> ft.Study:
        return replace(super().study(), hazard_model=ft.GLM("a + w"), diagnostics=True)

    def common(self) -> Columns:
        columns = super().common()
        event = ROW % 3 == 0
        return {**columns, "event": event * 1.0, "time": np.where(event, 0.5, 4.0)}

    def columns(self) -> Columns:
        columns = super().columns()
        columns["event"][PERSON], columns["time"][PERSON] = 1.0, 3.5
        return columns

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        _, told = asked(server, answer, EventBins)
        _, (without, events) = counts(told)
        _, told = asked(server, server.go_on(answer), AtRiskBins)
        _, treated = counts(told)
        leavers = without + events - sum(treated[3:])  # before the last period
        return events - leavers if treated[3] else 0


class FewLeavers(FewEvents):
    """Subtracts the numbers at risk in two periods, between which one person left."""

    yields = "that one treated person left in the second period"

    def study(self) -> ft.Study:
        return replace(super().study(), hazard_model=ft.GLM("a + w"), diagnostics=True)

    def common(self) -> Columns:
        columns = super().common()
        return {**columns, "event": (ROW % 3 == 0) * 1.0, "time": np.where(ROW % 3 == 0, 0.5, 3.5)}

    def columns(self) -> Columns:
        columns = super().columns()
        columns["event"][PERSON], columns["time"][PERSON] = 1.0, 1.5
        return columns

    def run(self, victim: Victim) -> float:
        _, told = asked(*self.server(victim), AtRiskBins)
        _, treated = counts(told)
        second, third = sum(treated[1:]), sum(treated[2:])  # at risk in the second and the third period
        return second - third


class CountedEvent(LoneEvent):
    """Counts events by arm and period, for hazards without a model, at a silo whose owner minds."""

    yields = "that one treated person had the event in the first period"
    keys = ("min_events",)
    strict = {"min_events": 3}  # noqa: RUF012 - read only

    def study(self) -> ft.Study:
        return replace(super().study(), hazard_model=None)

    def columns(self) -> Columns:
        columns = super().columns()
        columns["a"][PERSON] = 1.0
        return columns

    def run(self, victim: Victim) -> float:
        table, told = asked(*self.server(victim), LifeTable)
        _, treated = table.layout.split(told.values())["events 1"].reshape(2, 4)
        return float(treated[0])

    def works(self, learned: float) -> bool:
        return learned == 1.0


class WeightOfAnEvent(CountedEvent):
    """Sums weights of events by arm and period, for hazards without a model: one is a person's own."""

    yields = "the weight of the one person with an event in the first period, exactly, and the arm"
    keys = ("min_people",)
    strict = {}  # noqa: RUF012 - read only

    def study(self) -> ft.Study:
        variables = declare(event="binary", time=(0, 4), a="binary", w=(-1, 1), weight=(0, 10))
        return replace(super().study(), weights="weight", variables=variables)

    def common(self) -> Columns:
        return {**super().common(), "weight": 1.0 + (ROW % 5) / 2}

    def columns(self) -> Columns:
        columns = super().columns()
        columns["weight"][PERSON] = 3.14
        return columns

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        while not isinstance(getattr(server.query, "columns", None), LifeTable):
            parts = zip(server.query.members, server.query.split(answer), strict=True)
            totals = next(part for query, part in parts if isinstance(query, TallyQuery)).values()
            mean = sum(totals[3:5]) / sum(totals[:2])  # weights by arm over people by arm
            answer = server.go_on(answer)
        _, treated = server.query.columns.layout.split(answer.values())["events 1"].reshape(2, 4)
        return float(treated[0] * mean)

    def works(self, learned: float) -> bool:
        return abs(learned - 3.14) < 1e-9


class EventOverTime(AbstractOverTime):
    """Counts events by period in a study of treatment over time, at a silo whose owner minds."""

    yields = "that one person had the event in the first period"
    keys = ("min_events", "min_people")
    strict = {"min_events": 3}  # noqa: RUF012 - read only

    def study(self) -> ft.Study:
        names = ("l", "a", "y")
        over_time = {name: (f"{name}1", f"{name}2") for name in names}
        study = super().study()
        return replace(
            study,
            target=ft.RegimeMean(outcome="y", treatment="a", over_time=over_time, rules=self.rules),
        )

    def common(self) -> Columns:
        columns = super().common()
        return {**columns, "y1": np.zeros(60), "y2": columns.pop("y")}

    def columns(self) -> Columns:
        columns = {name: column * 1.0 for name, column in self.common().items()}
        columns["y1"][PERSON] = 1.0
        for name in ("l2", "a2", "y2"):
            columns[name][PERSON] = np.nan
        return columns

    def run(self, victim: Victim) -> float:
        table, told = asked(*self.server(victim), RegimeCounts)
        return float(table.layout.split(told.values())["events"][0])

    def works(self, learned: float) -> bool:
        return learned == 1.0


class CensoredOverTime(LoneLeaver):
    """Counts who is censored by period in a study of treatment over time, at a silo whose owner minds."""

    yields = "that one person was censored in the first period"
    keys = ("min_missing", "min_people")
    strict = {"min_missing": 3}  # noqa: RUF012 - read only

    def run(self, victim: Victim) -> tuple[float, float]:
        table, told = asked(*self.server(victim), RegimeCounts)
        first, second = table.layout.split(told.values())["censored"]
        return float(first), float(second)

    def works(self, learned: tuple[float, float]) -> bool:
        return learned == (1.0, 0.0)


class EventsByGradient(FewEvents):
    """Works the events of an arm out from gradient and curvature of the hazard model at zero."""

    yields = "that one treated person has the event"
    hidden_by = ()

    def study(self) -> ft.Study:
        return replace(super().study(), hazard_model=ft.GLM("a + w"))

    def run(self, victim: Victim) -> float:
        server, answer = self.server(victim)
        ((query, sums),) = first_sums(server, answer, EventResponse)
        model = query.problem
        place, dim = list(model.design_names).index("a"), model.dim
        scale = 2.0 ** model.scales[place]
        curvature = unpack(sums[dim:], dim)[place, place] * scale * scale  # a quarter of the periods at risk
        return float(2.0 * curvature - sums[place] * scale)

    def works(self, learned: float) -> bool:
        return abs(learned - 1.0) < 1e-9


ATTACKS: tuple[AbstractAttack, ...] = (CountedEvent(), EventOverTime(), CensoredOverTime(), WeightOfAnEvent())
SUPPRESSED: tuple[AbstractAttack, ...] = (FewEvents(), FewWithoutEvents(), FewLeavers(), LastEvent())
WORKING: tuple[AbstractAttack, ...] = (EventsByGradient(),)
